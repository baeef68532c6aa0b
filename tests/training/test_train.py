"""A stretch of training on a CPU: it learns, resumes, and its ablation is compared at the same step."""

import json
from dataclasses import replace

import pytest
import torch

from dsv4.errors import InputError
from scripts import train_demo
from scripts.training import ablation, architecture, recipe, state
from scripts.training.evaluation import Limits
from scripts.training.replay import Gradients
from scripts.training.rows import Rows
from scripts.training.trainee import Trainee, Wanted
from tests.training.test_export import TINY

SMALL = TINY | dict(vocab_size=1024)
ONLY = SMALL | dict(compress_ratios=[0] * len(SMALL["compress_ratios"]), moe_intermediate_size=96)

STAGES = (replace(recipe.DEMO.stages[0], length=256),)  # of two times 128 tokens, which make an entry of HCA


@pytest.fixture(scope="module")  # over 5 s: a model and its ablation, each resumed once
def states(corpus, tmp_path_factory):
    """(state of the model, of its ablation), two steps of a row of 256 tokens each, in two stretches."""
    root = tmp_path_factory.mktemp("states")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "DEMO", replace(recipe.DEMO, stages=STAGES, batch=256))
        patch.setattr(train_demo, "WINDOW_ONLY", ONLY)
        for name, raw in (("full", SMALL), ("window", ONLY)):
            (root / name).mkdir()
            for steps in (1, 2):
                run = train_demo.Run(corpus, root / name, "cpu", 1, raw)
                assert run.step == steps - 1
                run.stretch(5, steps)
    return root / "full", root / "window"


@pytest.fixture
def small_models(monkeypatch):
    monkeypatch.setattr(architecture, "CONFIG", SMALL)
    monkeypatch.setattr(architecture, "WINDOW_ONLY", ONLY)


def test_a_stretch_moves_every_parameter_that_it_trains(states):
    facts = state.facts_of(states[0])
    assert facts["step"] == 2 and facts["window_only"] is False and state.facts_of(states[1])["window_only"] is True
    trainee = Trainee(architecture.build(SMALL, architecture.BF16, "cpu"))
    parameters = dict(trainee.named_parameters())
    architecture.initialise(trainee.model, train_demo.SEED)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    state.load(states[0], parameters)
    still = [
        n
        for n, p in parameters.items()
        if p.is_floating_point() and torch.equal(p, before[n].to(torch.bfloat16).float())
    ]
    assert still == []


def test_the_ablation_is_paired_and_of_the_same_step(states, small_models, corpus, monkeypatch):
    monkeypatch.setattr(ablation, "LENGTHS", (256, 512))  # two rows of 256, one of 512
    rows, limits = (
        Rows(corpus, seed=0, length=1024, split="heldout"),
        Limits(tokens=1 << 11, chunk=256, rows=1, loss_tokens=512),
    )
    figures = ablation.compare(*states, rows, limits, "cpu", lambda text: None)
    assert {f.details["step"] for f in figures} == {2}
    for f in figures:
        assert f.value == pytest.approx(f.details["window_only"] - f.details["model"], abs=1e-6)
        assert f.details["standard_error"] > 0 if f.details["rows"] > 1 else f.details["standard_error"] is None
    assert {f.details["rows"] > 1 for f in figures} == {True, False}
    assert any(abs(f.value) > 1e-6 for f in figures)
    same = ablation.compare(states[0], states[1], rows, limits, "cpu", lambda text: None)
    assert [f.value for f in same] == [f.value for f in figures]


@pytest.mark.parametrize("which, step", [((0, 0), 2), ((1, 1), 2), ((1, 0), 2), ((0, 1), 1)])
def test_what_is_no_ablation_is_refused(states, tmp_path, small_models, corpus, which, step):
    import shutil

    first, second = (shutil.copytree(states[i], tmp_path / f"{at}") for at, i in enumerate(which))
    (second / "state.json").write_text(json.dumps(state.facts_of(second) | {"step": step}))
    with pytest.raises(InputError, match="expected the model and its ablation"):
        ablation.compare(
            first, second, Rows(corpus, seed=0, length=1024, split="heldout"), Limits(2048, 256, 1, 2048), "cpu", print
        )


def test_gradients_are_those_of_the_losses():
    """Gradients sets what backward would have; parameters that the loss does not reach keep none."""
    trainee = Trainee(architecture.build(SMALL, architecture.FP32, "cpu"))
    architecture.initialise(trainee.model, 0)
    parameters = dict(trainee.named_parameters())
    ids, weight = torch.randint(0, 1024, (2, 130), generator=torch.Generator().manual_seed(0)), torch.ones(2, 130)
    wanted = Wanted(sparse=False, chunk=32)
    out = Gradients(trainee, parameters, False)(ids, weight, wanted, 96)
    found = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    trainee(ids, weight, wanted, 96)["total"].backward()
    wanted_grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    assert found.keys() == wanted_grads.keys() and len(found) > 50
    for name in found:  # Trainee alone computes in fp32 throughout, Gradients casts matrices to bf16 first
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), wanted_grads[name].flatten(), 0) > 0.9, name
    assert not out["total"].requires_grad


def test_what_a_graph_holds_outlives_the_next_step():
    """The trainee clears its list of chosen experts before each forward; a graph hands out the same one at every
    replay."""
    trainee = Trainee(architecture.build(SMALL, architecture.FP32, "cpu"))
    architecture.initialise(trainee.model, 0)
    gradients = Gradients(trainee, dict(trainee.named_parameters()), False)
    ids, weight = torch.randint(0, 1024, (1, 130)), torch.ones(1, 130)
    made = gradients._compute(ids, weight, Wanted(sparse=False, chunk=32), 0)
    held = [chosen for _, chosen in made[2]]
    gradients._publish(*made)
    trainee(ids, weight, Wanted(sparse=False, chunk=32), 0)
    gradients._publish(*made)
    assert len(held) >= SMALL["num_hidden_layers"] and len(trainee.chosen) == len(held)
    assert all(chosen is mine for (_, chosen), mine in zip(trainee.chosen, held))
