"""Pages that rows share: a pool that holds a request runs it, and no row writes what another reads."""

import random

import pytest
import torch

from dsv4.engine import Request
from dsv4.speculation import Static
from dsv4.speculation.draft import MTPDrafter
from tests.conftest import TOLERANCE
from tests.engine.conftest import paged, prefill, random_ids
from tests.engine.test_batch import alone, nothing_is_held, run
from tests.engine.test_speculation import engine_of


@pytest.mark.parametrize("drafter", [MTPDrafter, None], ids=["mtp", "no drafts"])
def test_a_request_that_resumes_in_another_row_needs_no_second_page_for_its_own_prefix(model, drafter):
    """The kept prefix holds the only page of HCA entries, and another row wrote it. The request comes to its 256th
    token alone: then the prefix goes, and the page is written in place."""
    short, long = (
        Request(name, tuple(random_ids(model, n, seed=n).tolist()), tokens)
        for name, n, tokens in (("short", 5, 2), ("long", 250, 12))
    )
    made = drafter() if drafter else None
    engine, results = engine_of(model, made, rows=2, pages={"hca entries": 1}, policy=Static(2) if drafter else None)
    for request in (short, long):
        engine.submit(request)
    while "short" not in results or not engine.running[0].result.token_ids:
        engine.step()
    assert engine.running[0].row == 1
    engine._evict(engine.running[0])
    engine.step()
    assert engine.running[0].row == 0 and engine.cache.lengths[0] > 128, "it resumes on its own prefix"
    engine.run()
    assert results["long"].error is None and results["long"].token_ids == alone(model, long)
    assert nothing_is_held(engine)


def test_a_page_that_another_row_holds_is_no_reason_to_forget_a_prefix(model):
    """Dropping the prefix would leave two holders, and a copy would be made all the same."""
    cache = paged(model, 3, 400, max_rewind=0, prefixes=3)
    from dsv4.cache.prefixes import PrefixTree

    tree, ids = PrefixTree(cache), random_ids(model, 140).tolist()
    prefill(model, cache, ids[:128], 0, tree.remember)
    for b in (1, 2):
        assert tree.graft(b, ids) == 128
    [page] = cache._held[1]["hca entries"].values()
    free = len(cache.pools["hca entries"].free)
    tree.make_free("hca entries", free, [page])
    assert tree.dropped == 0
    cache.leave(0), cache.leave(2)
    tree.make_free("hca entries", free + 1, [page])
    assert tree.dropped == 1 and cache.pools["hca entries"].state[page].refs == 1


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("seed", range(2))
def test_requests_that_fit_their_pool_end_well_whoever_is_evicted_when(model, seed, together):
    """Random prompts over two prefixes, random evictions, pools of the least size that one request fits in."""
    r = random.Random(seed)
    shared = [random_ids(model, 200, seed=s).tolist() for s in (1, 2)]
    requests = []
    for i in range(5):
        prompt = (
            r.choice(shared)[: r.choice([0, 128, 150])] + random_ids(model, r.randint(1, 120), seed=50 + i).tolist()
        )
        requests.append(Request(f"r{i}", tuple(prompt), r.randint(2, 14), r.choice([0.0, 1.0])))
    engine, results = engine_of(
        model, MTPDrafter(), pages={"hca entries": 1, "csa entries": 2}, policy=Static(3), together=together
    )
    for request in requests:
        engine.submit(request)
    while engine.waiting or engine.running:
        engine.step()
        if engine.running and engine.evictions < 12 and r.random() < 0.3:
            engine._evict(r.choice(engine.running))
    assert [result.error for result in results.values()] == [None] * 5
    assert {name: result.token_ids for name, result in results.items()} == {q.id: alone(model, q) for q in requests}
    assert nothing_is_held(engine)


def test_a_joint_step_leaves_the_entries_of_the_row_that_lent_its_prefix_alone(numeric_model):
    """An append of both rows, uncaptured: where the lender completes a window, the borrower, which is behind it, does
    not, and the page of its next entry is the lender's."""
    model, ids = numeric_model, random_ids(numeric_model, 1, 320)[0].tolist()
    other = random_ids(model, 320, seed=5).tolist()
    cache = paged(model, 2, 320, max_rewind=8)
    prefill(model, cache, ids[:128])
    cache.graft(1, cache.snapshot(0))
    prefill(model, cache, ids[:203])
    mine = list(cache._held[0]["csa entries"].values())
    assert mine == list(cache._held[1]["csa entries"].values())
    held = [entries_of(cache, layer) for layer in cache.layers if layer.main is not None and layer.main.ratio == 4]
    logits = model.append(torch.tensor([[ids[203]], [other[0]]]), cache)
    now = [entries_of(cache, layer) for layer in cache.layers if layer.main is not None and layer.main.ratio == 4]
    for before, after in zip(held, now):
        for a, b in zip(before, after):
            assert torch.equal(a[:50], b[:50]), "the lender's entries, of its first 200 tokens"
    if model.numerics.name == "fp32":
        fresh = model(torch.tensor([ids[:204]]))
        assert (logits[0, 0] - fresh[0, -1]).abs().max() < TOLERANCE


def entries_of(cache, layer) -> list[torch.Tensor]:
    """Row 0's CSA entries and index keys, as bytes where they are packed."""
    table = cache.tables["csa entries"].physical[0]
    found = []
    for part in (layer.main.entries, layer.index.entries):
        data = part.buffer
        if isinstance(data, torch.Tensor):
            found.append(data[table].flatten(0, 1).clone())
        else:
            from dsv4.kernels.cache_rows import read_rows

            rows = (table.unsqueeze(1) * 64 + torch.arange(64)).flatten()
            found.append(read_rows(part.flat, rows).clone())
    return found


def test_rows_on_one_prefix_say_together_what_each_says_alone(model):
    """Greedy text, decoded in uncaptured steps of all rows, one of them far ahead of the others."""
    prefix = random_ids(model, 128, seed=8).tolist()
    requests = [Request(f"r{n}", tuple(prefix + random_ids(model, n, seed=n).tolist()), 24) for n in (95, 2, 9)]
    engine, results = engine_of(model, None, together=True)
    run(engine, requests)
    assert sorted(result.grafted for result in results.values()) == [0, 128, 128]
    assert {name: result.token_ids for name, result in results.items()} == {q.id: alone(model, q) for q in requests}
