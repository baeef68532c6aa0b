"""Times of every kernel beside its peers and its physical limits, on a GPU.

    python scripts/bench_kernels.py [--only REGEX] [--name PART] [--quick] [--no-peers] [--without REGEX] [--list]
    [--journal FILE] [--out DIR] python scripts/bench_kernels.py --from FILE.json

Rows come from `scripts/bench/rows_*.py`. Each is first held against the reference; a row that fails prints RED and no
time, and the exit code is 1. Then ours and each installed peer (`scripts/peers.sh` fetches them; their folder goes into
the environment variable PEERS) are timed with a cold L2 as CUDA-graph replays; at the end the kernels of rows that
missed their goal are profiled. --from judges the figures of an earlier run by the present goals beside peers, and draws
its report again, where it stands; it measures nothing. With --journal a run that was cut off goes on where it stopped,
when it is called again. Writes bench_kernels_[PART_]<device>.json, .md and .svg to DIR.
"""

import argparse
import importlib
import pkgutil
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import InputError
from dsv4.probes.journal import claim
from scripts import bench
from scripts.bench import beside, peers, redrawn, report
from scripts.bench.journal import CRASHED, Journal, supervise
from scripts.bench.measure import DeviceLost, Result, examine, measure
from scripts.bench.row import Row
from scripts.bench.timing import Clock, measure_machine
from scripts.places import folder

SCRIPT = "scripts/bench_kernels.py"
PROFILE = "profile"  # the part of a row that comes when all are timed


def collect(device: str, only: str | None = None) -> tuple[list[Row], list[str]]:
    """Rows of every rows_*.py whose name matches `only`, and a line for each module that cannot be imported or
    listed."""
    rows: list[Row] = []
    broken = []
    for module in pkgutil.iter_modules(bench.__path__):
        if module.name.startswith("rows_"):
            try:
                found = importlib.import_module(f"{bench.__name__}.{module.name}").rows(device)
                rows += [row for row in found if only is None or re.search(only, row.name)]
            except Exception as failure:  # the others still run; the exit code tells
                broken.append(f"{module.name}: {type(failure).__name__}: {failure}")
    twice = sorted({row.name for row in rows if sum(other.name == row.name for other in rows) > 1})
    return rows, broken + [f"two rows are called {name!r}" for name in twice]


def exit_code(results: Iterable[Result], broken: Iterable[str]) -> int:
    """A missed goal is a finding and not an error; a red row, or a module that is broken, is an error."""
    return int(any(r.red for r in results) or bool(list(broken)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="regular expression; rows whose 'op shape' it is found in")
    parser.add_argument("--name", help="of a part of the rows, in the names of its files")
    parser.add_argument("--quick", action="store_true", help="20 replays instead of 60")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--without", metavar="REGEX", help="peers to leave out: some tune themselves for a minute a row"
    )
    parser.add_argument("--list", action="store_true", help="print rows with floors and goals; needs no GPU")
    parser.add_argument("--seconds", type=float, help="begin no row after this many seconds")
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    parser.add_argument("--journal", type=Path, help="what is done, kept in FILE; absent or of the same run")
    parser.add_argument(
        "--from", dest="source", metavar="FILE", type=Path, help="draw an earlier run's report again, from its JSON"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        return show(args)
    if args.source:
        return report.exit_code(lambda: draw_again(args.source))
    if not torch.cuda.is_available():
        print("error: benchmarks need a CUDA device; --list works without one", file=sys.stderr)
        return 2
    if args.child:
        return run(args, Journal(args.journal))
    with tempfile.TemporaryDirectory() as folder:
        journal = args.journal or Path(folder) / "journal.jsonl"
        try:
            claim(
                journal, {k: v for k, v in report.provenance(SCRIPT).items() if k != "command"} | {"quick": args.quick}
            )
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return supervise(
            journal,
            [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--journal", str(journal), "--child"],
        )


def show(args) -> int:
    rows, broken = collect("cpu", args.only)
    for row in rows:
        relative = "".join(f", {beside.said(goal)}" for goal in row.beside)
        print(
            f"{row.name}: floor {report.us(row.floor_us())} µs, goal {report.us(row.goal_us)}{relative}, "
            f"peers {', '.join([*row.peers, *peers.for_row(row)]) or 'none'}"
        )
    for line in broken:
        print(f"BROKEN  {line}")
    return exit_code((), broken)


def draw_again(source: Path) -> None:
    """Raises InputError for a file that is no report."""
    results, machine, about = redrawn.read(source, collect("cpu")[0])
    about = about | {"redrawn": f"python {SCRIPT} --from {source}"}
    report.write(
        source.parent,
        source.stem,
        report.document(results, machine, about),
        report.markdown(results, machine, about),
        report.svgs(results, about),
    )


def run(args, journal: Journal) -> int:
    """Measure what the journal does not hold yet; write the report after every row."""
    rows, broken = collect("cuda", args.only)
    for line in broken:
        print(f"BROKEN  {line}", flush=True)
    begun, clock = time.monotonic(), Clock()
    machine, about = measure_machine(clock), report.provenance(SCRIPT)
    print(
        f"{machine.device}: read {machine.bandwidth / 1e12:.2f} TB/s, copy {machine.copy / 1e12:.2f}, bf16 product "
        f"{machine.matmul / 1e12:.0f} TFLOPS, empty kernel {machine.empty_us:.1f} µs, dependent kernel "
        f"{machine.dependent_us:.1f} µs; {len(rows)} rows",
        flush=True,
    )
    stem = "_".join(filter(None, ("bench_kernels", args.name, report.device_slug(machine.device))))
    out = folder(args.out, "kernels", args.name or "flash", machine.device)
    ready = lambda: [journal.results[row.name] for row in rows if row.name in journal.results]
    for row in rows:
        if row.name in journal.results:
            continue
        if args.seconds is not None and time.monotonic() - begun > args.seconds:
            broken.append(f"{len(rows) - len(journal.results)} rows were not begun within {args.seconds:.0f} s")
            print(f"BROKEN  {broken[-1]}", flush=True)
            break
        crashed = {part for name, part in journal.crashed if name == row.name}
        try:
            journal.done(
                measure(
                    row,
                    clock,
                    machine,
                    20 if args.quick else 60,
                    not args.no_peers,
                    lambda part, name=row.name: journal.begin(name, part),
                    crashed,
                    args.without,
                )
            )
        except DeviceLost as failure:
            print(f"LOST    {row.name}: {failure}", flush=True)
            return CRASHED
        print(f"{time.monotonic() - begun:5.0f} s {report.console(journal.results[row.name])}", flush=True)
        report.write(
            out, stem, report.document(ready(), machine, about), report.markdown(ready(), machine, about), None
        )
    for row in rows:
        result = journal.results.get(row.name)
        if result and result.verdict == "MISSED" and not result.limits and (row.name, PROFILE) not in journal.crashed:
            journal.begin(row.name, PROFILE)
            examine(row, result)
            journal.done(result)
    results = ready()
    report.write(
        out,
        stem,
        report.document(results, machine, about),
        report.markdown(results, machine, about),
        report.svgs(results, about),
    )
    print(report.markdown(results, machine, about))
    return exit_code(results, broken)


if __name__ == "__main__":
    sys.exit(main())
