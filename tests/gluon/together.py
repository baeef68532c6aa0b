"""Programs of a grid that run at the same time, as a cooperative launch promises: they take turns at their atomics."""

import random
import threading
from collections.abc import Callable

from tests.gluon.errors import Deadlock
from tests.gluon.memory import Memory
from tests.gluon.schedule import Program, Stopped


class Together:
    """Runs programs in threads of their own, of which one runs at a time. One that is at an atomic lets the next run,
    in an order that the seed draws; `running` holds the one that runs."""

    def __init__(self, programs: list[Program], memory: Memory, running: list[Program], seed: int):
        self.programs, self.memory, self.running = programs, memory, running
        self.turns = {program: threading.Semaphore(0) for program in programs}
        self.live, self.random, self.draws = list(programs), random.Random(seed), seed > 1
        self.ended, self.error = threading.Semaphore(0), None
        self.seen, self.idle = -1, 0  # writes that were seen at the last turn, and turns since they were others

    def run(self, function: Callable[[], None]) -> None:
        """Every program calls the function. Raises what any of them raises, and Deadlock if all wait for others."""
        threads = [threading.Thread(target=self._run, args=(p, function), daemon=True) for p in self.programs]
        for program, thread in zip(self.programs, threads):
            program.yields = lambda program=program: self._pause(program)
            thread.start()
        self._next(None)
        self.ended.acquire()
        if self.error is not None:
            raise self.error

    def _run(self, program: Program, function: Callable[[], None]) -> None:
        self.turns[program].acquire()
        try:
            if self.error is None:
                function()
                program.end()
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        after, self.idle = self._after(program), 0
        self.live.remove(program)
        if self.live:
            self._next(after)
        else:
            self.ended.release()

    def _pause(self, program: Program) -> None:
        """Let another program run, and return when the turn has come back."""
        self.idle = 0 if self.memory.changes != self.seen else self.idle + 1
        self.seen = self.memory.changes
        if self.idle > 3 * len(self.live):
            raise Deadlock(f"{len(self.live)} programs wait for others, and none of them writes")
        if (after := self._after(program)) is not program:
            self._next(after)
            self.turns[program].acquire()
            self.running[:] = [program]
        if self.error is not None:
            raise Stopped

    def _after(self, program: Program) -> Program | None:
        """Whose turn it is: the next in the order that is left."""
        place = self.live.index(program) + 1
        if self.draws and place == len(self.live):
            self.random.shuffle(self.live)
            return self.live[0]
        others = [*self.live[place:], *self.live[:place]]
        return others[0]

    def _next(self, program: Program | None) -> None:
        program = self.live[0] if program is None or program not in self.live else program
        self.running[:] = [program]
        self.turns[program].release()
