"""Held-out loss of the model against the ablation with window layers only, both at the same step of the same recipe.

    python -m scripts.training.ablation DATA STATE WINDOW_ONLY_STATE --out FILE.json [--device cuda] [--tokens 200000]

Both read the same rows; the difference is paired by row, so its standard error is that of the difference and not of the
text.
"""

import argparse
import json
import sys
from pathlib import Path

from dsv4.errors import InputError
from dsv4.kernels.errors import Dsv4Error
from scripts.bench.report import out_file
from scripts.measure_demo import Report
from scripts.training import evaluation, state
from scripts.training.evaluation import Figure, Limits
from scripts.training.rows import Rows

LENGTHS = (512, 1024)  # of rows that both have been trained on at that step


def compare(full: Path, window: Path, rows: Rows, limits: Limits, device: str, say) -> list[Figure]:
    """A figure a kind of text and length: mean of loss(window only) − loss(full), in nats a token."""
    at, other = (state.facts_of(directory) for directory in (full, window))
    if at["step"] != other["step"] or not other.get("window_only") or at.get("window_only"):
        raise InputError(
            f"{full} is at step {at['step']} and {window} at {other['step']}; expected the model and its ablation "
            "(--window-only) at the same step"
        )
    losses = [
        evaluation.state_row_losses(directory, rows, LENGTHS, limits, device, say) for directory in (full, window)
    ]
    figures = []
    for (kind, length), mine in losses[0].items():
        theirs = losses[1][kind, length]
        gap = theirs.mean(1) - mine.mean(1)
        error = (gap.std() / len(gap) ** 0.5).item() if len(gap) > 1 else None
        figures.append(
            Figure(
                "window-only ablation",
                f"held-out {kind}, {length} tokens: loss above the model's",
                gap.mean().item(),
                mine.numel(),
                {
                    "model": mine.mean().item(),
                    "window_only": theirs.mean().item(),
                    "rows": len(gap),
                    "standard_error": error,
                    "step": at["step"],
                },
            )
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "state", "window_state"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=out_file, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=200_000)
    args = parser.parse_args()
    try:
        report = Report(args.out, args.device, ["-m", "scripts.training.ablation"])
        limits = Limits(tokens=1 << 13, chunk=1024, rows=1, loss_tokens=args.tokens)
        rows = Rows(args.data, seed=0, length=1024, split="heldout")
        report.add(compare(args.state, args.window_state, rows, limits, args.device, report.say), "training bf16")
    except (Dsv4Error, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    for f in report.figures:
        print(f["name"], json.dumps({"value": f["value"], **f["details"]}))


if __name__ == "__main__":
    main()
