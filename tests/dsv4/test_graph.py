"""Captured steps: what they compute is what `append` computes, at every position, in every cache format. On a CPU
without a graph."""

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate
from dsv4.errors import ContextOverrun, InputError
from dsv4.model.numerics import NUMERICS
from dsv4.model.step import CapturedStep, Step
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import Sampling
from tests import checkpoints

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CACHES = [
    ("fp32", "auto", "auto"),
    ("native", "auto", "auto"),
    ("qat", "auto", "auto"),
    ("qat", "fp8", "fp4"),
    ("native", "fp8", "fp8"),
    ("native", "bf16", "fp4"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    raw = checkpoints.SMALL if DEVICE == "cuda" else checkpoints.BRIEF
    return checkpoints.write_official(tmp_path_factory.mktemp("graph") / "official", raw)


def loaded(checkpoint, numerics="fp32", cache="auto", index_cache="auto", backend="reference"):
    return load_model(
        checkpoint, numerics=numerics, backend=backend, device=DEVICE, cache=cache, index_cache=index_cache
    )


def prompts(model, *lengths):
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, model.config.vocab_size, (len(lengths), max(lengths)), generator=g)
    return ids, list(lengths)


@pytest.mark.few("numerics", "cache", "index_cache")
@pytest.mark.parametrize("numerics, cache, index_cache", CACHES)
def test_captured_steps_equal_append(checkpoint, numerics, cache, index_cache):
    """A ragged batch from several residues of the ratios, past the window and past 128 tokens, against append token by
    token."""
    model = loaded(checkpoint, numerics, cache, index_cache)
    ids, counts = prompts(model, 5, 126, 150)
    eager, captured = model.new_cache(3, 180), model.new_cache(3, 180)
    for c in (eager, captured):
        model.append(ids, c, n_new=counts, logits="last")
    graph = DecodeGraph(model, captured)
    g = torch.Generator().manual_seed(4)
    for step in range(9):
        new = torch.randint(0, model.config.vocab_size, (3, 1), generator=g)
        want, found = model.append(new, eager), graph.step(new)
        assert captured.lengths == eager.lengths
        assert torch.equal(want, found), step


def begun(model, ids):
    """A cache of 300 tokens that holds ids [1, n]."""
    cache = model.new_cache(1, 300)
    if ids.shape[1]:
        model.append(ids, cache, logits="none")
    return cache


@pytest.mark.few("index_cache")
@pytest.mark.parametrize("cache, index_cache", [("fp8", "fp4"), ("fp8", "fp8"), ("bf16", "fp4")])
def test_packed_caches_hold_what_simulated_numerics_make(checkpoint, cache, index_cache):
    """In qat numerics FP8 KV and FP4 keys lose nothing: prefill in pieces and decoding equal those on bf16 caches, bit
    for bit."""
    plain, packed = loaded(checkpoint, "qat"), loaded(checkpoint, "qat", cache, index_cache)
    ids, _ = prompts(plain, 300)
    for chunk in (300, 77):
        a, b = (m.append(ids, m.new_cache(1, 300), chunk=chunk) for m in (plain, packed))
        assert torch.equal(a, b), chunk
    for first, last in ((0, 10), (252, 260)):  # token by token: over the first entries, and the second of 128
        a, b = (
            m.append(ids[:, first:last], cache, chunk=1)
            for m, cache in ((m, begun(m, ids[:, :first])) for m in (plain, packed))
        )
        assert torch.equal(a, b), first
    cpu = load_model(checkpoint, numerics="qat", backend="cpu", cache=cache, index_cache=index_cache)
    short = cpu.append(ids[:, :10], cpu.new_cache(1, 10), chunk=1)
    assert torch.isfinite(short).all()


@pytest.mark.parametrize("numerics, cache, index_cache", [("fp32", "auto", "auto"), ("qat", "fp8", "fp4")])
def test_prompts_by_compositions_equal_prompts_by_operations(checkpoint, numerics, cache, index_cache, monkeypatch):
    """Every composition that a prompt may use, by its definition: the same numbers, in long chunks of ragged rows and
    in short ones. What is watched runs by itself."""
    model = loaded(checkpoint, numerics, cache, index_cache)
    ids, counts = prompts(model, 301, 170)
    run = lambda chunk: model.append(ids, model.new_cache(2, 301), n_new=counts, chunk=chunk, logits="last")
    want = [run(chunk) for chunk in (256, 50)]
    names = ("query_heads", "latent", "index_queries", "pool_entries", "mhc_pre_norm", "mhc_post_pre_norm", "moe")
    calls = dict.fromkeys(names, 0)

    def counted(name, real):
        def call(*args):
            calls[name] += 1
            return real(*args)

        return call

    for name in names:
        monkeypatch.setattr(model.op, name, counted(name, getattr(model.op, name)))
    monkeypatch.setattr(model.op, "fused", frozenset(names))
    for chunk, expected in zip((256, 50), want):
        assert torch.equal(run(chunk), expected), chunk
    assert all(calls.values()), calls
    seen, before = [], dict(calls)
    watched = [m for block in model.layers for m in (block.hc_attn, block.ffn_norm, block.ffn.experts)]
    undo = [m.register_forward_hook(lambda *args: seen.append(1)) for m in watched]
    # steps: 170 tokens of both rows, 131 of the first
    assert torch.equal(run(256), want[0]) and len(seen) == 2 * len(undo)
    for hook in undo:
        hook.remove()
    assert (
        all(calls[n] == before[n] for n in ("moe", "mhc_pre_norm", "mhc_post_pre_norm"))
        and calls["latent"] > before["latent"]
    )


def test_a_long_step_sees_what_the_ring_will_hold():
    """Rows of the step itself are handed out as they are, the others are read back from bytes: both are the same
    numbers."""
    from dsv4.cache.rows import Ring, Tokens
    from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout, read_rows
    from dsv4.kernels.quantize import simulate_fp8_blocks
    from dsv4.model.step import Step

    W, D, rope, T, room = 8, 96, 32, 50, 4
    rows = PackedRows(
        RowFormat.KV_FP8, torch.zeros(1, pack_layout(RowFormat.KV_FP8, D, rope).page, dtype=torch.uint8), D, rope, 64
    )
    ring = Tokens(Ring(rows, W - 1, W + room))
    values = simulate_fp8_blocks(torch.randn(T, D, generator=torch.Generator().manual_seed(0)).bfloat16(), 64, rope)
    for start, stop in ((0, 3), (3, 33), (33, 34), (34, 50)):
        step = Step(torch.zeros(1, stop - start, dtype=torch.int64), 0, [start], {})
        pool, index = ring.extend(step, values[start:stop]), ring.last(step, W)
        for row, t in zip(index, range(start, stop)):
            found = row[row >= 0]
            held = read_rows(pool, found).bfloat16() if isinstance(pool, PackedRows) else pool[found]
            assert torch.equal(held, values[max(0, t - W + 1) : t + 1])


def test_rows_that_rest_and_rewinds(checkpoint):
    model = loaded(checkpoint)
    ids, counts = prompts(model, 9, 30)
    cache, want = model.new_cache(2, 64), model.new_cache(2, 64)
    for c in (cache, want):
        model.append(ids, c, n_new=counts, logits="none")
    graph = DecodeGraph(model, cache)
    new = torch.tensor([[7], [8]])
    graph.step(new, active=[False, True])
    assert cache.lengths == [9, 31]
    graph.step(torch.tensor([[1], [2]]))
    cache.rewind(1)
    found = graph.step(new)
    model.append(new, want, n_new=[0, 1], logits="none")
    assert (found - model.append(new, want)).abs().max() < 2e-4 and cache.lengths == want.lengths == [10, 32]


def test_several_tokens_a_step(checkpoint):
    """A verify pass of 5 tokens crosses two windows of 4 at some positions and one at others; and one of 128."""
    model = loaded(checkpoint)
    for start in (121, 124, 126, 127, 128):
        ids, _ = prompts(model, start)
        eager, captured = model.new_cache(1, 160), model.new_cache(1, 160)
        for c in (eager, captured):
            model.append(ids, c, logits="none")
        new = ids[:, :5]
        found = DecodeGraph(model, captured, 5).step(new).clone()
        assert (found - model.append(new, eager)).abs().max() < 2e-4
        after = DecodeGraph(model, captured).step(new[:, :1])
        assert (after - model.append(new[:, :1], eager)).abs().max() < 2e-4


def test_greedy_steps_say_what_append_says(checkpoint):
    """Of a ragged batch; without more to come nothing runs, and what is fed is what was given to be."""
    model = loaded(checkpoint)
    ids, counts = prompts(model, 5, 126, 150)
    eager, captured = model.new_cache(3, 180), model.new_cache(3, 180)
    first = [model.append(ids, c, n_new=counts, logits="last") for c in (eager, captured)][1]
    graph, want = DecodeGraph(model, captured), first
    said, logits = graph.greedy(first, more=True)
    for _ in range(5):
        assert said == want[:, -1].argmax(-1).tolist()
        want = model.append(want[:, -1:].argmax(-1).cpu(), eager)
        assert torch.equal(want, logits) and eager.lengths == captured.lengths
        said, logits = graph.greedy(logits, more=True)
    lengths, fed = captured.lengths, torch.tensor([[1], [2], [3]])
    assert graph.greedy(logits, more=False)[1] is None and captured.lengths == lengths
    said, logits = graph.greedy(logits, True, fed.to(DEVICE))
    want = model.append(want[:, -1:].argmax(-1).cpu(), eager)
    assert said == want[:, -1].argmax(-1).tolist() and torch.equal(logits, model.append(fed, eager))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, 3)], ids=["greedy", "sampled"])
