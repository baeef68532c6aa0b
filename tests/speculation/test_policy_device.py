"""Device implementations equal the specification bit for bit (here on the CPU; tests/gpu has the same inside a CUDA
graph)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.errors import InputError
from dsv4.speculation import (
    Adaptive,
    AdaptiveParameters,
    CostAware,
    CostAwareParameters,
    Oracle,
    Static,
    on_device,
    under_pressure,
)
from dsv4.speculation.policy_device import DeviceCostAware, KernelCostAware
from scripts.bench.speculation_costs import flat, moe
from tests.capturing import Refusing
from tests.speculation.host import vector_means, vector_sizes

ODD = AdaptiveParameters(weight=0.3, start=0.55, thresholds=(0.25, 0.5, 0.75), sizes=(1, 3, 5, 7), pressure_cap=4)
DECAYS = AdaptiveParameters(undrafted="decay")
NO, YES = torch.tensor(False), torch.tensor(True)


@pytest.mark.parametrize(
    "parameters,rows",
    [(AdaptiveParameters(), 1 << 17), (ODD, 1 << 14), (DECAYS, 1 << 14)],
    ids=["issue", "others", "decays"],
)
def test_adaptive_equals_the_specification_over_millions_of_steps(parameters, rows):
    policy, steps = Adaptive(parameters), 16
    device, rng = on_device(policy, rows, "cpu"), np.random.default_rng(1)
    mean = np.full(rows, policy.initial())
    for step in range(steps):  # 2.1 million decisions
        proposed = rng.integers(0, 9, rows)
        accepted = rng.integers(0, proposed + 1)
        pressure = bool(step % 3 == 0)
        sizes = device.step(torch.from_numpy(accepted), torch.from_numpy(proposed), torch.tensor(pressure)).numpy()
        mean = vector_means(policy, mean, accepted, proposed)
        assert np.array_equal(device.mean.numpy().view(np.int32), mean.view(np.int32))
        assert sizes.dtype == np.int64 and np.array_equal(sizes, vector_sizes(policy, mean, pressure))
        for row in rng.integers(0, rows, 50):  # and the vectorised form is the specification
            assert policy.choose([mean[row]], pressure) == [sizes[row]]


@pytest.mark.parametrize("parameters", [AdaptiveParameters(), ODD, DECAYS], ids=["issue", "others", "decays"])
def test_adaptive_equals_the_specification_at_every_threshold_and_its_neighbours(parameters):
    policy = Adaptive(parameters)
    near = [np.nextafter(t, np.float32(to), dtype=np.float32) for t in policy.thresholds for to in (0, t, 1)]
    ratios = [(a, k) for k in range(9) for a in range(k + 1)]
    states = np.array([m for m in near for _ in ratios], np.float32)
    accepted, proposed = (np.array([pair[i] for _ in near for pair in ratios]) for i in (0, 1))
    device = on_device(policy, len(states), "cpu")
    device.mean.copy_(torch.from_numpy(states))
    assert device.choose(NO).tolist() == policy.choose(list(states))
    sizes = device.step(torch.from_numpy(accepted), torch.from_numpy(proposed), NO)
    expected, chosen = policy.step(list(states), accepted.tolist(), proposed.tolist())
    assert (
        np.array_equal(device.mean.numpy().view(np.int32), np.array(expected, np.float32).view(np.int32))
        and sizes.tolist() == chosen
    )


def test_adaptive_states_that_return_to_a_threshold_agree():
    """r = 0.75 or 1 with the mean at 0.8: products and sums that round at the threshold itself. All sequences of 4
    ratios."""
    policy = Adaptive()
    ratios = np.array([(a, k) for k in (1, 4, 8) for a in range(k + 1)])
    index = np.stack(np.meshgrid(*[np.arange(len(ratios))] * 4, indexing="ij"), -1).reshape(-1, 4)  # 16^4
    device, mean = on_device(policy, len(index), "cpu"), np.full(len(index), policy.initial())
    for step in range(4):
        accepted, proposed = ratios[index[:, step]].T
        sizes = device.step(torch.from_numpy(accepted.copy()), torch.from_numpy(proposed.copy()), NO).numpy()
        mean = vector_means(policy, mean, accepted, proposed)
        assert np.array_equal(sizes, vector_sizes(policy, mean, False))
    assert np.array_equal(device.mean.numpy().view(np.int32), mean.view(np.int32))


CASES = {
    "moe 1": (moe(), 1, CostAwareParameters()),
    "moe 8, live tokens cost": (moe(0.0), 8, CostAwareParameters()),
    "flat 32": (flat(), 32, CostAwareParameters()),
    "flat 8, few sizes": (
        replace(flat(), padding=0.5),
        8,
        CostAwareParameters(sizes=(0, 1, 2, 4, 8), chained=(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)),
    ),
}


@pytest.mark.parametrize("make", [DeviceCostAware, KernelCostAware], ids=["operations", "kernels"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cost_aware_equals_the_specification(case, make):
    """Kernels: in Triton's interpreter here, on a GPU in tests/gpu."""
    costs, batch, parameters = case
    policy, rng = CostAware(costs, batch, parameters), np.random.default_rng(2)
    device, states = make(policy, batch, "cpu"), [policy.initial()] * batch
    seen = set()
    for step in range(10 if make is KernelCostAware else 120 if batch < 32 else 50):
        if step % (4 if make is KernelCostAware else 25) == 0:
            rate = rng.random(batch) if step % 8 else np.full(batch, 0.97)
        proposed = rng.integers(0, 9, batch)
        accepted = np.minimum(rng.geometric(1 - 0.99 * rate) - 1, proposed)
        live = rng.random(batch) < 0.8
        live[0] = True
        pressure = bool(rng.random() < 0.3)
        sizes = device.step(
            *map(torch.from_numpy, (accepted, proposed)), torch.tensor(pressure), torch.from_numpy(live)
        ).numpy()
        states = [policy.observe(s, int(a), int(p)) for s, a, p in zip(states, accepted, proposed)]
        assert np.array_equal(device.belief.numpy().view(np.int32), np.stack(states).view(np.int32)), step
        assert sizes.tolist() == policy.choose([s if there else None for s, there in zip(states, live)], pressure), step
        seen.update(sizes.tolist())
    assert len(seen) > 2  # the comparison is of decisions that differ


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_kernels_weigh_has_the_bits_of_the_operations(case):
    """Sizes alone would not show in which order sums were taken."""
    costs, batch, parameters = case
    policy, rng = CostAware(costs, batch, parameters), np.random.default_rng(4)
    operations, kernels = (make(policy, batch, "cpu") for make in (DeviceCostAware, KernelCostAware))
    for _ in range(3):
        belief = torch.from_numpy(rng.dirichlet(np.ones(8), batch).astype(np.float32))
        operations.belief.copy_(belief), kernels.belief.copy_(belief)
        assert torch.equal(operations.net().view(torch.int32), kernels.net().contiguous().view(torch.int32))


