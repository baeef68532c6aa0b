"""Measure what a trained demo checkpoint can do, the GQA one's facts, needles and loss too; every figure goes to a JSON
file and a table.

    python scripts/measure_demo.py CHECKPOINT DATA --out FILE.json [--device cuda] [--numerics native,qat]
        [--lengths 4096,16384,32768] [--trials 100] [--only facts,needles,indexer,loss,mtp] [--plot FILE.svg]
        [--haystacks prose,filler,window] [--compare-state STATE]

DATA is the corpus folder of scripts/training/corpus.py, of which the held-out part is read (and for the loss, beside
it, text that was trained on). What each part measures stands in scripts/training/evaluation.py. The file is written
after every part, so that an interrupted run leaves what it has.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import load_model
from dsv4.errors import InputError
from dsv4.kernels.errors import Dsv4Error
from dsv4.model.gqa.model import GQAModel
from dsv4.model.load import resolve_device
from scripts.bench.report import out_file
from scripts.training import evaluation
from scripts.training.evaluation import Figure, Limits
from scripts.training.rows import Rows, load_tokenizer

PARTS = ("facts", "needles", "indexer", "loss", "mtp")
HAYSTACKS = dict(zip(("prose", "filler", "window"), evaluation.HAYSTACKS))
LOSS_LENGTHS = [1024, 4096]


class Report:
    """Figures so far, each with where it comes from; written to `out` whenever some are added."""

    def __init__(self, out: Path, device: str, program: Sequence[str] = ("scripts/measure_demo.py",)):
        self.out, self.console, self.begun = out, Console(stderr=True, highlight=False), time.time()
        self.source = {
            "command": shlex.join(["python", *program, *sys.argv[1:]]),
            "device": device_name(device),
            "torch": torch.__version__,
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.figures: list[dict] = []

    def say(self, text: str) -> None:
        self.console.print(f"{time.time() - self.begun:7.1f} s  {text}", markup=False, soft_wrap=True)

    def add(self, figures: list[Figure], numerics: str) -> None:
        self.figures += [asdict(figure) | {"numerics": numerics} | self.source for figure in figures]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"figures": self.figures}, indent=1) + "\n")

    def table(self) -> Table:
        table = Table("part", "figure", "numerics", "value", "count", "more")
        for f in self.figures:
            table.add_row(f["part"], f["name"], f["numerics"], f"{f['value']:.4f}", str(f["count"]), more(f["details"]))
        return table


def more(details: dict) -> str:
    """The numbers among the details, in short."""
    given = ("length", "seed", "beyond", "tokens", "prompt", "new", "rows")
    numbers = {k: v for k, v in details.items() if isinstance(v, (int, float)) and k not in given}
    return ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in numbers.items())


def device_name(device: str) -> str:
    """Raises InputError for a device that does not exist."""
    target = resolve_device(device)
    return torch.cuda.get_device_name(target) if target.type == "cuda" else f"{platform.machine()} CPU"


def commit() -> str:
    """DSV4_COMMIT, else what git says ("-dirty" with changes), else "unknown"."""
    if "DSV4_COMMIT" in os.environ:
        return os.environ["DSV4_COMMIT"]
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    try:
        head = git("rev-parse", "HEAD")
        return f"{head}{'-dirty' if git('status', '--porcelain', '-uno') else ''}" if head else "unknown"
    except OSError:
        return "unknown"


def measure(args, report: Report) -> None:
    limits = Limits.of(args.device)
    rows, seen = (Rows(args.data, seed=0, length=1024, split=split) for split in ("heldout", "train"))
    tokenizer = load_tokenizer(args.checkpoint)  # the shipped one
    haystacks = tuple(haystack for key, haystack in HAYSTACKS.items() if key in args.haystacks)
    for numerics in args.numerics:
        # what is measured is the checkpoint: by the definition, whose operations the evaluation also looks into
        backend = "auto" if args.device == "cpu" else "reference"
        model = load_model(args.checkpoint, numerics=numerics, device=args.device, backend=backend)
        check_parts(model, args)
        say = lambda text: report.say(f"{numerics}: {text}")
        parts = {
            "facts": lambda: evaluation.facts(model, tokenizer, limits, say),
            "needles": lambda: evaluation.needles(model, rows, args.lengths, args.trials, limits, say, haystacks),
            "indexer": lambda: evaluation.indexer(model, rows, indexer_lengths(model), limits, say),
            "loss": lambda: sum((evaluation.losses(model, r, LOSS_LENGTHS, limits, say) for r in (rows, seen)), []),
            "mtp": lambda: evaluation.mtp(model, rows, limits, say),
        }
        for part in args.only:
            report.add(parts[part](), numerics)
    if args.compare_state is not None:
        say = lambda text: report.say(f"state in bf16: {text}")
        report.add(
            evaluation.state_losses(args.compare_state, rows, LOSS_LENGTHS, limits, args.device, say), "bf16 state"
        )


def check_parts(model, args) -> None:
    """Raise InputError for parts that a GQA model does not have."""
    windows = {"needles of windows alone"} if "window" in args.haystacks and "needles" in args.only else set()
    absent = {"indexer", "mtp"} & set(args.only) | windows
    if isinstance(model, GQAModel) and (absent or args.compare_state is not None):
        raise InputError(
            f"{args.checkpoint} is a GQA model, which has no "
            f"{', '.join(sorted(absent)) or 'state in the demo format'}; pass --only facts,needles,loss --haystacks "
            "prose,filler"
        )


def indexer_lengths(model) -> list[int]:
    """Rows of which the indexer chooses an 8th and a 16th of the entries."""
    ratio = min(r for r in model.config.compress_ratios if r)
    return [ratio * model.config.index_topk * times for times in (8, 16)]


def plot(figures: list[dict], out: Path) -> None:
    """Needles found by length (with lower bounds), and by depth over all lengths, a line a numerics and haystack."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10, 4), layout="constrained")
    by_length, by_depth = canvas.subplots(1, 2, sharey=True)
    found: dict[str, list[dict]] = {}
    for f in figures:
        if f["part"] == "needles":
            found.setdefault(f"{f['details']['haystack']}, {f['numerics']}", []).append(f)
    for label, group in found.items():
        style = "--" if "window only" in label else ":" if "filler" in label else "-"
        lengths, shares = [f["details"]["length"] for f in group], [f["value"] for f in group]
        below = [f["value"] - f["details"]["at_least"] for f in group]
        by_length.errorbar(lengths, shares, [below, [0.0] * len(below)], fmt=style, marker="o", capsize=3, label=label)
        by_depth.plot(*depths([t for f in group for t in f["details"]["trials"]]), style, marker="o", label=label)
    by_length.set(xscale="log", xlabel="context (tokens), bars to the 97.5 % lower bound", ylabel="needles found")
    by_length.set_ylim(-0.03, 1.03)
    ticks = sorted({f["details"]["length"] for group in found.values() for f in group})
    by_length.set_xticks(ticks, [str(n) for n in ticks])
    by_length.minorticks_off()
    by_depth.set(xlabel="depth of the needle (0 start, 1 end), all lengths", xlim=(0, 1))
    by_length.legend(fontsize=7)
    canvas.savefig(out)


