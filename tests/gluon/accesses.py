"""Who reads and writes shared memory, and what orders it: races are errors at every timing.

Time is counted by vector clocks. A partition's epoch grows when it arrives on a barrier; who waits for the barrier then
knows the epochs that had arrived. A TMA load is known to who waited for the phase in which its bytes count.
"""

from dataclasses import dataclass

from tests.gluon.errors import EmulationError
from tests.gluon.memory import Allocation, Shared


def merge(clock: dict, other: dict) -> None:
    """Know what `other` knows."""
    for who, epoch in other.items():
        clock[who] = max(epoch, clock.get(who, 0))


@dataclass(eq=False)
class Access:
    """`who` is the index of a partition, or the barrier that an asynchronous copy arrives on. It is complete for those
    who know the epoch; None: for nobody yet."""

    view: Shared
    writes: bool
    what: str
    who: object
    epoch: int | None
    unfenced: bool = False  # a write that the async proxy may not read before a fence


class Accesses:
    """Accesses to each allocation of a program."""

    def __init__(self, program):
        self.program = program
        self.of: dict[Allocation, list[Access]] = {}

    def begin(self, view: Shared, what: str, writes: bool = False, who=None, epoch: int | None = None) -> Access:
        """An access of the current partition, which completes later: `complete`. Raise EmulationError where it is not
        ordered after an earlier one."""
        here = self.program.current
        self.program.crossed.pop(view.allocation, None)
        made = Access(view, writes, what, here.index if who is None else who, epoch)
        earlier = self.of.setdefault(view.allocation, [])
        for a in earlier:
            if (writes or a.writes) and not self._known(a) and a.view.overlaps(view):
                raise EmulationError(f"{here.name}: {what} of {view} is not ordered after {self._said(a)}")
        kept = [a for a in earlier if a.epoch is None or not _replaces(made, a)]
        self.of[view.allocation] = [*kept, made]
        return made

    def complete(self, access: Access) -> None:
        here = self.program.current
        access.who, access.epoch = here.index, here.clock[here.index]

    def read(self, view: Shared) -> None:
        self.complete(self.begin(view, "a load"))

    def write(self, view: Shared) -> None:
        made = self.begin(view, "a store", writes=True)
        self.complete(made)
        made.unfenced = True

    def _known(self, a: Access) -> bool:
        here = self.program.current
        return a.epoch is not None and (a.who == here.index or here.clock.get(a.who, 0) >= a.epoch)

    def _said(self, a: Access) -> str:
        if isinstance(a.who, int):
            by = self.program.partitions[a.who].name
            return f"{a.what} of {a.view} by {by}" + (", which is under way" if a.epoch is None else "")
        return f"{a.what} of {a.view}, which arrives on {a.who.name} in phase {a.epoch - 1}"

    # The async proxy: wgmma and TMA ----------------------------------------------------------------------------------

    def fence(self) -> None:
        """Stores of this partition, and those that it knows of, reach the async proxy."""
        for accesses in self.of.values():
            for a in accesses:
                a.unfenced = a.unfenced and not self._known(a)

    def require_fence(self, view: Shared, reader: str) -> None:
        for a in self.of.get(view.allocation, []):
            if a.unfenced and a.view.overlaps(view):
                stored = f"{reader} reads {view} after {self._said(a)}"
                raise EmulationError(f"{stored}, without fence_async_shared in between")


def _replaces(new: Access, old: Access) -> bool:
    """Whether what is ordered after the new access is ordered after the old one."""
    same = new.view.key == old.view.key and new.writes == old.writes
    return same and new.who == old.who and new.what == old.what
