"""The GQA model's trainer on a CPU: its loss is transformers' own, it learns, resumes, and exports what both load."""

import json
from dataclasses import replace

import pytest
import torch

from dsv4 import load_model
from dsv4.errors import InputError
from dsv4.loaders.errors import WriteError
from scripts import train_gqa
from scripts.training import gqa, recipe, state
from scripts.training.replay import Gradients

SMALL = gqa.CONFIG | dict(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=4096,
    max_window_layers=2,
)

STAGES = (replace(recipe.GQA.stages[0], length=256),)


@pytest.fixture(scope="module")  # over 5 s: with fewer steps the loss falls too little to tell
def trained(corpus, tmp_path_factory):
    """A state after 60 steps of 256 tokens, in two stretches, and the losses that the log has."""
    where = tmp_path_factory.mktemp("gqa") / "state"
    where.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "GQA", replace(recipe.GQA, stages=STAGES, batch=256, warm_up=5, restart=2))
        for steps in (25, 60):
            run = train_gqa.Run(corpus, where, "cpu", 1, SMALL)
            assert run.step == (0 if steps == 25 else 25)
            run.stretch(5, steps)
            run.log.close()
    return where, [json.loads(line) for line in (where / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def exported(trained, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gqa, "SHARD_BYTES", 100_000)
        gqa.export(corpus, trained[0], out, SMALL)
    return out


def test_training_moves_every_parameter_and_lowers_the_loss(trained):
    where, log = trained
    assert state.facts_of(where)["step"] == 60 and [row["step"] for row in log] == [25, 50]
    assert log[0]["next"] < 6.9 and log[1]["next"] < log[0]["next"] - 0.3  # ln 1024 = 6.93; weighted answers among text
    trainee = gqa.Trainee(gqa.build(SMALL, "cpu"))
    parameters = dict(trainee.named_parameters())
    gqa.initialise(trainee.model, train_gqa.stretch.SEED)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    state.load(where, parameters)
    assert [n for n, p in parameters.items() if torch.equal(p, before[n])] == []


def test_the_loss_and_its_gradients_are_those_of_transformers(exported):
    """fp32 throughout, on what was exported: an implementation that nobody here wrote."""
    from transformers import Qwen2ForCausalLM

    theirs = Qwen2ForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    model = gqa.build(SMALL, "cpu")
    model.numerics = replace(model.numerics, activation=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(theirs.get_parameter(name))
    ids = torch.randint(0, 1024, (3, 50), generator=torch.Generator().manual_seed(0))
    weight = torch.rand(3, 50, generator=torch.Generator().manual_seed(1))
    out = gqa.Trainee(model)(ids, weight)
    logits = theirs(ids[:, :48]).logits
    wanted = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:49].flatten(), reduction="none")
        * weight[:, 1:49].flatten()
    ).sum()
    wanted = wanted / weight[:, 1:49].sum()
    assert abs(out["total"].item() - wanted.item()) < 1e-5
    names = [name for name, _ in model.named_parameters()]
    mine = torch.autograd.grad(out["total"], [model.get_parameter(n) for n in names])
    other = torch.autograd.grad(wanted, [theirs.get_parameter(n) for n in names])
    for name, a, b in zip(names, mine, other):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7, name


def test_gradients_of_the_trainer_are_near_those_in_fp32(corpus):
    """Gradients casts matrices to bf16 first."""
    trainee = gqa.Trainee(gqa.build(SMALL, "cpu"))
    gqa.initialise(trainee.model, 0)
    with torch.no_grad():
        for name, p in trainee.named_parameters():
            # begin at 0, which would hide everything before them
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.normal_(0, p.shape[-1] ** -0.5)
    parameters = dict(trainee.named_parameters())
    ids, weight = torch.randint(0, 1024, (2, 66), generator=torch.Generator().manual_seed(0)), torch.ones(2, 66)
    out = Gradients(trainee, parameters, False)(ids, weight, None, 0)
    assert not out["total"].requires_grad
    found = {n: p.grad.clone() for n, p in parameters.items()}
    trainee.model.numerics = replace(trainee.model.numerics, activation=torch.float32)
    total = trainee(ids, weight)["total"]
    for (name, a), b in zip(found.items(), torch.autograd.grad(total, list(parameters.values()))):
        if name.endswith("k_proj.bias"):
            continue  # a shift of all keys moves no softmax: its gradient is what rounding leaves, but for the rotation
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.98, name


def test_what_is_exported_loads_here_and_in_transformers(trained, exported):
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    theirs = Qwen2ForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    ours = load_model(exported, numerics="fp32")
    assert len(list(exported.glob("*.safetensors"))) > 1 and ours.ledger.problems() == []
    ids = torch.randint(2, 1024, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (ours(ids) - theirs(ids).logits).abs().max() < 2e-4
    held = dict(gqa.Trainee(gqa.build(SMALL, "cpu")).named_parameters())
    state.load(trained[0], held)
    assert all(torch.equal(p, held[f"model.{name}"].to(torch.bfloat16).float()) for name, p in ours.named_parameters())
    assert AutoTokenizer.from_pretrained(exported)("the state").input_ids[0] == 0


def test_what_cannot_be_exported_is_refused(trained, exported, corpus, tmp_path):
    with pytest.raises(WriteError, match="exists already"):
        gqa.export(corpus, trained[0], exported, SMALL)
    with pytest.raises(InputError, match="no training state"):
        gqa.export(corpus, tmp_path, tmp_path / "x", SMALL)
    with pytest.raises(InputError, match="scripts.training.corpus"):
        gqa.export(tmp_path, trained[0], tmp_path / "x", SMALL)


def test_the_shipped_configuration():
    model = gqa.build(gqa.CONFIG, "cpu")
    c = model.config
    assert 2 * sum(p.numel() for p in model.parameters()) < 11.7e6
    assert c.head_dim == 64 and c.num_attention_heads // c.num_key_value_heads >= 4 and c.tie_word_embeddings
    assert c.max_position_embeddings >= max(stage.length for stage in recipe.GQA.stages) >= 16384
    assert all(recipe.GQA.batch % stage.length == 0 for stage in recipe.GQA.stages)


def test_what_it_can_do_is_measured_as_the_demo_is(exported, corpus, tmp_path, monkeypatch, capsys):
    """Needles and loss through the command that measures the demo; parts that a GQA model lacks are refused in one
    line."""
    import sys

    from scripts import measure_demo

    call = lambda *more: [
        "measure_demo.py",
        str(exported),
        str(corpus),
        "--out",
        str(tmp_path / "f.json"),
        "--numerics",
        "native",
        "--lengths",
        "700",
        "--trials",
        "2",
        *more,
    ]
    monkeypatch.setattr(measure_demo, "LOSS_LENGTHS", [256])
    monkeypatch.setattr(
        measure_demo.Limits,
        "of",
        classmethod(lambda cls, device: cls(tokens=1 << 11, chunk=256, rows=1, loss_tokens=1024)),
    )
    monkeypatch.setattr(sys, "argv", call("--only", "needles,loss", "--haystacks", "prose,filler"))
    measure_demo.main()
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    needles = [f for f in figures if f["part"] == "needles"]
    assert [f["count"] for f in needles] == [2, 2] and all(f["details"]["beyond"] == 512 for f in needles)
    assert all(0 < f["value"] < 7.5 for f in figures if f["part"] == "loss")
    monkeypatch.setattr(sys, "argv", call("--only", "indexer"))
    with pytest.raises(SystemExit, match="error: .*only facts,needles,loss"):
        measure_demo.main()
