"""Speculative decoding on a GPU: what rounds of each size cost, and every block-size policy on acceptance traces.

    python scripts/bench_speculation.py [--dummy-weights flash] [--layers 16] [--context 8K] [--batch 1,8,32] [--tokens
    1536,256,256]
                                        [--trace default|KIND=FILE ...] [--static 0,1,2,3,4,5,6,7,8] [--journal FILE]
                                        [--out DIR]
    python scripts/bench_speculation.py --checkpoint CHECKPOINT [--numerics native] [--batch 1,8,32] [--tokens
    384,384,384]
                                        [--trace default|KIND=FILE ... [--context 8K]] [--journal FILE] [--out DIR]
    python scripts/bench_speculation.py --record CHECKPOINT [--record-out DIR]
    python scripts/bench_speculation.py --from REPORT.json ... [--trace default|KIND=FILE ...] [--out DIR]

Rounds run as CUDA graphs on random weights of published widths, their kernels compiled by all processors first; a trace
says how many drafts are right. Costs of all sizes are measured, then each policy runs to `tokens` a row (one count for
each batch) and must take the sizes that the specification takes. The best static size is that of all from 0 to 8: those
not in --static take part as expected, by simulation with the costs of this run. `bench_speculation_sim.py --costs`
ranks policies with these costs over whole traces. `--checkpoint` runs them on a checkpoint's own text instead, greedily
continued from this project's code and prose, and counts the rows that equal plain decoding; with --trace ('default':
those of dummy weights) its rounds are judged by traces, as with dummy weights. With `--journal` a run that
was cut off goes on where it stopped, when it is called again. `--record` writes
traces of a checkpoint's own text. `--from` measures nothing: it draws the report of a race again, or that of several of
one model, commit and device whose batches differ, under the first one's name. KIND is 'mixed' or 'stationary'. Writes
bench_speculation_[<checkpoint>_[traces_]]<device>.json, .md and .svg and
speculation_costs_[<checkpoint>_[traces_]]<device>.json, a table for `dsv4 generate --draft-costs`, to DIR.
Exit code 0 whatever the verdicts, 2 for input that cannot be used.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import InputError
from dsv4.model.numerics import NUMERICS
from dsv4.speculation import MAX_DRAFTS, Trace
from scripts.bench import report, speculation_gpu, speculation_race, speculation_traces
from scripts.bench.speculation_journal import SpeculationJournal
from scripts.bench.speculation_race import Race
from scripts.bench_speculation_sim import named_trace
from scripts.places import folder

SCRIPT = "scripts/bench_speculation.py"
numbers = lambda text: [int(n) for n in text.split(",")]


def arguments(given: list[str] | None) -> argparse.Namespace:
    from dsv4.units import parse_count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy-weights", default="flash", choices=("flash", "pro"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=parse_count, default=8192)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--tokens", type=numbers)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--numerics", default="native", choices=tuple(NUMERICS))
    parser.add_argument("--static", type=numbers, default=list(range(MAX_DRAFTS + 1)))
    parser.add_argument("--trace", action="append", default=[], metavar="KIND=FILE")
    parser.add_argument("--record", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--record-out", type=Path, default=speculation_traces.FOLDER)
    parser.add_argument("--from", dest="reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--journal", type=Path)
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    return parser.parse_args(given)


def run(args: argparse.Namespace) -> None:
    if args.record is not None:
        for path in speculation_traces.record_all(args.record, args.record_out, say):
            say(f"wrote {path}")
        return
    if args.reports is not None:
        found = speculation_race.read(args.reports, [*speculation_traces.default_traces(), *given_traces(args)])
        found.write(args.out or args.reports[0].parent, args.reports[0].stem.removeprefix(speculation_race.STEM))
        return
    own_text = args.checkpoint is not None and not args.trace
    args.tokens = args.tokens or ([384] * len(args.batch) if own_text else [1536, 256, 256])
    if len(args.tokens) != len(args.batch):
        raise InputError(f"--tokens has {len(args.tokens)} counts for {len(args.batch)} batches; expected one for each")
    if not torch.cuda.is_available():
        raise InputError(
            "rounds are timed on a CUDA device; this machine has none (scripts/bench_speculation_sim.py simulates)"
        )
    if args.checkpoint is not None:
        (on_checkpoint if own_text else traces_on_checkpoint)(args)
        return
    from dsv4.model.dummy import load_dummy
    from scripts.bench.warm import warm_device

    traces, about, resumed = (
        given_traces(args),
        report.provenance(SCRIPT),
        args.journal is not None and args.journal.exists(),
    )
    journal = kept(args, about)
    if not resumed:
        say("{} rounds compiled ahead in {:.0f} s".format(*warm_device(args.dummy_weights, args.batch, args.context)))
    args.out = folder(args.out, "speculation", args.dummy_weights, torch.cuda.get_device_name())
    model = load_dummy(
        args.dummy_weights, args.layers, backend="triton", device="cuda", cache="fp8", index_cache="fp4", mtp=True
    )
    what = (
        f"{args.dummy_weights.capitalize()} widths, {args.layers} layers, the head and the MTP block, random "
        "weights, FP8 and FP4 caches"
    )
    on_traces(args, model, traces, what, about, journal, report.device_slug(torch.cuda.get_device_name()))


def given_traces(args: argparse.Namespace) -> list[tuple[str, Trace]]:
    """(kind, trace). Raises InputError."""
    return [
        found
        for text in args.trace or ["default"]
        for found in (speculation_traces.default_traces() if text == "default" else [named_trace(text)])
    ]


def on_traces(
    args: argparse.Namespace,
    model,
    traces: list[tuple[str, Trace]],
    what: str,
    about: dict,
    journal: SpeculationJournal,
    name: str,
) -> None:
    """Rounds of any model, judged by traces. name: of the report's files."""
    costs = speculation_gpu.measure_costs(
        model, args.batch, args.context, f"{what}; {report.headline(about)}", about, say, journal
    )
    speculation_race.write_costs(costs, args.out, name)
    for batch, tokens in zip(args.batch, args.tokens):
        speculation_gpu.race(model, traces, costs, batch, args.context, tokens, args.static, say, journal)
        Race(what, about, costs, traces, dict(zip(args.batch, args.tokens)), journal.ran).write(args.out, name)


