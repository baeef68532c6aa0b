"""Results of `scripts/bench_first_token.py` as JSON, markdown and SVG."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.decode import context_name
from scripts.bench.first_token import PUBLISHED, Row
from scripts.bench.first_token_counts import DATASHEET, GOAL, Bound, Rates, Widths, bound, least_tokens
from scripts.bench.report import ROOT, headline

PROFILE = ROOT / "audits/kernels/gqa/h100/bench_kernels_gqa_h100.json"
SHORTEST = 4096  # tokens at which the goal is stated
SHOWN_KERNELS = 12


def document(rows: Sequence[Row], about: dict, setup: dict, profiles: Sequence[dict], widths: Widths, rates: Rates):
    return {
        "about": about,
        "setup": setup,
        "rates": rates.document(),
        "rows": [row.document() | {"times": times(row, rows)} for row in rows],
        "goal": verdict(rows),
        "profiles": list(profiles),
        "counted": counted(widths, rates),
    }


def counted(widths: Widths, rates: Rates, name: str = "") -> dict:
    """What counting allows, as JSON values."""
    cuts = (PUBLISHED[0], *CUTS)
    found = [bound(widths, tokens, cut, rates) for tokens in COUNTED for cut in cuts]
    least = least_tokens(widths, rates)
    return {"geometry": name, "bounds": [b.document() for b in found], "least_tokens_of_a_whole_model": least}


def fastest_dense(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest dense reading of the same prompts."""
    same = [r for r in rows if (r.batch, r.tokens) == (row.batch, row.tokens) and r.way.cut is None and r.ms]
    return min(same, key=lambda r: r.ms, default=None)


