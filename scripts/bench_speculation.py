"""Speculative decoding on a GPU: what rounds of each size cost, and every block-size policy on acceptance traces.

    python scripts/bench_speculation.py [--dummy-weights flash] [--layers 16] [--context 8K] [--batch 1,8,32] [--tokens 1536,256,192]
                                        [--trace KIND=FILE ...] [--static 0,1,2,4,8] [--journal FILE] [--out DIR]
    python scripts/bench_speculation.py --checkpoint CHECKPOINT [--numerics native] [--batch 1,8,32] [--tokens 384,384,384]
                                        [--journal FILE] [--out DIR]
    python scripts/bench_speculation.py --record CHECKPOINT [--record-out DIR]

Rounds run as CUDA graphs on random weights of published widths, their kernels compiled by all processors first; a trace says how many drafts are right. Costs of all sizes are
measured, then each policy runs to `tokens` a row (one count for each batch) and must take the sizes that the specification takes.
`bench_speculation_sim.py --costs` ranks policies with these costs over whole traces. `--checkpoint` runs them on a checkpoint's own text
instead, greedily continued from this project's code and prose, and counts the rows that equal plain decoding. With `--journal` a run that
was cut off goes on where it stopped (of a checkpoint's text: at the batch that it was at), when it is called again. `--record` writes
traces of a checkpoint's own text. KIND is 'mixed' or 'stationary'. Writes bench_speculation_[<checkpoint>_]<device>.json, .md,
.svg and, with dummy weights, speculation_costs_<device>.json to DIR (audits). Exit code 0 whatever the verdicts, 2 for input that cannot be used.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import InputError  # noqa: E402
from dsv4.numerics import NUMERICS  # noqa: E402
from scripts.bench import report, speculation, speculation_gpu, speculation_report, speculation_traces  # noqa: E402
from scripts.bench.speculation_journal import SpeculationJournal  # noqa: E402
from scripts.bench_speculation_sim import named_trace  # noqa: E402

SCRIPT = "scripts/bench_speculation.py"
OWN_TEXT = ("its own text, greedily continued from this project's files. The oracle plans round by round with acceptance as it was recorded "
            "before; once a draft comes out otherwise its plan is out of step, so here it is no bound")
numbers = lambda text: [int(n) for n in text.split(",")]


def arguments(given: list[str] | None) -> argparse.Namespace:
    from dsv4.memory import parse_count
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy-weights", default="flash", choices=("flash", "pro"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=parse_count, default=8192)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--tokens", type=numbers)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--numerics", default="native", choices=tuple(NUMERICS))
    parser.add_argument("--static", type=numbers, default=[0, 1, 2, 4, 8])
    parser.add_argument("--trace", action="append", default=[], metavar="KIND=FILE")
    parser.add_argument("--record", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--record-out", type=Path, default=speculation_traces.FOLDER)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--out", type=Path, default=Path("audits"))
    return parser.parse_args(given)


def run(args: argparse.Namespace) -> None:
    if args.record is not None:
        for path in speculation_traces.record_all(args.record, args.record_out, say):
            say(f"wrote {path}")
        return
    args.tokens = args.tokens or ([1536, 256, 192] if args.checkpoint is None else [384] * len(args.batch))
    if len(args.tokens) != len(args.batch):
        raise InputError(f"--tokens has {len(args.tokens)} counts for {len(args.batch)} batches; expected one for each")
    if not torch.cuda.is_available():
        raise InputError("rounds are timed on a CUDA device; this machine has none (scripts/bench_speculation_sim.py simulates)")
    if args.checkpoint is not None:
        on_checkpoint(args)
        return
    traces = [named_trace(text) for text in args.trace] or speculation_traces.default_traces()
    from dsv4.dummy import load_dummy
    from scripts.bench.warm import warm_device
    about, resumed = report.provenance(SCRIPT), args.journal is not None and args.journal.exists()
    journal = kept(args, about)
    if not resumed:
        say("{} rounds compiled ahead in {:.0f} s".format(*warm_device(args.dummy_weights, args.batch, args.context)))
    model = load_dummy(args.dummy_weights, args.layers, backend="triton", device="cuda", cache="fp8", index_cache="fp4", mtp=True)
    slug = report.device_slug(torch.cuda.get_device_name())
    what = f"{args.dummy_weights.capitalize()} widths, {args.layers} layers, the head and the MTP block, random weights, FP8 and FP4 caches"
    costs = speculation_gpu.measure_costs(model, args.batch, args.context, f"{what}; {report.headline(about)}", about, say, journal)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"speculation_costs_{slug}.json").write_text(json.dumps(costs.document(), indent=1, ensure_ascii=False) + "\n")
    for batch, tokens in zip(args.batch, args.tokens):
        speculation_gpu.race(model, traces, costs, batch, args.context, tokens, args.static, say, journal)
        write(args.out, slug, journal.ran, about, costs, traces, what)


def kept(args: argparse.Namespace, about: dict) -> SpeculationJournal:
    """The run's journal, of these arguments, this commit and this machine. Raises InputError for one of another run."""
    return SpeculationJournal(args.journal, {key: str(value) for key, value in (vars(args) | about).items()
                                             if key not in ("out", "journal", "command")})


