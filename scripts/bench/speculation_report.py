"""The ranking of block-size policies as JSON, markdown and SVG."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from dsv4.speculation import MAX_DRAFTS, CostTable
from scripts.bench.report import headline
from scripts.bench.speculation import BOUNDS, GOALS, JUDGED, Point, Timeline, groups, ranked, references, verdicts

EXPECTED = (
    " A size that did not run takes part as expected: by simulation of the same excerpt with the costs "
    "measured in this run."
)
BOUNDED = (
    "Informed knows the true rates but not the outcomes: about what the best estimate from past acceptance could "
    "reach. The oracle knows each outcome: exact at batch 1, one step of policy iteration from the best static size "
    "beyond, where the optimum lies between it and the bound, which no schedule of a drafter exceeds. No speculation "
    "has no drafter, so it may be faster than either."
)
COLORS = {"no speculation": "0.75", "ASBS": "#d9a300", "cost-aware": "#1f6feb", "informed": "#7a9e7e", "oracle": "0.25"}
# by rounds under way
LAUNCHED = {
    1: "the one before has ended",
    2: "the one before has begun, with the sizes that the one before that decided",
}
PLAINLY = (
    "; no speculation is decoding as without --speculate: no drafter, a step is a graph whose token the host waits for"
)


def document(points: Sequence[Point], about: Mapping, setup: Mapping, line: Timeline | None) -> dict:
    return {
        "about": dict(about),
        "setup": dict(setup),
        "points": ranked(points),
        "goals": verdicts(points),
        "timeline": None if line is None else asdict(line),
    }


def markdown(points: Sequence[Point], about: Mapping, setup: Mapping) -> str:
    """setup: 'how' says in a sentence how the points were obtained, 'notes' are lines for the end."""
    bounded = any(not p.own_text for p in points)
    lines = [
        "# Block sizes of speculative decoding",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        setup["how"],
        "",
        "Relative to the best static size (no speculation is size 0 and competes)"
        + "; of oracle in brackets" * bounded
        + "."
        + EXPECTED * any(p.expected for p in points),
        "",
        "| trace | batch | best static | tokens/s | no speculation | ASBS | cost-aware | informed | oracle | bound |",
        "|---|---:|---|" + "---:|" * 7,
    ]
    rows = {(r["trace"], r["batch"], r["policy"]): r for r in ranked(points)}
    for (trace, batch), group in groups(points).items():
        best, _ = references(group)
        cells = [_cell(rows.get((trace, batch, policy))) for policy in ("no speculation", *JUDGED, *BOUNDS)]
        lines.append(f"| {trace} | {batch} | {best.label} | {best.tokens_per_second:.0f} | " + " | ".join(cells) + " |")
    lines += ["", BOUNDED] if bounded else []
    lines += [
        "",
        f"Goals: {GOALS['mixed']} of the best static size on mixed traces, {GOALS['stationary']} on stationary "
        "ones" + f", {GOALS['oracle']} of the oracle" * bounded + ".",
        "",
        "| policy | trace | batch | of | measured | goal | |",
        "|---|---|---:|---|---:|---:|---|",
    ]
    lines += [
        f"| {v['policy']} | {v['trace']} | {v['batch']} | {v['of']}{_of_expected(v)} | {v['measured']:.3f} | ≥ "
        f"{v['goal']:.2f} | {v['verdict']} |"
        for v in verdicts(points)
    ]
    lines += [
        "",
        "| trace | batch | policy | tokens/s | passes | acceptance | mean block size | variance |",
        "|---|---:|---|" + "---:|" * 5,
    ]
    lines += [
        f"| {p.trace} | {p.batch} | {p.label} | {p.tokens_per_second:.0f} | {_or_dash(p.passes, 'd')} "
        f"| {_or_dash(p.acceptance, '.3f')} | {_or_dash(p.mean_block_size, '.2f')} | "
        f"{_or_dash(p.block_size_variance, '.2f')} |"
        for p in points
    ]
    notes = [f"- {note}" for note in setup.get("notes", ())]
    return "\n".join([*lines, "", *notes] if notes else lines) + "\n"


def real(costs: CostTable, ran: Sequence, points: Sequence[Point], ahead: int) -> str:
    """What rounds cost, and policies as they ran (`Timed`), as markdown. points: theirs, and of sizes that did not run.
    ahead: rounds under way."""
    texts = any(r.same is not None for r in ran)
    lines = _costs(costs)
    lines += [
        "",
        "## As it really ran",
        "",
        "Each round is a graph replay that the host launches when "
        + LAUNCHED[min(ahead, 2)]
        + "; it runs until the first row has its tokens"
        + (PLAINLY if any(c.plain for c in costs.batches.values()) else "")
        + ". Expected: by simulation with the costs above. "
        + (
            "The text is the checkpoint's own."
            if texts
            else "The sizes were those of the specification in every round."
        ),
        "",
        "| trace | batch | policy | tokens | rounds | tokens/s | of the best static size | expected "
        "tokens/s | host waits |" + " rows with the plain text |" * texts,
        "|---|---:|---|" + "---:|" * (6 + texts),
    ]
    best = {place: references(group)[0].tokens_per_second for place, group in groups(points).items()}
    for r in sorted(ran, key=lambda r: (r.batch, r.trace)):
        lines.append(
            f"| {r.trace} | {r.batch} | {r.policy} | {r.tokens} | {len(r.rounds)} | {r.tokens_per_second:.0f} "
            f"| {r.tokens_per_second / best[r.trace, r.batch]:.3f} | {r.expected:.0f} | "
            f"{r.synchronisations} |" + f" {r.same} of {r.batch} |" * texts
        )
    return "\n".join(lines) + "\n"


def _costs(costs: CostTable) -> list[str]:
    """Of whole rounds; beside them, where a table has them, of a plain step and of following rounds without drafts."""
    batches = sorted(costs.batches.items())
    following, plain = sorted({n for _, c in batches for n, _ in c.catch_up}), any(c.plain for _, c in batches)
    heads = [
        *map(str, range(MAX_DRAFTS + 1)),
        "one draft",
        *[f"following {n}" for n in following],
        *["plain step"] * plain,
    ]
    lines = [
        "",
        "## What a round costs, ms",
        "",
        "Drafting k tokens, verifying k + 1, and the block again over what was verified"
        + (": after rounds without drafts over several at once, before the next draft" if following else "")
        + ".",
        "",
        f"| batch | {' | '.join(heads)} |",
        "|---:|" + "---:|" * len(heads),
    ]
    for batch, cost in batches:
        found = [
            *(cost.draft * k + t for k, t in enumerate(cost.verify)),
            cost.draft,
            *map(cost.following, following),
            *[cost.step] * plain,
        ]
        lines.append(f"| {batch} | " + " | ".join(f"{t * 1e3:.3f}" for t in found) + " |")
    return lines


def _cell(row: dict | None) -> str:
    if row is None:
        return "–"
    return f"{row['of_static']:.3f}" + ("" if row["of_oracle"] is None else f" ({row['of_oracle']:.2f})")


def _of_expected(verdict: Mapping) -> str:
    return f" ({verdict['reference']}, expected)" if verdict["expected"] else ""


def _or_dash(value, form: str) -> str:
    return "–" if value is None else format(value, form)


def svg(points: Sequence[Point], about: Mapping, setup: Mapping, line: Timeline | None) -> str:
    """Bars relative to the best static size, and block sizes over time. Raises ModuleNotFoundError without
    matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4.2 if line is None else 7), layout="constrained")
        above, *below = figure.subplots(1 if line is None else 2, 1, squeeze=False)[:, 0]
        _draw_bars(above, points)
        above.set_title(f"{setup['title']}\n{headline(about)}", fontsize=8, wrap=True)
        for axis in below:
            _draw_timeline(axis, line)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_bars(axis, points: Sequence[Point]) -> None:
    rows = {(r["trace"], r["batch"], r["policy"]): r["of_static"] for r in ranked(points)}
    places, width = list(groups(points)), 0.8 / len(COLORS)
    for i, (policy, color) in enumerate(COLORS.items()):
        shift = (i - (len(COLORS) - 1) / 2) * width
        bars = [(x + shift, rows[*place, policy]) for x, place in enumerate(places) if (*place, policy) in rows]
        if bars:
            axis.bar(*zip(*bars), width, color=color, label=policy)
    axis.axhline(1, color="0.4", lw=0.8)
    axis.axhline(GOALS["mixed"], color="#b3423c", lw=0.8, ls=":", label=f"goal on mixed traces, {GOALS['mixed']}")
    names = [f"{trace}, batch {batch}" for trace, batch in places]
    axis.set_xticks(range(len(places)), names, fontsize=7, rotation=40, ha="right", rotation_mode="anchor")
    axis.set_ylabel("tokens/s of the best static size", fontsize=8)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_timeline(axis, line: Timeline) -> None:
    for (begin, end), color, name in (
        (line.low, "#f4e3c1", "free text"),
        (line.pressure, "#f2c9c5", "cache under pressure"),
    ):
        axis.axvspan(begin, end, color=color, label=name)
    for policy, sizes in line.sizes.items():
        at, size = zip(*sizes)
        axis.step(at, size, where="post", lw=1, color=COLORS.get(policy), label=policy)
    axis.set_title("simulated: drafts of made-up acceptance, pressure by decree; nothing was run", fontsize=8)
    axis.set(xlabel="tokens committed, batch 1", ylabel="drafted tokens", xlim=(0, line.tokens), ylim=(-0.3, 8.5))
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
