"""Time to the first token of a whole GQA model by length: dense at once, dense in pieces, and sparse.

    python scripts/bench_first_token.py [CHECKPOINT | --dummy-weights llama-8b] [--tokens 4K,8K,16K,32K,64K,128K]
        [--batch 1,2,4,8] [--most-tokens 32K] [--cuts "1024,256,256 512,64,192"] [--pieces 512,1K,2K,4K] [--only TEXT]
        [--seconds 480] [--device cuda] [--out DIR]
    python scripts/bench_first_token.py --count [--out DIR]       # what counting allows, without a GPU

Several prompts of one length are read together where they have at most --most-tokens tokens in all, densely and by the
first two cuts at once. What is read at once comes first, then what is read in pieces, both with the fewest tokens
first. Predictions are written before anything is measured, and the files again after each row, so that what is known
stays if the run is killed. On a GPU the kernels of the shortest prompt are listed at the end. Writes
first_token_<device>.json, .md and .svg. Exit code 1 when a row failed.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from dsv4.errors import Dsv4Error
from dsv4.model.gqa.choice import chunking_named
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.units import parse_count
from scripts.bench import first_token_report as shown
from scripts.bench import report
from scripts.bench.first_token import PIECES, PUBLISHED, TUNED, Bench, Row, Way, ways
from scripts.bench.first_token_counts import H100, Widths, predicted
from scripts.places import folder

SCRIPT = "scripts/bench_first_token.py"
COUNTED = "llama-8b", "qwen3-8b"


def arguments() -> argparse.Namespace:
    counts = lambda text: tuple(parse_count(part) for part in text.split(","))
    cuts = lambda text: tuple(chunking_named("--cuts", word) for word in text.split())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--dummy-weights", default=None, choices=tuple(GEOMETRIES))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--tokens", type=counts, default=counts("4K,8K,16K,32K,64K,128K"))
    parser.add_argument("--batch", type=counts, default=(1, 2, 4, 8))
    parser.add_argument("--most-tokens", type=parse_count, default=1 << 15, help="of all prompts of a batch above 1")
    parser.add_argument("--cuts", type=cuts, default=PUBLISHED + TUNED)
    parser.add_argument("--pieces", type=counts, default=PIECES)
    parser.add_argument("--only", default="", help="only ways whose names have this text")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480, help="begin no row after this many seconds")
    for name, value in (("numerics", "native"), ("backend", "auto"), ("device", "cuda")):
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--count", action="store_true", help="only count; needs no GPU and no model")
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    return parser.parse_args()


def rows_of(args: argparse.Namespace, widths: Widths, longest: int) -> list[Row]:
    """What is to be measured: at once before in pieces, which take a multiple of the time, and the fewest tokens
    first."""
    chosen = [way for way in ways(args.cuts, args.pieces) if args.only in way.name]
    found = []
    for batch in args.batch:
        for tokens in args.tokens:
            if tokens > longest or batch > 1 and batch * tokens > args.most_tokens:
                continue
            few = None, *args.cuts[:2]
            for way in chosen:
                if way.fits(tokens) and (batch == 1 or way.piece is None and way.cut in few):
                    expected = predicted(widths, tokens, batch, way.cut, way.piece, way.peer)
                    found.append(Row(way, tokens, batch, expected, why="not begun"))
    order = lambda row: (row.way.piece is not None, row.batch * row.tokens, row.batch)
    return sorted(found, key=order)  # stable: ways keep their order


def count(args: argparse.Namespace) -> int:
    """Print and write what counting allows for published widths."""
    models = []
    for name in COUNTED:
        config = GQAConfig.from_dict(GEOMETRIES[name] | {"max_position_embeddings": 1 << 20})
        models.append((name, Widths.of(config)))
    about = report.provenance(SCRIPT) | {"device": "none (counted with rates of an H100)"}
    found = {
        "about": about,
        "rates": H100.document(),
        "models": [shown.counted(widths, H100, name) for name, widths in models],
        "as_built": shown.profiled(),
    }
    lines = [
        "# How much faster sparse prefill can be, by counting",
        "",
        f"{report.headline(about)}. Nothing was measured here.",
        "",
        f"    {about['command']}",
        "",
        *shown.counting(models, H100),
    ]
    out = folder(args.out, "prefill", "counted", "h100")
    report.write(out, "first_token_counted", report.finite(found), "\n".join(lines), None)
    print("\n".join(lines))
    return 0


def load(args: argparse.Namespace):
    from dsv4.model.dummy import load_dummy
    from dsv4.model.load import load_model

    given = args.numerics, args.backend, args.device
    if args.checkpoint is not None:
        return args.checkpoint.resolve().name, load_model(args.checkpoint, *given)
    name = args.dummy_weights or "llama-8b"
    return name, load_dummy(name, args.layers, *given)


def main() -> int:
    args = arguments()
    if args.count:
        return count(args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: prompts are timed on a CUDA device; pass --device cpu for small ones", file=sys.stderr)
        return 2
    begun = time.monotonic()
    try:
        name, model = load(args)
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not isinstance(model.config, GQAConfig):
        print(f"error: {name} is no GQA model, and prompts are read sparsely by those alone", file=sys.stderr)
        return 2
    widths, about = Widths.of(model.config), report.provenance(SCRIPT)
    if model.device.type == "cpu":
        about["device"] = "cpu"
    setup = {
        "model": name,
        "layers": len(model.layers),
        "numerics": model.numerics.name,
        "backend": model.backend,
        "weight_bytes": model.nbytes,
    }
    rows, profiles = rows_of(args, widths, model.config.max_position_embeddings), []
    out, stem = folder(args.out, "prefill", name, about["device"]), f"first_token_{report.device_slug(about['device'])}"

    def write(picture: bool = False) -> None:
        given = rows, about, setup, profiles, widths, H100
        found = report.finite(shown.document(*given))
        report.write(out, stem, found, shown.markdown(*given), shown.svg(rows, about) if picture else None)

    write()  # predictions
    bench = Bench(model, args.runs, begun + args.seconds)
    for i, row in enumerate(rows):
        row.why = ""
        bench.measure(row)
        print(row.line(), flush=True)
        write(picture=i + 1 == len(rows) or rows[i + 1].tokens != row.tokens)
    if model.device.type == "cuda" and rows:  # at the end, because the profiler may slow what comes after it
        for way in (Way(peer=True), *(Way(cut) for cut in args.cuts[:1])):
            profiles.append(bench.profile(way, rows[0].tokens))
            write()
    print(shown.markdown(rows, about, setup, profiles, widths, H100))
    return int(any(row.red for row in rows) or not any(row.ms for row in rows))


if __name__ == "__main__":
    sys.exit(main())
