"""Times of whole decode steps, each one CUDA graph, on a GPU with random weights.

    python scripts/bench_decode.py [--dummy-weights flash] [--layers 16] [--context 8K,128K,1M] [--batch 1,8] [--cache
    fp8]
                                   [--index-cache fp4] [--transformers 5] [--prefill 8K,128K] [--out DIR]

For each batch and context: ms a step and a layer, kernels, the bytes that a step must read as a time, peak memory, and
how often the host waited, Triton compiled or memory was allocated after warm-up. `--transformers N` times N layers of
transformers' eager model beside it (0: not). `--prefill` times whole prompts of those lengths too, in the model's own
chunks, batch 1: tokens/s, ms a layer, and the time that their bytes and products need at least. Writes
bench_decode_<device>.json, .md and .svg to DIR. Exit code 1 when a step was not clean.

    python scripts/bench_decode.py --dummy-weights qwen2.5-7b --attention block-bound [--attention-tokens 8b,16b,32b]
    [--layers 28] [--context 8K,32K,128K,1M] [--batch 1,8]

times a GQA model instead: dense steps and those of the policy at each budget in turns over one cache, and writes
bench_decode_gqa_<device>.json and .md after each batch and context. A shape whose weights and caches do not fit is
measured with as many layers as do, and the reason is written in bytes. `dsv4 regime steps` fits the cost model of whole
steps to the JSON.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import decode_gqa, decode_report, report
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy-weights", default="flash", choices=("flash", "pro", *GEOMETRIES))
    parser.add_argument("--layers", type=int, default=None, help="16 of flash and pro, else all")
    parser.add_argument(
        "--attention", default="block-bound", choices=[name for name in NAMES if name != "dense"], help="of a GQA model"
    )
    parser.add_argument(
        "--attention-tokens", default="4096", help="4096, or 8b,16b,32b; of snapkv and pyramidkv a share: 0.2"
    )
    parser.add_argument("--context", type=counts, default=counts("8K,128K,1M"))
    parser.add_argument("--batch", type=counts, default=[1, 8])
    parser.add_argument("--numerics", default="native")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--cache", default="fp8")
    parser.add_argument("--index-cache", default="fp4")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--transformers", type=int, default=5, metavar="N")
    parser.add_argument("--prefill", type=counts, default=[], metavar="TOKENS")
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    args = parser.parse_args()
    args.gqa = args.dummy_weights in GEOMETRIES
    args.layers = args.layers or (None if args.gqa else 16)
    return args


def main() -> int:
    args = arguments()
    if not torch.cuda.is_available():
        print("error: decode steps are timed on a CUDA device", file=sys.stderr)
        return 2
    machine, about = measure_machine(Clock()), report.provenance(SCRIPT)
    release()
    args.out = folder(args.out, "decode", args.dummy_weights, machine.device)
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
            lambda: measure_prefill(model, tokens, machine),
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
