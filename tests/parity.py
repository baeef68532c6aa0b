"""What every model must satisfy beside the same numbers of somebody else."""

import torch

from tests.conftest import TOLERANCE

LENGTHS = [5, 130, 301, 64, 130]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def assert_ragged_batches(ours, ids: torch.Tensor, wanted: torch.Tensor) -> None:
    """ids int64 [1, 310] and their logits [1, 310, vocab]: rows of several lengths in one batch, prefilled and decoded,
    equal each alone."""
    cache = ours.new_cache(len(LENGTHS), ids.shape[1])
    rows = torch.full((len(LENGTHS), max(LENGTHS)), -5)  # pads outside the vocabulary: they must not be looked at
    for b, n in enumerate(LENGTHS):
        rows[b, :n] = ids[0, :n]
    got = ours.append(rows, cache, n_new=LENGTHS)
    for b, n in enumerate(LENGTHS):
        assert far(got[b, :n], wanted[0, :n]) < TOLERANCE
        assert got[b, n:].isnan().all()
    for step in range(6):  # decode: rows at different positions in one step
        fed = torch.stack([ids[0, n + step] for n in LENGTHS]).unsqueeze(1)
        got = ours.append(fed, cache)
        for b, n in enumerate(LENGTHS):
            assert far(got[b, 0], wanted[0, n + step]) < TOLERANCE
    cache.rewind([1, 2, 3, 4, 6])
    assert cache.lengths == [10, 134, 304, 66, 130]


def assert_quiet(graph, cache, ids: torch.Tensor) -> None:
    """50 replays of a captured step of two rows allocate nothing and never wait; nothing is compiled for them, nor for
    positions far apart."""
    from triton import knobs

    compiled = []
    before, knobs.runtime.jit_post_compile_hook = (
        knobs.runtime.jit_post_compile_hook,
        lambda **kw: compiled.append(kw.get("key")),
    )
    try:
        graph.step(ids)
        torch.cuda.synchronize()
        counted = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(50):
            graph.step(ids)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == counted
        for length in (5, 127, 128, 4095, 60_000, (1 << 17) - 2):
            cache._main.now = [length, length // 2]
            assert torch.isfinite(graph.step(ids)).all()
        assert compiled == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
        knobs.runtime.jit_post_compile_hook = before


def assert_repeats(graph, cache, ids: torch.Tensor) -> None:
    """Replays of a captured step from the same caches give the same bits, those of the eager captured step. Leaves the
    graph eager."""
    first = graph.step(ids).clone()
    for _ in range(20):
        cache.rewind(1)
        assert torch.equal(graph.step(ids), first)
    cache.rewind(1)
    graph.graph = None
    assert torch.equal(graph.step(ids), first)
