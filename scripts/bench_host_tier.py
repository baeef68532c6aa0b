"""Decode with the cache in host memory: against the resident cache and against streaming the dense cache over the same
link.

    python scripts/bench_host_tier.py [--parts grouped decode entries flash] [--context 1M] [--layers 28] [--locality
    0.9] [--out DIR]

grouped: keys and values of Qwen2.5-7B's shape (28 query heads, 4 KV heads × 128, bf16), 60 GB at 1M tokens and 28
layers: a step's attention in all layers as one captured graph, and the whole cache streamed. decode: the same cache
under the model itself with random weights, captured steps, tokens a second. entries: those of Flash-width CSA layers
(512 numbers, 512 of them chosen), in bf16 and in packed 584-byte rows. flash: decode through layers of Flash widths.
Choices of the attention rows come from a trace with a given locality: each distant block (entry) of a step is, with
that probability, of the choice before, else drawn anew. Output of the tier is held against the resident path bit for
bit before anything is timed. The link is measured in the same run: large cudaMemcpyAsync, each way. Host memory is
pinned once, for grouped and decode together. Writes host_tier_<device>.{json,md,svg} after each part;
host_tier_csa_<device> for entries and flash alone.
"""

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import Dsv4Error
from dsv4.units import parse_count
from scripts.bench import host_tier, host_tier_model, host_tier_report
from scripts.bench.report import out_folder, provenance, timed
from scripts.places import device_slug, folder

PARTS = ("grouped", "decode", "entries", "flash")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--context", type=parse_count, default=1 << 20)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--csa-layers", type=int, default=21)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--entry-batch",
        type=int,
        nargs="+",
        default=[1, 8],
        help="rows of the part entries; layers are divided by them",
    )
    parser.add_argument(
        "--topk", type=int, default=29, help="distant blocks a step; with a sink and two local blocks 4096 tokens"
    )
    parser.add_argument("--slots", type=int, default=64, help="staged blocks a KV head")
    parser.add_argument("--entry-slots", type=int, default=1024, help="staged entries of a row")
    parser.add_argument("--flash-layers", type=int, default=6, help="of Flash widths, 3.6 GB each")
    parser.add_argument("--locality", type=float, nargs="+", default=[0.5, 0.9, 0.99])
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each row")
    parser.add_argument(
        "--out", type=out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    return parser.parse_args()


def measured(args):
    """The report, again after each part."""
    report = {"about": provenance("scripts/bench_host_tier.py"), "link": asdict(host_tier.link()), "seconds": {}}

    def timed(part: str, run) -> dict:
        begun = time.perf_counter()
        report[part] = run()
        report["seconds"][part] = time.perf_counter() - begun
        return report

    if {"grouped", "decode"} & set(args.parts):
        begun = time.perf_counter()
        model, cache, report["setup"] = host_tier_model.loaded(args)
        report["seconds"]["setup"] = time.perf_counter() - begun
        if "grouped" in args.parts:
            yield timed(
                "grouped",
                lambda: (
                    host_tier.grouped(args, cache.far, model.op)
                    | {"stream_seconds": host_tier.stream_dense(model.op, cache.stream)}
                ),
            )
        if "decode" in args.parts:
            yield timed("decode", lambda: host_tier_model.decode(args, model, cache))
        del model, cache
        gc.collect()
    for part, run in (("entries", host_tier.entries), ("flash", host_tier_model.flash)):
        if part in args.parts:
            yield timed(part, lambda: run(args))


def main() -> int:
    args = arguments()
    try:
        if not torch.cuda.is_available():
            raise host_tier.no_device()
        for report in measured(args):
            text = write(report, args.out)
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def write(report: dict, out: Path | None) -> str:
    """The three files of what is there so far; returns the markdown."""
    # of CSA alone they have files of their own, and those of GQA models stay
    grouped = {"grouped", "decode"} & set(report)
    name = f"host_tier_{'' if grouped else 'csa_'}{device_slug(report['about']['device'])}"
    out = folder(out, "host_tier", "qwen2.5-7b" if grouped else "flash", report["about"]["device"])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(timed(report), indent=1) + "\n")
    text = host_tier_report.markdown(report)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.svg").write_text(host_tier_report.svg(report))
    return text


if __name__ == "__main__":
    sys.exit(main())
