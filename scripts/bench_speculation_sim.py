"""Ranks block-size policies on acceptance traces by simulation with a cost table. No GPU is needed.

    python scripts/bench_speculation_sim.py [--costs FILE] [--batch 1,8,32] [--padding SHARE] [--trace KIND=FILE ...]
                                            [--requests 64] [--tokens 1024] [--seed 1] [--out DIR]

Without --trace: synthetic ones, whose rates are assumptions, and those recorded of the demo checkpoint. KIND is 'mixed'
or 'stationary' and says which goal applies.
--padding replaces the table's share of cost that unused tokens of a pass still have. Writes
speculation_sim_<table>.json, .md and .svg to DIR; <table> is the file's name, with the padding if it was
replaced. Exit code 0 whatever the verdicts, 2 for input that cannot be used.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import InputError
from dsv4.speculation import read_costs, read_trace
from scripts.bench import report, speculation, speculation_report, speculation_traces
from scripts.bench.speculation_costs import FOLDER
from scripts.places import folder

SCRIPT = "scripts/bench_speculation_sim.py"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=FOLDER / "speculation_h100_flash16.json")
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--padding", type=float)
    parser.add_argument("--trace", action="append", default=[], metavar="KIND=FILE")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    return parser.parse_args(given)


def named_trace(text: str):
    """'mixed=FILE' → (kind, trace). Raises InputError."""
    kind, _, path = text.partition("=")
    if kind not in ("mixed", "stationary") or not path:
        raise InputError(f"--trace {text!r} was given; expected mixed=FILE or stationary=FILE")
    return kind, read_trace(path)


def run(args: argparse.Namespace) -> None:
    costs = read_costs(args.costs)
    if args.padding is not None:
        if not 0 <= args.padding <= 1:
            raise InputError(f"--padding {args.padding} was given; expected a share from 0 to 1")
        costs = dataclasses.replace(costs, padding=args.padding)
    traces = [named_trace(text) for text in args.trace] or [
        *speculation.default_traces(args.requests, args.tokens, args.seed),
        *speculation_traces.recorded(),
    ]
    if min(args.requests, args.tokens, *args.batch) < 1:
        raise InputError("--requests, --tokens and --batch are counts; expected 1 or more")
    points = speculation.simulated(traces, costs, args.batch, said=lambda text: print(text, flush=True))
    line = speculation.timeline(costs) if 1 in costs.batches else None
    stem = args.costs.stem.removeprefix("speculation_") + ("" if args.padding is None else f"_padding{args.padding:g}")
    how = f"Simulated, not timed. Costs: {costs.name}, padding {costs.padding:g} ({costs.provenance.get('kind')})."
    notes = [f"cost table, {key}: {value}" for key, value in costs.provenance.items()]
    notes += [f"{trace.name}: {dict(trace.provenance)}" for _, trace in traces]
    if not args.trace:
        notes.append(
            "the defaults of the cost-aware policy were chosen on traces of the same generators, with other seeds, "
            "and on every other recorded request"
        )
    setup = {
        "title": f"simulated: {costs.name}",
        "how": how,
        "notes": notes,
        "costs": costs.document(),
        "traces": [{"kind": kind, "name": t.name, **t.provenance} for kind, t in traces],
    }
    about = {key: value for key, value in report.provenance(SCRIPT).items() if key != "seconds"}  # nothing is timed
    report.write(
        folder(args.out, "speculation", "simulated", "cpu"),
        f"speculation_sim_{stem}",
        speculation_report.document(points, about, setup, line),
        speculation_report.markdown(points, about, setup),
        speculation_report.svg(points, about, setup, line),
    )


def main(given: list[str] | None = None) -> int:
    return report.exit_code(lambda: run(arguments(given)))


if __name__ == "__main__":
    sys.exit(main())