def depths(trials: list[dict], bins: int = 10) -> tuple[list[float], list[float]]:
    """Middles of the bins that have trials, and the share of hits in each."""
    groups: dict[int, list[bool]] = {}
    for trial in trials:
        groups.setdefault(min(int(trial["depth"] * bins), bins - 1), []).append(trial["hit"])
    return [(b + 0.5) / bins for b in sorted(groups)], [sum(groups[b]) / len(groups[b]) for b in sorted(groups)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=out_file, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numerics", type=words, default=["native", "qat"])
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[4096, 16384, 32768])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--haystacks", type=words, default=list(HAYSTACKS), help=f"of {','.join(HAYSTACKS)}")
    parser.add_argument("--only", type=words, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--plot", type=Path, help="needles by length and depth, as SVG (takes matplotlib)")
    parser.add_argument(
        "--compare-state", type=Path, help="training state whose loss in bf16 stands beside the checkpoint's"
    )
    args = parser.parse_args()
    for name, given, known in (("--only", args.only, PARTS), ("--haystacks", args.haystacks, HAYSTACKS)):
        if strange := [word for word in given if word not in known]:
            parser.error(f"{name} has {', '.join(strange)}; expected some of {', '.join(known)}")
    if args.trials < 1:
        parser.error(f"--trials is {args.trials}; expected at least 1")
    for file in (args.checkpoint / "tokenizer.json", args.data / "tokenizer.json", args.data / "tokens.npz"):
        if not file.is_file():
            sys.exit(f"error: {file} does not exist")
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            sys.exit("error: --plot takes matplotlib, which is not installed; pip install matplotlib")
    return args


def main() -> None:
    args = arguments()
    try:
        report = Report(args.out, args.device)
        measure(args, report)
    except (Dsv4Error, ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    if args.plot is not None:
        plot(report.figures, args.plot)
    Console(width=200 if not sys.stdout.isatty() else None).print(report.table())


if __name__ == "__main__":
    main()
