"""What a benchmark run has finished and what it was doing, so that a kernel that takes the process down costs only
itself.

A child process measures rows and appends to the journal; its parent, which never touches the device, starts another
child after a crash. What was running when a child died is not run again: it is reported as having crashed.
"""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from dsv4.probes.journal import append, lines_of
from scripts.bench.limits import Kernel
from scripts.bench.measure import PeerResult, Result
from scripts.bench.row import Beside
from scripts.bench.timing import Timing

CRASHED = 3  # exit code of a child whose device is lost
ATTEMPTS = 12


class Journal:
    """Lines of JSON: ["of", …], ["begin", row, part] (a peer's name, "" for the row itself), ["done", result],
    ["crash", row, part]."""

    def __init__(self, path: Path):
        self.path = path
        lines = lines_of(path)
        self.results = {r.name: r for r in (restore(line[1]) for line in lines if line[0] == "done")}
        self.crashed = {(line[1], line[2]) for line in lines if line[0] == "crash"}
        self.running = None
        for line in lines:
            self.running = (line[1], line[2]) if line[0] == "begin" else None

    def begin(self, row: str, part: str = "") -> None:
        self._append("begin", row, part)

    def done(self, result: Result) -> None:
        self.results[result.name] = result
        self._append("done", {f.name: getattr(result, f.name) for f in fields(Result)})

    def crash(self) -> tuple[str, str] | None:
        """Note that what is running has crashed; None when nothing was."""
        if self.running is None:
            return None
        self._append("crash", *self.running)
        return self.running

    def _append(self, *line) -> None:
        append(self.path, *line)


def restore(values: dict) -> Result:
    timing = lambda t: None if t is None else Timing(**t)
    found = {
        name: PeerResult(**{**p, "timing": timing(p["timing"]), "beside": timing(p.get("beside"))})
        for name, p in values["peers"].items()
    }
    return Result(
        **{
            **values,
            "timing": timing(values["timing"]),
            "peers": found,
            "limits": [Kernel(**k) for k in values.get("limits", ())],
            "beside": [Beside(**g) for g in values.get("beside", ())],
        }
    )


def supervise(path: Path, command: list[str]) -> int:
    """Run `command` until it ends by itself, restarting it when it crashes. Returns its exit code."""
    for _ in range(ATTEMPTS):
        code = subprocess.run(command).returncode
        if code in (0, 1, 2):
            return code
        lost = Journal(path).crash()
        if lost is None:
            return code
        what = " / ".join(filter(None, lost))
        print(f"CRASH   {what} took the process down (exit {code}); going on without it", file=sys.stderr, flush=True)
    return 1
