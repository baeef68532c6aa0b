"""Decode steps and a prompt with routed experts in pinned host memory, beside what the link allows.

    python scripts/bench_expert_memory.py [CHECKPOINT | --dummy-weights flash --layers 24] [--resident-experts 102]
        [--prompt 2K] [--tokens 64] [--batch 1,8] [--device cuda] [--out DIR]

A layer of Flash takes 3.4 GB of host memory: 24 layers fit 128 GiB. 102 of 256 experts are what one 80 GB card holds of
each of the 44 layers that have experts (`dsv4 plan flash --expert-memory host --device h100`). Writes
expert_memory_<device>.json and .md.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.model.dummy import load_dummy
from dsv4.model.expert_memory import ExpertMemory
from dsv4.model.load import load_model
from dsv4.units import parse_count
from scripts.bench import report
from scripts.bench.expert_memory import document, markdown, measure
from scripts.places import device_slug, folder

SCRIPT = "scripts/bench_expert_memory.py"
WHOLE = 43  # layers of Flash that a step without drafts runs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--dummy-weights", default="flash", choices=("flash", "pro"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--resident-experts", type=int, default=102)
    parser.add_argument("--prompt", type=parse_count, default=2048)
    parser.add_argument("--tokens", type=int, default=64, help="decode steps of a row")
    parser.add_argument("--batch", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8))
    for name, value in (("numerics", "native"), ("backend", "auto"), ("device", "cuda")):
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    choice = ExpertMemory(args.resident_experts)
    given = dict(numerics=args.numerics, backend=args.backend, device=args.device, expert_memory=choice)
    if args.checkpoint is not None:
        model = load_model(args.checkpoint, **given)
    else:
        model = load_dummy(args.dummy_weights, args.layers, cache="fp8", index_cache="fp4", **given)
    rows = measure(model, args.prompt, args.tokens, args.batch)
    whole = WHOLE if args.checkpoint is None else len(model.expert_tier.layers)
    found = report.finite(document(model, rows, whole, report.provenance(SCRIPT)))
    text, subject = markdown(found), args.checkpoint.name if args.checkpoint else args.dummy_weights
    print(text)
    place = folder(args.out, "expert_memory", subject, found["about"]["device"])
    for path in report.write(place, f"expert_memory_{device_slug(found['about']['device'])}", found, text, None):
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(report.exit_code(main))