def test_static_on_the_device():
    device = on_device(Static(8), 3, "cpu")
    none = torch.zeros(3, dtype=torch.int64)
    assert device.step(none, none, NO).tolist() == [8] * 3 and device.step(none, none, YES).tolist() == [2] * 3
    assert device.step(none, none, NO, torch.tensor([True, False, True])).tolist() == [8, 0, 8]


@pytest.mark.parametrize("policy", [Adaptive(), CostAware(flat(), 8)], ids=["adaptive", "cost-aware"])
def test_reset_begins_a_new_request_in_some_rows_only(policy):
    device = on_device(policy, 8, "cpu")
    state = device.mean if isinstance(policy, Adaptive) else device.belief
    begun = state.clone()
    device.observe(torch.zeros(8, dtype=torch.int64), torch.full((8,), 4))
    moved = state.clone()
    assert not torch.equal(moved, begun)
    fresh = torch.arange(8) % 2 == 0
    device.reset(fresh)
    assert torch.equal(state[fresh], begun[fresh]) and torch.equal(state[~fresh], moved[~fresh])


@pytest.mark.parametrize("policy", [Static(4), Adaptive(), CostAware(flat(), 8)], ids=lambda p: p.name)
def test_a_step_reads_nothing_back_and_takes_nothing_from_the_host(policy):
    device = on_device(policy, 8, "cpu")
    counts, live, pressure = torch.ones(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool), torch.tensor(True)
    with Refusing() as mode:
        device.step(counts, counts, pressure, live)
        device.reset(live)
    assert mode.seen


def test_pressure_is_the_same_in_tensors():
    live = torch.arange(0, 2001)
    assert under_pressure(live, 2000).tolist() == [under_pressure(n, 2000) for n in range(2001)]


def test_what_has_no_device_implementation_raises():
    with pytest.raises(InputError, match="oracle has no device implementation"):
        on_device(Oracle(moe(), 1), 1, "cpu")
    with pytest.raises(InputError, match="made for 8"):
        on_device(CostAware(moe(), 8), 4, "cpu")
