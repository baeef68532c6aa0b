"""Times of whole decode steps, each one CUDA graph, on a GPU with random weights.

    python scripts/bench_decode.py [--dummy-weights flash] [--layers 16] [--context 8K,128K,1M] [--batch 1,8] [--cache
    fp8]
                                   [--index-cache fp4] [--transformers 5] [--prefill 8K,128K] [--chunk 2K]
                                   [--out DIR]

For each batch and context: ms a step and a layer, kernels, the bytes that a step must read as a time, peak memory, and
how often the host waited, Triton compiled or memory was allocated after warm-up. `--transformers N` times N layers of
transformers' eager model beside it (0: not). `--prefill` times whole prompts of those lengths too, in the model's own
chunks or those of `--chunk`, batch 1: tokens/s, ms a layer, and the time that their bytes and products need at least.
Writes bench_decode_<device>.json, .md and .svg to DIR. Exit code 1 when a step was not clean.

    python scripts/bench_decode.py --dummy-weights qwen2.5-7b --attention block-bound [--attention-tokens 8b,16b,32b]
    [--layers 28] [--context 8K,32K,128K,1M] [--batch 1,8]

times a GQA model instead: dense steps and those of the policy at each budget in turns over one cache, and writes
bench_decode_gqa_<device>.json and .md after each batch and context. A shape whose weights and caches do not fit is
measured with as many layers as do, and the reason is written in bytes. `dsv4 regime steps` fits the cost model of whole
steps to the JSON.

    python scripts/bench_decode.py --dummy-weights llama-8b --sweep [--context 8K,32K] [--batch 1,8,32,4,16,2]
    [--retention 0.8,0.2] [--rule tau=1e-5,phi=1e-3,patience=5] [--seconds 520]

times a token of a GQA model against batch: full attention, and every policy at each retention, to the end and with
each rule of stopping early. Predictions are written before anything is timed, and files after every row, so a run that
is killed keeps what it has. Batches are measured in the order given; what does not fit, and what would begin after
--seconds, is said. Writes bench_decode_sweep_<device>.json, .md and .svg. --device cpu runs all rows on a host (small
widths, --backend cpu).
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import decode_gqa, decode_report, decode_sweep, decode_sweep_report, report
from scripts.bench.decode import STEPS, measure_point, profile_point, transformers_eager
from scripts.bench.decode_prefill import measure_prefill
from scripts.bench.timing import Clock, measure_machine
from scripts.places import folder

SCRIPT = "scripts/bench_decode.py"
EXPERTS = 16  # of transformers' model, whose bf16 stacks of 256 would not leave room


def arguments() -> argparse.Namespace:
    from dsv4.model.gqa.choice import NAMES
    from dsv4.model.gqa.dummy import GEOMETRIES
    from dsv4.units import parse_count

    counts = lambda text: [parse_count(part) for part in text.split(",")]
    shares = lambda text: [float(part) for part in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy-weights", default="flash", choices=("flash", "pro", *GEOMETRIES))
    parser.add_argument("--layers", type=int, default=None, help="16 of flash and pro, else all")
    parser.add_argument(
        "--attention", default="block-bound", choices=[name for name in NAMES if name != "dense"], help="of a GQA model"
    )
    parser.add_argument(
        "--attention-tokens", default="4096", help="4096, or 8b,16b,32b; of snapkv and pyramidkv a share: 0.2"
    )
    parser.add_argument("--context", type=counts, help="default: 8K,128K,1M; of a sweep 8K,32K")
    parser.add_argument("--batch", type=counts, help="default: 1,8; of a sweep 1,8,32,4,16,2")
    parser.add_argument("--sweep", action="store_true", help="of a GQA model: time against batch, all policies")
    parser.add_argument("--retention", type=shares, default=[0.8, 0.2], help="shares of the context, of a sweep")
    parser.add_argument(
        "--rule", action="append", metavar="RULE", help="of stopping early, of a sweep; several times: each"
    )
    parser.add_argument("--seconds", type=float, default=520, help="of a sweep: begin nothing later")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of a sweep")
    parser.add_argument("--numerics", default="native")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--cache", default="fp8")
    parser.add_argument("--index-cache", default="fp4")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--transformers", type=int, default=5, metavar="N")
    parser.add_argument("--prefill", type=counts, default=[], metavar="TOKENS")
    parser.add_argument(
        "--chunk", type=parse_count, metavar="TOKENS", help="of a prompt in one pass; default: the model's"
    )
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    args = parser.parse_args()
    args.gqa = args.dummy_weights in GEOMETRIES
    args.layers = args.layers or (None if args.gqa else 16)
    args.context = args.context or counts("8K,32K" if args.sweep else "8K,128K,1M")
    args.batch = args.batch or ([1, 8, 32, 4, 16, 2] if args.sweep else [1, 8])
    args.rule = args.rule or [decode_sweep.RULE]
    if args.sweep and not args.gqa:
        parser.error(f"--sweep is of GQA models: --dummy-weights {', '.join(GEOMETRIES)}")
    if args.device == "cpu" and not args.sweep:
        parser.error("--device cpu is of --sweep: decode steps are timed on a CUDA device")
    return args


def main() -> int:
    begun, args = time.monotonic(), arguments()
    if args.sweep and args.device == "cpu":
        return sweep(args, None, report.provenance(SCRIPT), begun)
    if not torch.cuda.is_available():
        print("error: decode steps are timed on a CUDA device", file=sys.stderr)
        return 2
    machine, about = measure_machine(Clock()), report.provenance(SCRIPT)
    release()
    args.out = folder(args.out, "decode", args.dummy_weights, machine.device)
    if args.sweep:
        return sweep(args, machine, about, begun)
    if args.gqa:
        return policies(args, machine, about)
    transformers, failed = None, []
    if args.transformers:
        try:
            transformers = transformers_eager(
                args.transformers,
                EXPERTS,
                min(8192, min(args.context)),
                prefill=min(8192, *args.prefill) if args.prefill else 0,
            )
            print(f"transformers {transformers['version']}: {transformers['layer_ms']:.1f} ms a layer", flush=True)
        except Exception as failure:  # other people's code: the comparison is missing, ours is still timed
            failed.append(f"transformers: {type(failure).__name__}: {failure}")
            print(failed[-1], flush=True)
        release()
    from dsv4.model.dummy import load_dummy

    choices = {"numerics": args.numerics, "backend": args.backend, "cache": args.cache, "index_cache": args.index_cache}
    model = load_dummy(args.dummy_weights, args.layers, device="cuda", **choices)
    setup = {"preset": args.dummy_weights.capitalize(), "layers": args.layers, **choices, "weight_bytes": model.nbytes}
    stem, points, prefills = f"bench_decode_{report.device_slug(machine.device)}", [], []
    results = points, machine, about, setup, transformers, failed, prefills
    for tokens in args.prefill:
        attempt(
            f"prefill of {decode_report.context_name(tokens)}",
            failed,
            prefills,
            lambda: measure_prefill(model, tokens, machine, args.chunk),
        )
        write(args.out, stem, results)
    for batch in args.batch:
        for context in args.context:
            attempt(
                f"batch {batch} at {decode_report.context_name(context)}",
                failed,
                points,
                lambda: measure_point(model, batch, context, machine, args.steps),
            )
            write(args.out, stem, results)
    for p in points:
        try:
            profile_point(model, p)
        except Exception as failure:  # the times stand without the count of kernels
            failed.append(f"{p.name}, profile: {type(failure).__name__}: {failure}")
        release()
    write(args.out, stem, results)
    print(decode_report.markdown(*results))
    return int(bool(failed) or not points or decode_report.red(points))


def policies(args: argparse.Namespace, machine, about: dict) -> int:
    """Dense steps of a GQA model beside those of a policy at some budgets."""
    from dsv4.commands.console import budgets
    from dsv4.model.gqa.choice import attention_named

    failed, pairs = [], []
    sparse = [attention_named(args.attention, tokens) for tokens in sorted(budgets(args.attention_tokens))]
    ways, models = [attention_named("dense"), *sparse], Models(args)
    room = int(decode_gqa.SHARE * torch.cuda.mem_get_info()[0])
    layers, nbytes = models.sizes()
    setup = {
        "geometry": args.dummy_weights,
        "layers": layers,
        "numerics": args.numerics,
        "backend": args.backend,
        "weight_bytes": nbytes,
        "attention": ways[-1].document(),
        "ways": [way.document() for way in ways],
        "reduced": [],
    }
    for shape in ((batch, context) for batch in args.batch for context in args.context):
        fit, why = decode_gqa.layers_that_fit(args.dummy_weights, layers, *shape, ways[-1].policy, room)
        setup["reduced"] += [why] * bool(why)
        if fit:
            attempt(
                f"batch {shape[0]} at {decode_report.context_name(shape[1])}",
                failed,
                pairs,
                lambda: decode_gqa.measure_pair(models.of(fit), *shape, machine, ways, args.steps),
            )
        found = about, setup, machine, pairs, failed
        report.write(
            args.out,
            f"bench_decode_gqa_{report.device_slug(machine.device)}",
            report.finite(decode_gqa.document(*found)),
            decode_gqa.markdown(*found),
            None,
        )
    print(decode_gqa.markdown(*found))
    return int(bool(failed) or decode_report.red([p for pair in pairs for p in pair.points]))


class Models:
    """The model with as many layers as asked for; one at a time is in memory."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.model = args, None

    def of(self, layers: int | None):
        from dsv4.model.dummy import load_dummy

        if self.model is None or layers != len(self.model.layers):
            self.model = None
            release()
            choices = self.args.numerics, self.args.backend, "cuda"
            self.model = load_dummy(self.args.dummy_weights, layers, *choices)
        return self.model

    def sizes(self) -> tuple[int, int]:
        """Layers of the whole model, and bytes of its weights."""
        model = self.of(self.args.layers)
        return len(model.layers), model.nbytes


