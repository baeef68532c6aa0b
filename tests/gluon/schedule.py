"""A program of the grid: its partitions, of which one runs at a time, their barriers, and what is under way."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.gluon.accesses import Access, Accesses, merge
from tests.gluon.errors import Deadlock, EmulationError, refuse
from tests.gluon.memory import Allocation, Memory, Shared
from tests.gluon.timing import Timing


class Stopped(BaseException):
    """Another partition failed: this one ends."""


@dataclass(eq=False)
class Copy:
    """A copy to shared memory under way; `land` writes it."""

    land: Callable[[], None]
    bytes: int = 0  # 0: it does not count, but arrives `arrivals` times
    arrivals: int = 0
    access: Access | None = None  # of a cp.async


class Barrier:
    """An mbarrier. Phase n is complete when `count` arrivals and as many bytes as were expected have come in it."""

    def __init__(self, name: str, count: int):
        self.name, self.count = name, count
        self.phase, self.missing, self.expected, self.received = 0, count, 0, 0
        self.pending: list[Copy] = []  # not landed
        self.clock: dict = {}  # what who waits comes to know

    def passed(self, parity: int) -> bool:
        """Whether the last phase of this parity is complete: phases before the first count as complete."""
        return self.phase % 2 != parity

    def arrive(self, count: int) -> None:
        refuse(count > self.missing, f"{self.name}: more arrivals in phase {self.phase} than its count of {self.count}")
        self.missing -= count
        self._advance()

    def expect(self, bytes: int) -> None:
        self.expected += bytes
        self.arrive(1)

    def receive(self, copy: Copy) -> None:
        copy.land()
        self.received += copy.bytes
        wrong = f"{self.name}: {self.received} bytes came in phase {self.phase}, and {self.expected} were expected"
        refuse(copy.bytes > 0 and self.received > self.expected, wrong)
        if copy.arrivals:
            self.arrive(copy.arrivals)
        else:
            self._advance()

    def _advance(self) -> None:
        if self.missing == 0 and self.received == self.expected:
            self.phase, self.missing, self.expected, self.received = self.phase + 1, self.count, 0, 0

    def land(self) -> bool:
        """Land what is under way until the phase is complete; whether there was any."""
        phase, some = self.phase, bool(self.pending)
        while self.pending and self.phase == phase:
            self.receive(self.pending.pop(0))
        return some

    def state(self) -> str:
        bytes = self.expected - self.received
        return f"{self.missing} of {self.count} arrivals and {bytes} of {self.expected} bytes missing"


@dataclass(eq=False)
class Partition:
    name: str
    index: int
    warps: int
    run: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: tuple[Barrier, int] | None = None
    done: bool = False
    clock: dict = field(default_factory=dict)  # epochs of partitions, and phases of barriers, that are known here
    copies: list[Copy] = field(default_factory=list)  # cp.async, not committed
    groups: list[list[Copy]] = field(default_factory=list)  # committed, not waited for
    products: list = field(default_factory=list)  # wgmma, not waited for
    stores: list = field(default_factory=list)  # by TMA, not waited for

    def ready(self) -> bool:
        return not self.done and (self.waiting is None or self.waiting[0].passed(self.waiting[1]))

    def finish(self) -> None:
        """Refuse to end with operations under way that read or write shared memory."""
        copies = [copy for group in (*self.groups, self.copies) for copy in group]
        for left, what, wait in (
            (self.products, "products", "warpgroup_mma_wait"),
            (self.stores, "TMA stores", "tma.store_wait"),
            (copies, "asynchronous copies", "async_copy.wait_group"),
        ):
            refuse(bool(left), f"{self.name} ends with {len(left)} {what} under way: {wait} is missing")


class Program:
    """One program of the grid. `current` is the partition that runs."""

    def __init__(
        self, ids: tuple[int, ...], grid: tuple[int, ...], memory: Memory, timing: Timing, warps: int, asm: dict
    ):
        """ids and grid: of three axes; asm: emulations of inline assembly."""
        self.ids, self.grid, self.memory, self.timing, self.asm = ids, grid, memory, timing, asm
        self.barriers: dict[tuple, Barrier] = {}
        self.accesses = Accesses(self)
        self.final: list[Callable[[], None]] = []  # writes to global memory that nothing waits for
        self.crossed: dict[Allocation, str] = {}  # copies under way to what was not used since: why that is wrong
        self.error: BaseException | None = None
        self.yields: Callable[[], None] = lambda: None  # lets another program run
        self.partitions = [Partition("the kernel", 0, warps, clock={0: 1})]
        self.current = self.partitions[0]

    # Partitions -------------------------------------------------------------------------------------------------------

    def specialize(self, functions: list[tuple[str, Callable]], warps: list[int]):
        """Run the first function here and the others in threads of their own; the first's result."""
        refuse(len(self.partitions) > 1, "warp_specialize within warp_specialize, or a second one")
        refuse(len(warps) != len(functions) - 1, f"{len(functions) - 1} workers and {len(warps)} numbers of warps")
        main = self.current
        main.name = functions[0][0]
        for index, ((name, _), count) in enumerate(zip(functions[1:], warps), start=1):
            same = [p for p in self.partitions if p.name.split(" #")[0] == name]
            self.partitions.append(Partition(f"{name} #{len(same) + 1}" if same else name, index, count))
        for p in self.partitions[1:]:
            p.clock = {**main.clock, p.index: 1}
        main.clock[0] += 1
        workers = list(zip(self.partitions[1:], (f for _, f in functions[1:])))
        threads = [threading.Thread(target=self._worker, args=w, daemon=True) for w in workers]
        for thread in threads:
            thread.start()
        try:
            result = functions[0][1]()
            main.finish()
            main.done = True
            self._switch()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        main.done = False
        self._join(main)
        return result

    def _join(self, main: Partition) -> None:
        """The kernel goes on after its partitions: it knows what all of them have stored."""
        for p in self.partitions:
            merge(main.clock, p.clock)
        self.current = main

    def _worker(self, partition: Partition, function: Callable) -> None:
        partition.run.acquire()
        try:
            if self.error is None:
                function()
                partition.finish()
                partition.done = True
                self._switch()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for p in self.partitions:
            p.run.release()

    def _switch(self) -> None:
        """Let the next partition run, and return when this one's turn has come again (at once if it has ended)."""
        here = self.current
        following = self._next()
        if following is None or following is here:
            return
        self.current = following
        following.run.release()
        if here.done and here.index > 0:
            return
        here.run.acquire()
        if self.error is not None:
            raise Stopped

    def _next(self) -> Partition | None:
        if self.timing.lands_early():
            self._land(self.barriers.values())
        while True:
            runnable = [p for p in self.partitions if p.ready()]
            if runnable:
                return self.timing.next(runnable, self.current)
            waiting = [p for p in self.partitions if not p.done]
            if not waiting:
                return self.partitions[0]  # all have ended: the kernel goes on
            if not self._land(p.waiting[0] for p in waiting):
                raise self._deadlock(waiting)

    def _land(self, barriers) -> bool:
        return any(barrier.land() for barrier in barriers)

    def _deadlock(self, waiting: list[Partition]) -> Deadlock:
        lines = [
            f"{p.name} waits for {p.waiting[0].name}, phase {p.waiting[1]} ({p.waiting[0].state()})" for p in waiting
        ]
        return Deadlock("every partition waits: " + "; ".join(lines))

    # Scratch memory ---------------------------------------------------------------------------------------------------

    def exchanges(self, what: str) -> None:
        """Warps exchange numbers through shared memory, which may be that of any allocation that is not used later."""
        here = self.current
        for copy in (*(copy for group in here.groups for copy in group), *here.copies):
            view = copy.access.view
            self.crossed[view.allocation] = f"{here.name}: {what} while {copy.access.what} to {view} is under way"

    # Barriers ---------------------------------------------------------------------------------------------------------

    def barrier(self, view: Shared) -> Barrier:
        key = view.allocation, view.bits.storage_offset()
        if key not in self.barriers:
            raise EmulationError(f"{view} is used as an mbarrier without mbarrier.init")
        return self.barriers[key]

    def init_barrier(self, view: Shared, count: int) -> None:
        refuse(view.numel != 1 or view.dtype.name != "int64", f"{view} is no mbarrier: int64 [1]")
        key = view.allocation, view.bits.storage_offset()
        refuse(key in self.barriers, f"{view} is initialised again without mbarrier.invalidate")
        self.barriers[key] = Barrier(str(view), count)

    def wait(self, barrier: Barrier, parity: int) -> None:
        here = self.current
        here.waiting = barrier, parity
        while not barrier.passed(parity):
            self._switch()
        here.waiting = None
        merge(here.clock, barrier.clock)
        here.clock[barrier] = barrier.phase

    def released(self, barrier: Barrier) -> None:
        """The current partition arrives: who waits will know what it knows now."""
        here = self.current
        merge(barrier.clock, here.clock)
        here.clock[here.index] += 1

    def pause(self) -> None:
        """After an arrival: another partition may run."""
        if len(self.partitions) > 1 and self.timing.switches():
            self._switch()

    def end(self) -> None:
        self.partitions[0].finish()
        for crossed in self.crossed.values():
            raise EmulationError(f"{crossed}; its memory is not used after that, and may be the scratch memory")
        for barrier in self.barriers.values():
            left = f"{barrier.name}: the kernel ends with {len(barrier.pending)} copies under way"
            refuse(bool(barrier.pending), f"{left} ({barrier.state()})")
            refuse(barrier.received != barrier.expected, f"{barrier.name}: the kernel ends with {barrier.state()}")
        for write in self.final:
            write()
