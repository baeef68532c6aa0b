"""Two policies that know the future, as bounds to compare the others with."""

from collections.abc import Sequence

import numpy as np

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError
from dsv4.speculation.costs import BatchCost, CostTable, after_rest
from dsv4.speculation.policy import Policy, checked
from dsv4.speculation.trace import Request, Trace


def potential(request: Request, costs: CostTable, batch: int, width: int | None = None) -> np.ndarray:
    """Seconds from each position to the end, fp64 [T + 1, R + 1], for a row that pays its share (1 / batch) of passes.

    width None: the least possible, by dynamic programming from the end, when all rows always draft alike. Otherwise:
    when every pass is `width` wide, whatever the row itself could use. The second dimension, at batch 1 without a
    width: how many passes without drafts wait for the drafter. Otherwise R is 0, and such a pass pays its share of the
    drafter's step over many (`CostTable.uniform`).
    """
    T, share = len(request), [costs.uniform(batch, k) / batch for k in range(MAX_DRAFTS + 1)]
    cost, accepted = costs.of(batch), request.accepted.tolist()
    R = cost.rests if batch == 1 and width is None else 0
    rest = cost.verify[0] if R else share[0]
    left = np.zeros((T + 1, R + 1))
    for t in range(T - 1, -1, -1):
        most = min(accepted[t], T - t - 1)  # more drafts cost time and gain nothing
        if width is not None:
            left[t] = share[width] + left[t + min(most, width) + 1]
            continue
        drafting = min((share[k] + left[t + k + 1, 0] for k in range(1, most + 1)), default=np.inf)
        for r in range(R + 1):
            left[t, r] = min(drafting + cost.following(r), rest + resting(left[t + 1], r, cost))
    return left


def resting(left: np.ndarray, rested: int, cost: BatchCost) -> float:
    """Seconds to the end after one more pass without drafts: left fp64 [R + 1] of the position after it."""
    most = len(left) - 1
    return left[after_rest(rested, most)] + (cost.following(rested) if rested == most else 0.0)


def bound(trace: Trace, costs: CostTable, batch: int) -> float:
    """tokens/s that no schedule of a drafter exceeds: every row pays at least its share of its own sizes.

    It holds at padding 1 if verify grows with the size, and at less padding if verify is also concave in the size
    (tokens that share a pass never cost more than apart).
    """
    return trace.tokens / sum(potential(r, costs, batch)[0, 0] for r in trace.requests)


class Oracle(Policy):
    """It knows how many drafts each position accepts. State: (potential, accepted, position, passes without drafts that
    wait).

    Assumes that acceptance at a position does not depend on how it was reached, and that costs add up. At batch 1
    (width None) its time is the least possible one, exactly: it follows the dynamic programme. In a larger batch rows
    are coupled by their common pass, and the exact optimum would need the product of all rows' positions; there it
    looks one pass ahead: the sizes that minimise the cost of the pass and the sum of the rows' potentials after it.
    With the potentials of passes of one width, that is one step of policy iteration from the static size, and not
    slower in the long run: take the best over all widths. No schedule of a drafter exceeds `bound`. The oracle needs
    traces, so it only exists in simulation.
    """

    pressure_cap = None  # it is about speed only: the other policies are compared with it without pressure

    def __init__(self, costs: CostTable, batch: int, width: int | None = None):
        self.costs, self.batch, self.width, self.name = costs, batch, width, "oracle"
        self.sizes = tuple(range(MAX_DRAFTS + 1))
        self.price = costs.linear(batch)[1]
        self._potentials: dict[int, tuple[Request, np.ndarray]] = {}

    def initial(self, request: Request | None = None) -> tuple[np.ndarray, np.ndarray, int, int]:
        if request is None:
            raise InputError("the oracle needs the acceptance trace of its request; it cannot run in an engine")
        if id(request) not in self._potentials:  # the request is kept, because its id is unique only while it lives
            self._potentials[id(request)] = request, potential(request, self.costs, self.batch, self.width)
        return self._potentials[id(request)][1], request.accepted, 0, 0

    def observe(self, state, accepted: int, proposed: int):
        checked(accepted, proposed)
        left, counts, t, rested = state
        return left, counts, t + accepted + 1, 0 if proposed else after_rest(rested, left.shape[1] - 1)

    def choose(self, states: Sequence, pressure: bool = False) -> list[int]:
        if pressure:
            raise InputError("the oracle is not defined under pressure; rank policies without it")
        rows = [
            (self._after(left, t, rested), min(int(counts[t]), len(counts) - t - 1))
            for left, counts, t, rested in states
        ]
        plans = {}
        for m in range(MAX_DRAFTS + 1):
            plans[tuple(min(m, most) for _, most in rows)] = None
            if self.price[m]:  # a row may draft less than it could, if live tokens cost
                plans[
                    tuple(
                        int(np.argmin(after[: min(m, most) + 1] + self.price[m] * np.arange(min(m, most) + 1)))
                        for after, most in rows
                    )
                ] = None
        cost = lambda plan: self.costs.seconds(self.batch, plan) + sum(after[k] for k, (after, _) in zip(plan, rows))
        return list(min(plans, key=cost))

    def _after(self, left: np.ndarray, t: int, rested: int) -> np.ndarray:
        """Seconds to the end by the number of drafts accepted in the next pass, fp64 [up to 9], including the drafter's
        step over the passes before it."""
        cost = self.costs.of(self.batch)
        after = left[t + 1 : t + MAX_DRAFTS + 2, 0] + cost.following(rested)
        after[0] = resting(left[t + 1], rested, cost)
        return after


class Informed(Policy):
    """It knows the true rates of a synthetic trace, not the outcomes: about the limit of the best estimator. State:
    (rates, position).

    Chooses as `CostAware` does, with a sure belief of the next 8 rates.
    """

    pressure_cap = None

    def __init__(self, costs: CostTable, batch: int):
        self.costs, self.batch, self.name = costs, batch, "informed"
        self.sizes = tuple(range(MAX_DRAFTS + 1))
        self.uniform = np.array([costs.uniform(batch, k) for k in self.sizes])
        own = np.arange(MAX_DRAFTS + 1)
        marginal = batch * np.array(costs.linear(batch)[1]) / self.uniform
        self.price = np.where(own <= own[:, None], marginal[:, None] * (own - own[:, None]), np.inf)

    def initial(self, request: Request | None = None) -> tuple[np.ndarray, int]:
        if request is None or request.rates is None:
            raise InputError(
                "the informed policy needs the rates of a synthetic trace; a recorded one does not have them"
            )
        return np.concatenate([request.rates, np.zeros(MAX_DRAFTS)]), 0

    def observe(self, state, accepted: int, proposed: int):
        checked(accepted, proposed)
        return state[0], state[1] + accepted + 1

    def choose(self, states: Sequence, pressure: bool = False) -> list[int]:
        if pressure:
            raise InputError("the informed policy is not defined under pressure; rank policies without it")
        ahead = np.stack([rates[t : t + MAX_DRAFTS] for rates, t in states])
        expected = np.cumsum(np.concatenate([np.ones((len(states), 1)), np.cumprod(ahead, axis=1)], axis=1), axis=1)
        value = np.log(expected)
        net = value[:, None, :] - self.price
        width = int((len(states) * np.log(self.uniform) - net.max(2).sum(0)).argmin())
        return [int(k) for k in net[:, width].argmax(1)]
