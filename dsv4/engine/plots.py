"""A run of the engine as an SVG document; the same bytes for the same figures."""

import warnings
from io import StringIO

from dsv4.cache.paging import PRESSURE_PERCENT
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.speculation.policy import PRESSURE_CAP

DRAWN = 8  # requests whose sizes are drawn: those with the most passes


def svg(name: str, report: dict) -> str:
    """Block sizes over committed tokens, a strip a request, acceptance, latency percentiles, and over steps live pages
    and their fragmentation; a panel without data is left out. What is drawn has an id, by which it can be found:
    `sizes-0`, `live-csa-entries`. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        drawn = [
            r
            for r in sorted(report["requests"], key=lambda r: -len(r["block_size_history"]))[:DRAWN]
            if r["block_size_history"]
        ]
        strips = [f"request-{n}" for n in range(len(drawn))]
        rows, heights = _panels(report, drawn, strips)
        figure = Figure(figsize=(9, sum(heights) + 1.2), layout="constrained")
        axes = figure.subplot_mosaic(rows, height_ratios=heights) if rows else {}
        about = report["about"]
        figure.suptitle(
            f"{name}: {about['speculate']}, draft tokens {about['draft tokens']}; {about['checkpoint']}, "
            f"{about['numerics']}, {about['device']}" + ("" if rows else "\nnothing was measured that could be drawn"),
            fontsize=8,
        )
        if strips:
            _draw_sizes([axes[strip] for strip in strips], drawn, len(report["requests"]) - len(drawn))
        if "acceptance" in axes:
            _draw_acceptance(axes["acceptance"], drawn)
        for what, found in report["latency_seconds"].items():
            if what in axes:
                _draw_latency(axes[what], what.replace("_", " "), found)
        if "pages" in axes:
            _draw_live(axes["pages"], report["figures"])
        if "fragmentation" in axes:
            _draw_fragmentation(axes["fragmentation"], report["figures"])
        for key, axis in axes.items():
            axis.tick_params(labelsize=7)
            axis.set_gid(key)
        out = StringIO()
        with warnings.catch_warnings():
            # an id may be in any script, so its width is only estimated
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _panels(report: dict, drawn: list[dict], strips: list[str]) -> tuple[list[list[str]], list[float]]:
    """Rows of the mosaic, twelve columns each, and their heights in inches; a panel without data is left out."""
    rows, heights = [[strip] * 12 for strip in strips], [0.75] * len(strips)
    middle = [what for what, found in report["latency_seconds"].items() if found is not None]
    middle = ["acceptance"] * 2 * any(r["acceptance"] is not None for r in drawn) + middle
    if middle:
        rows, heights = [*rows, [name for name in middle for _ in range(12 // len(middle))]], [*heights, 2.2]
    for name, key in (("pages", "live_share"), ("fragmentation", "fragmentation")):
        if any(report["figures"][key].values()):
            rows, heights = [*rows, [name] * 12], [*heights, 2.2]
    return rows, heights


def committed(request: dict) -> list[int]:
    """Tokens that a request had when each of its passes began; prefill gave the first."""
    had = [1]
    for accepted in request["accepted_history"]:
        had.append(had[-1] + accepted + 1)
    return had[:-1]


def _draw_sizes(strips, drawn: list[dict], omitted: int) -> None:
    """drawn: requests, as many as strips or none."""
    most = max((len(r["token_ids"]) for r in drawn), default=1)
    for n, axis in enumerate(strips):
        for r in drawn[n : n + 1]:
            at, sizes, color = committed(r), r["block_size_history"], f"C{n}"
            axis.step(
                [*at, len(r["token_ids"])], [*sizes, sizes[-1]], where="post", lw=1, color=color, gid=f"sizes-{n}"
            )
            pressed = [i for i, under in enumerate(r["pressed_history"]) if under]
            axis.plot([at[i] for i in pressed], [sizes[i] for i in pressed], "v", ms=3, color=color, gid=f"pressed-{n}")
            axis.set_ylabel(_label(r["id"]), fontsize=6, rotation=0, ha="right", va="center")
        axis.axhline(PRESSURE_CAP, color="#b3423c", lw=0.8, ls=":", label=f"most under pressure, {PRESSURE_CAP}")
        axis.set(xlim=(0, most), ylim=(-0.3, MAX_DRAFTS + 0.5), yticks=(0, 4, 8))
        axis.tick_params(labelbottom=axis is strips[-1])
    axis.plot([], [], "v", ms=3, color="0.4", label="chosen under pressure")
    axis.set_xlabel(
        "drafted tokens of a pass, over tokens committed"
        + (f" ({omitted} requests with fewer passes or none are not drawn)" if omitted else ""),
        fontsize=8,
    )
    axis.legend(fontsize=6, loc="upper right")


def _draw_acceptance(axis, drawn: list[dict]) -> None:
    """One bar a request, in the colour of its sizes; a request that drafted nothing has none."""
    axis.set_title("accepted, % of drafts", fontsize=8)
    for n, r in enumerate(drawn):
        share = 100 * (r["acceptance"] or 0.0)
        [bar] = axis.barh(n, share, 0.7, color=f"C{n}")
        bar.set_gid(f"acceptance-{n}")
        axis.text(share + 1, n, "–" if r["acceptance"] is None else f"{share:.0f}", fontsize=6, va="center")
    axis.set_yticks(range(len(drawn)), [_label(r["id"]) for r in drawn])
    axis.set(xlim=(0, 110), ylim=(max(len(drawn), 1) - 0.5, -0.5))


def _draw_latency(axis, what: str, found: dict) -> None:
    axis.set_title(f"{what}, ms", fontsize=8)
    bars = axis.bar(list(found), [seconds * 1e3 for seconds in found.values()], 0.6, color="#1f6feb")
    axis.bar_label(bars, [f"{seconds * 1e3:.1f}" for seconds in found.values()], fontsize=7)
    axis.margins(y=0.15)


def _draw_live(axis, figures: dict) -> None:
    _draw_courses(axis, "live", figures["live_share"], figures["steps_a_point"], figures)
    axis.axhline(PRESSURE_PERCENT, color="#b3423c", lw=0.8, ls=":", label=f"pressure, over {PRESSURE_PERCENT} %")
    evicted = figures["eviction_steps"]
    axis.plot(
        evicted, [101] * len(evicted), "x", ms=4, color="0.2", label="an eviction", gid="evictions", clip_on=False
    )
    axis.set_ylabel("live pages, % of the pool", fontsize=8)
    axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=8)


def _draw_fragmentation(axis, figures: dict) -> None:
    """Draws in the colours of the live pages above it."""
    _draw_courses(axis, "fragmentation", figures["fragmentation"], figures["steps_a_look"], figures)
    axis.set_xlabel("steps", fontsize=8)
    axis.set_ylabel("fragmentation: empty rows of\nlive pages, %", fontsize=8)


def _draw_courses(axis, what: str, courses: dict[str, list[float]], every: int, figures: dict) -> None:
    """Draws the share of each pool, sampled every `every` steps, as percentages over the steps of the run."""
    for pool, course in courses.items():
        axis.plot(
            [i * every for i in range(len(course))],
            [100 * share for share in course],
            lw=1,
            label=pool,
            gid=f"{what}-{pool.replace(' ', '-')}",
        )
    axis.set(xlim=(0, max(figures["steps"], 1)), ylim=(0, 104))


def _label(name: str) -> str:
    """A name for the legend. It is quoted, because matplotlib omits names that begin with an underscore; characters
    that cannot be drawn become ?."""
    return "“" + "".join(c if c.isprintable() else "?" for c in name[:24]) + "”"
