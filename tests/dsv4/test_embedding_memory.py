"""The token embedding in host memory: the bits of a model that has it on the device, in any step; bytes; refusals."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsv4 import load_model
from dsv4.cache.host_tier import memory
from dsv4.cache.host_tier.memory import PinnedMemoryError
from dsv4.engine.generate import generate
from dsv4.errors import InputError
from dsv4.model import dummy
from dsv4.model.dummy import load_dummy
from dsv4.model.expert_memory import ExpertMemory
from dsv4.model.module import Module
from dsv4.model.placement import place
from dsv4.model.ranks import Ranks
from dsv4.model.vocabulary import Embedding
from dsv4.parallel.threads import together
from dsv4.runtime.graph import DecodeGraph
from dsv4.runtime.planning import plan
from tests import checkpoints
from tests.dsv4.test_expert_memory import BACKENDS, DEMO, DEVICE, appended
from tests.gqa import oracle
from tests.parallel.held import run
from tests.parallel.test_launch import ASKED, TWO, ended, start

GQA = DEMO.parent / "demo_gqa"
ids = lambda rows, tokens: torch.arange(rows * tokens).view(rows, tokens) * 7 % 90


def in_host(model):
    """That model, whose embedding's parameter has no memory any more: whoever reads it, and not the pages that the
    device addresses, fails on a host processor too."""
    assert model.embed.weight.data_ptr() == model.embed.host.host.data_ptr()
    model.embed.weight = nn.Parameter(torch.empty_like(model.embed.weight, device="meta"), requires_grad=False)
    return model


def both(path=DEMO, **options):
    """A model with its embedding on the device, and one with it in host memory."""
    plain, host = (load_model(path, device=DEVICE, embedding_memory=m, **options) for m in ("device", "host"))
    return plain, in_host(host)


def equal(found, wanted) -> bool:
    """Whether all tensors have the same bits; logits that were not asked for are NaN."""
    return all(torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)) for a, b in zip(found, wanted, strict=True))


# ---- bits --------------------------------------------------------------------------------


@pytest.mark.few(numerics=["native"])
@pytest.mark.parametrize("numerics", ["fp32", "native", "qat", "qat:fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_has_the_bits_of_a_model_on_the_device(numerics, backend):
    """Prompts, steps of one and of several tokens, a ragged batch, and the MTP block, which shares the embedding."""
    plain, host = both(numerics=numerics, backend=backend)
    assert equal(appended(host), appended(plain))


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_captured_steps_of_kernels(tmp_path, numerics):  # over 5 s: it interprets all kernels of a layer
    """A prompt and a captured step of the triton backend, which reads the embedding in a kernel of its own."""
    few = dict(hidden_size=64, index_n_heads=8, n_routed_experts=4, moe_intermediate_size=64, hc_sinkhorn_iters=2)
    raw = checkpoints.BRIEF | few | dict(vocab_size=160, num_hidden_layers=1, compress_ratios=[0, 0])
    path = checkpoints.write_official(tmp_path / "c", raw)

    def served(model):
        cache = model.new_cache(2, 8)
        prompt = model.append(ids(2, 3), cache).clone()
        return prompt, DecodeGraph(model, cache).step(ids(2, 1)).clone()

    plain, host = both(path, numerics=numerics, backend="triton", mtp=False)
    assert equal(served(host), served(plain))
    assert any(row["operation"] == "embed_streams" and row["calls"] for row in host.dispatch.rows())


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_a_gqa_model_with_a_head_of_its_own(tmp_path, numerics):
    config = oracle.CONFIGS["llama, llama3 rope and biases"]
    plain, host = both(oracle.save(oracle.randomised(config), config, tmp_path), numerics=numerics)

    def served(model):
        cache = model.new_cache(2, 60)
        prompt = model.append(ids(2, 40), cache)
        step = DecodeGraph(model, cache).step(ids(2, 1))
        return prompt, step.clone(), torch.tensor(generate(model, [5, 3, 8], 8).token_ids)

    assert equal(served(host), served(plain))


# Over 5 s: each rank runs all steps.
@pytest.mark.few(size=[2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_ranks_have_the_bits_of_ranks_on_the_device(size, numerics):
    given = dict(numerics=numerics, backend="reference")
    plain, host = (
        together(size, lambda ranks, m=m: load_model(DEMO, ranks=ranks, embedding_memory=m, **given))
        for m in ("device", "host")
    )
    wanted, found = run(plain, appended), run([in_host(model) for model in host], appended)
    assert all(equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_random_weights_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(dummy, "preset", lambda name: dict(checkpoints.SMALL))
    plain, host = (load_dummy("flash", device=DEVICE, embedding_memory=m) for m in ("device", "host"))
    for a, b in zip(plain.parameters(), host.parameters(), strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
    found, wanted = (m.append(ids(1, 9), m.new_cache(1, 20)) for m in (in_host(host), plain))
    assert torch.equal(found, wanted)


def test_a_rank_without_a_part_of_the_vocabulary_pins_nothing():
    class Short(Module):
        def __init__(self, rank):
            super().__init__()
            shape = SimpleNamespace(vocab_size=5, hidden_size=4)
            self.embed = Embedding(shape, torch.float32, Ranks(rank, 4))

    for rank, tokens in enumerate((2, 2, 1, 0)):
        with torch.device("meta"):
            model = Short(rank)
        place(model, torch.device("cpu"), None, "host")
        assert model.embed.host_bytes == tokens * 16 and model.embed.table.shape == (tokens, 4)
        assert model.embed.table.device.type == "cpu" and (model.embed.host is None) == (not tokens)


# ---- bytes -------------------------------------------------------------------------------


def pinned(rows: list[dict]) -> dict[str, int]:
    """Name → bytes of rows of pinned memory, whose formulas give these bytes."""
    found = {row["name"]: row["nbytes"] for row in rows if row["group"] == "pinned"}
    formulas = [re.sub(r"tokens|layers?|experts|B", "", r["formula"]) for r in rows if r["group"] == "pinned"]
    assert [eval(f.replace("×", "*")) for f in formulas] == list(found.values())
    return found


@pytest.mark.parametrize("numerics", ["native", "fp32"])
@pytest.mark.parametrize("slots", [None, 7])
def test_a_plan_says_what_is_allocated(numerics, slots):
    experts = slots and ExpertMemory(slots)
    given = str(DEMO), "300", 1, 8, numerics, "80GiB"
    document, before = (plan(*given, expert_memory=experts, embedding_memory=m) for m in ("host", "device"))
    model = load_model(DEMO, numerics=numerics, expert_memory=experts, embedding_memory="host")
    rows, size = pinned(document["rows"]), model.embed.host_bytes
    assert rows.pop("embedding") == size == 4096 * 256 * (4 if numerics == "fp32" else 2)
    assert list(rows.values()) == ([model.expert_tier.host_bytes] if slots else [])
    assert [before[key] - document[key] for key in ("weights_bytes", "total_bytes")] == [size, size]
    if not slots:
        assert document["weights_bytes"] == model.nbytes - size
        assert document["total_bytes"] == document["gpus"][0]["weights_bytes"] + document["gpus"][0]["cache_bytes"]


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_pins_what_its_plan_says(size):
    given = str(DEMO), "300", 3, 8, "native", "80GiB"
    document, before = (plan(*given, ranks=size, embedding_memory=m) for m in ("host", "device"))
    for r, was in zip(document["ranks"], before["ranks"], strict=True):
        model = load_model(DEMO, backend="reference", ranks=Ranks(r["rank"], size), embedding_memory="host")
        assert pinned(r["rows"]) == {"embedding": model.embed.host_bytes} and r["pinned_bytes"] > 0
        assert r["weights_bytes"] == model.nbytes - model.embed.host_bytes == was["weights_bytes"] - r["pinned_bytes"]
        left = [d["gpus"][r["rank"]]["left_bytes"] for d in (document, before)]
        assert left[0] - left[1] == r["pinned_bytes"]
    assert document["pinned_bytes"] == sum(r["pinned_bytes"] for r in document["ranks"]) == 4096 * 256 * 2


def test_a_plan_of_two_cards_for_readers(command_line):
    asked = ("plan", "flash", "--tensor-parallel-size", "2", "--max-context", "1M", "--device", "h100")
    code, out, err = command_line(*asked, "--cache", "fp8", "--index-cache", "fp4", "--embedding-memory", "host")
    assert code == 0 and err == "" and re.match(r"fits: .*; and 1010.00 MiB pinned in host memory\n", out)
    assert re.search(r"pinned host memory of each rank\n.*\n *529530880  embedding  64640 tokens × 4096 × 2 B\n", out)


# ---- commands ----------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["native", "fp32"])
def test_generate_gives_the_same_text_with_drafts(command_line, numerics):
    given = ("generate", DEMO, "--prompt", "The capital of France", "--max-new-tokens", "12", "--numerics", numerics)
    drafts = ("--speculate", "mtp", "--draft-tokens", "2")
    plain, drafted = command_line(*given), command_line(*given, *drafts)
    code, out, err = command_line(*given, *drafts, "--embedding-memory", "host")
    assert code == 0 and out == plain[1] == drafted[1]
    nbytes = 4096 * 256 * (4 if numerics == "fp32" else 2)
    assert f"embedding: {nbytes >> 20}.00 MiB of the weights in host memory" in err and "embedding: " not in plain[2]
    found = json.loads(command_line(*given, "--embedding-memory", "host", "--json")[1])
    plain = json.loads(command_line(*given, "--json")[1])
    assert found["embedding"] == {"pinned_bytes": nbytes} and "embedding" not in plain
    assert found["bytes"]["weights"] == plain["bytes"]["weights"] and found["load"] == plain["load"]


def test_batch_says_it_too(command_line, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"token_ids": [5, n, 9], "max_tokens": 6}) + "\n" for n in (3, 4)))
    given = ("batch", file, "--checkpoint", DEMO, "--rows", "2", "--together")
    lines = [json.loads(line) for line in command_line(*given)[1].splitlines()]
    experts = ("--expert-memory", "host", "--resident-experts", "8")
    code, out, err = command_line(*given, "--embedding-memory", "host", *experts)
    host = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "embedding: 2.00 MiB of the weights" in err and "experts: 8 of 16" in err
    assert [x["token_ids"] for x in host[:-1]] == [x["token_ids"] for x in lines[:-1]]
    assert host[-1]["figures"]["embedding"] == {"pinned_bytes": 2 << 20}
    assert "embedding" not in lines[-1]["figures"]


# Over 5 s: processes that import torch.
def test_two_processes_give_the_text_of_one():
    runs = [
        start(*ASKED, "--max-new-tokens", "12", "--json", *more) for more in ((), (*TWO, "--embedding-memory", "host"))
    ]
    (code, one, _), (again, two, err) = map(ended, runs)
    assert (code, again) == (0, 0), err
    one, two = json.loads(one), json.loads(two)
    assert one["token_ids"] == two["token_ids"] and len(two["token_ids"]) == 12
    assert two["embedding"]["pinned_bytes"] > 0 and any("gloo" in note for note in two["notes"])


# ---- refusals ----------------------------------------------------------------------------


def test_what_is_refused(command_line, monkeypatch):
    for options, said in (
        (dict(device_map="auto"), "--device-map were given; the embedding is read by one device.* leave out one"),
        (dict(path=GQA), "the head is tied to the embedding .* leave the option out"),
        (dict(embedding_memory="disk"), "--embedding-memory 'disk' is unknown; expected device or host"),
    ):
        with pytest.raises(InputError, match=said):
            load_model(**dict(path=DEMO, embedding_memory="host") | options)
    for words in (
        ("generate", GQA, "--prompt", "a"),
        ("plan", GQA),
        ("plan", "flash", "--device", "h100", "--gpus", "2"),
        ("generate", DEMO, "--prompt", "a", "--device-map", "auto"),
    ):
        code, out, err = command_line(*words, "--embedding-memory", "host")
        assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: --embedding-memory host")
    monkeypatch.setattr(memory, "_limit", lambda: 1 << 20)
    with pytest.raises(PinnedMemoryError, match="the token embedding takes 2097152 bytes of pinned host memory, which"):
        load_model(DEMO, embedding_memory="host")
