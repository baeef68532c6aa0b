"""Routed experts in host memory: the bits of a model that has them on the device, in any step; bytes; refusals."""

import json
import re
from pathlib import Path

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.host_tier import memory
from dsv4.cache.host_tier.memory import PinnedMemoryError
from dsv4.errors import CapacityError, InputError
from dsv4.kernels.quantize.kept import keeping
from dsv4.loaders.config_files import read_config
from dsv4.loaders.convert import convert
from dsv4.model import dummy
from dsv4.model.config import ModelConfig
from dsv4.model.dummy import load_dummy
from dsv4.model.expert_memory import RESERVE, ExpertMemory, ExpertSizes, expert_memory_named
from dsv4.model.host_experts import distinct
from dsv4.runtime.gpus import named_bytes
from dsv4.runtime.graph import DecodeGraph
from tests import checkpoints

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEMO = Path(__file__).resolve().parents[2] / "demo"
BACKENDS = ("triton", "reference") if DEVICE == "cuda" else ("cpu", "reference")
STEPS = ((1, 40), (1, 1), (1, 1), (1, 2), (1, 1), (1, 9), (1, 1), (1, 1))  # rows and tokens, from a prompt on


def loaded(slots=None, path=DEMO, **options):
    where = None if slots is None else ExpertMemory(slots)
    return load_model(path, device=DEVICE, expert_memory=where, **options)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small checkpoint in NVFP4, whose experts have one more scale each."""
    folder = tmp_path_factory.mktemp("experts")
    source = checkpoints.write_official(folder / "official")
    convert(source, folder / "nvfp4", "nvfp4", ModelConfig.from_official(read_config(source)[0]), True)
    return folder / "nvfp4"


def appended(model, seed=0):
    """Logits of every step of `STEPS`, of a ragged batch of two, and of MTP."""
    g, found = torch.Generator().manual_seed(seed), []
    new = lambda *shape: torch.randint(0, model.config.vocab_size, shape, generator=g)
    cache = model.new_cache(1, 200)
    for rows, tokens in STEPS:
        logits, streams = model.append(new(rows, tokens), cache, return_streams=True)
        found.append(logits)
        if model.mtp:
            found.append(model.mtp_logits(streams, new(rows, tokens), cache))
    batch = model.new_cache(2, 100)
    found.append(model.append(new(2, 30), batch, n_new=[30, 11], logits="last"))
    return [*found, *(model.append(new(2, 1), batch) for _ in range(3))]


@pytest.mark.few(numerics=["native"])
@pytest.mark.parametrize("numerics", ["fp32", "native", "qat", "qat:fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_has_the_bits_of_a_model_on_the_device(numerics, backend):
    """With few slots, and with one fewer than there are experts: prompts that choose more than the slots, steps of one
    and of several tokens, batches, and the MTP block."""
    want = appended(loaded(numerics=numerics, backend=backend))
    for slots in (8, 15) if numerics == "native" else (8,):
        model = loaded(slots, numerics=numerics, backend=backend)
        for i, (a, b) in enumerate(zip(want, appended(model), strict=True)):
            assert (
                torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
            ), (slots, i)
        counts = model.expert_tier.counts()
        assert min(counts.hits, counts.misses, counts.wholes) > 0


def test_nvfp4_and_weights_that_are_kept_for_several_tokens(small):
    """A matrix in a slot is another one after the next fetch, so what was dequantised of it is not kept."""
    plain, tier = loaded(path=small), loaded(4, path=small)
    with keeping():
        for a, b in zip(appended_small(plain), appended_small(tier), strict=True):
            assert torch.equal(a, b)
    assert tier.expert_tier.counts().misses > 0


def appended_small(model):
    g, cache = torch.Generator().manual_seed(1), model.new_cache(1, 60)
    return [
        model.append(torch.randint(0, model.config.vocab_size, (1, n), generator=g), cache) for n in (20, *[1] * 12)
    ]


def test_a_decode_graph_has_them_too():
    plain, tier = (loaded(slots, backend=BACKENDS[0]) for slots in (None, 6))
    steps = [DecodeGraph(m, m.new_cache(1, 60)).step for m in (plain, tier)]
    g = torch.Generator().manual_seed(2)
    for _ in range(20):
        x = torch.randint(0, plain.config.vocab_size, (1, 1), generator=g)
        assert torch.equal(*(step(x) for step in steps))


def test_random_weights_are_those_of_the_device(monkeypatch):
    """Pieces of random weights are drawn on the device that runs them."""
    monkeypatch.setattr(dummy, "preset", lambda name: dict(checkpoints.SMALL))
    plain, tier = (load_dummy("flash", device=DEVICE, expert_memory=m) for m in (None, ExpertMemory(4)))
    for a, b in zip(*map(held, (plain, tier)), strict=True):
        assert torch.equal(a, b)
    x = torch.arange(8).view(1, -1)
    assert torch.equal(plain.append(x, plain.new_cache(1, 20)), tier.append(x, tier.new_cache(1, 20)))


def held(model):
    """Bytes of all parameters, in host memory."""
    return [p.cpu().view(torch.uint8) for p in model.parameters()]


def test_slots_hold_what_the_table_says_after_any_run():
    model = loaded(6)
    cache = model.new_cache(1, 100)
    model.append(torch.arange(50).view(1, -1), cache)
    for n in range(12):
        model.append(torch.tensor([[n * 31]]), cache)
    for layer in model.expert_tier.layers:
        held = layer.table.held[0].tolist()
        assert len(set(held)) == len(held) == 6 and min(held) >= 0
        for pool in layer.pools:
            assert torch.equal(pool.staged[0, :, 0], pool.host[0, held, 0])


def test_the_most_used_experts_of_a_prompt_take_the_slots():
    model = loaded(5)
    layer = model.expert_tier.layers[0]
    assert layer.table.held[0].tolist() == [0, 1, 2, 3, 4]
    chosen = torch.tensor([[9, 8, 7, 6], [9, 8, 7, 5], [9, 8, 11, 3]], device=layer.home)
    layer.stacks(chosen)
    assert set(layer.table.held[0].tolist()) == {9, 8, 7, 3, 5}  # of those used once the first
    assert layer.table.count[0].tolist() == [1, 6] and int(layer.wholes) == 1


def test_lists_of_different_experts():
    given = torch.tensor([5, 2, 5, 9, 2, 2])
    assert distinct(given, 16).tolist() == [[2, -1, -1, 5, -1, 9]]
    assert distinct(given, 10).tolist() == [[2, -1, -1, 5, -1, 9]]
    assert distinct(given.repeat(2), 10).tolist() == [[-1, -1, 2, -1, -1, 5, -1, -1, -1, 9]]


# ---- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["native", "fp32"])
@pytest.mark.parametrize("slots", [4, 7, 16])
def test_a_plan_says_what_is_allocated(command_line, slots, numerics):
    options = ("--expert-memory", "host", "--resident-experts", str(slots), "--numerics", numerics, "--json")
    code, out, err = command_line("plan", DEMO, *options)
    document, tier = json.loads(out), loaded(slots, numerics=numerics).expert_tier
    assert code == 0 and err == ""
    assert document["pinned_bytes"] == tier.host_bytes == sum(b.nbytes for x in tier.layers for b in x.buffers)
    assert document["staging_bytes"] == tier.device_bytes == tier.sizes.device_bytes(slots)
    assert document["experts"]["resident"] == slots and document["experts"]["layers"] == 9
    for row in document["rows"]:
        if row["group"] in ("pinned", "staging"):
            formula = re.sub(r"layers?|slots|experts|B", "", row["formula"]).replace("×", "*")
            assert eval(formula) == row["nbytes"], row


def test_the_whole_of_flash_on_one_card(command_line):
    """Slots fill what the rest and a reserve leave; the answer says so, and how much host memory it takes."""
    given = ("--device", "h100", "--expert-memory", "host", "--max-context", "1M")
    code, out, _ = command_line("plan", "flash", *given, "--json")
    document = json.loads(out)
    assert code == 0 and document["fits"] and "140.25 GiB pinned in host memory" in document["answer"]
    used, slots = document["total_bytes"], document["experts"]["resident"]
    assert document["step_bytes"] == RESERVE and 6 <= slots < 256
    assert used <= named_bytes("h100") < used + 44 * (13369344 + 16)  # not one more in each layer
    code, out, err = command_line("plan", "flash", *given, "--expert-budget", "6GiB")
    assert code == 2 and out == "" and re.fullmatch(r"error: a token chooses 6 of 256 experts.* at least 6, .*\n", err)


def test_slots_that_fit_a_budget():
    sizes = ExpertSizes((100, 100, 120), 16, 4)
    for slots in (1, 4, 9):
        nbytes = sizes.device_bytes(slots)
        assert sizes.fitting(nbytes) == slots and sizes.fitting(nbytes - 1) == slots - 1
        assert sum(s.nbytes for s in sizes.streams(slots) if s.place == "staging") == nbytes
    # a slot for each expert takes less than one fewer, which needs a buffer for those of a whole layer
    for slots in (15, 16):
        assert sizes.fitting(sizes.device_bytes(slots)) == 16
    assert sizes.fitting(sizes.device_bytes(16) - 1) == 10 and sizes.fitting(-5) == 0


# ---- commands ----------------------------------------------------------------------------


def test_generate_says_what_was_fetched_and_gives_the_same_text(command_line):
    given = ("generate", DEMO, "--prompt", "The capital of France", "--max-new-tokens", "12")
    plain = command_line(*given)[1]
    code, out, err = command_line(*given, "--expert-memory", "host", "--resident-experts", "5")
    assert code == 0 and out == plain
    said = r"experts: 5 of 16 a layer on the device .* hits and .* misses .* fetched a token; the link was not measured"
    assert DEVICE == "cuda" or re.search(said + r" on a CPU; measured [\d.]+ tokens/s", err)
    document = json.loads(command_line(*given, "--expert-memory", "host", "--resident-experts", "5", "--json")[1])
    found = document["experts"]["decode"]
    assert found["hits"] + found["misses"] == 11 * 8 * 4  # steps, layers, and experts of a token
    assert found["fetched_bytes"] == found["misses"] * 65280 == 11 * found["fetched_bytes_per_token"]
    assert "experts" not in json.loads(command_line(*given, "--json")[1])


def test_batch_says_it_too(command_line, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"token_ids": [5, n, 9], "max_tokens": 6}) + "\n" for n in (3, 4)))
    given = ("batch", file, "--checkpoint", DEMO, "--rows", "2", "--together")
    lines = [json.loads(line) for line in command_line(*given)[1].splitlines()]
    code, out, err = command_line(*given, "--expert-memory", "host", "--resident-experts", "8")
    tier = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "experts: 8 of 16 a layer on the device" in err
    assert [x["token_ids"] for x in tier[:-1]] == [x["token_ids"] for x in lines[:-1]]
    assert tier[-1]["figures"]["experts"]["decode"]["misses"] > 0
    code, out, err = command_line(*given, "--expert-memory", "host", "--resident-experts", "7")
    assert code == 2 and re.search(r"a step of 2 rows may choose 8 experts .* --resident-experts 8 \(\d+ bytes", err)


# ---- refusals ----------------------------------------------------------------------------


def test_what_is_refused(command_line, monkeypatch):
    with pytest.raises(CapacityError, match="a token chooses 4 of 16 experts at once, and 3 slots.* at least 4"):
        loaded(3)
    with pytest.raises(CapacityError, match=r"expected at least 4, which take \d+ bytes"):
        load_model(DEMO, device=DEVICE, expert_memory=ExpertMemory(budget=1000))
    with pytest.raises(InputError, match="a layer has 16 experts"):
        loaded(17)
    with pytest.raises(CapacityError, match="a step of 3 rows may choose 12 experts of a layer, which has 11"):
        loaded(11).new_cache(3, 50)
    with pytest.raises(InputError, match="leave out one"):
        loaded(8, device_map="auto")
    with pytest.raises(InputError, match="both say how many"):
        ExpertMemory(4, 1 << 30)
    with pytest.raises(InputError, match="no routed experts"):
        loaded(8, path=DEMO.parent / "demo_gqa")
    with pytest.raises(InputError, match="--resident-experts says .* add --expert-memory host"):
        expert_memory_named("device", 4)
    monkeypatch.setattr(memory, "_limit", lambda: 1 << 20)
    with pytest.raises(PinnedMemoryError, match="9400320 bytes of host memory"):
        loaded(8)
    for option in (("--gpus", "2"), ("--tensor-parallel-size", "2")):
        code, out, err = command_line("plan", "flash", "--device", "h100", "--expert-memory", "host", *option)
        assert (code, out) == (2, "") and err.count("\n") == 1 and "leave out one" in err
