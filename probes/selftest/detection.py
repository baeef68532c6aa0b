"""The detection matrix: running the self-test, and its results as markdown and as JSON
(probes/schema/selftest-1.json)."""

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.probes.audit import open_subject
from dsv4.probes.catalogue.backend_matrix import BackendMatrix
from dsv4.probes.faults import Mutation, catalogue, sections
from dsv4.probes.faults import profile as profiles
from dsv4.probes.machine import usable_processors
from dsv4.probes.probe import available, probe_named
from dsv4.probes.report import json_report, words
from dsv4.probes.report.files import write_files
from dsv4.probes.report.markdown import escape, fence, table
from dsv4.probes.report.provenance import provenance
from dsv4.probes.result import Status
from dsv4.probes.scenes.compile_ahead import compile_ahead
from dsv4.probes.selftest.journal import SelftestJournal
from dsv4.probes.selftest.run import Bench, Clean, Outcome, chance, run_all, settings

VERSION = "1"
SCHEMA = Path(__file__).resolve().parent.parent / "schema" / f"selftest-{VERSION}.json"
STEM = "selftest"
# keys of the provenance: equal in all runs of one journal
DEPENDS_ON = ("commit", "dirty", "device", "versions", "backend")
EXPLAINED = """\
Each mutation plants one class of known bug in a synthetic checkpoint or in the code that runs it. It counts as \
caught only if
a FAIL or ERROR names the part that is at fault; probes are not told what is planted. *By chance* is the share of a \
sound
subject's checks that the mutation's words match: how often just any red check would have counted."""
MOST_TEXT = 160  # characters of a note in a cell; the JSON has all


@dataclass
class Matrix:
    """What became of the selected mutations, in the order of the catalogue, and of the sound subjects."""

    outcomes: list[Outcome]
    clean: list[Clean]
    selection: str = "all"
    provenance: dict = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gaps(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.found.caught]

    @property
    def alarms(self) -> list[Clean]:
        """Sound subjects that are not green."""
        return [c for c in self.clean if not c.green]

    @property
    def exit_code(self) -> int:
        return 1 if self.gaps or self.alarms or any(o.left for o in self.outcomes) else 0

    def chance(self, outcome: Outcome) -> float:
        m = outcome.mutation
        alike = (c.texts for c in self.clean if (c.profile, c.numerics, c.caches) == (m.profile, m.numerics, m.caches))
        texts = next(filter(None, alike), ())
        return chance(m, texts)


def select(
    section: str | None = None,
    name: str | None = None,
    fast: bool = False,
    probe: str | None = None,
    backend: str = "cpu",
) -> list[Mutation]:
    """Mutations of one section, with a text in their name, that one probe should name, or (fast) the first of each
    section; those of a GPU only for the triton backend. Raises InputError for none, and Dsv4Error for a probe that is
    unknown."""
    aimed = probe and probe_named(probe).name
    found = [m for m in catalogue() if m.backend != "triton" or backend == "triton"]
    found = [m for m in found if section in (None, m.section) and (name or "").casefold() in m.name.casefold()]
    found = [m for m in found if aimed in (None, *m.probes[:1])]
    if fast:
        found = [next(group) for _, group in groupby(found, key=lambda m: m.section)]
    if not found:
        raise InputError(
            f"no mutation is of section {section or 'any'} with {name or 'anything'!r} in its name, for "
            f"{probe or 'any'} probe to name; sections are {', '.join(sections())}"
        )
    return found


