"""Rows of `scripts/bench/decode_sweep.py` as JSON, markdown and SVG."""

import io
from collections.abc import Sequence
from dataclasses import asdict

from scripts.bench.decode import context_name
from scripts.bench.decode_sweep import MEASURED, NO_ROOM, Row
from scripts.bench.report import headline
from scripts.bench.timing import Machine

OVERHEAD = 1.013  # time with a rule over time without one that is aimed at, where nothing stops
STOPS = 0.999  # share of the tiles: where more are read, nothing stopped


def document(about: dict, setup: dict, machine: Machine | None, rows: Sequence[Row]) -> dict:
    return {
        "about": about,
        "machine": None if machine is None else asdict(machine),
        "setup": setup,
        "rows": [row.document() for row in rows],
    }


def without(rows: Sequence[Row], row: Row) -> Row | None:
    """The row that reads to the end what `row` reads until it stops."""
    same = lambda r: (
        (r.batch, r.context, r.attention, r.retention)
        == (
            row.batch,
            row.context,
            row.attention,
            row.retention,
        )
    )
    return next((r for r in rows if r.rule is None and same(r)), None) if row.rule else None


def full(rows: Sequence[Row], row: Row) -> Row | None:
    """Full attention at the same batch and context, read to the end."""
    same = (r for r in rows if (r.batch, r.context, r.attention, r.rule) == (row.batch, row.context, "dense", None))
    return next(same, None)


def _over(row: Row, other: Row | None) -> float | None:
    return None if other is None or not row.step_ms or not other.step_ms else row.step_ms / other.step_ms


def markdown(about: dict, setup: dict, machine: Machine | None, rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.status == MEASURED]
    own = "" if machine is None else f" This device reads 1 GiB at {machine.bandwidth / 1e12:.2f} TB/s."
    lines = [
        "# Time of a token against batch: policies, with and without stopping early",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['geometry']} widths with random weights, {setup['layers']} layers and the head, numerics "
        f"{setup['numerics']}, backend {setup['backend']}; weights {setup['weight_bytes'] / 1e9:.2f} GB. Predicted, "
        f"before anything was timed: the bytes of a step that reads all at {setup['beta'] / 1e12:.1f} TB/s.{own} "
        "Median of captured steps; both ways of a policy in turns over one cache. Keys and queries are random, so "
        "nothing is alike in them: with the published rule hardly anything stops, and its rows show what asking "
        "costs. Retention: share of the context that a layer keeps; page-bound, block-bound and sink-window keep the "
        "nearest whole blocks, and their least at least.",
        "",
        *_reading(rows, measured),
        "",
        "| context | batch | attention | retention | stops by | predicted ms | ms a token | spread | tokens/s "
        "| over full | over to the end | tiles read | clean |",
        "|---:|---:|---|---:|---|" + "---:|" * 7 + "---|",
        *(_line(rows, row) for row in sorted(rows, key=_order)),
    ]
    without_room: dict[str, str] = {}
    for row in (row for row in rows if row.status == NO_ROOM and row.why):  # the first reason of each cell says enough
        without_room.setdefault(
            f"- batch {row.batch} at {context_name(row.context)}: {NO_ROOM}", row.why.split(" (")[0]
        )
    notes = [f"{cell}: {why}" for cell, why in without_room.items()]
    notes += [f"- {row.name}: {row.status}: {row.why}" for row in rows if row.why and row.status != NO_ROOM]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _order(row: Row) -> tuple:
    return row.context, row.batch


def _reading(rows: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    asked = [(row, _over(row, without(rows, row))) for row in measured if row.rule]
    idle = [(row, over) for row, over in asked if over and (row.tiles_read is None or row.tiles_read >= STOPS)]
    found = [f"- {len(measured)} of {len(rows)} rows were measured."]
    if idle:
        row, worst = max(idle, key=lambda one: one[1])
        within = sum(over <= OVERHEAD for _, over in idle)
        found.append(
            f"- Where nothing stops, asking costs at most {worst - 1:+.1%} ({row.name}); {within} of {len(idle)} rows "
            f"are within {OVERHEAD - 1:.1%}."
        )
    gains = [(row, over) for row, over in asked if over and row.tiles_read is not None and row.tiles_read < STOPS]
    if gains:
        row, best = min(gains, key=lambda one: one[1])
        found.append(f"- Where some stop: best {best - 1:+.1%} of {len(gains)} rows ({row.name}).")
    far = [row.step_ms / row.predicted_ms for row in measured if row.step_ms and row.predicted_ms and not row.rule]
    if far:
        found.append(f"- Measured over predicted, to the end: {min(far):.2f} to {max(far):.2f}.")
    return found


def _line(rows: Sequence[Row], row: Row) -> str:
    number = lambda value, form: "–" if value is None else format(value, form)
    ms = row.status if row.step_ms is None else f"{row.step_ms:.3f}"
    clean = "–" if row.status != MEASURED else "yes" if row.clean else f"no: {row.why or 'see JSON'}"
    return (
        f"| {context_name(row.context)} | {row.batch} | {row.attention} | {number(row.retention, 'g')} "
        f"| {row.rule or '–'} | {row.predicted_ms:.3f} | {ms} | {number(row.spread, '.1%')} "
        f"| {number(row.tokens_per_second, ',.0f')} | {number(_over(row, full(rows, row)), '.3f')} "
        f"| {number(_over(row, without(rows, row)), '.3f')} | {number(row.tiles_read, '.1%')} | {clean} |"
    )


def svg(rows: Sequence[Row], about: dict) -> str | None:
    """ms a token against batch: a panel a context and retention, full attention in each; rows that stop dashed,
    predictions dotted. None where nothing was measured. Raises ModuleNotFoundError without matplotlib."""
    measured = [row for row in rows if row.step_ms is not None]
    if not measured:
        return None
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    contexts = sorted({row.context for row in measured})
    shares = sorted({row.retention for row in measured if row.retention is not None}, reverse=True) or [None]
    names = list(dict.fromkeys(row.attention for row in rows))
    rules = [None, *dict.fromkeys(row.rule for row in rows if row.rule)]
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.6 * len(shares), 3.4 * len(contexts)), layout="constrained")
        panels = figure.subplots(len(contexts), len(shares), squeeze=False)
        for (context, share), axis in zip([(c, s) for c in contexts for s in shares], panels.flat):
            for i, name in enumerate(names):
                for rule, style in zip(rules, ("o-", "x--", "+-.", "^--")):
                    mine = [r for r in measured if (r.context, r.attention, r.rule) == (context, name, rule)]
                    mine = sorted((r for r in mine if r.retention in (None, share)), key=lambda r: r.batch)
                    if not mine:
                        continue
                    x, label = [r.batch for r in mine], name if rule is None else None
                    axis.plot(x, [r.step_ms for r in mine], style, color=f"C{i}", lw=1, ms=3, label=label)
                    if rule is None:
                        axis.plot(x, [r.predicted_ms for r in mine], ":", color=f"C{i}", lw=0.8)
            ticks = sorted({r.batch for r in measured})
            axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="ms a token")
            axis.set_xticks(ticks, [str(t) for t in ticks])
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
            kept = "" if share is None else f", {share:g} kept"
            axis.set_title(f"{context_name(context)}{kept}", fontsize=9)
        panels.flat[0].legend(fontsize=6)
        figure.suptitle(f"{headline(about)}; dashed: may stop, dotted: predicted", fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
