"""A policy that compares the value of drafts with the cost of a pass.

Each request has a belief: a probability for each of 8 hypotheses. A hypothesis says how likely the first draft is
right, and each further draft if those before it are (a block that was trained to look one token ahead is worse at its
own chains). A pass is evidence (Bayes). With every committed token the kind of text may change, so the belief drifts
towards the prior. This replaces hysteresis: one rejection changes a sure belief little, several change it at once.

A pass of width m costs C(m) seconds and commits E_g[k] tokens of a row under hypothesis g. The width is the one with
the least

    n · log C(m) − Σ_rows (Σ_g p_g · log E_g[k_row] − horizon · what the row would lose in a later pass, knowing what
    this one shows)

For one row whose belief is sure, and for rows that are all alike, that is the best ratio E / C. For rows of several
kinds it is the best common width too: a slow row stays longer, so its tokens are worth more, by 1 / E; a sum of ratios
would neglect that. The last term is the value of information (a one-step lookahead, also called knowledge gradient):
without it a row that drafts nothing would learn nothing and never draft again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError
from dsv4.speculation.costs import CostTable
from dsv4.speculation.policy import PRESSURE_CAP, Policy, checked, checked_size

HYPOTHESES = 8  # a power of two: sums are folded in halves, so their order is the same on host and device


@dataclass(frozen=True)
class CostAwareParameters:
    """rates and chained [8], prior [8, sums to 1]: hypotheses: the first draft is right with rate, a further one with
    chained if those before are; drift: the probability that a token begins another kind of text; horizon: later passes
    of a row on its own that profit from what one shows; sizes: candidates, ascending. Raises InputError. Defaults: five
    kinds of text whose drafts are right independently, and three of a block that loses its thread, as the demo's does
    (first draft right 0.74 … 0.79, second
    0.43 … 0.49); horizon and drift by the costs of an H100 at batch 1, 8 and 32. Chosen on every other recorded request
    and on synthetic traces of another seed."""

    rates: tuple[float, ...] = (0.3, 0.5, 0.7, 0.85, 0.95, 0.6, 0.8, 0.93)
    chained: tuple[float, ...] = (0.3, 0.5, 0.7, 0.85, 0.95, 0.35, 0.4, 0.5)
    prior: tuple[float, ...] = (0.1, 0.1, 0.1, 0.15, 0.25, 0.1, 0.1, 0.1)
    drift: float = 1 / 192
    horizon: float = 2.0
    sizes: tuple[int, ...] = tuple(range(MAX_DRAFTS + 1))
    pressure_cap: int | None = PRESSURE_CAP

    def __post_init__(self):
        for name, found in (("rates", self.rates), ("chained", self.chained)):
            if len(found) != HYPOTHESES or not all(0 < r < 1 for r in found):
                raise InputError(
                    f"{name} are {found}; expected {HYPOTHESES} probabilities between 0 and 1, neither included"
                )
        if len(self.prior) != HYPOTHESES or not all(p > 0 for p in self.prior) or abs(sum(self.prior) - 1) > 1e-6:
            raise InputError(f"prior is {self.prior}; expected {HYPOTHESES} positive numbers that sum to 1")
        if not 0 < self.drift < 1:
            raise InputError(f"drift {self.drift} was asked for; expected 0 < drift < 1")
        if not 0 <= self.horizon < 1e6:
            raise InputError(f"horizon is {self.horizon}; expected a number of passes, 0 or more")
        for size in self.sizes:
            checked_size(size, "a size")
        if not self.sizes or any(a >= b for a, b in zip(self.sizes, self.sizes[1:])):
            raise InputError(f"sizes are {self.sizes}; expected ascending ones")
        if self.pressure_cap is not None and checked_size(self.pressure_cap, "pressure_cap") < self.sizes[0]:
            raise InputError(
                f"pressure_cap {self.pressure_cap} is below the smallest size {self.sizes[0]}; allow a smaller size"
            )


class Tables:
    """Everything that does not depend on the state, computed in fp64 and rounded to fp32 once. G = 8 hypotheses, K =
    len(sizes).

    likelihood [9 · 9, G]: row proposed · 9 + accepted; 0 where accepted > proposed. stay [9], move [9, G]: after
    accepted + 1 tokens. value [G, K]: log E; cost [K]: log C; price [K, K] by the pass's size and the row's own: what
    the row adds to log C · n beyond a row that uses the whole width (0 or less), +inf where its own is larger. later
    [16, R, G, K]: by outcome (accepted, zeros after 8), response and own size, the horizon times probability times
    loss.
    """

    def __init__(self, p: CostAwareParameters, costs: CostTable, batch: int, horizon: float):
        own = np.array(p.sizes)
        # [G, 8]: if those before are
        right = np.column_stack([p.rates] + [p.chained] * (MAX_DRAFTS - 1))
        # [G, 9]: the first a are right
        survive = np.concatenate([np.ones((HYPOTHESES, 1)), np.cumprod(right, axis=1)], axis=1)
        likelihood = outcomes(right, survive)
        stay = (1 - p.drift) ** np.arange(1, MAX_DRAFTS + 2)
        uniform = np.array([costs.uniform(batch, k) for k in p.sizes])
        value = np.log(np.cumsum(survive, axis=1)[:, own])  # E = 1 + Σ survive
        loss = np.log(uniform) - value
        # [G, K]: 0 at the best size
        loss -= loss.min(1, keepdims=True)
        responses = np.unique(loss.argmin(1))
        shown = np.zeros((16, HYPOTHESES, len(own)))
        shown[: MAX_DRAFTS + 1] = likelihood[own].transpose(1, 2, 0)  # [outcome, G, K]
        # of n · log C, by a drafted token
        marginal = batch * np.array(costs.linear(batch)[1])[own] / uniform
        unused = marginal[:, None] * (own - own[:, None])
        self.likelihood = likelihood.reshape(-1, HYPOTHESES).astype(np.float32)
        self.stay = stay.astype(np.float32)
        self.move = ((1 - stay)[:, None] * np.array(p.prior)).astype(np.float32)
        self.value = value.astype(np.float32)
        self.cost = np.log(uniform).astype(np.float32)
        self.price = np.where(own <= own[:, None], unused, np.inf).astype(np.float32)
        self.later = (horizon * shown[:, None] * loss.T[responses][None, :, :, None]).astype(np.float32)


def outcomes(right: np.ndarray, survive: np.ndarray) -> np.ndarray:
    """P(accepted | proposed, g) as [9 proposed, 9 accepted, G], from the probability of each depth [G, 8] and of the
    first a [G, 9]."""
    table = np.zeros((MAX_DRAFTS + 1, MAX_DRAFTS + 1, len(right)))
    for proposed in range(MAX_DRAFTS + 1):
        for accepted in range(proposed + 1):
            table[proposed, accepted] = survive[:, accepted] * (1 - right[:, accepted] if accepted < proposed else 1.0)
    return table


def fold(values: np.ndarray, axis: int) -> np.ndarray:
    """Sum along an axis whose length is a power of two by adding halves to each other, the one order that host and
    device share."""
    while values.shape[axis] > 1:
        half = values.shape[axis] // 2
        first, second = np.split(values, [half], axis)
        values = first + second
    return values.squeeze(axis)


class CostAware(Policy):
    """State: belief fp32 [8]. Sizes of the rows of a pass are chosen together, because they share its cost and its
    width is the largest size."""

    def __init__(self, costs: CostTable, batch: int, parameters: CostAwareParameters = CostAwareParameters()):
        """batch: rows of the passes; their costs must be in the table, else InputError.

        A row that shares its pass can use less of what it learns, the width being common: the horizon is divided by
        √batch (a heuristic), and then doubled, up to 64 times itself, until a batch of new requests drafts at all.
        """
        self.parameters, self.batch, self.name = parameters, batch, "cost-aware"
        self.pressure_cap = parameters.pressure_cap
        self.sizes = parameters.sizes
        self.horizon = parameters.horizon / batch**0.5
        self.tables = Tables(parameters, costs, batch, self.horizon)
        most, fresh = 64 * self.horizon, [self.initial()] * batch
        while self.horizon < most and not any(self.choose(fresh)):
            self.horizon *= 2
            self.tables = Tables(parameters, costs, batch, self.horizon)

    def initial(self, request=None) -> np.ndarray:
        return np.array(self.parameters.prior, np.float32)

    def observe(self, state: np.ndarray, accepted: int, proposed: int) -> np.ndarray:
        """Update the belief by the evidence, then drift over the accepted + 1 committed tokens. Without drafts there is
        only drift."""
        checked(accepted, proposed)
        t = self.tables
        weighed = state * t.likelihood[proposed * (MAX_DRAFTS + 1) + accepted]
        return weighed / fold(weighed, 0) * t.stay[accepted] + t.move[accepted]

    def choose(self, states: Sequence[np.ndarray | None], pressure: bool = False) -> list[int]:
        """At most `batch` states. Equal scores take the smaller size."""
        if len(states) > self.batch:
            raise InputError(f"{len(states)} rows share a pass; this policy was made for a batch of {self.batch}")
        t, live = self.tables, [b for b, state in enumerate(states) if state is not None]
        sizes = [0] * len(states)
        if not live:
            return sizes
        belief = np.stack([states[b] for b in live])
        value = fold(belief[:, :, None] * t.value, 1)  # [n, K]
        # [n, outcome, K]: after the best response
        later = fold(belief[:, None, None, :, None] * t.later, 3).min(2)
        net = (value - fold(later, 1))[:, None, :] - t.price  # [n, K of the pass, K of the row]
        worth = np.zeros((1 << (self.batch - 1).bit_length(), len(self.sizes)), np.float32)
        worth[live] = net.max(2)
        score = np.float32(len(live)) * t.cost - fold(worth, 0)
        if pressure and self.pressure_cap is not None:
            score = np.where(np.array(self.sizes) > self.pressure_cap, np.float32(np.inf), score)
        # argmin and argmax: the first of equals
        for b, own in zip(live, net[:, int(score.argmin())].argmax(1)):
            sizes[b] = self.sizes[own]
        return sizes
