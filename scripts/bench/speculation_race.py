"""A race of block sizes as a whole: what ran, what sizes that did not run would make of it, and its report, from a run
or from files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dsv4.errors import InputError
from dsv4.speculation import MAX_DRAFTS, CostTable, Static, Trace, simulate
from dsv4.speculation.costs import parse_costs
from dsv4.speculation.documents import read_document, write_whole
from dsv4.speculation.host_loop import AHEAD
from scripts.bench import report, speculation, speculation_report
from scripts.bench.speculation import Point
from scripts.bench.speculation_gpu import part
from scripts.bench.speculation_journal import Timed

JUDGE = "the trace as the judge of its drafts"
OWN_TEXT = (
    "its own text, greedily continued from this project's files. The oracle plans round by round with acceptance as "
    "it was recorded before; once a draft comes out otherwise its plan is out of step, so here it is no bound and "
    "nothing is measured against it"
)
SAME = ("commit", "device", "torch", "triton")  # of files that are drawn together
STEM = "bench_speculation_"


@dataclass
class Race:
    """title: the model in words. traces: (kind, trace), whole; none where a checkpoint wrote its own text.
    tokens[batch]: of each row. ahead: rounds under way, as of `Rounds`."""

    title: str
    about: Mapping
    costs: CostTable
    traces: Sequence[tuple[str, Trace]]
    tokens: Mapping[int, int]
    ran: list[Timed] = field(default_factory=list)
    ahead: int = AHEAD

    def points(self) -> list[Point]:
        return [*(r.point() for r in self.ran), *self.unraced()]

    def unraced(self) -> Iterator[Point]:
        """Static sizes that did not run, by simulation of the excerpts that did, with the costs that were measured."""
        raced: dict[tuple[str, int], set[str]] = {}
        for r in self.ran:
            raced.setdefault((r.trace, r.batch), set()).add(r.policy)
        kinds = {trace.name: (kind, trace) for kind, trace in self.traces}
        for (name, batch), policies in raced.items():
            for size in map(Static, range(MAX_DRAFTS + 1) if name in kinds else ()):
                if size.name not in policies:
                    kind, trace = kinds[name]
                    run = simulate(size, part(trace, batch, self.tokens[batch]), self.costs, batch, ahead=self.ahead)
                    yield replace(speculation.point(run, kind), expected=True)

    def setup(self) -> dict:
        absent = set(range(MAX_DRAFTS + 1)) - {
            size for r in self.ran for size in range(MAX_DRAFTS + 1) if r.policy == Static(size).name
        }
        notes = [f"{trace.name}: {dict(trace.provenance)}" for _, trace in self.traces]
        if absent and not self.traces:
            notes.append(
                f"static sizes {', '.join(map(str, sorted(absent)))} did not run, and what they would make of "
                "this text was not recorded"
            )
        judge = JUDGE if self.traces else OWN_TEXT
        return {
            "title": self.title,
            "notes": notes,
            "costs": self.costs.document(),
            "tokens": {str(b): n for b, n in self.tokens.items()},
            **({"ahead": self.ahead} if self.ahead > 1 else {}),
            "how": f"{self.title}. Each policy ran on the device, round after round, with {judge}.",
            "traces": [_about_trace(kind, t) for kind, t in self.traces],
            "ran": [asdict(r) | {"tokens_per_second": r.tokens_per_second} for r in self.ran],
        }

    def write(self, folder: Path, name: str) -> None:
        """STEM NAME.json, .md and .svg, and speculation_costs_NAME.json."""
        points, setup = self.points(), self.setup()
        line = speculation.timeline(self.costs) if 1 in self.costs.batches else None  # simulated
        text = speculation_report.markdown(points, self.about, setup) + speculation_report.real(
            self.costs, self.ran, points, self.ahead
        )
        report.write(
            folder,
            STEM + name,
            report.finite(speculation_report.document(points, self.about, setup, line)),
            text,
            speculation_report.svg(points, self.about, setup, line),
        )
        write_costs(self.costs, folder, name)


def write_costs(costs: CostTable, folder: Path, name: str) -> None:
    """A table as `--draft-costs` takes it, whole or not at all. Raises InputError when it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(
        folder / f"speculation_costs_{name}.json", json.dumps(costs.document(), indent=1, ensure_ascii=False) + "\n"
    )


def _about_trace(kind: str, trace: Trace) -> dict:
    return {"kind": kind, "name": trace.name, **trace.provenance}


# ---- from files ---------------------------------------------------------------------------


