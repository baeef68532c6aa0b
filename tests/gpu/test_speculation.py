"""Block-size policies inside a CUDA graph: replays equal the specification bit for bit, with no round trip to the
host."""

import numpy as np
import pytest
import torch

from dsv4.speculation import Adaptive, CostAware, Static, on_device
from scripts.bench.speculation_costs import flat, moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = 32
POLICIES = {
    "static": Static(4),
    "adaptive": Adaptive(),
    "cost-aware, moe": CostAware(moe(0.5), ROWS),
    "cost-aware, flat": CostAware(flat(), ROWS),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_replays_equal_the_specification(policy):
    device = on_device(policy, ROWS, "cuda")
    accepted, proposed = (torch.zeros(ROWS, dtype=torch.int64, device="cuda") for _ in range(2))
    live, fresh = (torch.zeros(ROWS, dtype=torch.bool, device="cuda") for _ in range(2))
    pressure = torch.zeros((), dtype=torch.bool, device="cuda")
    fresh.fill_(True)

    def step():
        sizes = device.step(accepted, proposed, pressure, live)
        device.reset(fresh)
        return sizes

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the zeros above are written there
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            sizes = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rng, states, seen = np.random.default_rng(3), [policy.initial() for _ in range(ROWS)], set()
    graph.replay()
    rate = rng.random(ROWS)
    for step_number in range(200):
        if step_number % 20 == 0:
            rate = rng.random(ROWS) * rng.random()  # all high or all low by turns too
        k = rng.integers(0, 9, ROWS)
        a = np.minimum(rng.geometric(1 - 0.99 * rate) - 1, k)
        there, new, pressed = rng.random(ROWS) < 0.8, rng.random(ROWS) < 0.05, bool(rng.random() < 0.3)
        for tensor, value in ((accepted, a), (proposed, k), (live, there), (fresh, new)):
            tensor.copy_(torch.from_numpy(value))
        pressure.fill_(pressed)
        graph.replay()
        states = [policy.observe(s, int(x), int(y)) for s, x, y in zip(states, a, k)]
        assert sizes.tolist() == policy.choose([s if t else None for s, t in zip(states, there)], pressed), step_number
        states = [policy.initial() if n else s for s, n in zip(states, new)]
        held = {Adaptive: lambda: device.mean, CostAware: lambda: device.belief}.get(type(policy))
        if held:
            assert np.array_equal(held().cpu().numpy().view(np.int32), np.stack(states).view(np.int32)), step_number
        seen.update(sizes.tolist())
    assert len(seen) > 2


def test_adaptive_over_millions_of_steps():
    """The host's implementation in tensors is compared with the specification in tests/speculation."""
    rows, rng = 1 << 20, torch.Generator().manual_seed(0)
    host, device = on_device(Adaptive(), rows, "cpu"), on_device(Adaptive(), rows, "cuda")
    for step in range(12):
        proposed = torch.randint(0, 9, (rows,), generator=rng)
        accepted = (torch.rand(rows, generator=rng) * (proposed + 1)).long().clamp(max=8).minimum(proposed)
        pressure = torch.tensor(step % 3 == 0)
        expected = host.step(accepted, proposed, pressure)
        assert torch.equal(device.step(accepted.cuda(), proposed.cuda(), pressure.cuda()).cpu(), expected)
        assert torch.equal(device.mean.cpu().view(torch.int32), host.mean.view(torch.int32))
