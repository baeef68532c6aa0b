"""How many tokens to draft: the specification, in plain Python with fp32 arithmetic.

A size is the number of drafted tokens of one row in one pass. Drafting k costs k draft steps and a verify pass over k +
1 tokens (the last committed one and the drafts); a drafted tokens are accepted, a + 1 tokens are committed. Size 0 is a
pass without speculation.

Every operation on fp32 state is rounded by itself (numpy.float32; no fused multiply-add, no double in between), so that
`policy_device`, which runs inside the captured step, is equal bit for bit. Parameters are rounded to fp32 once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4.cache.paging import PRESSURE_PERCENT as PRESSURE_PERCENT  # old places of these names, until 0.4
from dsv4.cache.paging import under_pressure as under_pressure
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError

PRESSURE_CAP = 2
LARGEST = MAX_DRAFTS  # its old name, until 0.4


class Policy:
    """The interface. States are per request and immutable. They hold what a row needs to know, and nothing about other
    rows.

    name: for tables. sizes: all sizes that `choose` may return, ascending: the graphs that an engine needs.
    pressure_cap: no row drafts more than this while the cache is under pressure; None: pressure is ignored.
    """

    name: str
    sizes: tuple[int, ...]
    pressure_cap: int | None = PRESSURE_CAP

    @property
    def drafts(self) -> bool:
        """Whether it may ever draft."""
        return any(self.sizes)

    def initial(self, request: Any = None) -> Any:
        """State of a new request. request: its trace, for policies that know the future; the others ignore it."""
        raise NotImplementedError

    def observe(self, state: Any, accepted: int, proposed: int) -> Any:
        """State after a pass that really drafted `proposed` tokens of the row, `accepted` of them accepted.

        proposed may be less than the chosen size (end of the request or context, pressure, other rows), and 0.
        Raises InputError unless 0 <= accepted <= proposed <= 8.
        """
        raise NotImplementedError

    def choose(self, states: Sequence[Any], pressure: bool = False) -> list[int]:
        """Sizes of the next pass for rows that share it. None is a row at rest: it does not count, and its size is
        0."""
        raise NotImplementedError

    def step(self, states: Sequence[Any], accepted: Sequence[int], proposed: Sequence[int], pressure: bool = False):
        """`observe` for each row, then `choose`: (states, sizes)."""
        rows = zip(states, accepted, proposed, strict=True)
        states = [None if state is None else self.observe(state, a, p) for state, a, p in rows]
        return states, self.choose(states, pressure)


def room(remaining: int, free: int) -> int:
    """The most tokens worth drafting: a pass commits up to size + 1 tokens, and writes as many.

    remaining: tokens that the request may still commit; free: slots of its context that are still empty. Sizes are cut
    to it after `choose`, and `observe` gets the number really drafted.
    """
    return max(0, min(remaining, free) - 1)


def checked(accepted: int, proposed: int) -> None:
    if not 0 <= accepted <= proposed <= MAX_DRAFTS:
        raise InputError(
            f"{accepted} of {proposed} drafted tokens were accepted; expected 0 <= accepted <= drafted <= {MAX_DRAFTS}"
        )


def checked_size(size: int, what: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_DRAFTS:
        raise InputError(f"{what} is {size!r}; expected a whole number of drafted tokens from 0 to {MAX_DRAFTS}")
    return size


class Static(Policy):
    """Always the same size; 0 is no speculation. pressure_cap None keeps it under pressure too."""

    def __init__(self, size: int, pressure_cap: int | None = PRESSURE_CAP):
        self.size = checked_size(size, "the static size")
        self.pressure_cap = None if pressure_cap is None else checked_size(pressure_cap, "pressure_cap")
        self.capped = size if pressure_cap is None else min(size, pressure_cap)
        self.name = f"static {size}" if size else "no speculation"
        self.sizes = tuple(sorted({self.size, self.capped}))

    def initial(self, request=None) -> tuple[()]:
        return ()

    def observe(self, state, accepted: int, proposed: int) -> tuple[()]:
        checked(accepted, proposed)
        return state

    def choose(self, states, pressure: bool = False) -> list[int]:
        return [0 if state is None else self.capped if pressure else self.size for state in states]


# keep: such a pass is no evidence, and the mean stays. decay: it counts as a ratio of 0, as in the published code
UNDRAFTED = ("keep", "decay")


@dataclass(frozen=True)
class AdaptiveParameters:
    """Parameters of `Adaptive`; the defaults are those of the specification.

    weight: of the newest ratio in the mean; start: the mean of a new request; thresholds ascending: sizes[i + 1] is
    taken from thresholds[i] on, sizes[0] below all. The smallest size is at least 1: with nothing drafted nothing is
    measured, and the mean could never rise again. undrafted: what a pass without drafts does to the mean, one of
    UNDRAFTED. Raises InputError.
    """

    weight: float = 0.2
    start: float = 0.8
    thresholds: tuple[float, ...] = (0.5, 0.8)
    sizes: tuple[int, ...] = (1, 4, 8)
    pressure_cap: int | None = PRESSURE_CAP
    undrafted: str = "keep"

    def __post_init__(self):
        if self.undrafted not in UNDRAFTED:
            raise InputError(f"undrafted is {self.undrafted!r}; expected {' or '.join(UNDRAFTED)}")
        if not 0 < self.weight <= 1 or not 0 <= self.start <= 1:
            raise InputError(
                f"weight {self.weight} and start {self.start} were asked for; expected 0 < weight <= 1, 0 <= start <= 1"
            )
        if not _ascending(self.thresholds) or not all(0 < t <= 1 for t in self.thresholds):
            raise InputError(f"thresholds are {self.thresholds}; expected ascending numbers over 0 and up to 1")
        for size in self.sizes:
            checked_size(size, "a size")
        if len(self.sizes) != len(self.thresholds) + 1 or not _ascending(self.sizes) or self.sizes[0] < 1:
            raise InputError(
                f"sizes are {self.sizes}; expected {len(self.thresholds) + 1} ascending ones, 1 or more, for "
                f"{len(self.thresholds)} thresholds"
            )
        if self.pressure_cap is not None and checked_size(self.pressure_cap, "pressure_cap") < 1:
            raise InputError(
                "pressure_cap is 0; expected 1 or more: with nothing drafted the acceptance would never be "
                "measured again"
            )


def _ascending(values: Sequence[float]) -> bool:
    return all(a < b for a, b in zip(values, values[1:]))


class Adaptive(Policy):
    """Adaptive block size: an exponential mean of r = accepted / proposed picks the size. State: the mean,
    np.float32."""

    def __init__(self, parameters: AdaptiveParameters = AdaptiveParameters()):
        self.parameters = p = parameters
        self.name = "ASBS" if p.undrafted == "keep" else "ASBS, decaying"
        self.pressure_cap = p.pressure_cap
        capped = {size if p.pressure_cap is None else min(size, p.pressure_cap) for size in p.sizes}
        self.sizes = tuple(sorted({*p.sizes, *capped}))
        self.weight, self.keep = np.float32(p.weight), np.float32(1 - p.weight)
        self.thresholds = tuple(map(np.float32, p.thresholds))

    def initial(self, request=None) -> np.float32:
        return np.float32(self.parameters.start)

    def observe(self, state: np.float32, accepted: int, proposed: int) -> np.float32:
        """ε ← weight · r + (1 − weight) · ε. If nothing was drafted, `undrafted` says whether ε stays or r is 0."""
        checked(accepted, proposed)
        if proposed == 0 and self.parameters.undrafted == "keep":
            return state
        ratio = np.float32(accepted) / np.float32(max(proposed, 1))
        return self.weight * ratio + self.keep * state

    def size_of(self, state: np.float32) -> int:
        """The size before the cap."""
        size = self.parameters.sizes[0]
        for threshold, larger in zip(self.thresholds, self.parameters.sizes[1:]):
            if state >= threshold:
                size = larger
        return size

    def choose(self, states, pressure: bool = False) -> list[int]:
        cap = self.pressure_cap if pressure and self.pressure_cap is not None else MAX_DRAFTS
        return [0 if state is None else min(self.size_of(state), cap) for state in states]
