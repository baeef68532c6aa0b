"""Experts in slots of a pool: the bits of the whole stack, whatever the slots; and bringing items to their places."""

import pytest
import torch

from dsv4.kernels.experts import experts
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.staging import bring, fetch, items_of, new_table, paired
from tests.kernels.gqa_inputs import DEVICE, randn

E, S, D, I = 12, 9, 64, 32


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_a_pool_has_the_bits_of_the_stack(backend, tokens):
    """Slots in another order than experts, and fewer; the kernels' tiles are those of all experts."""
    if backend == "cpu" and DEVICE != "cpu":
        pytest.skip("runs on a host processor only")
    whole = [PackedWeight(WeightFormat.DENSE, randn(E, *s, seed=i)) for i, s in enumerate(((2 * I, D), (D, I)))]
    held = torch.tensor([7, 2, 11, 0, 5, 3, 10, 1, 8], device=DEVICE)
    pool = [w._replace(weight=w.weight[held].contiguous(), of=E) for w in whole]
    g = torch.Generator().manual_seed(tokens)
    slots = torch.stack([torch.randperm(S, generator=g)[:3] for _ in range(tokens)]).to(DEVICE)
    x, routing = randn(tokens, D, seed=5), randn(tokens, 3, seed=6).abs()
    assert hold("w13", pool[0]).stack == E  # by which tiles are chosen; in fp32 on a host processor they change no bit
    got = experts(x, slots, routing, *pool, 10.0, False, backend=backend)
    assert torch.equal(got, experts(x, held[slots], routing, *whole, 10.0, False, backend=backend))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_items_are_brought_from_their_slots_or_from_the_host(backend):
    """What is staged is told from the host's by other values; places that are not wanted stay as they were."""
    host = torch.arange(8 * 6, dtype=torch.float32, device=DEVICE).view(1, 8, 6)
    staged, place = torch.zeros(1, 3, 6, device=DEVICE), torch.full((1, 8, 6), -1.0, device=DEVICE)
    pool, table = paired(items_of(host, 1), items_of(staged, 1)), new_table(1, 8, 3, DEVICE)
    ask = lambda *items: torch.tensor([items], device=DEVICE)
    end = torch.full((1,), 8, device=DEVICE)
    fetch(table, (pool,), ask(6, 1, 4), end, 1, False, backend=backend)
    fetch(table, (pool,), ask(2), end, 1, False, backend=backend)  # evicts the first slot's
    staged += 100
    before = [t.clone() for t in table.state]
    bring(table, (pool,), (items_of(place, 1).view(pool.host.dtype),), ask(4, -1, 7, 6, 2), backend=backend)
    want = torch.full_like(place, -1)
    want[0, [4, 2]], want[0, [7, 6]] = host[0, [4, 2]] + 100, host[0, [7, 6]]
    assert torch.equal(place, want) and all(torch.equal(a, b) for a, b in zip(before, table.state))
