"""The training log as one SVG: losses, the indexer, balance and speed against tokens, stages marked.

    python -m scripts.training.plot LOG.jsonl OUT.svg [ABLATION.jsonl]

The log of the window-only ablation is drawn dotted, where it says something.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

PANELS = (  # (keys, title, unit)
    (("next", "draft"), "loss of the next token, and of the MTP draft", "nats, answers of needles weighted 6"),
    (("indexer",), "KL of the dense attention's mass from the index scores", "nats"),
    (("kept",), "share of that mass on the selected entries", "share"),
    (("load",), "load of the busiest expert over the mean", "ratio"),
    (("tokens_per_s",), "speed", "tokens/s"),
)


def smooth(values: list[float], width: int = 9) -> list[float]:
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def plot(log: Path, out: Path, ablation: Path | None = None) -> None:
    """Draw the rows of `log`. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dsv4"
    import matplotlib.pyplot as plt

    read = lambda file: [json.loads(line) for line in file.read_text().splitlines()]
    rows, other = read(log), [] if ablation is None else read(ablation)
    panels = [
        (logged, title if logged == keys else title.split(",")[0], unit)
        for keys, title, unit in PANELS
        # a GQA model has no drafts, no indexer and no experts
        if (logged := tuple(key for key in keys if key in rows[0]))
    ]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 2.1 * len(panels)), sharex=True, constrained_layout=True)
    for axis, (keys, title, unit) in zip(axes, panels):
        for stage, x in _draw(axis, rows, keys, "-"):
            axis.axvline(x, color="0.85", lw=0.8, zorder=0)
            if axis is axes[0]:
                axis.text(
                    x,
                    1.02,
                    stage,
                    transform=axis.get_xaxis_transform(),
                    fontsize=6,
                    rotation=30,
                    ha="left",
                    va="bottom",
                )
        if keys[0] not in ("indexer", "kept"):
            _draw(axis, other, keys, ":")
            title += " (dotted: window layers only)" if other else ""
        axis.set_ylabel(unit, fontsize=7)
        axis.text(0.99, 0.9, title, transform=axis.transAxes, ha="right", va="top", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[-1].set_xlabel("million tokens", fontsize=8)
    figure.savefig(out, metadata={"Date": None})


def _draw(axis, rows: list[dict], keys: tuple[str, ...], style: str) -> list[tuple[str, float]]:
    """Lines of the keys, broken between stages. Returns (stage, where it begins)."""
    begun = []
    for stage, part in groupby(rows, key=lambda row: row["stage"]):
        part = list(part)
        x = [row["tokens"] / 1e6 for row in part]
        for i, key in enumerate(keys):
            axis.plot(x, smooth([row[key] for row in part]), style, color=f"C{i}", lw=1.1)
        begun.append((stage, x[0]))
    return begun


if __name__ == "__main__":
    plot(*map(Path, sys.argv[1:]))
