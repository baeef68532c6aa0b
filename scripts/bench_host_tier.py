"""Decode with the cache in host memory: against the resident cache and against streaming the dense cache over the same link.

    python scripts/bench_host_tier.py [--context 1M] [--layers 28] [--batch 1] [--topk 29] [--slots 64] [--locality 0.9] [--out audits]

Part one, keys and values of Qwen2.5-7B's shape (28 query heads, 4 KV heads × 128, bf16), 60 GB at 1M tokens and 28 layers: a step's
attention in all layers, as one captured graph. Part two, the entries of Flash-width CSA layers (512 numbers, 512 of them chosen), in
bf16 and in packed 584-byte rows. Choices come from a trace with a given locality: each distant block (entry) of a step is, with that
probability, of the choice before, else drawn anew. Output of the tier is held against the resident kernels bit for bit before
anything is timed. The link is measured in the same run: large cudaMemcpyAsync, each way. Writes host_tier_<device>.{json,md,svg}.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import Dsv4Error  # noqa: E402
from dsv4.memory import parse_count  # noqa: E402
from scripts.bench import host_tier, host_tier_report  # noqa: E402
from scripts.bench.report import device_slug, provenance  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=parse_count, default=1 << 20)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--csa-layers", type=int, default=21)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--topk", type=int, default=29, help="distant blocks a step; with a sink and two local blocks 4096 tokens")
    parser.add_argument("--slots", type=int, default=64, help="staged blocks a KV head")
    parser.add_argument("--entry-slots", type=int, default=1024, help="staged entries of a row")
    parser.add_argument("--locality", type=float, nargs="+", default=[0.5, 0.9, 0.99])
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each row")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "audits")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        if not torch.cuda.is_available():
            raise host_tier.no_device()
        report = {"about": provenance("scripts/bench_host_tier.py"), "link": asdict(host_tier.link())}
        report["grouped"] = host_tier.grouped(args)
        report["entries"] = host_tier.entries(args)
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = f"host_tier_{device_slug(report['about']['device'])}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    text = host_tier_report.markdown(report)
    (args.out / f"{name}.md").write_text(text)
    (args.out / f"{name}.svg").write_text(host_tier_report.svg(report))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
