"""The fit of whole decode steps as JSON values and as markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean

from dsv4.cost_model.report import launches, priced, tokens
from dsv4.cost_model.steps import HELD_OUT, MeasuredSteps, residuals
from dsv4.units import format_bytes

FORMAT, VERSION = "dsv4-regime-steps", 1
FORMS = {True: "bytes / β + c₀ + c₁", False: "bytes / β + c₀ + c₁, c₀ by rows and c₁ by scored blocks"}
GOAL = "worst error of a step left out"
KV = "keys", "values"


def document(found: MeasuredSteps, about: Mapping) -> dict:
    """The fit of either form, its residuals, and whether steps that were left out are predicted as well as published.
    about: where this report comes from."""
    forms = [residuals(found, constant) for constant in FORMS]
    forms = [form | {"bill": asdict(form["bill"]), "form": FORMS[form["constant"]]} for form in forms]
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(about),
        "measured": {
            "geometry": found.geometry,
            "device": found.device,
            "commit": found.commit,
            "command": found.command,
            "read": found.read,
            "copy": found.copy,
        },
        "goals": [_goal(form) for form in forms],
        "forms": forms,
        "signs": [sign for form in forms for sign in signs(form)],
    }


def _goal(form: Mapping) -> dict:
    """Whether the form predicts steps that were left out as well as published."""
    worst = (form["quality"]["without one step"] or {}).get("worst_error")
    verdict = "not measured" if worst is None else "met" if worst <= HELD_OUT else "FAILED"
    goal = GOAL if form["constant"] else f"{GOAL}, c₀ by rows and c₁ by scored blocks"
    return {"goal": goal, "wanted": f"<= {HELD_OUT}", "found": worst, "verdict": verdict}


def signs(form: Mapping) -> list[dict]:
    """Mean residuals of groups of steps: by kind of step and length, and by batch. A sign that all steps of a group
    share is something that the form does not describe."""
    kind = lambda row: "dense" if row["policy"] == "dense" else "sparse"
    keys = {
        "kind and length": lambda row: f"{kind(row)} at {tokens(row['context'])}",
        "kind and batch": lambda row: f"{kind(row)}, batch {row['batch']}",
    }
    found = []
    for what, key in keys.items():
        for name in dict.fromkeys(map(key, form["rows"])):
            errors = [row["error"] for row in form["rows"] if key(row) == name]
            found.append(
                {
                    "constant": form["constant"],
                    "by": what,
                    "group": name,
                    "steps": len(errors),
                    "mean": mean(errors),
                    "one_sign": len(errors) > 1 and abs(sum(e > 0 for e in errors) * 2 - len(errors)) == len(errors),
                }
            )
    return found


def markdown(report: Mapping) -> str:
    measured, about = report["measured"], report["about"]
    shown = ", ".join(f"{k} {v}" for k, v in about.items() if k not in ("command", "dirty") and v is not None)
    lines = [
        f"# Whole decode steps of {measured['geometry']}: bytes / β + c₀ (+ c₁)",
        "",
        f"{shown}.",
        "",
        f"    {about['command']}",
        "",
        f"Steps of {measured['device']}, commit {measured['commit']}: `{measured['command']}`.",
        "",
        "Bytes are those of weights, keys and values and block summaries, by formula. β, c₀ and c₁ are not negative, "
        "and minimise the squares of relative errors over dense and sparse steps together; c₀ and c₁ are of one layer. "
        "The first form has one number for each, as published. In the second c₀ grows with each row of the batch after "
        "the first, because linear layers multiply more rows; c₁ grows with the scored blocks of all rows and KV "
        "heads, whose scores are written and read, and with those of one row, because one program chooses from one "
        "list. "
        "Left out: a step, or all steps of one length, predicted by a fit of the others. In that run a large read took "
        f"{measured['read'] / 1e12:.3f} TB/s, a copy {measured['copy'] / 1e12:.3f} (read and written).",
        "",
        "| goal | wanted | found | |",
        "|---|---|---:|---|",
        *(f"| {g['goal']} | {g['wanted']} | {_percent(g['found'], '.1%')} | {g['verdict']} |" for g in report["goals"]),
        "",
        *_fits(report["forms"], measured["read"]),
    ]
    return "\n".join([*lines, "", "## Steps", "", *_rows(report["forms"]), "", "## Signs", "", *_signs(report)]) + "\n"


def _percent(value: float | None, form: str = "+.1%") -> str:
    return "–" if value is None else format(value, form)


def _fits(forms: Sequence[Mapping], read: float) -> list[str]:
    lines = [
        "| form | β | of the read | c₀ | c₁ | worst fitted | worst without one step | worst without one length |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for form in forms:
        bill, quality = form["bill"], form["quality"]
        prices = "; ".join(f"{name}: {priced(price)}" for name, price in bill["finding"].items()) or "–"
        worst = [
            "–" if q is None else f"{q['worst_error']:.1%} ({q['worst']})" + _undetermined(q) for q in quality.values()
        ]
        lines.append(
            f"| {form['form']} | {bill['bandwidth'] / 1e12:.3f} TB/s | {bill['bandwidth'] / read:.0%} | "
            f"{launches(bill)} | {prices} | {' | '.join(worst)} |"
        )
    return lines


def _undetermined(quality: Mapping) -> str:
    count = quality["undetermined"]
    return f"; {count} not determined by the others" if count else ""


def _rows(forms: Sequence[Mapping]) -> list[str]:
    """A line for each step, with the errors of both forms."""
    names = ["ms", "error", *(f"without {name}" for name in forms[0]["rows"][0]["left_out"])]
    lines = [
        "Errors are predicted over measured − 1: positive where the prediction is too long. Columns of the second "
        "form, by rows and blocks, are marked ′.",
        "",
        "| step | batch | context | layers | weights | keys and values | summaries | all bytes | measured ms | "
        + " | ".join(names + [f"{name}′" for name in names])
        + " |",
        "|---|" + "---:|" * (8 + 2 * len(names)),
    ]
    for row, other in zip(*(form["rows"] for form in forms)):
        parts, share = row["parts"], lambda names, of=row["parts"]: format_bytes(sum(of.get(n, 0) for n in names))
        others = [name for name in parts if name not in (*KV, "block summaries", "queries and outputs")]
        said = [share(others), share(KV), share(["block summaries"])] if parts else ["–"] * 3
        found = [
            cell
            for r in (row, other)
            for cell in (f"{r['predicted'] * 1e3:.3f}", *map(_percent, (r["error"], *r["left_out"].values())))
        ]
        lines.append(
            f"| {row['policy']} | {row['batch']} | {tokens(row['context'])} | {row['layers']} | {' | '.join(said)} | "
            f"{format_bytes(row['bytes'])} | {row['seconds'] * 1e3:.3f} | " + " | ".join(found) + " |"
        )
    return lines


def _signs(report: Mapping) -> list[str]:
    """Mean errors of groups in both forms, and what a sign says."""
    lines = ["| group | steps | error, one number each | error, by rows and blocks |", "|---|---:|---:|---:|"]
    signs = {(s["constant"], s["by"], s["group"]): s for s in report["signs"]}
    shown = lambda s: f"{s['mean']:+.1%}" + " *" * s["one_sign"]
    for (constant, by, group), s in signs.items():
        if constant:
            lines.append(f"| {group} | {s['steps']} | {shown(s)} | {shown(signs[False, by, group])} |")
    count = len(report["forms"][0]["rows"])
    lines += ["", "*: all steps of the group have that sign.", "", *(f"- {reason}" for reason in _reasons(report))]
    return [*lines, f"- {count} steps were fitted."]


def _reasons(report: Mapping) -> list[str]:
    """What the residuals say, in sentences that follow from the figures."""
    published, priced_form = report["forms"]
    sparse = [row for row in published["rows"] if row["policy"] != "dense"]
    reasons, found = [], published["quality"]["without one step"]
    if found is None or found["undetermined"]:
        reasons.append("Some steps cannot be left out, because the others do not determine β, c₀ and c₁.")
    for key, name, why in (
        ("context", tokens, "scoring takes longer with more blocks, and a c₁ of one number cannot say so"),
        ("batch", lambda batch: f"batch {batch}", "more rows take longer, and one number cannot say so"),
    ):
        ends = [side((row[key] for row in sparse), default=0) for side in (min, max)]
        first, last = (mean([row["error"] for row in sparse if row[key] == end] or [0.0]) for end in ends)
        if first > 0 > last:
            reasons.append(
                f"Sparse steps are predicted too long at {name(ends[0])} ({first:+.1%}) and too short at "
                f"{name(ends[1])} ({last:+.1%}): {why}."
            )
    worst = lambda form: form["quality"]["fitted"]["worst_error"]
    if worst(priced_form) < worst(published) / 2:
        reasons.append(
            f"With c₀ by rows and c₁ by scored blocks the worst fitted error falls from {worst(published):.1%} to "
            f"{worst(priced_form):.1%}, so that is what the residuals are."
        )
    dense = [row for row in published["rows"] if row["policy"] == "dense"]
    if len(dense) == 2 and found and found["worst_error"] > HELD_OUT:
        reasons.append(
            "There are two dense steps. Without one of them β and c₀ rest on one dense step and on sparse steps whose "
            "bytes hardly differ, so its error says how few steps there are, not how good the form is."
        )
    return reasons
