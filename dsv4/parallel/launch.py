"""Starting the ranks of one command on this machine, and ending all of them when one ends badly."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from dsv4.parallel.ranks_asked import LOST, WATCHED

GRACE = 5.0  # seconds for the others after one rank failed, and after they were asked to end
INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}


def launch(size: int, arguments: Sequence[str], program: Sequence[str] = ("-m", "dsv4")) -> int:
    """Run `dsv4 ARGUMENTS`, or another Python program, as that many ranks, and return the exit code: rank 0's if none
    fails, else that of the first that fails, which is named in one line on stderr. Rank 0 has this process's streams.
    Interrupted or terminated, all ranks end, and so they do if this process is killed."""
    stopped: list[int] = []
    before = {s: signal.signal(s, lambda number, _: stopped.append(number)) for s in INTERRUPTED}
    ranks: list[Rank] = []
    try:
        said = sys.stdin.buffer.read() if "-" in arguments and sys.stdin is not None else None
        port, host = _free_port()
        ranks += [Rank(rank, size, port, (*program, *arguments), said) for rank in range(size)]
        host.close()
        failed = _first_failure(ranks, stopped)
        if stopped:
            return INTERRUPTED[signal.Signals(stopped[0])]
        return 0 if failed is None else _told(failed, ranks)
    finally:
        for rank in ranks:
            rank.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class Rank:
    """One process. Rank 0 speaks for all; what another one writes to stderr is kept, and its stdout dropped."""

    def __init__(self, rank: int, size: int, port: int, arguments: Sequence[str], said: bytes | None):
        self.rank, self.size, self.errors = rank, size, None if rank == 0 else tempfile.TemporaryFile()
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            WATCHED: str(os.getpid()),
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL if said is None else subprocess.PIPE,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends all
        )
        if said is not None:
            threading.Thread(target=self._give, args=(said,), daemon=True).start()

    def _give(self, said: bytes) -> None:
        try:
            self.process.communicate(said)
        except (BrokenPipeError, ValueError):
            pass  # it has ended, which is seen elsewhere

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def error(self) -> str:
        """The last error line that it wrote, '' if it wrote none or is rank 0, whose lines were seen."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error: ")), "").removeprefix("error: ")

    def end(self) -> None:
        """End it and all that it started: asked first, then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.code is not None:
                return
            try:
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)  # a stopped process ends only when it goes on
                self.process.wait(GRACE if number == signal.SIGTERM else None)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _first_failure(ranks: Sequence[Rank], stopped: Sequence[int]) -> Rank | None:
    """The rank that failed, once all have ended or GRACE after the first one failed. One that others left is never it
    if another failed by itself."""
    since: float | None = None
    while True:
        running, failed = ([r for r in ranks if r.code is None], [r for r in ranks if r.code])
        own = [rank for rank in failed if rank.code != LOST]
        if failed and since is None:
            since = time.monotonic()
        waited = 0.0 if since is None else time.monotonic() - since
        if stopped or not running or waited > (GRACE / 5 if own else GRACE):
            return next(iter(own or failed and running or failed), None)
        time.sleep(0.05)


def _told(failed: Rank, ranks: Sequence[Rank]) -> int:
    """Say which rank failed, unless rank 0 has said it, and the exit code."""
    code, head = failed.code, f"error: rank {failed.rank} of {failed.size}"
    if code is None:
        print(f"{head} stalled; all ranks were ended", file=sys.stderr)
        return 2
    if code < 0:
        print(f"{head} died of {signal.Signals(-code).name}; all ranks were ended", file=sys.stderr)
        return 2
    if code == LOST:
        print(f"{head} lost the others; all ranks were ended", file=sys.stderr)
        return 2
    if failed.rank and ranks[0].code in (None, LOST):
        print(f"{head}: {failed.error() or f'exit code {code}'}", file=sys.stderr)
    return code


def _free_port() -> tuple[int, socket.socket]:
    """A port that is free now, held until the socket is closed."""
    host = socket.socket()
    host.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    host.bind(("127.0.0.1", 0))
    return host.getsockname()[1], host
