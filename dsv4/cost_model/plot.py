"""The regime map and the cost model's line as an SVG document, equal byte for byte for equal figures."""

from io import StringIO

from dsv4.cost_model.report import times, tokens


def svg(report: dict) -> str:
    """The map of context × batch on top, measured against predicted times below. Raises ModuleNotFoundError without
    matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(9, 8.5 if report["rows"] else 5), layout="constrained")
        axes = figure.subplots(2, 1, height_ratios=(1.2, 1)) if report["rows"] else [figure.subplots()]
        _draw_map(figure, axes[0], report)
        if report["rows"]:
            _draw_rows(axes[1], report)
        for axis in axes:
            axis.tick_params(labelsize=7)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_map(figure, axis, report: dict) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    cells, hardware = report["map"], report["hardware"]
    contexts, batches, policies = (list(dict.fromkeys(c[key] for c in cells)) for key in ("context", "batch", "best"))
    letters = {policy: chr(ord("a") + n) for n, policy in enumerate(p for p in policies if p != "dense")}
    at = {(c["batch"], c["context"]): c["attention_speedup"] for c in cells}
    mesh = axis.pcolormesh(
        [[at[b, s] for s in contexts] for b in batches], cmap="viridis", norm=LogNorm(1, max(2.0, *at.values()))
    )
    figure.colorbar(mesh, ax=axis, format="%g").set_label("attention, times faster than dense", fontsize=7)
    for c in cells:
        x, y = contexts.index(c["context"]), batches.index(c["batch"])
        if not c["fits"]:
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor="0.85", edgecolor="0.6", hatch="//", linewidth=0))
        alone = "" if c["fits_by_policy"]["dense"] else "†"
        said = (
            ""
            if not c["fits"]
            else "dense"
            if c["best"] == "dense"
            else f"{times(c['attention_speedup'])} {letters[c['best']]}{alone}"
        )
        axis.text(
            x + 0.5,
            y + 0.5,
            said,
            ha="center",
            va="center",
            fontsize=6,
            color="white" if c["attention_speedup"] < 4 else "black",
        )
    axis.set_xticks([i + 0.5 for i in range(len(contexts))], map(tokens, contexts))
    axis.set_yticks([i + 0.5 for i in range(len(batches))], map(str, batches))
    axis.set_xlabel("context, tokens", fontsize=7)
    axis.set_ylabel("batch", fontsize=7)
    axis.set_title(
        f"{report['about']['model']} on {hardware['name']}, fastest policy: "
        + ", ".join(f"{n} {p}" for p, n in letters.items())
        + f"\nhatched: the caches of {hardware['layers']} layers do not fit; †: those of dense "
        "attention do not",
        fontsize=8,
    )


def _draw_rows(axis, report: dict) -> None:
    for n, policy in enumerate(dict.fromkeys(r["policy"] for r in report["rows"])):
        for held_out in (False, True):
            rows = [r for r in report["rows"] if (r["policy"], r["held_out"]) == (policy, held_out)]
            predicted, seen = ([r[key] * 1e6 for r in rows] for key in ("predicted", "seconds"))
            axis.plot(
                predicted,
                seen,
                "o" if held_out else ".",
                ms=5,
                mfc="none" if held_out else f"C{n}",
                color=f"C{n}",
                lw=0,
                label=policy + (", held out" if held_out else ""),
            )
    ends = [f(r[key] * 1e6 for r in report["rows"] for key in ("predicted", "seconds")) for f in (min, max)]
    axis.plot(ends, ends, color="0.6", lw=0.8)
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("predicted, µs a layer", fontsize=7)
    axis.set_ylabel("measured, µs a layer", fontsize=7)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
    quality = report["quality"]
    held = quality["held out"]
    worst = f"; worst of {held['rows']} held-out rows {held['worst_error']:.1%}" if held else ""
    axis.set_title(f"R² {quality['all']['r_squared']:.4f}{worst}", fontsize=8)
    axis.legend(fontsize=6, ncols=2)
