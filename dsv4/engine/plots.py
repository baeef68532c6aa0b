"""A run of the engine as an SVG document; the same bytes for the same figures."""

import warnings
from io import StringIO

from dsv4.speculation.policy import LARGEST, PRESSURE_CAP, PRESSURE_PERCENT

DRAWN = 8  # requests whose sizes are drawn: those with the most passes


def svg(name: str, report: dict) -> str:
    """Block sizes over committed tokens, latency percentiles, and live pages over steps. Raises ModuleNotFoundError without
    matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(9, 9), layout="constrained")
        axes = figure.subplot_mosaic([["sizes", "sizes"], ["time_to_first_token", "inter_token"], ["pages", "pages"]])
        about = report["about"]
        axes["sizes"].set_title(f"{name}: {about['speculate']}, draft tokens {about['draft tokens']}; {about['checkpoint']}, "
                                f"{about['numerics']}, {about['device']}", fontsize=8)
        _draw_sizes(axes["sizes"], report["requests"])
        for what, found in report["latency_seconds"].items():
            _draw_latency(axes[what], what.replace("_", " "), found)
        _draw_pages(axes["pages"], report["figures"])
        for axis in axes.values():
            axis.tick_params(labelsize=7)
        out = StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # an id may be in any script; only the width of its text is a guess then
            figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def committed(request: dict) -> list[int]:
    """Tokens that a request had when each of its passes began; the first came of prefill."""
    had = [1]
    for accepted in request["accepted_history"]:
        had.append(had[-1] + accepted + 1)
    return had[:-1]


def _draw_sizes(axis, requests: list[dict]) -> None:
    drawn = sorted(requests, key=lambda r: -len(r["block_size_history"]))[:DRAWN]
    for n, r in enumerate(r for r in drawn if r["block_size_history"]):
        at, sizes, color = committed(r), r["block_size_history"], f"C{n}"
        axis.step([*at, len(r["token_ids"])], [*sizes, sizes[-1]], where="post", lw=1, color=color, label=_label(r["id"]))
        pressed = [i for i, under in enumerate(r["pressed_history"]) if under]
        axis.plot([at[i] for i in pressed], [sizes[i] for i in pressed], "v", ms=3, color=color)
    axis.plot([], [], "v", ms=3, color="0.4", label="chosen under pressure")
    axis.axhline(PRESSURE_CAP, color="#b3423c", lw=0.8, ls=":", label=f"most under pressure, {PRESSURE_CAP}")
    omitted = len(requests) - len(drawn)
    axis.set_xlabel("tokens committed" + (f" ({omitted} requests with fewer passes are not drawn)" if omitted else ""), fontsize=8)
    axis.set_ylabel("drafted tokens of a pass", fontsize=8)
    axis.set_ylim(-0.3, LARGEST + 0.5)
    axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=5)


def _draw_latency(axis, what: str, found: dict | None) -> None:
    axis.set_title(f"{what}, ms", fontsize=8)
    if found is None:
        axis.text(0.5, 0.5, "none was measured", ha="center", fontsize=8, transform=axis.transAxes)
        return
    bars = axis.bar(list(found), [seconds * 1e3 for seconds in found.values()], 0.6, color="#1f6feb")
    axis.bar_label(bars, [f"{seconds * 1e3:.1f}" for seconds in found.values()], fontsize=7)
    axis.margins(y=0.15)


def _draw_pages(axis, figures: dict) -> None:
    every = figures["steps_a_point"]
    for pool, course in figures["live_share"].items():
        axis.plot([i * every for i in range(len(course))], [100 * share for share in course], lw=1, label=pool)
    axis.axhline(PRESSURE_PERCENT, color="#b3423c", lw=0.8, ls=":", label=f"pressure, over {PRESSURE_PERCENT} %")
    axis.set_xlabel("steps", fontsize=8)
    axis.set_ylabel("live pages, % of the pool", fontsize=8)
    axis.set_ylim(0, 104)
    axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=7)


def _label(name: str) -> str:
    """A name for the legend: in quotes, because it leaves out those that begin with an underscore; what cannot be drawn is a ?."""
    return "“" + "".join(c if c.isprintable() else "?" for c in name[:24]) + "”"