def on_checkpoint(args: argparse.Namespace, device: str = "cuda") -> None:
    """Its own text. Raises CheckpointError, InputError."""
    from dsv4 import load_model
    from dsv4.tokenizer import Tokenizer
    from scripts.bench.speculation_text import race_texts
    backend = "triton" if device == "cuda" else "cpu"
    model = load_model(args.checkpoint, numerics=args.numerics, mtp=True, device=device, backend=backend)
    encode, about = Tokenizer(args.checkpoint, model.config.vocab_size).encode, report.provenance(SCRIPT)
    journal = kept(args, about)
    name = args.checkpoint.resolve().name
    what = f"{name}, {args.numerics} numerics, {backend} backend"
    costs = speculation_gpu.measure_costs(model, args.batch, 2 * speculation_traces.PROMPT, f"{what}; {report.headline(about)}", about, say,
                                          journal)
    args.out.mkdir(parents=True, exist_ok=True)
    slug = report.device_slug(torch.cuda.get_device_name()) if device == "cuda" else device
    for batch, tokens in zip(args.batch, args.tokens):
        prompts = {kind: [ids for ids, _ in zip(speculation_traces.prompts(pattern, encode), range(batch))]
                   for kind, pattern in speculation_traces.KINDS.items()}
        if batch not in {timed.batch for timed in journal.ran}:  # of a text the whole batch: its rows are held against the first policy's
            for timed in race_texts(model, prompts, costs, tokens, args.static, say):
                journal.done(timed)
        write(args.out, f"{name}_{slug}", journal.ran, about, costs, [], what, OWN_TEXT)


def write(folder: Path, slug: str, ran, about: dict, costs, traces, what: str, judge: str = "the trace as the judge of its drafts") -> None:
    points = [r.point() for r in ran]
    notes = [f"{trace.name}: {dict(trace.provenance)}" for _, trace in traces]
    setup = {"title": what, "notes": notes, "costs": costs.document(),
             "how": f"{what}. Each policy ran on the device, round after round, with {judge}.",
             "traces": [{"kind": kind, "name": t.name, **t.provenance} for kind, t in traces],
             "ran": [dataclasses.asdict(r) | {"tokens_per_second": r.tokens_per_second} for r in ran]}
    line = speculation.timeline(costs) if 1 in costs.batches else None  # simulated
    text = speculation_report.markdown(points, about, setup) + speculation_report.real(costs, ran)
    report.write(folder, f"bench_speculation_{slug}", report.finite(speculation_report.document(points, about, setup, line)), text,
                 speculation_report.svg(points, about, setup, line))


def say(text: str) -> None:
    print(text, flush=True)


def main(given: list[str] | None = None) -> int:
    return report.exit_code(lambda: run(arguments(given)))


if __name__ == "__main__":
    sys.exit(main())
