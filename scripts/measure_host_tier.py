"""Whether caches in host memory change anything: logits and text of the demo checkpoints against the resident caches,
bit for bit.

    python scripts/measure_host_tier.py [--device cpu] [--prompt 2000] [--steps 48] [--out DIR]

The prompt is the repository's own README. Every row decodes the same tokens, which the resident cache's greedy choice
says, through both caches, with a rewind and another piece of prompt on the way. Writes
host_tier_identity_<device>.{json,md,svg}; exit code 1 where a bit differs.
"""

import argparse
import json
import sys
from io import StringIO
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import load_model
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import host_use
from dsv4.engine.generate import generate
from dsv4.model import families
from dsv4.model.gqa.choice import attention_named
from dsv4.model.tokenizer import Tokenizer
from scripts.bench.report import headline, out_folder, provenance, size, timed
from scripts.places import device_slug, folder

KEPT, PIECE = 512, 100  # tokens a GQA policy keeps; tokens of the piece of prompt on the way
WAYS = [("demo_gqa", name, {}) for name in ("block-bound", "page-bound", "block-mean", "sink-window", None)]
WAYS += [
    ("demo_gqa", "block-bound", {"terminate": True}),
    ("demo_gqa", "block-bound", {"prefill_chunks": "256,64,64"}),
    ("demo", None, {}),
    ("demo", None, {"cache": "fp8", "index_cache": "fp4"}),
]


def compared(args, checkpoint: str, policy: str | None, options: dict) -> dict:
    """One row: greatest difference of any logit, positions compared, texts equal, traffic."""
    formats = {k: v for k, v in options.items() if k in ("cache", "index_cache")}
    reads = attention_named(
        policy, KEPT if policy else None, options.get("terminate", False), options.get("prefill_chunks")
    )
    model = load_model(ROOT / checkpoint, device=args.device, attention=reads, **formats)
    ids = prompt(model, checkpoint, args.prompt + PIECE)
    caches = []
    for choice in (None, HostMemory()):
        model.kv_memory = choice
        caches.append(model.new_cache(1, len(ids) + args.steps))
    greatest, positions = 0.0, 0

    def both(fed: list[int], **how) -> torch.Tensor:
        nonlocal greatest, positions
        want, got = (model.append(torch.tensor([fed]), cache, **how) for cache in caches)
        greatest, positions = max(greatest, float((want - got).abs().max())), positions + want.shape[1]
        return want[0, -1]

    token = int(both(ids[: args.prompt], prompt=True).argmax())
    for step in range(args.steps):
        token = int(both([token], prompt=False).argmax())
        if step == args.steps // 2:
            for cache in caches:
                cache.rewind(args.steps // 3)
            if "prefill_chunks" not in options:
                token = int(both(ids[args.prompt :], prompt=True).argmax())
    texts = []
    for choice in (None, HostMemory()):
        model.kv_memory = choice
        texts.append(generate(model, ids[: args.prompt], args.steps).token_ids)
    ran = {row["operation"]: row["implementation"] for row in model.dispatch.rows() if row["calls"]}
    ran = {name: ran[name] for name in ("fetch", "write_back") if name in ran}
    return {
        "checkpoint": checkpoint,
        "policy": policy or ("dense" if checkpoint == "demo_gqa" else "CSA"),
        "options": options,
        "backend": model.backend,
        "positions": positions,
        "greatest_difference": greatest,
        "same_text": texts[0] == texts[1],
        "text_tokens": len(texts[0]),
        "implementations": ran,
        **host_use(caches[1]),
    }


def prompt(model, checkpoint: str, tokens: int) -> list[int]:
    """Token ids of the README, again and again until there are enough."""
    text, tokenizer = (
        (ROOT / "README.md").read_text(encoding="utf-8"),
        Tokenizer(ROOT / checkpoint, model.config.vocab_size),
    )
    ids = families.of(model.config).prompt_ids(tokenizer, text, model.config)
    return (ids * (-(-tokens // len(ids))))[:tokens]


def markdown(report: dict) -> str:
    lines = [
        "# Caches in host memory: the same logits",
        "",
        f"{headline(report['about'])}.",
        "",
        f"    {report['about']['command']}",
        "",
        f"A prompt of {report['prompt']} tokens of the README, {report['steps']} steps, a rewind, another piece of "
        "prompt; numerics native. Differences are of logits against the resident cache: 0 is every bit.",
        "",
        "| checkpoint | reads | options | positions | greatest difference | greedy text | pinned | "
        "fetched | staged already |",
        "|---|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for r in report["rows"]:
        options = ", ".join(f"{k} {v}" for k, v in r["options"].items()) or "–"
        lines.append(
            f"| {r['checkpoint']} | {r['policy']} | {options} | {r['positions']} | {r['greatest_difference']:g} | "
            f"{'the same' if r['same_text'] else 'DIFFERS'}, {r['text_tokens']} tokens | {size(r['pinned_bytes'])} | "
            f"{size(r['fetched_bytes'])} | {r['hit_rate']:.1%} |"
        )
    failed = [r for r in report["rows"] if not sound(r)]
    return "\n".join(
        [
            *lines,
            "",
            f"{len(report['rows']) - len(failed)} of {len(report['rows'])} rows are the resident cache's to the "
            "last bit.",
            "",
        ]
    )


def sound(row: dict) -> bool:
    return row["greatest_difference"] == 0 and row["same_text"]


def svg(report: dict) -> str:
    """What of the choices was staged already, and what was fetched a step. Raises ModuleNotFoundError without
    matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [
        f"{r['checkpoint']}, {r['policy']} {' '.join(r['options'])}" + ("" if sound(r) else " DIFFERS")
        for r in report["rows"]
    ]
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(8, 3.5), layout="constrained")
        axis = figure.subplots()
        axis.barh(names, [100 * r["hit_rate"] for r in report["rows"]], color="#1f6feb")
        axis.set_xlabel(
            "% of what steps chose that was staged already; logits are the resident cache's except where it says so",
            fontsize=7,
        )
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument(
        "--out", type=out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    args = parser.parse_args()
    report = {
        "about": provenance("scripts/measure_host_tier.py"),
        "prompt": args.prompt,
        "steps": args.steps,
        "rows": [],
    }
    for way in WAYS:
        report["rows"].append(compared(args, *way))
        print(json.dumps(report["rows"][-1]), file=sys.stderr, flush=True)
    device = "cpu" if args.device == "cpu" else report["about"]["device"]
    name, args.out = f"host_tier_identity_{device_slug(device)}", folder(args.out, "host_tier", "demo", device)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(timed(report), indent=1) + "\n")
    (args.out / f"{name}.md").write_text(markdown(report))
    (args.out / f"{name}.svg").write_text(svg(report))
    print(markdown(report))
    return 0 if all(map(sound, report["rows"])) else 1


if __name__ == "__main__":
    sys.exit(main())
