"""What chunked prefill kept, as an SVG document; the same bytes for the same memory."""

from io import StringIO

import torch

from dsv4.sparse_prefill.measures import kept_by_chunk, stability
from kernels.chunked_prefill import Chunking


def svg(title: str, positions: torch.Tensor, chunking: Chunking) -> str:
    """Heat map of which chunks the memory comes from, and the stability of its heavy hitters. Raises ModuleNotFoundError without
    matplotlib."""
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    kept, jaccard = kept_by_chunk(positions, chunking).cpu(), stability(positions, chunking).flatten(1).cpu()
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(7, 8), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(2.5, 1))
        shown = kept.masked_fill(kept == 0, float("nan"))
        mesh = above.pcolormesh(shown.numpy(), cmap="viridis", norm=LogNorm(0.1, max(1.0, float(kept.max()))))
        figure.colorbar(mesh, ax=above, format="%g").set_label("tokens held, mean over KV heads", fontsize=7)
        above.invert_yaxis()
        above.set_title(f"{title}: chunks of {chunking.chunk}, {chunking.local} local and {chunking.heavy} heavy tokens", fontsize=8)
        above.set_xlabel("chunk that the tokens are of", fontsize=7)
        above.set_ylabel("chunk that attends to them", fontsize=7)
        live = [(i + 2, row[~row.isnan()]) for i, row in enumerate(jaccard)]
        live = [(i, row) for i, row in live if len(row)]
        for name, value in (("mean", torch.mean), ("least", torch.min), ("most", torch.max)):
            below.plot([i for i, _ in live], [float(value(row)) for _, row in live], ".-", ms=3, lw=1 if name == "mean" else 0.5,
                       label=name)
        below.set_ylim(-0.02, 1.02)
        below.set_xlabel("update", fontsize=7)
        below.set_ylabel("Jaccard of heavy hitters\nwith the update before", fontsize=7)
        if live:
            below.legend(fontsize=6, ncols=3)
        for axis in (above, below):
            axis.tick_params(labelsize=7)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
