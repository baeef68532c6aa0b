"""What each choice of numerics does to the logits, measured against fp32.

    python scripts/measure_numerics.py CHECKPOINT [--tokens 512] [--out audits/numerics_NAME]

Writes OUT.md and OUT.json: for each numerics the mean KL divergence from fp32 (nats), the share of positions with the
same argmax, and the root mean square and largest difference of logits; and for the CSA layers the share of selected
entries that fp32 selects too, beside chance. Random tokens, fixed seed. Effects are reported, not judged.
"""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

from dsv4 import load_model
from dsv4.kernels.errors import Dsv4Error
from scripts.bench.report import out_file

ROOT = Path(__file__).resolve().parent.parent


def run(path: Path, numerics: str, ids: torch.Tensor):
    """(logits [T, vocab], selection of each CSA layer [T, k]) of one numerics."""
    model = load_model(path, numerics=numerics, mtp=False)
    picked: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.layers):
        if layer.spec.selects:
            layer.attn.indexer.register_forward_hook(lambda m, args, out, i=i: picked.__setitem__(i, out[0].clone()))
    logits = model.append(ids, model.new_cache(1, ids.shape[1]), chunk=ids.shape[1])[0]
    return logits, picked, model


def overlap(a: torch.Tensor, b: torch.Tensor, topk: int) -> tuple[float, float]:
    """Share of b's picks that a made too, and chance, over the queries that had to choose."""
    shares, chance = [], []
    for t in range(a.shape[0]):
        visible = (t + 1) // 4
        if visible > topk:
            wanted = set(b[t].tolist())
            shares.append(len(wanted & set(a[t].tolist())) / topk)
            chance.append(topk / visible)
    return (sum(shares) / len(shares), sum(chance) / len(chance)) if shares else (float("nan"), float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=out_file)
    args = parser.parse_args()
    rows = []
    try:
        ids = torch.randint(
            0,
            load_model(args.checkpoint, numerics="native").config.vocab_size,
            (1, args.tokens),
            generator=torch.Generator().manual_seed(0),
        )
        exact, chosen, model = run(args.checkpoint, "fp32", ids)
        for numerics in ("native", "qat", "qat:fp32"):
            logits, picked, _ = run(args.checkpoint, numerics, ids)
            p, q = exact.log_softmax(-1), logits.log_softmax(-1)
            shares = {i: overlap(picked[i], chosen[i], model.config.index_topk) for i in picked}
            rows.append(
                {
                    "numerics": numerics,
                    "mean_kl_nats": (p.exp() * (p - q)).sum(-1).mean().item(),
                    "same_argmax": (exact.argmax(-1) == logits.argmax(-1)).float().mean().item(),
                    "rms_logit_difference": (exact - logits).square().mean().sqrt().item(),
                    "max_logit_difference": (exact - logits).abs().max().item(),
                    "selection_overlap": {str(i): share for i, (share, _) in shares.items()},
                    "selection_chance": next(iter(shares.values()))[1] if shares else None,
                }
            )
    except Dsv4Error as error:
        sys.exit(f"error: {error}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    document = {
        "checkpoint": str(args.checkpoint),
        "tokens": args.tokens,
        "layout": model.inventory.layout.name,
        "commit": commit,
        "logit_rms_of_fp32": exact.square().mean().sqrt().item(),
        "torch": torch.__version__,
        "device": f"{platform.machine()} CPU",
        "command": " ".join(["python", "scripts/measure_numerics.py", *sys.argv[1:]]),
        "rows": rows,
    }
    text = markdown(document)
    print(text)
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


def markdown(document: dict) -> str:
    lines = [
        f"# Numerics of `{document['checkpoint']}` against fp32",
        "",
        f"{document['tokens']} random tokens, layout {document['layout']}, commit {document['commit']}, "
        f"{document['device']}, torch {document['torch']}. fp32 logits have a root mean square of "
        f"{document['logit_rms_of_fp32']:.3f}.",
        "",
        f"`{document['command']}`",
        "",
        "| numerics | mean KL (nats) | same argmax | rms logit difference | largest | selection "
        "shared with fp32, by CSA layer (chance) |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        shares = ", ".join(f"{i}: {share:.1%}" for i, share in row["selection_overlap"].items())
        chance = "" if row["selection_chance"] is None else f" ({row['selection_chance']:.1%})"
        lines.append(
            f"| {row['numerics']} | {row['mean_kl_nats']:.4f} | {row['same_argmax']:.1%} | "
            f"{row['rms_logit_difference']:.4f} | {row['max_logit_difference']:.3f} | {shares}{chance} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
