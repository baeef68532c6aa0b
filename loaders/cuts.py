"""Which part of a tensor of the file a rank holds, where several ranks hold one model together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsv4.kernels.errors import UnsupportedInput


@dataclass(frozen=True)
class Cut:
    """Elements [start, stop) of the `whole` that a tensor has along `axis`: 0 its rows, 1 its columns."""

    axis: int
    start: int
    stop: int
    whole: int

    def stored(self, unit: int, name: str) -> "Cut":
        """This part in elements of a tensor that has one for `unit` of these: of packed codes, or scales of blocks.

        A part begins at a block's first element or lies within one block; raises UnsupportedInput otherwise.
        """
        within = self.start < self.stop and self.start // unit == (self.stop - 1) // unit
        if self.start % unit and not within:
            raise UnsupportedInput(
                f"{name} would be cut at {self.start} of {self.whole}, within a block of {unit}; expected a number of "
                "ranks that cuts between blocks"
            )
        return Cut(self.axis, self.start // unit, -(-self.stop // unit), -(-self.whole // unit))

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole, of which this part has `shape`."""
        return *shape[: self.axis], self.whole, *shape[self.axis + 1 :]

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def share(self) -> float:
        return self.size / self.whole

    @property
    def columns(self) -> "Cut":
        """This part along axis 1."""
        return replace(self, axis=1)

    @property
    def partial(self) -> "Cut | None":
        """None if it is all of the tensor."""
        return None if self.size == self.whole else self


def joint_problems(accounts: Sequence[Mapping[str, Cut | None]], names: Sequence[str]) -> list[str]:
    """What is wrong with the parts that all ranks hold together; empty means that each element of each tensor is held
    once, or by every rank. A scale of a block that several ranks share may be held by each of these.

    accounts: of each rank, official name → its part, None for all of the tensor. names: those that must be held.
    """
    found = [(name, _problem(name, [a[name] for a in accounts if name in a], len(accounts))) for name in names]
    return [f"tensor {name} {problem}" for name, problem in found if problem]


def _problem(name: str, held: Sequence[Cut | None], ranks: int) -> str | None:
    held = [c for c in held if c is None or c.size]
    cuts = sorted((c for c in held if c is not None), key=lambda c: c.start)
    if name.endswith("scale"):
        cuts = list(dict.fromkeys(cuts))
    if not held:
        return "is held by no rank"
    if len({c is None for c in held}) == 2 or len({(c.axis, c.whole) for c in held if c is not None}) > 1:
        return "is cut by some ranks otherwise than by others"
    if held[0] is None and 1 < len(held) < ranks:
        return f"is held whole by {len(held)} of {ranks} ranks; expected one or all"
    if cuts and [*(c.start for c in cuts), cuts[0].whole] != [0, *(c.stop for c in cuts)]:
        spans = ", ".join(f"{c.start} to {c.stop}" for c in cuts)
        return f"has {cuts[0].whole} elements along axis {cuts[0].axis}; ranks hold {spans}"
    return None
