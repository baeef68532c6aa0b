"""Results of a self-test so far, task by task, so that an interrupted one can be resumed."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from dsv4.probes.faults import Mutation
from dsv4.probes.journal import Kept
from dsv4.probes.result import Status
from dsv4.probes.selftest.run import Clean, Found, Outcome

Task = Mutation | Clean


def name_of(task: Task) -> str:
    """A task's name in the journal: a mutation's own, or how a sound subject is opened."""
    return (
        task.name
        if isinstance(task, Mutation)
        else ", ".join(("sound", task.profile, task.numerics, task.backend, *task.caches))
    )


class SelftestJournal:
    """Lines of JSON: ["of", what], ["done", seconds of the self-test so far, name of the task, its result]. No path:
    nothing is kept.

    what: everything that results depend on. Raises InputError for a journal of something else.
    """

    def __init__(self, path: Path | None, what: dict):
        self.kept, self.results, self.before, self.begun = Kept(path, what), {}, 0.0, time.monotonic()
        for _, before, name, result in self.kept.held:
            self.before = before
            self.results[name] = result

    @property
    def seconds(self) -> float:
        """Of the self-test, earlier runs included."""
        return self.before + time.monotonic() - self.begun

    def result(self, task: Task) -> Outcome | Clean | None:
        """What was found before; None if the task was not finished."""
        held = self.results.get(name_of(task))
        if held is None:
            return None
        if isinstance(task, Mutation):
            return Outcome(
                task,
                Found(**{**held["found"], "seen": tuple(held["found"]["seen"])}),
                held["seconds"],
                tuple(held["left"]),
            )
        lists = {key: tuple(held[key]) for key in ("red", "vacuous", "texts")}
        return replace(task, totals={Status(k): n for k, n in held["totals"].items()}, seconds=held["seconds"], **lists)

    def done(self, task: Task, result: Outcome | Clean) -> None:
        held = (
            {"found": asdict(result.found), "seconds": result.seconds, "left": result.left}
            if isinstance(result, Outcome)
            else {
                "totals": {k.value: n for k, n in result.totals.items()},
                "red": result.red,
                "vacuous": result.vacuous,
                "texts": result.texts,
                "seconds": result.seconds,
            }
        )
        self.kept.append("done", round(self.seconds, 1), name_of(task), held)