def selftest(
    mutations: Sequence[Mutation],
    bench: Bench,
    jobs: int,
    selection: str = "all",
    command: list[str] | None = None,
    done: Callable[[Outcome | Clean, int], None] = lambda result, of: None,
    journal: Path | None = None,
) -> Matrix:
    """Plant all faults, and audit sound subjects. done(result, number of all) is called for each as it is ready.
    journal: a file that keeps results, for a self-test that is cut off and called again; absent, or of the same commit,
    backend, device and libraries, or InputError is raised."""
    begun, backend = time.time(), bench.resolved
    tasks = [*mutations, *settings(mutations, backend, selection == "all")]
    with tempfile.TemporaryDirectory(prefix="dsv4-profiles-") as folder:
        bench = replace(bench, profiles=Path(folder), backend=backend)
        for name in profiles.NAMES:
            profiles.write(bench.profiles / name, name)
        # or it cannot run at all
        subject = open_subject(bench.profiles / "default", "ours", "fp32", backend, bench.device)
        about = lambda: provenance(subject, command or sys.argv, {"profiles": 0, "probes": 0}, begun)
        kept = SelftestJournal(journal, {key: value for key, value in about().items() if key in DEPENDS_ON})
        if bench.device.startswith("cuda") and selection == "all":
            configs = [
                open_subject(bench.profiles / name, "ours", "fp32", backend, bench.device).config
                for name in profiles.NAMES
            ]
            compile_ahead(configs, (torch.float32, torch.bfloat16), backend, bench.device, BackendMatrix.seed, jobs)
        results = [kept.result(task) for task in tasks]
        for result in filter(None, results):
            done(result, len(tasks))
        left = [i for i, result in enumerate(results) if result is None]
        for i, result in run_all([tasks[i] for i in left], bench, jobs):
            results[left[i]] = result
            kept.done(tasks[left[i]], result)
            done(result, len(tasks))
        outcomes, clean = results[: len(mutations)], results[len(mutations) :]
        # of many subjects, not of one
        of_all = {"jobs": jobs, "numerics": ", ".join(dict.fromkeys(c.numerics for c in clean)), "dispatch": []}
        return Matrix(outcomes, clean, selection, about() | of_all, kept.seconds)


def run(
    out: Path | None,
    section: str | None,
    name: str | None,
    fast: bool,
    jobs: int | None,
    backend: str,
    device: str,
    say: Callable[[str], None],
    done: Callable[[Outcome | Clean, int], None],
    journal: Path | None = None,
    probe: str | None = None,
) -> int:
    """`dsv4 audit selftest`: the exit code (0 all caught and green, 1 gaps or false alarms). probe: only mutations that
    it should name, and no other probe runs."""
    chosen = {"section": section, "name": name, "fast": fast or None, "probe": probe}
    selection = ", ".join(f"{key} {value}" for key, value in chosen.items() if value) or "all"
    bench, jobs = Bench(Path(), backend, device, probe), jobs or usable_processors()
    found = select(section, name, fast, probe, bench.resolved)
    matrix = selftest(found, bench, jobs, selection, done=done, journal=journal)
    for line in summary(matrix):
        say(line)
    if out is not None:
        for file in write(matrix, out):
            say(f"wrote {file}")
    return matrix.exit_code


def result_line(result: Outcome | Clean) -> str:
    """One line of a result, for a log."""
    if isinstance(result, Clean):
        word, about = (
            "green" if result.green else "ALARM",
            f"{setting(result)}, {result.backend}{''.join(f'; {r}' for r in result.red[:3])}",
        )
    else:
        word, about = (
            "caught" if result.found.caught else "GAP",
            result.mutation.name + (f": {result.found.note}" if result.found.note else ""),
        )
    return f"{word:6} {result.seconds:5.1f} s  {about}"


def summary(matrix: Matrix) -> list[str]:
    """For the terminal: every gap, every false alarm, the totals."""
    lines = [f"GAP    {o.mutation.section:5} {o.mutation.name}: {o.found.note}" for o in matrix.gaps]
    lines += [f"ALARM  {setting(c)}, {c.backend}: {red}" for c in matrix.alarms for red in c.red]
    lines += [f"LEFT   {o.mutation.name}: {place} is not as before" for o in matrix.outcomes for place in o.left]
    return [*lines, f"{headline(matrix)}; {matrix.seconds:.0f} s; exit code {matrix.exit_code}"]