def test_text_of_steps_that_are_under_way_before_their_token_is_known(checkpoint, monkeypatch, sampling):
    """To the last token, to one that stops, and to the end of the context; greedily one step too many runs where a
    token stops, and none elsewhere."""
    model, ids, ran = loaded(checkpoint), [3, 1, 4, 1, 5], []
    want, step = generate(model, ids, 12, sampling).token_ids, DecodeGraph.step
    monkeypatch.setattr(model, "backend", "triton")  # the steps, without a graph of them
    monkeypatch.setattr(DecodeGraph, "step", lambda *given: ran.append(1) or step(*given))
    assert generate(model, ids, 12, sampling, max_context=100).token_ids == want and len(ran) == 11
    ran.clear()
    at = next(i for i in range(3, 12) if want[i] not in want[:i])
    told = []
    out = generate(model, ids, 12, sampling, stop_ids=[want[at]], on_token=told.append)
    assert (
        out.token_ids == want[: at + 1]
        and told == want[:at]
        and out.stop_reason == "eos"
        and len(ran) == at + (sampling.temperature == 0) * (at < 11)
    )
    ran.clear()
    told = []
    with pytest.raises(ContextOverrun, match="full after 6 new tokens"):
        generate(model, ids, 12, sampling, max_context=10, on_token=told.append)
    assert told == want[:6] and len(ran) == 5
    assert generate(model, ids, 1, sampling).token_ids == want[:1] and len(ran) == 5


