"""Times of a model that several GPUs of one host hold together, with random weights.

    python scripts/bench_parallel.py [--ranks 2] [--dummy-weights flash] [--only exchange,part,whole,long]
        [--layers 16] [--numerics native] [--expert-parallel] [--embedding-memory device|host] [--journal FILE]
        [--out DIR]

exchange: sums over ranks alone, beside NCCL, and while they are merged into the streams. part: decode steps of the
first --layers layers, batch 1 and 8 at 8K, and a prompt of 8K; with --ranks 1 on one GPU, for scaling. whole: all
layers, head and MTP block: steps at batch 1, 8 and 32, rounds of drafts as they were accepted in recorded text, a
prompt of 128K. long: the same model at 1M tokens, a step and a prompt. By default the token embedding is in host memory
in the part long, and on the device in the others.
Each part is a launch of its own. FILE keeps every row: called again, the script measures what is missing, and the
report has the rows of all calls. Writes bench_parallel_<device>.json and .md. Exit code 1 when a sum was wrong or a
step was not clean.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.parallel.launch import launch
from dsv4.parallel.ranks_asked import settle_streams, speaks
from dsv4.probes.journal import append, lines_of
from scripts.bench import parallel, report
from scripts.bench.parallel_report import document, markdown, red
from scripts.bench.timing import Clock, Machine, measure_machine
from scripts.places import folder

SCRIPT = "scripts/bench_parallel.py"
PARTS = ("exchange", "part", "whole", "long")
K = 1024
Row = tuple[str, Callable[[], Iterator[dict]]]  # its name in the journal, and what measures it


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dummy-weights", default="flash", choices=("flash", "pro"))
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), metavar=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--embedding-memory", choices=("device", "host"))
    parser.add_argument("--numerics", default="native")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # one rank of a part
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    args = parser.parse_args()
    if not set(args.only) <= set(PARTS):
        parser.error(f"--only {','.join(args.only)}: expected some of {', '.join(PARTS)}")
    return args


def main() -> int:
    args = arguments()
    if not torch.cuda.is_available() or torch.cuda.device_count() < args.ranks:
        print(f"error: {args.ranks} ranks need as many GPUs; found {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    if args.child:
        return of_rank(args)
    journal = args.journal or Path(tempfile.mkdtemp()) / "parallel.jsonl"
    failed = [part for part in args.only if run(args, part, journal)]
    return written(args, journal, failed)


def run(args: argparse.Namespace, part: str, journal: Path) -> int:
    """The exit code of one part, in processes of its own."""
    given = ["--ranks", str(args.ranks), "--dummy-weights", args.dummy_weights, "--layers", str(args.layers)]
    given += ["--only", part, "--journal", str(journal), "--child", *["--expert-parallel"] * args.expert_parallel]
    given += ["--embedding-memory", embedding_memory(args, part), "--numerics", args.numerics]
    return launch(args.ranks, given, (SCRIPT,))


def embedding_memory(args: argparse.Namespace, part: str) -> str:
    """Where a part's token embedding is: the caches of a long context need its room on the device."""
    return args.embedding_memory or ("host" if part == "long" else "device")


def written(args: argparse.Namespace, journal: Path, failed: list[str]) -> int:
    lines = lines_of(journal)
    rows = [line[2] for line in lines if line[0] == "row"]
    machine = next((Machine(**line[1]) for line in lines if line[0] == "machine"), None)
    found = document(rows, machine, report.provenance(SCRIPT), args.dummy_weights, failed)
    text = markdown(found)
    print(text)
    place = folder(args.out, "parallel", args.dummy_weights, found["about"]["device"])
    stem = f"bench_parallel_{report.device_slug(found['about']['device'])}"
    for path in report.write(place, stem, report.finite(found), text, None):
        print(f"wrote {path}")
    return int(bool(failed) or red(rows))


def of_rank(args: argparse.Namespace) -> int:
    """One rank's part of a launch. All read the journal before rank 0 writes to it."""
    from dsv4.parallel.processes import join, leave

    settle_streams()
    join("cuda", args.expert_parallel)
    from dsv4.model.ranks import here

    ranks, (part,) = here(), args.only
    had = {line[1] for line in lines_of(args.journal) if line[0] == "row"}
    if ranks.group is not None:
        ranks.group.exchange("the journal", b"")
        print(f"{part}: {ranks.size} ranks exchange by {ranks.group.by}", flush=True)
    machine = measure_machine(Clock())
    if speaks():
        append(args.journal, "machine", vars(machine))
    for name, measured in rows_of(part, args, machine):
        where = ", embedding in host memory" * (part != "exchange" and args.embedding_memory == "host")
        where += f", {args.numerics}" * (part != "exchange" and args.numerics != "native")
        name = f"{part}, {ranks.size} ranks{', by expert' * ranks.by_expert}{where}: {name}"
        if name in had:
            continue
        for row in measured():
            print(f"{name}: {shown(row)}", flush=True)
            if speaks():
                held = {"by_expert": ranks.by_expert, "embedding_memory": args.embedding_memory}
                held |= {"numerics": args.numerics}
                append(args.journal, "row", name, row | {"part": part} | held)
    ranks.check()
    leave(0)
    return 0


def shown(row: dict) -> str:
    keys = ("step_ms", "share_of_floor", "tokens_per_second", "seconds", "ours_us", "peak_bytes", "finite")
    return ", ".join(f"{key} {row[key]:.4g}" for key in keys if key in row)


def rows_of(part: str, args: argparse.Namespace, machine: Machine) -> list[Row]:
    """What a part measures; its model is loaded now."""
    from dsv4.model.dummy import load_dummy
    from dsv4.model.ranks import here

    if part == "exchange":
        return [
            ("sums", lambda: parallel.exchanges(here(), print)),
            ("boundaries", lambda: parallel.boundaries(here(), print)),
        ]
    layers = args.layers if part == "part" else None
    model = load_dummy(
        args.dummy_weights, layers, backend="triton", device=f"cuda:{torch.cuda.current_device()}", cache="fp8",
        index_cache="fp4", mtp=layers is None, embedding_memory=args.embedding_memory, numerics=args.numerics,
    )  # fmt: skip
    held, pinned = model.nbytes / 2**30, model.embed.host_bytes / 2**30
    print(f"{part}: {held:.2f} GiB of weights on this rank, {pinned:.2f} of them in host memory", flush=True)
    step = lambda batch, context: (
        f"step of batch {batch} at {context}",
        lambda: iter([parallel.step(model, batch, context, machine)]),
    )
    profile = ("kernels of a step", lambda: iter([parallel.kernels(model, 1, 8 * K)]))
    prompt = lambda tokens, chunk, runs: (
        f"prompt of {tokens} in chunks of {chunk}",
        lambda: iter([parallel.prompt(model, tokens, chunk, runs)]),
    )
    if part == "part":
        return [step(1, 8 * K), step(8, 8 * K), prompt(8 * K, 4 * K, 2), profile]
    if part == "long":
        return [step(1, K * K), prompt(K * K, K, 1)]
    return [
        step(1, 8 * K),
        step(8, 8 * K),
        *(prompt(128 * K, chunk * K, 2) for chunk in (4, 8)),
        step(32, 8 * K),
        ("drafts", lambda: parallel.drafts(model, 8 * K, print)),
        profile,
        ("kernels of a chunk", lambda: iter([parallel.chunk_kernels(model, 4 * K, 64 * K)])),
    ]


if __name__ == "__main__":
    sys.exit(main())