def sweep(args: argparse.Namespace, machine, about: dict, begun: float) -> int:
    """Time of a token against batch. begun: of time.monotonic, when --seconds began."""
    from dsv4.model.dummy import load_dummy

    device = "cpu" if machine is None else machine.device
    out = folder(args.out, "decode", args.dummy_weights, device)
    model = load_dummy(args.dummy_weights, args.layers, args.numerics, args.backend, args.device)
    cells = [(batch, context) for batch in args.batch for context in args.context]
    rows = decode_sweep.planned(model, decode_sweep.ATTENTIONS, args.retention, args.rule, cells)
    setup = {
        "geometry": args.dummy_weights,
        "layers": len(model.layers),
        "numerics": args.numerics,
        "backend": args.backend,
        "weight_bytes": model.nbytes,
        "beta": decode_sweep.BETA,
        "steps": args.steps,
    }
    stem, places = f"bench_decode_sweep_{report.device_slug(device)}", {row.name: i for i, row in enumerate(rows)}

    def written(drawn: bool = False) -> None:
        found = about, setup, machine, rows
        contents, text = report.finite(decode_sweep_report.document(*found)), decode_sweep_report.markdown(*found)
        report.write(out, stem, contents, text, decode_sweep_report.svg(rows, about) if drawn else None)

    def done(row: decode_sweep.Row) -> None:
        rows[places[row.name]] = row
        said = row.status if row.step_ms is None else f"{row.step_ms:.3f} ms, predicted {row.predicted_ms:.3f}"
        print(f"{time.monotonic() - begun:5.0f} s  {row.name}: {said}", flush=True)
        written()

    written()
    print(f"predictions of {len(rows)} rows are in {out / stem}.md", flush=True)
    for cell in cells:
        mine = [row for row in rows if (row.batch, row.context) == cell]
        decode_sweep.measure_cell(model, mine, args.steps, done, begun + args.seconds)
        written(drawn=True)
    print(decode_sweep_report.markdown(about, setup, machine, rows))
    failed = [row for row in rows if row.status == decode_sweep.FAILED or not row.clean]
    return int(bool(failed) or all(row.step_ms is None for row in rows))


def attempt(name: str, failed: list[str], found: list, measure: Callable) -> None:
    """Append and print what `measure` finds, or say in `failed` that it failed, so that the next can follow."""
    try:
        found.append(measure())
    except Exception as failure:
        failed.append(f"{name}: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}")
        print(failed[-1], flush=True)
    else:
        print(found[-1].line(), flush=True)
    release()


def write(folder: Path, stem: str, results: tuple) -> None:
    points, _, about, _, transformers, _, prefills = results
    report.write(
        folder,
        stem,
        report.finite(decode_report.document(*results)),
        decode_report.markdown(*results),
        decode_report.svg(points, about, transformers, prefills),
    )


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