def kept(args: argparse.Namespace, about: dict) -> SpeculationJournal:
    """The run's journal, of these arguments, this commit and this machine. Raises InputError for one of another run."""
    return SpeculationJournal(
        args.journal,
        {key: str(value) for key, value in (vars(args) | about).items() if key not in ("out", "journal", "command")},
    )


def loaded(args: argparse.Namespace, device: str):
    """(model, its name, the model in words, the device in file names). Raises CheckpointError."""
    from dsv4 import load_model

    backend, name = "triton" if device == "cuda" else "cpu", args.checkpoint.resolve().name
    model = load_model(args.checkpoint, numerics=args.numerics, mtp=True, device=device, backend=backend)
    slug = report.device_slug(torch.cuda.get_device_name()) if device == "cuda" else device
    args.out = folder(args.out, "speculation", name, slug)
    return model, name, f"{name}, {args.numerics} numerics, {backend} backend", slug


def traces_on_checkpoint(args: argparse.Namespace, device: str = "cuda") -> None:
    """A checkpoint's rounds, judged by traces. Raises CheckpointError, InputError."""
    traces, about = given_traces(args), report.provenance(SCRIPT)
    model, name, what, slug = loaded(args, device)
    on_traces(args, model, traces, what, about, kept(args, about), f"{name}_traces_{slug}")


def on_checkpoint(args: argparse.Namespace, device: str = "cuda") -> None:
    """Its own text. Raises CheckpointError, InputError."""
    from dsv4.model.tokenizer import Tokenizer
    from scripts.bench.speculation_text import race_texts

    model, name, what, slug = loaded(args, device)
    encode, about = Tokenizer(args.checkpoint, model.config.vocab_size).encode, report.provenance(SCRIPT)
    journal = kept(args, about)
    costs = speculation_gpu.measure_costs(
        model, args.batch, 2 * speculation_traces.PROMPT, f"{what}; {report.headline(about)}", about, say, journal
    )
    speculation_race.write_costs(costs, args.out, f"{name}_{slug}")
    for batch, tokens in zip(args.batch, args.tokens):
        prompts = {
            kind: [ids for ids, _ in zip(speculation_traces.prompts(pattern, encode), range(batch))]
            for kind, pattern in speculation_traces.KINDS.items()
        }
        race_texts(model, prompts, costs, tokens, args.static, say, journal)
        Race(what, about, costs, [], dict(zip(args.batch, args.tokens)), journal.ran).write(args.out, f"{name}_{slug}")


def say(text: str) -> None:
    print(text, flush=True)


def main(given: list[str] | None = None) -> int:
    return report.exit_code(lambda: run(arguments(given)))


if __name__ == "__main__":
    sys.exit(main())
