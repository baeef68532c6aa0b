"""Parts of figures, and figures as SVG documents. matplotlib is an optional dependency: without it there are no plots,
and the report says so."""

from collections.abc import Iterable
from io import StringIO
from math import floor, isfinite

DEPTHS = 10  # bins of a needle's depth
MISSING = "no plots: matplotlib is not installed; pip install 'dsv4[plots]' (or matplotlib), and run again"


def available() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def canvas(panels: int):
    """(figure, its axes beside each other)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * panels, 3.8), layout="constrained")
    return figure, figure.subplots(1, panels)


def logarithmic(axis, side: str, values) -> None:
    """Make 'x' or 'y' logarithmic with room around the positive ones of `values`; linear where there are none, since
    matplotlib draws no logarithmic axis without a point on it."""
    positive = [v for v in values if v is not None and isfinite(v) and v > 0]
    if positive:
        getattr(axis, f"set_{side}scale")("log")
        low, high = min(positive), max(positive)
        room = max(1.2, (high / low) ** 0.05)
        getattr(axis, f"set_{side}lim")(low / room, high * room)


def legend(figure) -> None:
    """Name the lines below the panels, where they hide none: once if one panel has all names, else panel by panel."""
    named = [(axis, *axis.get_legend_handles_labels()) for axis in figure.axes]
    named = [(axis, handles, labels) for axis, handles, labels in named if labels]
    if not named:
        return
    short = all(len(label) < 34 for _, _, labels in named for label in labels)
    _, handles, most = max(named, key=lambda one: len(one[2]))
    if all(set(labels) <= set(most) for _, _, labels in named):
        columns = min(len(most), (2 if short else 1) * max(1, round(figure.get_figwidth() / 5)))
        figure.legend(handles, most, loc="outside lower center", ncols=columns, fontsize=7)
        rows = -(-len(most) // columns)
    else:
        for axis, handles, labels in named:
            axis.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1 + short, fontsize=7)
        rows = max(-(-len(labels) // (1 + short)) for _, _, labels in named)
    figure.set_figheight(figure.get_figheight() + 0.17 * rows)


def svg(figure) -> str:
    """The figure as an SVG document; equal figures give equal bytes."""
    from matplotlib import rc_context

    out = StringIO()
    with rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def share_axis(axis, title: str) -> None:
    """An axis of shares, up to 1; from 0, or from a round share below what was plotted where all of it lies high."""
    values = [v for line in axis.get_lines() for v in line.get_ydata() if isfinite(v)]
    least = max(0.0, floor(10 * (min(values, default=0.0) - 0.02)) / 10)
    least = least if least >= 0.5 else 0.0
    axis.set_title(title + (f"; from {least:g}" if least else ""), fontsize=9)
    axis.set_ylim(least - 0.03 * (1 - least), 1 + 0.03 * (1 - least))
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)


def finished(figure, axes: Iterable, label: str) -> str:
    """The figure as SVG, its lines named, and `label` below these of its axes."""
    for axis in axes:
        axis.set_xlabel(label, fontsize=8)
    legend(figure)
    return svg(figure)


def numbers(values: Iterable[float | None]) -> list[float]:
    """What a line is drawn through: a gap where nothing was measured."""
    return [float("nan") if value is None else value for value in values]


def column(rows: Iterable[dict], key: str) -> list[float]:
    return numbers(row[key] for row in rows)


def shaded(axis, cells: list[list[float]], fontsize: int):
    """A map of shares, each cell with its percents; NaN: an empty cell. Returns the mesh."""
    for y, line in enumerate(cells):
        for x, share in enumerate(line):
            if isfinite(share):
                color = "w" if share < 0.6 else "k"
                place = {"ha": "center", "va": "center", "fontsize": fontsize, "color": color}
                axis.text(x + 0.5, y + 0.5, f"{100 * share:.0f}", **place)
    return axis.pcolormesh(cells, cmap="viridis", vmin=0, vmax=1)


def needle_maps(panels: dict[str, dict[str, list[dict]]]) -> str:
    """A panel a title: a row a label, a column a tenth of the context, in a cell the share found in percent."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for trials in panels.values() for label in trials))
    figure = Figure(figsize=(1.6 + 4.4 * len(panels), 1.2 + 0.3 * len(labels)), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, trials) in zip(axes, panels.items()):
        cells = [[float("nan")] * DEPTHS for _ in labels]
        for y, label in enumerate(labels):
            for middle, share in zip(*by_depth(trials.get(label, []))):
                cells[y][int(middle * DEPTHS)] = share
        shaded(axis, cells, 7)
        axis.set_title(title, fontsize=9)
        axis.set_xticks([0, DEPTHS / 2, DEPTHS], ["0", "0.5", "1"])
        axis.set_yticks([y + 0.5 for y in range(len(labels))], labels)
        axis.set_xlabel("depth (0: start of the context)", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0].invert_yaxis()
    return svg(figure)


def task_map(rows: list[dict]) -> str:
    """Recall of tasks in percent: a row a way of reading, a column a task, haystack and context."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((r["task"], r["haystack"], r["context"]) for r in rows))
    labels = list(dict.fromkeys(r["variant"] for r in rows))
    cells = [[float("nan")] * len(columns) for _ in labels]
    for r in rows:
        cells[labels.index(r["variant"])][columns.index((r["task"], r["haystack"], r["context"]))] = r["recall"]
    figure = Figure(figsize=(2.5 + 0.9 * len(columns), 2.2 + 0.3 * len(labels)), layout="constrained")
    axis = figure.subplots()
    shaded(axis, cells, 7)
    axis.set_title("recall of what was generated, %", fontsize=9)
    names = [f"{task}\n{haystack}\n{context:,}" for task, haystack, context in columns]
    axis.set_xticks([x + 0.5 for x in range(len(columns))], names, rotation=90)
    axis.set_yticks([y + 0.5 for y in range(len(labels))], labels)
    axis.tick_params(labelsize=7)
    axis.invert_yaxis()
    return svg(figure)


def by_depth(trials: list[dict]) -> tuple[list[float], list[float]]:
    """(middles of the depth bins that have trials, the share found in each)."""
    bins: dict[int, list[bool]] = {}
    for trial in trials:
        bins.setdefault(min(int(trial["depth"] * DEPTHS), DEPTHS - 1), []).append(trial["hit"])
    return [(b + 0.5) / DEPTHS for b in sorted(bins)], [sum(bins[b]) / len(bins[b]) for b in sorted(bins)]