@pytest.mark.few("numerics", "cache", "index_cache")
@pytest.mark.parametrize("numerics, cache, index_cache", CACHES)
def test_what_nobody_has_written_is_not_read(checkpoint, numerics, cache, index_cache):
    """Every buffer full of NaN (bytes of 255 in packed ones) beyond what the prompt wrote."""
    model = loaded(checkpoint, numerics, cache, index_cache)
    ids, _ = prompts(model, 21)
    clean, dirty = model.new_cache(1, 96), model.new_cache(1, 96)
    for layer in dirty.layers:
        for t in layer.tensors.values():
            t.fill_(255 if t.dtype is torch.uint8 else float("nan"))
    for c in (clean, dirty):
        model.append(ids, c, logits="none")
    a, b = DecodeGraph(model, clean), DecodeGraph(model, dirty)
    for token in range(6):
        new = torch.tensor([[token + 3]])
        assert torch.equal(a.step(new), b.step(new))


def test_refusals(checkpoint):
    model = loaded(checkpoint)
    cache = model.new_cache(1, 4, max_rewind=0)
    with pytest.raises(InputError, match="max_rewind >= 1"):
        DecodeGraph(model, cache, 2)
    graph = DecodeGraph(model, cache)
    for _ in range(4):
        graph.step(torch.tensor([[3]]))
    with pytest.raises(ContextOverrun, match="max_context of 4"):
        graph.step(torch.tensor([[3]]))
    for cache_format, index_format in (("fp4", "auto"), ("auto", "int8")):
        with pytest.raises(InputError, match="unknown"):
            NUMERICS["native"].with_caches(cache_format, index_format)
    with pytest.raises(InputError, match="fp32"):
        NUMERICS["fp32"].with_caches("fp8", "auto")


def test_a_step_is_on_the_device_that_names_no_number():
    """`load_model(device="cuda")` keeps 'cuda'; tensors made there are on 'cuda:0'."""
    from dsv4.errors import UnsupportedInput

    ids, start = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for step in (Step(ids, 0, [0], {}), CapturedStep(ids, start, 8, {})):
        step.device = torch.device("cuda", 0)  # as ids on a GPU say
        assert step.on(torch.device("cuda")) is step and step.on(torch.device("cuda", 0)) is step
    with pytest.raises(UnsupportedInput, match="cuda:0 met a layer on cuda:1"):
        step.on(torch.device("cuda", 1))
