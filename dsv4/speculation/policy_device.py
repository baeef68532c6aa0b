"""The policies of `policy` and `cost_aware` for all rows of a batch, as tensor operations.

For use inside a captured step: constants are placed on the device when a policy is made; `step` never waits for the
device, copies nothing from the host and has no branch on data. State tensors are updated in place, so that replays
follow each other. Each operation rounds by itself and sums are folded in halves, so sizes and states equal the
specification bit for bit; code generators that contract a product and a sum (Inductor, Triton with fused multiply-add)
would break that.

Inputs are not checked, because the host would wait for them: the caller must ensure 0 <= accepted <= proposed <= 8.
"""

import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError
from dsv4.kernels import draft_sizes
from dsv4.speculation.cost_aware import HYPOTHESES, CostAware
from dsv4.speculation.policy import Adaptive, Policy, Static


class DevicePolicy:
    """The interface. `step(accepted, proposed, pressure, live) → sizes`, `reset(fresh)`.

    accepted, proposed: int64 or int32 [B], counts of the pass that just ended; pressure: bool scalar tensor; live: bool
    [B], rows that take part in the next pass (None: all). sizes int64 [B], 0 for rows at rest. Before the first pass,
    and for rows that rested, proposed is 0: they keep what they know, unless passes without drafts decay it.
    reset(fresh bool [B]): those rows begin a new request.
    """

    def step(
        self, accepted: torch.Tensor, proposed: torch.Tensor, pressure: torch.Tensor, live: torch.Tensor | None = None
    ):
        self.observe(accepted, proposed)
        return self.choose(pressure, live)

    def observe(self, accepted: torch.Tensor, proposed: torch.Tensor) -> None:
        raise NotImplementedError

    def choose(self, pressure: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def reset(self, fresh: torch.Tensor) -> None:
        raise NotImplementedError


class DeviceStatic(DevicePolicy):
    def __init__(self, policy: Static, batch: int, device: torch.device | str):
        self.size = torch.full((batch,), policy.size, dtype=torch.int64, device=device)
        self.capped = torch.full((batch,), policy.capped, dtype=torch.int64, device=device)

    def observe(self, accepted, proposed) -> None:
        pass

    def choose(self, pressure, live=None):
        return _resting(torch.where(pressure, self.capped, self.size), live)

    def reset(self, fresh) -> None:
        pass


class DeviceAdaptive(DevicePolicy):
    """State: mean fp32 [B]."""

    def __init__(self, policy: Adaptive, batch: int, device: torch.device | str):
        self.weight, self.keep = float(policy.weight), float(policy.keep)
        self.decays = policy.parameters.undrafted == "decay"
        self.mean = torch.full((batch,), float(policy.initial()), dtype=torch.float32, device=device)
        self.start = self.mean.clone()
        self.thresholds = torch.tensor([float(t) for t in policy.thresholds], dtype=torch.float32, device=device)
        self.sizes = torch.tensor(policy.parameters.sizes, dtype=torch.int64, device=device)
        self.cap = torch.full(
            (), MAX_DRAFTS if policy.pressure_cap is None else policy.pressure_cap, dtype=torch.int64, device=device
        )

    def observe(self, accepted, proposed) -> None:
        ratio = accepted.float() / proposed.clamp(min=1).float()
        fresh = ratio * self.weight + self.mean * self.keep  # two products and a sum, each rounded
        self.mean.copy_(fresh if self.decays else torch.where(proposed > 0, fresh, self.mean))

    def choose(self, pressure, live=None):
        # right: a mean that equals a threshold has reached it
        size = self.sizes.index_select(0, torch.bucketize(self.mean, self.thresholds, right=True))
        return _resting(torch.where(pressure, torch.minimum(size, self.cap), size), live)

    def reset(self, fresh) -> None:
        self.mean.copy_(torch.where(fresh, self.start, self.mean))


class DeviceCostAware(DevicePolicy):
    """State: belief fp32 [B, 8]."""

    def __init__(self, policy: CostAware, batch: int, device: torch.device | str):
        if batch != policy.batch:
            raise InputError(f"a batch of {batch} rows was asked for; this policy was made for {policy.batch}")
        place = lambda array: torch.from_numpy(array.copy()).to(device)
        t = policy.tables
        self.likelihood, self.stay, self.move = place(t.likelihood), place(t.stay), place(t.move)
        self.value, self.cost, self.price, self.later = place(t.value), place(t.cost), place(t.price), place(t.later)
        self.rows = batch
        self.start = place(policy.initial()).expand(batch, -1).contiguous()
        self.belief = self.start.clone()
        self.sizes = torch.tensor(policy.sizes, dtype=torch.int64, device=device)
        self.index = torch.arange(len(policy.sizes), device=device)
        self.none = torch.full((), len(policy.sizes), device=device)
        cap = MAX_DRAFTS if policy.pressure_cap is None else policy.pressure_cap
        self.over = self.sizes > cap
        self.infinite = torch.full((), torch.inf, dtype=torch.float32, device=device)
        self.spare = torch.zeros(
            (1 << (batch - 1).bit_length()) - batch, len(policy.sizes), dtype=torch.float32, device=device
        )

    def observe(self, accepted, proposed) -> None:
        weighed = self.belief * self.likelihood.index_select(0, proposed * (MAX_DRAFTS + 1) + accepted)
        weighed = weighed / _fold(weighed, 1).unsqueeze(1)
        self.belief.copy_(
            weighed * self.stay.index_select(0, accepted).unsqueeze(1) + self.move.index_select(0, accepted)
        )

    def net(self) -> torch.Tensor:
        """The value of each row at each width of the pass and each size of its own: fp32 [B, K, K]."""
        value = _fold(self.belief.unsqueeze(2) * self.value, 1)  # [B, K]
        later = _fold(self.belief.view(-1, 1, 1, HYPOTHESES, 1) * self.later, 3).amin(2)  # [B, outcome, K]
        return (value - _fold(later, 1)).unsqueeze(1) - self.price

    def choose(self, pressure, live=None):
        net = self.net()
        worth, rows = net.amax(2), self.cost * self.rows
        if live is not None:
            worth, rows = worth * live.unsqueeze(1), self.cost * live.sum()
        score = rows - _fold(torch.cat([worth, self.spare]), 0)
        score = torch.where(pressure & self.over, self.infinite, score)
        width = self._first(score == score.amin())
        chosen = net.index_select(1, width.unsqueeze(0)).squeeze(1)  # [B, K]
        own = self._first(chosen == chosen.amax(1, keepdim=True))
        return _resting(self.sizes.index_select(0, own), live)

    def _first(self, found: torch.Tensor) -> torch.Tensor:
        """Index of the first true value of the last dimension: argmin and argmax do not promise which of equals they
        return."""
        return torch.where(found, self.index, self.none).amin(-1)

    def reset(self, fresh) -> None:
        self.belief.copy_(torch.where(fresh.unsqueeze(1), self.start, self.belief))


class KernelCostAware(DeviceCostAware):
    """`DeviceCostAware` in kernels of its own: on a GPU the separate operations of that class take as long as a small
    model's whole round."""

    def __init__(self, policy: CostAware, batch: int, device: torch.device | str):
        super().__init__(policy, batch, device)
        self.value, self.later = self.value.mT.contiguous(), self.later.mT.contiguous()  # hypotheses last
        self.cap = MAX_DRAFTS if policy.pressure_cap is None else policy.pressure_cap
        self.all = torch.ones(batch, dtype=torch.bool, device=device)

    def observe(self, accepted, proposed) -> None:
        draft_sizes.observe(self.belief, self.likelihood, self.stay, self.move, accepted, proposed)

    def net(self) -> torch.Tensor:
        net, _ = draft_sizes.weigh(self.belief, self.value, self.later, self.price, self.all.view(torch.uint8))
        return net[:, : len(self.sizes), : len(self.sizes)]

    def choose(self, pressure, live=None):
        return draft_sizes.choose(
            self.belief,
            self.value,
            self.later,
            self.price,
            self.cost,
            self.sizes,
            self.all if live is None else live,
            pressure,
            self.cap,
        )


def on_device(policy: Policy, batch: int, device: torch.device | str) -> DevicePolicy:
    """The device implementation of a policy. Raises InputError for a policy without one (the oracles need a trace)."""
    cost_aware = KernelCostAware if torch.device(device).type == "cuda" else DeviceCostAware
    for kind, implementation in ((Static, DeviceStatic), (Adaptive, DeviceAdaptive), (CostAware, cost_aware)):
        if isinstance(policy, kind):
            return implementation(policy, batch, device)
    raise InputError(f"{policy.name} has no device implementation; expected Static, Adaptive or CostAware")


def _fold(values: torch.Tensor, dim: int) -> torch.Tensor:
    """As `cost_aware.fold`: halves added to each other, in one order everywhere."""
    while values.shape[dim] > 1:
        first, second = values.chunk(2, dim)
        values = first + second
    return values.squeeze(dim)


def _resting(sizes: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    return sizes if live is None else sizes * live