def setting(of: Mutation | Clean) -> str:
    """'default, qat, fp8 and fp4 caches': what a subject was opened with."""
    return f"{of.profile}, {of.numerics}" + (
        f", {' and '.join(of.caches)} caches" if set(of.caches) != {"auto"} else ""
    )


def headline(matrix: Matrix) -> str:
    caught, green = len(matrix.outcomes) - len(matrix.gaps), len(matrix.clean) - len(matrix.alarms)
    return f"{caught} of {len(matrix.outcomes)} mutations caught, {green} of {len(matrix.clean)} sound subjects green"


def write(matrix: Matrix, directory: Path) -> list[Path]:
    """selftest.md and selftest.json, each whole or not at all; selftest_triton of that backend. Raises WriteError."""
    backends = "".join(f"_{name}" for name in dict.fromkeys(c.backend for c in matrix.clean) if name in ("triton",))
    return write_files(
        directory,
        {
            f"{STEM}{backends}.md": markdown(matrix),
            f"{STEM}{backends}.json": json.dumps(document(matrix), ensure_ascii=False, indent=1, allow_nan=False)
            + "\n",
        },
    )


# ---- JSON ---------------------------------------------------------------------------------


def document(matrix: Matrix) -> dict:
    """The matrix as JSON values of the schema."""
    gaps, alarms = len(matrix.gaps), len(matrix.alarms)
    return {
        "schema_version": VERSION,
        "title": "Detection matrix",
        "exit_code": matrix.exit_code,
        "selection": matrix.selection,
        "totals": {
            "mutations": len(matrix.outcomes),
            "caught": len(matrix.outcomes) - gaps,
            "gaps": gaps,
            "clean": len(matrix.clean),
            "green": len(matrix.clean) - alarms,
        },
        "seconds": round(matrix.seconds, 1),
        "provenance": json_report.strict(matrix.provenance),
        "mutations": [_mutation(matrix, o) for o in matrix.outcomes],
        "clean": [
            {
                "profile": c.profile,
                "numerics": c.numerics,
                "caches": list(c.caches),
                "backend": c.backend,
                "green": c.green,
                "totals": {status.value: n for status, n in c.totals.items()},
                "red": list(c.red),
                "vacuous": list(c.vacuous),
                "seconds": round(c.seconds, 2),
            }
            for c in matrix.clean
        ],
    }


def _mutation(matrix: Matrix, o: Outcome) -> dict:
    m, f, level = o.mutation, o.found, matrix.chance(o)
    row = {
        "name": m.name,
        "section": m.section,
        "bugs": list(m.bugs),
        "what": m.what,
        "parts": list(m.parts),
        "numerics": m.numerics,
        "profile": m.profile,
        "caches": list(m.caches),
        "caught": f.caught,
        "by": f.by or None,
        "seen": list(f.seen),
        "chance": None if math.isnan(level) else round(level, 4),
        "seconds": round(o.seconds, 2),
    }
    said = {
        "status": f.status,
        "finding": f.finding,
        "where": f.where,
        "part": f.part,
        "word": f.word,
        "note": f.note,
        "left": list(o.left),
    }
    return row | {key: value for key, value in said.items() if value}


# ---- markdown -----------------------------------------------------------------------------


