"""One shape of one policy: the bytes that it must read, how it runs, and what was measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Run = Callable[[int], object]  # one layer's attention, for the layer of that number


@dataclass(frozen=True)
class Row:
    """One layer's decode attention of `batch` rows of `context` tokens.

    policy: name in tables. bytes: what one layer must read and write. dense: whether β and c₀ may be fitted on it.
    finding: name of the price of finding, None if nothing is searched. searched: how many items are searched, over all
    rows and heads. make(inputs): implementations by name, of which the fastest counts. They take the number of a layer;
    layers share no inputs.
    """

    policy: str
    batch: int
    context: int
    bytes: int
    dense: bool
    finding: str | None = None
    searched: int = 0
    make: Callable[[object], Mapping[str, Run]] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch, self.context

    @property
    def name(self) -> str:
        return f"{self.policy} B{self.batch} {self.context}"


@dataclass(frozen=True)
class Measured:
    """A row's time: seconds of one layer, by the fastest implementation. held_out: it may be predicted and never
    fitted."""

    policy: str
    batch: int
    context: int
    bytes: int
    dense: bool
    finding: str | None
    searched: int
    held_out: bool
    seconds: float
    by: str = ""
    others: Mapping[str, float | str] | None = None  # seconds of the slower implementations, or why one did not run

    @property
    def fitted(self) -> bool:
        """Whether β, c₀ or a price may be fitted on it. Sparse rows that search nothing are only ever predicted."""
        return not self.held_out and (self.dense or self.finding is not None)

    @classmethod
    def of(cls, row: Row, held_out: bool, seconds: float, by: str = "", others=None) -> "Measured":
        return cls(
            row.policy,
            row.batch,
            row.context,
            row.bytes,
            row.dense,
            row.finding,
            row.searched,
            held_out,
            seconds,
            by,
            others,
        )


class Source(Protocol):
    """A kind of model: its rows at a shape, the inputs that they share, and formulas of bytes by policy."""

    name: str

    def rows(self, batch: int, context: int) -> list[Row]: ...

    def inputs(self, batch: int, context: int, layers: int, distinct: int) -> object:
        """Inputs for `layers` layers, whose caches are `distinct` different ones."""

    def document(self) -> dict:
        """The parameters of its formulas of bytes, as JSON values."""

    def ways(self) -> tuple:
        """(dense, sparse policies) as `regime.Way`s."""

    def cache_bytes(self, batch: int, context: int) -> int:
        """Bytes of one layer's inputs on the device while they are measured, over all policies."""
