"""Results of `scripts/bench_decode.py` as JSON, markdown and SVG."""

import io
from collections.abc import Sequence
from dataclasses import asdict

from scripts.bench.decode import Point, context_name
from scripts.bench.decode_prefill import Prefill
from scripts.bench.goals import goal_table
from scripts.bench.report import headline
from scripts.bench.timing import Machine

GOALS = {  # perf.md §5, batch 1, V4-Flash widths with head; per layer, and as a ratio
    "layer_ms": 2.7 / 16,
    "kernels_per_layer": 20,
    "longest_over_shortest": 1.15,
    "over_transformers": 40,
}


def verdicts(points: Sequence[Point], transformers: dict | None) -> list[dict]:
    """Each goal with what was measured; audits (compiles, syncs, allocations) have the goal 0."""

    def one(what: str, measured: float | None, goal: float, least: bool = False):
        met = measured is not None and (measured >= goal if least else measured <= goal)
        return {
            "what": what,
            "measured": measured,
            "goal": goal,
            "at_least": least,
            "verdict": "met" if met else "MISSED",
        }

    rows = []
    single = sorted((p for p in points if p.batch == 1), key=lambda p: p.context)
    rows += [one(f"ms a layer, {p.name}", p.layer_ms, GOALS["layer_ms"]) for p in single]
    rows += [
        one(f"kernels a layer, {p.name}", p.kernels_per_layer, GOALS["kernels_per_layer"]) for p in points if p.kernels
    ]
    if len(single) > 1:
        rows.append(
            one(
                f"{context_name(single[-1].context)} over {context_name(single[0].context)}, batch 1",
                single[-1].step_ms / single[0].step_ms,
                GOALS["longest_over_shortest"],
            )
        )
    if transformers and single:
        rows.append(
            one(
                "times faster a layer than transformers eager, batch 1",
                transformers["layer_ms"] / single[0].layer_ms,
                GOALS["over_transformers"],
                least=True,
            )
        )
    for what in ("compiles", "syncs", "allocations"):
        rows.append(one(f"{what} after warm-up, all points", sum(getattr(p, what) for p in points), 0))
    rows.append(one("points with logits that are not finite", sum(not p.finite for p in points), 0))
    return rows


def red(points: Sequence[Point]) -> bool:
    """Whether a step broke what it must hold whatever its speed."""
    return any(not p.finite or p.compiles or p.syncs for p in points)


def document(
    points,
    machine: Machine,
    about: dict,
    setup: dict,
    transformers: dict | None,
    failed: Sequence[str],
    prefills: Sequence[Prefill] = (),
) -> dict:
    return {
        "about": about,
        "machine": asdict(machine),
        "setup": setup,
        "points": [p.document() for p in points],
        "transformers": transformers,
        "goals": verdicts(points, transformers),
        "failed": list(failed),
        "prefills": [p.document() for p in prefills],
    }


def markdown(
    points,
    machine: Machine,
    about: dict,
    setup: dict,
    transformers: dict | None,
    failed: Sequence[str],
    prefills: Sequence[Prefill] = (),
) -> str:
    lines = [
        "# A decode step as one CUDA graph",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"DeepSeek-V4-{setup['preset']} widths with random weights, {setup['layers']} layers and the head, numerics "
        f"{setup['numerics']}, backend {setup['backend']}, cache {setup['cache']}, index keys "
        f"{setup['index_cache']}; weights {setup['weight_bytes'] / 1e9:.1f} GB. Floor: the bytes that a step reads "
        f"at {machine.bandwidth / 1e12:.2f} TB/s (1 GiB read, measured here).",
        "",
        "| batch | context | ms a step | mean | a layer | floor | share | kernels | a layer | capture s | "
        "cache GB | peak GB |",
        "|---:" * 12 + "|",
        *map(_line, points),
    ]
    if transformers:
        lines += [
            "",
            f"transformers {transformers['version']} eager, same widths, {transformers['layers']} layers of "
            f"{transformers['experts']} experts, bf16, batch 1 after {context_name(transformers['context'])}: "
            f"{transformers['step_ms']:.1f} ms a step, {transformers['layer_ms']:.2f} ms a layer.",
        ]
    lines += goal_table(verdicts(points, transformers))
    lines += _prefill_table(prefills, machine, transformers)
    notes = [f"- {p.name}: {p.why}" for p in (*points, *prefills) if p.why] + [f"- failed: {line}" for line in failed]
    lines += ["", *notes] if notes else []
    lines += _kernel_table(points)
    return "\n".join(lines) + "\n"


