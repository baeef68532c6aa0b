"""The orders of CSA's and HCA's walks: which rows each of the first tiles has, for known scores."""

import math
from types import SimpleNamespace

import torch

from dsv4.probes.measure.termination import orders

W, N = 6, 8  # rows of the window's pool, entries
WINDOW = [3, 4, 5, 0, 1]  # a ring: slot 1 has the newest token, slot 3 the oldest of five
SCORES = [0.1, 0.9, -2.0, 0.4, 0.8, 0.2, 5.0, 0.3]  # of entries; from the seventh on they lie ahead of the query


def tiles_read(walk, wanted):
    """Rows of each tile of each query of `walk`. Row r has the weight 2^r, so that a sum of weights says of which rows
    it is; wanted: what is hoped for, of which only each query's largest number is used: sums come in units of the
    largest weight."""
    found = []
    for mass, tiles, hoped in zip(walk.mass[:, 0], walk.tiles.tolist(), wanted, strict=True):
        sums = (
            (mass[:tiles].diff(prepend=mass.new_zeros(1)) * 2.0 ** max(r for tile in hoped for r in tile))
            .round()
            .long()
            .tolist()
        )
        found.append([{r for r in range(W + N) if total >> r & 1} for total in sums])
    return found


def pools():
    """(attn, q [2, 1, 1], pool of window rows [W, 1], window_index [2, 5], entries [N, 1]); the second query's window
    has two tokens."""
    attn = SimpleNamespace(scale=1.0, attn_sink=torch.tensor([-math.inf]), ratio=4, layer=None)
    rows = torch.arange(W + N).double().unsqueeze(-1)
    index = torch.tensor([WINDOW, [-1, -1, -1, 0, 1]])
    return attn, torch.full((2, 1, 1), math.log(2.0), dtype=torch.float64), rows[:W].float(), index, rows[W:].float()


def step_and_cache(entries):
    """Six entries are visible to the first query, none to the second."""
    step = SimpleNamespace(visible=lambda ratio: torch.tensor([[6, 0]]), max_visible=lambda ratio: 6)
    return step, SimpleNamespace(
        main=SimpleNamespace(entries=SimpleNamespace(visible=lambda step: entries.unsqueeze(0)))
    )


def indexed(attn, topk):
    """The indexer of `SCORES`, −∞ where a query does not see."""
    seen = torch.tensor([SCORES] * 2)[:, :6].masked_fill(torch.tensor([[False], [True]]), -math.inf)
    attn.indexer = SimpleNamespace(topk=topk, scores=lambda x, qr, step, cache: seen.unsqueeze(0))
    return attn


def entry(*numbers):
    return {W + n for n in numbers}


def test_csa_reads_the_window_newest_first_and_then_the_best_entries():
    attn, q, window, index, rows = pools()
    step, cache = step_and_cache(rows)
    near = [{1, 0}, {5, 4}, {3} | entry(1), entry(4, 3)]
    for topk, rest in ((4, [entry(5)]), (6, [entry(5, 0), entry(2)])):  # some are chosen, or all that there are
        wanted = [near + rest, [{1, 0}]]
        assert (
            tiles_read(orders.entries(indexed(attn, topk), None, None, q, window, index, step, cache, 2), wanted)
            == wanted
        )


def test_hca_reads_the_window_and_then_the_entries_newest_first():
    attn, q, window, index, rows = pools()
    step, cache = step_and_cache(rows)
    wanted = [[{1, 0}, {5, 4}, {3} | entry(5), entry(4, 3), entry(2, 1), entry(0)], [{1, 0}]]
    assert tiles_read(orders.heavily_compressed(attn, q, window, index, step, cache, 2), wanted) == wanted
    alone = [[{r} for r in (1, 0, 5, 4, 3)] + [entry(n) for n in (5, 4, 3, 2, 1, 0)], [{1}, {0}]]
    assert tiles_read(orders.heavily_compressed(attn, q, window, index, step, cache, 1), alone) == alone