def times(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times as fast as the fastest dense reading."""
    dense = fastest_dense(row, rows)
    return None if dense is None or row.ms is None else dense.ms / row.ms


def verdict(rows: Sequence[Row]) -> dict:
    """The goal at 4K tokens, batch 1, by the fastest sparse reading."""
    mine = [r for r in rows if r.batch == 1 and r.tokens == SHORTEST and r.way.cut is not None]
    found = [(t, r.way.name) for r in mine if (t := times(r, rows)) is not None]
    best = max(found, default=None)
    met = "not measured" if best is None else "met" if best[0] >= GOAL else "MISSED"
    return {"times": GOAL, "tokens": SHORTEST, "best": best and best[0], "way": best and best[1], "verdict": met}


def markdown(rows, about: dict, setup: dict, profiles, widths: Widths, rates: Rates) -> str:
    goal = verdict(rows)
    best = "" if goal["best"] is None else f": {goal['best']:.2f}× ({goal['way']})"
    lines = [
        "# Time to the first token of a whole model",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['model']}, {setup['layers']} layers and the head, numerics {setup['numerics']}, backend "
        f"{setup['backend']}; weights {setup['weight_bytes'] / 1e9:.1f} GB. From the call until the first token is on "
        "the host. Batch: prompts that are read together. Medians. Predicted: by formula "
        "(`scripts/bench/first_token_counts.py`) with rates of an H100, and written before anything was measured. "
        "Times as fast: as the fastest dense reading of the same prompts. Difference: of the last logits from those "
        "of the first dense reading; of sparse ones it is no error.",
        "",
        f"- {GOAL}× at 4K tokens, batch 1: **{goal['verdict']}**{best}.",
        *_by_length(rows),
        "",
        "| batch | tokens | prompt read | ms | least … most | runs | predicted ms | measured / predicted | tokens/s | "
        "times as fast | difference | peak GB |",
        "|---:|---:|---|" + "---:|" * 9,
        *(_line(row, rows) for row in rows if row.ms is not None or row.red),
    ]
    notes = [f"- {r.batch} × {context_name(r.tokens)}, {r.way.name}: {r.why}" for r in rows if r.red]
    notes += _not_begun(rows)
    lines += ["", *notes] if notes else []
    for profile in profiles:
        lines += ["", *_profile(profile)]
    told = "Every length and cut: `python scripts/bench_first_token.py --count`."
    lines += ["", "## What counting allows", "", *_allowed(widths, rates), "", told]
    return "\n".join(lines) + "\n"


def _by_length(rows: Sequence[Row]) -> list[str]:
    """A line for the fastest sparse reading of each length, batch 1."""
    found = []
    for tokens in sorted({r.tokens for r in rows}):
        mine = [r for r in rows if r.batch == 1 and r.tokens == tokens and r.way.cut is not None]
        best = max((t for r in mine if (t := times(r, rows)) is not None), default=None)
        found += [] if best is None else [f"{context_name(tokens)} {best:.2f}×"]
    return [f"- The fastest sparse reading, batch 1: {', '.join(found)}."] if found else []


def _not_begun(rows: Sequence[Row]) -> list[str]:
    """One line for each batch and length of which rows were not begun, with what was predicted of them."""
    found: dict[tuple, list[float]] = {}
    for r in rows:
        if r.ms is None and not r.red:
            found.setdefault((r.batch, r.tokens, r.why), []).append(r.predicted)
    return [
        f"- {batch} × {context_name(tokens)}: {len(ms)} rows {why} (predicted {min(ms):.4g} to {max(ms):.4g} ms)"
        for (batch, tokens, why), ms in found.items()
    ]


def _line(row: Row, rows: Sequence[Row]) -> str:
    if row.ms is None:
        cells = ["–"] * 3 + [f"{row.predicted:.4g}"] + ["–"] * 5
    else:
        ratio, peak = times(row, rows), row.peak_bytes
        cells = [
            f"{row.ms:.1f}",
            f"{row.least:.1f} … {row.most:.1f}",
            str(row.runs),
            f"{row.predicted:.4g}",
            f"{row.ms / row.predicted:.2f}",
            f"{row.tokens_per_second:.0f}",
            "–" if ratio is None else f"{ratio:.2f}",
            "–" if row.difference is None else f"{row.difference:.1e}",
            "–" if peak is None else f"{peak / 1e9:.1f}",
        ]
    return f"| {row.batch} | {context_name(row.tokens)} | {row.way.name} | " + " | ".join(cells) + " |"


def _profile(profile: dict) -> list[str]:
    lines = [
        f"## Kernels: {profile['way']}, {context_name(profile['tokens'])}",
        "",
        f"What each adds to {profile['us'] / 1e3:.1f} ms, by the profiler.",
        "",
        "| kernel | launches | ms | share |",
        "|---|---:|---:|---:|",
    ]
    for k in profile["kernels"][:SHOWN_KERNELS]:
        lines.append(f"| `{k['name']}` | {k['launches']} | {k['us'] / 1e3:.2f} | {k['us'] / profile['us']:.1%} |")
    return lines


# ---- counting ------------------------------------------------------------------------

COUNTED = 4096, 8192, 16384, 32768, 65536, 131072
CUTS = tuple(PUBLISHED[0].__class__(*sizes) for sizes in ((512, 64, 192), (1024, 128, 384), (2048, 256, 768)))


def counting(models: Sequence[tuple[str, Widths]], rates: Rates) -> list[str]:
    """The section on what counting allows, for models by name."""
    lines = [
        "## What counting allows",
        "",
        "The most that sparse prefill can gain over the fastest dense one, whoever writes the kernels: the choice of "
        "the memory, its column sums and its gathering cost nothing here. Products outside attention run at "
        f"{rates.matmul / 1e12:.0f} TFLOPS (a square bf16 product of 8192; datasheet: {DATASHEET / 1e12:.0f}). Dense "
        "attention runs at the rate of the fastest kernel measured (cuDNN, "
        f"{min(r for _, r in rates.dense) / 1e12:.0f} to {max(r for _, r in rates.dense) / 1e12:.0f} TFLOPS). Sparse "
        "attention multiplies only kept pairs, and waits for one launch a chunk "
        f"({rates.dependent * 1e6:.1f} µs), since a chunk's memory depends on the attention of the chunk before. "
        "Attention alone: at the rate of the square product, and at that of the dense kernel. Free: attention takes "
        "no time at all. Needed: rate on kept pairs with which attention alone is "
        f"{GOAL}× as fast.",
    ]
    for name, widths in models:
        lines += ["", *_counted(name, widths, rates)]
    return [*lines, "", *as_built()]


def _allowed(widths: Widths, rates: Rates) -> list[str]:
    """What counting says of a model, in three lines."""
    shortest = bound(widths, SHORTEST, PUBLISHED[0], rates)
    fp8 = (shortest.dense + shortest.linear * rates.matmul / DATASHEET / 2) / (
        shortest.linear * rates.matmul / DATASHEET / 2
    )
    return [
        f"- Whole model at 4K: attention is {shortest.dense:.1f} of {shortest.dense + shortest.linear:.1f} ms. If it "
        f"took no time, the first token would come {shortest.free:.2f}× as fast ({shortest.datasheet:.2f}× with "
        f"products at the datasheet's rate, {fp8:.2f}× at twice that, in FP8). So {GOAL}× of a whole model "
        f"at 4K **{'cannot be reached, whoever writes the kernels' if fp8 < GOAL else 'is not ruled out'}**.",
        f"- A whole model can be {GOAL}× as fast from {least_tokens(widths, rates):,} tokens on, if attention takes no "
        "time.",
        f"- Attention alone at 4K, published cut: up to {shortest.alone_least:.2f}×, so {GOAL}× "
        f"**{'is not ruled out' if shortest.alone_least >= GOAL else 'cannot be reached'}** by counting.",
    ]


def _counted(name: str, widths: Widths, rates: Rates) -> list[str]:
    found = [bound(widths, tokens, cut, rates) for tokens in COUNTED for cut in (PUBLISHED[0], *CUTS)]
    return [
        f"### {name}",
        "",
        *_allowed(widths, rates),
        "",
        "| tokens | cut | causal pairs | kept | of them | linear ms | dense attention ms | sparse, least ms | alone | "
        "alone, dense kernel's rate | needed TFLOPS | whole | free |",
        "|---:|---|" + "---:|" * 11,
        *map(_bound, found),
    ]


def _bound(b: Bound) -> str:
    return (
        f"| {context_name(b.tokens)} | {b.chunk}: {b.local} + {b.heavy} | {b.causal:,} | {b.kept:,} | "
        f"{b.kept / b.causal:.1%} | {b.linear:.4g} | {b.dense:.4g} | {b.least:.4g} | {b.alone_least:.2f} | "
        f"{b.alone_alike:.2f} | {'–' if b.needed is None else f'{b.needed / 1e12:.0f}'} | {b.whole:.2f} | "
        f"{b.free:.2f} |"
    )


def profiled(path: Path = PROFILE) -> list[dict]:
    """From a committed benchmark of kernels, of its prompts of 4K tokens: µs of a layer's sparse prefill, of its work
    on the memory's choice, and of the fastest dense attention beside it."""
    if not path.is_file():
        return []
    found = []
    for r in json.loads(path.read_text())["rows"]:
        if r["op"] != "chunked_prefill" or not r["shape"].startswith(f"{SHORTEST} tokens") or not r["limits"]:
            continue
        us = {k["name"]: k["us"] for k in r["limits"]}
        choosing = us.get("choose", 0.0) + us.get("chunk_mass", 0.0)
        whole, dense = r["timing"]["cold_us"], r["best_peer"]["cold_us"]
        found.append(
            {
                "shape": r["shape"],
                "us": whole,
                "dense_us": dense,
                "choosing_us": choosing,
                "times": dense / whole,
                "times_hidden": dense / (whole - choosing),
            }
        )
    return found


def as_built() -> list[str]:
    """The kernels as they are: what would be left if all work on the memory's choice were hidden."""
    rows = profiled()
    if not rows:
        return []
    return [
        "### The kernels as they are",
        "",
        f"One layer at 4K tokens on an H100 ([figures]({_relative(PROFILE)})). Choosing: column sums of phase 1 "
        "(`chunk_mass`) and the choice (`choose`). Hidden: if both took no time.",
        "",
        "| cut | sparse µs | fastest dense µs | times as fast | choosing µs | times as fast, hidden |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {r['shape']} | {r['us']:.0f} | {r['dense_us']:.0f} | {r['times']:.2f} | {r['choosing_us']:.0f} | "
            f"{r['times_hidden']:.2f} |"
            for r in rows
        ),
    ]