def _kernel_table(points: Sequence[Point]) -> list[str]:
    """Lines of what each kernel adds to a step of each point that was profiled; none without any."""
    found = [p for p in points if p.by_kernel]
    if not found:
        return []
    lines = [
        "",
        "µs that kernels add to a step, launches in brackets: from the end of those before to their own. Profiled, "
        "so more than above.",
        "",
        "| kernel | " + " | ".join(p.name for p in found) + " |",
        "|---|" + "---:|" * len(found),
    ]
    each = [{name: (count, us) for name, count, us in p.by_kernel} for p in found]
    names = sorted(
        dict.fromkeys(name for kernels in each for name in kernels),
        key=lambda n: -max(k.get(n, (0, 0))[1] for k in each),
    )
    for name in names:
        cells = ("–" if name not in kernels else f"{kernels[name][1]:.0f} ({kernels[name][0]})" for kernels in each)
        lines.append(f"| `{name or 'fill or copy'}` | " + " | ".join(cells) + " |")
    return [*lines, "| all | " + " | ".join(f"{sum(us for _, us in k.values()):.0f}" for k in each) + " |"]


def _prefill_table(prefills: Sequence[Prefill], machine: Machine, transformers: dict | None) -> list[str]:
    """Lines of whole prompts, none without any."""
    if not prefills:
        return []
    lines = [
        "",
        f"Whole prompts, batch 1, in chunks of {prefills[0].chunk}, the fastest of five runs after the "
        f"first. Floor: each part at {machine.bandwidth / 1e12:.2f} TB/s or "
        f"{machine.matmul / 1e12:.0f} TFLOPS, whichever is longer.",
        "",
        "| tokens | ms | first run | tokens/s | ms a layer | floor | share | compiles | syncs | peak GB |",
        "|---:" * 10 + "|",
    ]
    lines += [
        f"| {context_name(p.tokens)} | {p.ms:.1f} | {p.first_ms:.1f} | {p.tokens_per_second:.0f} | "
        f"{p.ms / p.layers:.2f} | {p.floor_ms:.1f} | {p.floor_ms / p.ms:.0%} | {p.compiles} | {p.syncs} | "
        f"{p.peak_bytes / 1e9:.1f} |"
        for p in prefills
    ]
    if transformers and transformers.get("prefill"):
        tokens, ms = transformers["prefill"], transformers["prefill_ms"]
        lines += [
            "",
            f"transformers eager, {transformers['layers']} layers: {context_name(tokens)} in {ms:.1f} ms, "
            f"{ms / transformers['layers']:.2f} ms a layer.",
        ]
    return lines


def _line(p: Point) -> str:
    kernels = "– | –" if p.kernels is None else f"{p.kernels} | {p.kernels_per_layer:.1f}"
    return (
        f"| {p.batch} | {context_name(p.context)} | {p.step_ms:.3f} | {p.mean_ms:.3f} | {p.layer_ms:.4f} "
        f"| {p.floor_ms:.3f} | {p.floor_ms / p.step_ms:.0%} | {kernels} | {p.capture_seconds:.1f} "
        f"| {p.cache_bytes / 1e9:.2f} | {p.peak_bytes / 1e9:.1f} |"
    )


def svg(
    points: Sequence[Point], about: dict, transformers: dict | None, prefills: Sequence[Prefill] = ()
) -> str | None:
    """ms a layer against context for each batch, and tokens/s of prompts if there are any, with floors.

    Raises ModuleNotFoundError without matplotlib."""
    if not points:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10 if prefills else 7, 3.6), layout="constrained")
        axis, *beside = (
            figure.subplots(1, 2, squeeze=False, width_ratios=(3, 2))[0] if prefills else [figure.subplots()]
        )
        for i, batch in enumerate(sorted({p.batch for p in points})):
            mine = sorted((p for p in points if p.batch == batch), key=lambda p: p.context)
            x = [p.context for p in mine]
            axis.plot(x, [p.layer_ms for p in mine], "o-", color=f"C{i}", lw=1.2, ms=4, label=f"batch {batch}")
            axis.plot(
                x, [p.floor_ms / p.layers for p in mine], ":", color=f"C{i}", lw=1, label=f"its floor, batch {batch}"
            )
        if transformers:
            at, ms = transformers["context"], transformers["layer_ms"]
            axis.plot([at], [ms], "x", color="0.3", label="transformers eager, batch 1")
        ticks = sorted({p.context for p in points})
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms a layer")
        axis.set_xticks(ticks, [context_name(t) for t in ticks])
        axis.minorticks_off()
        axis.set_title(headline(about), fontsize=8)
        axis.legend(fontsize=6)
        for other in beside:
            _draw_prefills(other, sorted(prefills, key=lambda p: p.tokens))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_prefills(axis, prefills: Sequence[Prefill]) -> None:
    x = [p.tokens for p in prefills]
    axis.plot(x, [p.tokens_per_second * p.layers for p in prefills], "o-", color="C0", lw=1.2, ms=4, label="prompt")
    axis.plot(x, [p.tokens / p.floor_ms * 1e3 * p.layers for p in prefills], ":", color="C0", lw=1, label="its floor")
    axis.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="tokens/s · layers")
    axis.set_xticks(x, [context_name(t) for t in x])
    axis.minorticks_off()
    axis.legend(fontsize=6)
