"""What routed experts of DeepSeek-V4-Flash cost by the number of tokens, on a GPU: the curve from decode to prefill.

    python scripts/bench_experts.py [--tokens 1,2,3,4,6,8,…,4096] [--out DIR]

For native and official numerics: µs of the operation with a cold L2, the bytes that must be moved over that time, and
the kernels that ran. A number of tokens that takes over 5 % longer than some larger number is a cliff, and is named.
Writes bench_experts_<device>.json, .md and .svg. Exit code 1 where there is a cliff.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.contracts import productions
from dsv4.kernels.experts import triton
from dsv4.kernels.experts.contract import expert_work
from dsv4.kernels.linear.drawn import MXFP4
from dsv4.kernels.widths import FLASH
from scripts.bench import report
from scripts.bench.timing import Clock, device_kernels, measure_machine
from scripts.places import folder

SCRIPT = "scripts/bench_experts.py"
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
REPLAYS = 20
CLIFF = 1.05
NAMES = {False: "native", True: "official"}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=list(TOKENS))
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    args = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("error: experts are timed on a CUDA device; there is none", file=sys.stderr)
        return 2
    clock, rows = Clock(), []
    machine = measure_machine(clock)
    for simulate in (False, True):
        for tokens in args.tokens:
            rows.append(measured(tokens, simulate, clock, machine.bandwidth))
            print(line(rows[-1]), flush=True)
    about, found = report.provenance(SCRIPT), cliffs(rows)
    text = markdown(rows, found, about)
    print(text)
    place = folder(args.out, "experts", "flash", about["device"])
    stem = f"bench_experts_{report.device_slug(about['device'])}"
    for path in report.write(place, stem, {"about": about, "rows": rows, "cliffs": found}, text, svg(rows, about)):
        print(f"wrote {path}")
    return int(bool(found))


def measured(tokens: int, simulate: bool, clock: Clock, bandwidth: float) -> dict:
    """One row. Several draws of weights do not fit, so the L2 cache is emptied instead."""
    drawn = productions()["experts"].drawn(FLASH, 0, "cuda", form=MXFP4, tokens=tokens, simulate=simulate)
    run = partial(triton.experts, *drawn)
    us, moved = clock.runs([run], REPLAYS).cold_us, expert_work(*drawn).bytes
    kernels = list(dict.fromkeys(name.split("(")[0].lstrip("_") for name, *_ in device_kernels(run)))
    share = moved / bandwidth / us * 1e6
    return {"tokens": tokens, "numerics": NAMES[simulate], "us": us, "share_of_bandwidth": share, "kernels": kernels}


def line(row: dict) -> str:
    return (
        f"{row['numerics']}, {row['tokens']} tokens: {row['us']:.1f} µs, {row['share_of_bandwidth']:.0%} of the "
        f"bandwidth; {' '.join(row['kernels'])}"
    )


def cliffs(rows: Sequence[dict]) -> list[str]:
    """Numbers of tokens that take over 5 % longer than a larger number."""
    found = []
    for numerics in dict.fromkeys(row["numerics"] for row in rows):
        curve = sorted((row["tokens"], row["us"]) for row in rows if row["numerics"] == numerics)
        for i, (tokens, us) in enumerate(curve):
            fewer = min(curve[i + 1 :], key=lambda point: point[1], default=None)
            if fewer and us > CLIFF * fewer[1]:
                found.append(f"{numerics}: {tokens} tokens take {us:.0f} µs, and {fewer[0]} tokens {fewer[1]:.0f}")
    return found


def markdown(rows: Sequence[dict], found: Sequence[str], about: dict) -> str:
    by = {(row["numerics"], row["tokens"]): row for row in rows}
    lines = [
        "# What routed experts cost by the number of tokens",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        "DeepSeek-V4-Flash: 256 MXFP4 experts, 6 a token, random weights and routing; cold L2, median. Share: bytes "
        "that must be moved, over the time, of the bandwidth measured here.",
        "",
        "| tokens | native µs | share | official µs | share | kernels, official |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        cells = [str(tokens)]
        for numerics in NAMES.values():
            row = by.get((numerics, tokens))
            cells += [f"{row['us']:.1f}", f"{row['share_of_bandwidth']:.0%}"] if row else ["–", "–"]
        official = by.get(("official", tokens))
        lines.append(f"| {' | '.join(cells)} | {' '.join(official['kernels']) if official else '–'} |")
    lines += (
        ["", *(f"- cliff: {cliff}" for cliff in found)] if found else ["", "No cliff: more tokens never cost less."]
    )
    return "\n".join(lines) + "\n"


def svg(rows: Sequence[dict], about: dict) -> str | None:
    """µs against tokens, both logarithmic; None without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axis = figure.subplots()
        for numerics, color in zip(NAMES.values(), ("#8b949e", "#1f6feb")):
            curve = sorted((row["tokens"], row["us"]) for row in rows if row["numerics"] == numerics)
            axis.plot(*zip(*curve), "o-", color=color, ms=3, lw=1.2, label=numerics) if curve else None
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("µs, cold L2, median", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.2)
        axis.legend(fontsize=7, frameon=False)
        axis.set_title(f"Routed experts of Flash. {report.headline(about)}", fontsize=8)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