def _relative(path: Path) -> str:
    """From a folder of three levels under audits/."""
    return "../../../" + str(path.relative_to(ROOT / "audits").with_suffix(".md"))


# ---- picture -------------------------------------------------------------------------


def svg(rows: Sequence[Row], about: dict) -> str | None:
    """ms to the first token against the length, batch 1; predictions dotted. Raises ModuleNotFoundError without
    matplotlib."""
    timed = [r for r in rows if r.ms is not None and r.batch == min(row.batch for row in rows)]
    if not timed:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axis = figure.subplots()
        for i, name in enumerate(dict.fromkeys(r.way.name for r in timed)):
            mine = sorted((r for r in timed if r.way.name == name), key=lambda r: r.tokens)
            x, style = [r.tokens for r in mine], "s--" if mine[0].way.cut is None else "o-"
            axis.plot(x, [r.ms for r in mine], style, color=f"C{i % 10}", lw=1.1, ms=3.5, label=name)
            axis.plot(x, [r.predicted for r in mine], ":", color=f"C{i % 10}", lw=0.8)
        ticks = sorted({r.tokens for r in timed})
        axis.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="ms to the first token")
        axis.set_xticks(ticks, [context_name(t) for t in ticks])
        axis.minorticks_off()
        axis.set_title(f"{headline(about)}; dotted: predicted", fontsize=8)
        axis.legend(fontsize=5, ncols=2)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
