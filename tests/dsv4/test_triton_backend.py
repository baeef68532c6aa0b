"""The triton backend of the whole model: same logits and text as the reference; a decode step that neither allocates,
waits nor compiles."""

from pathlib import Path

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.runtime.graph import DecodeGraph
from tests import checkpoints
from tests.parity import assert_quiet, assert_repeats

DEMO = Path(__file__).parents[2] / "demo"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CACHES = [
    ("native", "auto", "auto"),
    ("qat", "auto", "auto"),
    ("qat", "fp8", "fp4"),
    ("qat", "fp8", "fp8"),
    ("native", "fp8", "fp4"),
]

# The interpreter takes seconds a layer: one of each kind there (window, CSA, HCA; experts of a table and of scores).
FEW = dict(
    hidden_size=64, index_n_heads=8, n_routed_experts=4, moe_intermediate_size=64, hc_sinkhorn_iters=2, vocab_size=160
)
RAW = checkpoints.SMALL if GPU else checkpoints.BRIEF | FEW


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write_official(tmp_path_factory.mktemp("triton") / "official", RAW)


def pair(path, numerics, cache="auto", index_cache="auto"):
    held = dict(numerics=numerics, device=DEVICE, cache=cache, index_cache=index_cache, mtp=False)
    return load_model(path, backend="reference", **held), load_model(path, backend="triton", **held)


def test_fp32_logits(checkpoint):  # over 5 s: the one test that interprets all kernels of a model
    """Prefill and captured steps; in the interpreter a few tokens only, which still pass every kind of layer and make
    an entry of four tokens."""
    reference, ours = pair(checkpoint, "fp32")
    n, steps = (300, 10) if GPU else (4, 1)
    ids = torch.randint(0, RAW["vocab_size"], (2, n + steps), generator=torch.Generator().manual_seed(0))
    a, b = reference.new_cache(2, n + steps), ours.new_cache(2, n + steps)
    assert (reference.append(ids[:, :n], a) - ours.append(ids[:, :n], b)).abs().max() < 2e-4
    graph = DecodeGraph(ours, b)
    for t in range(n, n + steps):
        want = reference.append(ids[:, t : t + 1], a)
        assert (want - graph.step(ids[:, t : t + 1])).abs().max() < 2e-4, t
    used = {row["operation"]: row["implementation"] for row in ours.dispatch.rows()}
    assert "reference" not in used.values()


@pytest.mark.gpu
def test_the_golden(golden_path):
    from safetensors.torch import load_file

    expected = load_file(golden_path / "expected.safetensors")
    model = load_model(golden_path, numerics="fp32", backend="triton", device="cuda")
    cache = model.new_cache(1, 300)
    logits, streams = model.append(expected["ids"], cache, return_streams=True)
    assert (logits.cpu() - expected["logits"]).abs().max() < 2e-4
    assert (
        model.mtp_logits(streams, expected["next_ids"].cuda(), cache).cpu() - expected["mtp_logits"]
    ).abs().max() < 2e-4
    stepwise = model.new_cache(1, 300)
    graph = DecodeGraph(model, stepwise)
    for t in range(300):
        assert (graph.step(expected["ids"][:, t : t + 1])[0, 0].cpu() - expected["logits"][0, t]).abs().max() < 2e-4, t


@pytest.mark.gpu
@pytest.mark.parametrize("numerics, cache, index_cache", [("fp32", "auto", "auto"), *CACHES])
def test_greedy_text_of_the_demo(numerics, cache, index_cache):
    """The text is the reference's; in rounded numerics a token differs only where the reference's own choice hangs on
    its rounding.

    How far rounding moves logits is measured: the reference's on the CPU, which sums in another order, against the
    reference's on the GPU. Triton's may be twice as far, and a token may differ where the logits of both are nearer
    than that."""
    from dsv4.model.tokenizer import Tokenizer

    reference, ours = pair(DEMO, numerics, cache, index_cache)
    on_cpu = load_model(DEMO, backend="reference", numerics=numerics, cache=cache, index_cache=index_cache, mtp=False)
    tokenizer = Tokenizer(DEMO, reference.config.vocab_size)
    for prompt in (
        "The capital of France is",
        "def fibonacci(n):\n",
        "import os\n\n\nclass Reader:\n    def __init__(self",
    ):
        ids = [0, *tokenizer.encode(prompt)]
        want, got = (generate(m, ids, 64, max_context=160).token_ids for m in (reference, ours))
        if numerics == "fp32" or prompt.startswith("The capital"):
            assert want == got, prompt
        text = torch.tensor([ids + want])
        a, b, c = (m.append(text, m.new_cache(1, text.shape[1])).float().cpu()[0] for m in (reference, ours, on_cpu))
        rounding, apart = (a - c).abs().mean(), (a - b).abs().mean()
        assert apart <= 2 * rounding + 1e-6, (prompt, float(apart), float(rounding))
        if want != got:
            n = next(n for n, pair_ in enumerate(zip(want, got)) if pair_[0] != pair_[1])
            at = a[len(ids) - 1 + n]
            gap, moved = float(at[want[n]] - at[got[n]]), float((a - b)[len(ids) - 1 + n].abs().max())
            assert gap <= 2 * moved, (prompt, n, gap, moved)


@pytest.mark.gpu
def test_a_decode_step_neither_allocates_nor_waits_nor_compiles():
    """Flash widths, ragged rows, 50 replays at positions far apart."""
    model = load_dummy(
        "flash", layers=4, backend="triton", device="cuda", cache="fp8", index_cache="fp4", max_context=1 << 17
    )
    cache = model.new_cache(2, 1 << 17)
    fill_cache(cache, 1000)
    graph = DecodeGraph(model, cache)
    assert_quiet(graph, cache, torch.zeros(2, 1, dtype=torch.int64, device="cuda"))


@pytest.mark.gpu
def test_replays_equal_eager_steps_bitwise_and_repeat():
    """A replay is the eager captured step; 20 replays from the same caches give the same bits."""
    model = load_dummy(
        "flash", layers=5, backend="triton", device="cuda", cache="fp8", index_cache="fp4", max_context=1 << 15
    )
    cache = model.new_cache(2, 1 << 15)
    fill_cache(cache, [20_000, 9_001])
    ids = torch.tensor([[17], [4000]], device="cuda")
    graph = DecodeGraph(model, cache)
    assert_repeats(graph, cache, ids)