def markdown(matrix: Matrix) -> str:
    whole = "" if matrix.selection == "all" else f" Not the whole matrix: {escape(matrix.selection)}."
    parts = [
        "# Detection matrix",
        f"**{headline(matrix)}** (exit code {matrix.exit_code}). {matrix.seconds:.0f} s.{whole}",
        EXPLAINED,
        _gaps(matrix),
        _by_probe(matrix),
        "## Sound subjects",
        _clean(matrix),
        "## Mutations",
    ]
    titles = sections()
    for section, group in groupby(matrix.outcomes, key=lambda o: o.mutation.section):
        parts += [f"### {section} {titles.get(section, '')}", _rows(matrix, list(group))]
    rows = [[escape(key), escape(value)] for key, value in words.flat(matrix.provenance) if key != "command" and value]
    parts += ["## Provenance", fence(str(matrix.provenance.get("command", ""))), table(["", ""], rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _gaps(matrix: Matrix) -> str:
    red = lambda o: f" (red: {escape(', '.join(o.found.seen))})" if o.found.seen else ""
    lines = [
        f"- **gap** {escape(o.mutation.section)} **{escape(o.mutation.name)}**: {escape(o.found.note)}{red(o)}. "
        f"{escape(o.mutation.what)}"
        for o in matrix.gaps
    ]
    lines += [
        f"- **false alarm** {escape(setting(c))}, {escape(c.backend)}: {escape(red)}"
        for c in matrix.alarms
        for red in c.red or ["nothing passed"]
    ]
    lines += [
        f"- **not undone** {escape(o.mutation.name)}: {escape(', '.join(o.left))}" for o in matrix.outcomes if o.left
    ]
    return "## Gaps\n\n" + ("\n".join(lines) or "None.")


def _by_probe(matrix: Matrix) -> str:
    """How many faults of each section each probe is the first to name."""
    sections = list(dict.fromkeys(o.mutation.section for o in matrix.outcomes))
    found = Counter((o.found.by, o.mutation.section) for o in matrix.outcomes if o.found.caught)
    probes = [p for p in ("load", *available()) if any(by == p for by, _ in found)]
    cell = lambda n: str(n) if n else "·"
    rows = [[p, *(cell(found[p, s]) for s in sections), str(sum(found[p, s] for s in sections))] for p in probes]
    return "## First to name the part\n\n" + table(["probe", *(">" + s for s in sections), ">all"], rows)


def _clean(matrix: Matrix) -> str:
    rows = [
        [
            c.profile,
            setting(c).partition(", ")[2],
            c.backend,
            "green" if c.green else "**RED**",
            *(str(c.totals.get(status, 0) or "·") for status in Status),
            f"{c.seconds:.0f}",
        ]
        for c in matrix.clean
    ]
    parts = [
        table(["profile", "numerics", "backend", "", *(">" + status.value for status in Status), ">seconds"], rows)
    ]
    vacuous = [f"- {escape(f'{setting(c)}, {c.backend}: {v}')}" for c in matrix.clean for v in c.vacuous]
    if vacuous:
        parts.append(
            "<details><summary>VACUOUS checks of sound subjects: no evidence there</summary>\n\n"
            + "\n".join(vacuous)
            + "\n\n</details>"
        )
    return "\n\n".join(parts)


def _rows(matrix: Matrix, outcomes: list[Outcome]) -> str:
    columns = ["mutation", "bugs", "what", "caught by", "finding", "part named", ">by chance"]
    return table(columns, [_row(o, matrix.chance(o)) for o in outcomes])


def _row(o: Outcome, level: float) -> list[str]:
    m, f = o.mutation, o.found
    unusual = [
        said
        for said, usual in ((m.numerics, "fp32"), (m.profile, "default"), (" + ".join(m.caches), "auto + auto"))
        if said != usual
    ]
    how = f" ({', '.join(unusual)})" if unusual else ""
    note = f.note if len(f.note) <= MOST_TEXT else f.note[:MOST_TEXT].rpartition(" ")[0] + " …"
    finding = f.finding + (f" at {f.where}" if f.where else "") + (f": {note}" if note else "")
    by = f"**{f.by}**" + (" (ERROR)" if f.status == Status.ERROR.value else "") if f.caught else "**gap**"
    named = f"{f.part or '–'} ({f.word})" if f.caught and f.word.casefold() not in f.part.casefold() else f.part
    return [
        escape(m.name + how),
        ", ".join(map(str, m.bugs)),
        escape(m.what),
        by,
        escape(finding if f.caught else f.note),
        escape(named),
        "" if math.isnan(level) else f"{level:.1%}",
    ]