def read(paths: Sequence[Path], traces: Sequence[tuple[str, Trace]]) -> Race:
    """The race that JSON files of this report hold: of one model, commit and device, each batch in one of them. Raises
    InputError, also where the traces that judged it are not among `traces` (kind, trace)."""
    races = [read_document(path, lambda document: _parsed(document, traces)) for path in paths]
    first = races[0]
    for path, race in zip(paths, races):
        differ = [key for key in SAME if race.about[key] != first.about[key]] + [
            key for key in ("title", "ahead") if getattr(race, key) != getattr(first, key)
        ]
        if differ:
            raise InputError(
                f"{paths[0]} and {path}: {', '.join(differ)} differ; expected runs of one model, commit and device"
            )
    batches = [batch for race in races for batch in sorted({r.batch for r in race.ran})]
    if len(batches) > len(set(batches)):
        raise InputError(f"{', '.join(map(str, paths))} have batches {batches}; expected each in one file")
    of_batches = lambda of: (
        {n: value for race in races for n, value in of(race).items()}
        | {
            # of a batch that was cut off, the file's in which it ran
            n: of(race)[n]
            for race in races
            for n in {r.batch for r in race.ran} & of(race).keys()
        }
    )
    command = lambda of: {"command": "; ".join(dict.fromkeys(of(race)["command"] for race in races))}
    costs = CostTable(
        first.costs.name,
        first.costs.padding,
        of_batches(lambda race: race.costs.batches),
        dict(first.costs.provenance) | command(lambda race: race.costs.provenance),
    )
    whole = {trace.name: (kind, trace) for race in races for kind, trace in race.traces}
    return Race(
        first.title,
        dict(first.about) | command(lambda race: race.about),
        costs,
        list(whole.values()),
        of_batches(lambda race: race.tokens),
        [r for race in races for r in race.ran],
        first.ahead,
    )


def _parsed(document: object, traces: Sequence[tuple[str, Trace]]) -> Race:
    try:
        about, setup = document["about"], document["setup"]
        ran = [Timed(**{key: value for key, value in r.items() if key != "tokens_per_second"}) for r in setup["ran"]]
        title, costs, judges = setup["title"], parse_costs(setup["costs"]), setup["traces"]
        missing = [key for key in ("command", *SAME) if key not in about] + ["command of costs"] * (
            "command" not in costs.provenance
        )
        tokens = (
            {int(batch): count for batch, count in setup["tokens"].items()}
            if "tokens" in setup
            else {r.batch: len(r.rounds) for r in ran if r.policy == Static(0).name}
        )  # a token a round
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{error!r}; expected the JSON of a report of scripts/bench_speculation.py") from None
    if not all(r.rounds for r in ran):
        raise InputError(
            "setup.ran has no rounds of its runs, which were left out; expected a report as it was written"
        )
    if missing:
        raise InputError(
            f"about has no {', '.join(missing)}; expected the JSON of a report of scripts/bench_speculation.py"
        )
    same = lambda a, b: json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    known = [next(((k, t) for k, t in traces if same(_about_trace(k, t), judge)), None) for judge in judges]
    for judge, found in zip(judges, known):
        if found is None:
            raise InputError(
                f"trace {judge['name']!r} judged this race and is not among those given; expected it by --trace "
                "KIND=FILE"
            )
    race = Race(title, about, costs, known, tokens, ran, setup.get("ahead", 1))
    _check_excerpts(race)
    return race


def _check_excerpts(race: Race) -> None:
    """Sizes that ran are expected to make of the excerpts what they were expected to make then. Raises InputError."""
    whole = {trace.name: trace for _, trace in race.traces}
    for r in race.ran:
        size = next((k for k in range(MAX_DRAFTS + 1) if r.policy == Static(k).name), None)
        if r.trace in whole and size is not None:
            if r.batch not in race.tokens:
                raise InputError(
                    f"how many tokens a row of batch {r.batch} had is neither in setup.tokens nor seen: no "
                    "speculation did not run"
                )
            found = simulate(
                Static(size), part(whole[r.trace], r.batch, race.tokens[r.batch]), race.costs, r.batch, ahead=race.ahead
            ).tokens_per_second
            if abs(found - r.expected) > 1e-9 * r.expected:
                raise InputError(
                    f"{r.policy} on {r.trace}, batch {r.batch}, is expected to make {found:.1f} tokens/s of this "
                    f"trace and was expected to make {r.expected:.1f}: another trace judged that race"
                )
