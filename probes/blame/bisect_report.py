"""The output of `dsv4 audit bisect`: a table of layers and points, the verdict in words, a plot; and the command
itself."""

import html
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dsv4.errors import InputError
from dsv4.probes import families
from dsv4.probes.blame.bisect import Bisection, reference_of
from dsv4.probes.blame.by_layer import FACTOR, STEP, STEPS, Difference, dtype_of
from dsv4.probes.blame.causes import WORDS
from dsv4.probes.blame.confirm import Confirmation, Verdict
from dsv4.probes.blame.consult import PARTS as OF_MODULE
from dsv4.probes.report.document import Report, Section
from dsv4.probes.report.files import write
from dsv4.probes.report.markdown import escape, table
from dsv4.probes.report.provenance import provenance
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import POINTS

PARTS = {
    "attn_in": "hyper-connections",
    "q_after_rope": "queries",
    "kv_window": "window rows",
    "compressed_kv": "compressed entries",
    "index_keys": "indexer keys",
    "index_scores": "indexer scores",
    "selection": "selection",
    "attn_out": "attention core",
    "ffn_out": "experts",
    "streams": "hyper-connections",
    "logits": "head",
}
TITLE = "the first point that leaves the reference"
CELL, LEFT, TOP = (88, 26), 70, 62  # of the plot, in pixels


def run(
    checkpoint: Path,
    subject_is: str,
    reference_is: str,
    device: str,
    ids_of: Callable,
    budget: float | None,
    out: Path | None,
    say: Callable[[str], None],
    cache: str = "auto",
    index_cache: str = "auto",
) -> int:
    """`dsv4 audit bisect`: the exit code (0 nothing above the floor, 1 a difference, 2 it could not run).

    ids_of(subject) → int64 [1, T], the tokens of a subject that is not recorded. cache, index_cache: of the subject.
    """
    from dsv4.probes.audit import open_subject

    started, subject = (
        time.time(),
        open_subject(checkpoint, subject_is, device=device, cache=cache, index_cache=index_cache),
    )
    families.of(subject).check_command("bisect", subject.name)
    if not subject.can & {"block", "recorded"}:
        raise InputError(
            f"{subject.name} runs nothing that could be compared; bisect takes ours, transformers, or a dump"
        )
    other = None if reference_is == "oracle" else open_subject(checkpoint, reference_is, device=device)
    recorded = next((s for s in (subject, other) if s is not None and "recorded" in s.can), None)
    ids = ids_of(subject) if recorded is None else recorded.ids
    found = Bisection(subject, reference_of(subject, other), ids, budget, say).run()
    verdict = Confirmation(found).verdict() if found.fault else None
    report = to_report(found, verdict, started)
    say(sentence(found, verdict))
    if out is not None:
        for file in write(report, out, f"{checkpoint.resolve().name}_bisect"):
            say(f"wrote {file}")
    return report.exit_code


def to_report(found: Bisection, verdict: Verdict | None, started: float, command: list[str] | None = None) -> Report:
    """One section: a check a point, one for the confirmation, the table and the plot."""
    about = provenance(found.subject, command or sys.argv, {}, started)
    about["about"] = {**about["about"], "reference": found.reference.name, "tokens": found.ids.shape[1]}
    section = Section(
        "bisect",
        TITLE,
        checks(found, verdict),
        time.time() - started,
        text(found, verdict),
        {"ratio to the floor": plot(found)},
    )
    return Report(f"Bisection of {found.subject.name}", about, [section])


# ---- checks -----------------------------------------------------------------------------------


def floor_words(numerics: str) -> str:
    """The floor in one line for the reader."""
    dtype = str(dtype_of(numerics)).removeprefix("torch.")
    steps = (
        f"; the worst token may move by a step ({STEP:g}, indexer {max(STEPS.values()):g})" if "qat" in numerics else ""
    )
    return f"{FACTOR[dtype_of(numerics)]:g} times what rounding to {dtype} does to the oracle on the same values{steps}"


def checks(found: Bisection, verdict: Verdict | None) -> list[Check]:
    rows, source = [], floor_words(found.subject.numerics)
    for layer in range(found.config.num_hidden_layers):
        reading = next((r for r in found.layers if r.index == layer), None)
        if reading is None or not reading.found:
            why = "the budget was spent before it" if reading is None else "no point with known inputs"
            rows.append(vacuous("difference from the reference", why, where=f"layer {layer}"))
        rows += [_check(d, source) for d in (reading.found if reading else ())]
    if found.head is not None:
        rows.append(_check(found.head, source))
    if verdict is not None:
        status = Status.PASS if verdict.confirmed else Status.WARN
        rows.append(
            Check(
                "the cause is confirmed by a swap",
                status,
                verdict.module,
                module_part(verdict),
                "vanishes" if verdict.confirmed else "unconfirmed",
                "",
                "==",
                "vanishes",
                "the difference must vanish when that one module is the oracle's",
                samples=max(1, len(verdict.tried)),
                note="; ".join(said for said in (verdict.why, verdict.note, *verdict.tried) if said),
            )
        )
    return rows


def module_part(verdict: Verdict) -> str:
    """The part of the module whose swap removed the difference; else that of the point."""
    module = ".".join(verdict.module.split(".")[2:])  # without layers.N
    return OF_MODULE.get(module, PARTS[verdict.first.point]) if verdict.confirmed else PARTS[verdict.first.point]


def _check(d: Difference, source: str) -> Check:
    share, error, floor = d.worst
    note = f"relative error {error:.3g}, floor {floor:.3g}, of the {share:.0%} nearest tokens"
    left = 0 if d.kept is None else int((~d.kept).sum())
    note += f"; {left} tokens left out, whose experts rounding may change" if left else ""
    return compare(
        f"{d.point} within the noise floor",
        d.ratio,
        "<=",
        1.0,
        source,
        len(d.errors),
        unit="of the floor",
        where="head" if d.layer < 0 else f"layer {d.layer}",
        part=PARTS[d.point],
        note=note,
    )


# ---- words ------------------------------------------------------------------------------------


def sentence(found: Bisection, verdict: Verdict | None) -> str:
    """The verdict in one paragraph of plain text."""
    if verdict is None:
        some = any(r.found for r in found.layers)
        return f"nothing above the noise floor of {found.reference.name}" if some else "nothing could be compared"
    d = verdict.first
    share, error, floor = d.worst
    place = "the head's logits" if d.layer < 0 else f"layer {d.layer}, {d.point}"
    said = (
        f"first difference at {place}: relative error {error:.2g}, {d.ratio:.3g} times the noise floor of {floor:.2g}"
    )
    kind = WORDS.get(verdict.module.partition(".")[2].partition(".")[2], "")
    said += f"; cause: {verdict.module}" + (f" ({kind})" if kind else "")
    said += f", {verdict.why}" if verdict.why else ""
    if verdict.confirmed:
        said += "; confirmed: with that module swapped for the oracle's the difference vanishes"
        seen = [(label, *row) for label, row in verdict.after.items() if row[0] > row[2]]
        if seen:
            label, before, after, _ = seen[-1]
            said += f", at {label} from {before:.2g} to {after:.2g}"
        elif verdict.after:
            said += " there; further on it was within the floor already"
    return said + (f"; {verdict.note}" if verdict.note else "")


def text(found: Bisection, verdict: Verdict | None) -> str:
    """Markdown of the section."""
    numerics, said = found.subject.numerics, sentence(found, verdict)
    parts = [
        f"**Verdict.** {escape(said[:1].upper() + said[1:])}.",
        f"Reference: {escape(found.reference.name)}. {escape(_how(found))} Floor: {escape(floor_words(numerics))}. A "
        "cell is the largest error, as relative error / floor; bold is above it, · is not there.",
    ]
    if verdict is not None and verdict.tried:
        parts.append(
            "Swaps of one module, tried in this order:\n\n" + "\n".join(f"- {escape(t)}" for t in verdict.tried)
        )
    if verdict is not None and verdict.after:
        rows = [[escape(label), f"{b:.3g}", f"{a:.3g}", f"{f:.3g}"] for label, (b, a, f) in verdict.after.items()]
        parts.append(
            f"Accumulated from the ids on, median token, before and after swapping `{verdict.module}`:\n\n"
            + table(["streams after", ">before", ">after", ">floor"], rows)
        )
    points = [p for p in POINTS if any(d.point == p for r in found.layers for d in r.found)]
    rows = [
        [f"{r.index}", *(_cell(r.found, p) for p in points), "·", _accumulated(r.accumulated)] for r in found.layers
    ]
    if found.head is not None:
        rows.append(["head", *("·" for _ in points), _figures(found.head), _accumulated(found.logits)])
    columns = ["layer", *(f">{p}" for p in points), ">logits", ">accumulated"]
    return "\n\n".join([*parts, table(columns, rows)] if rows else parts)


def _how(found: Bisection) -> str:
    if found.reference.recorded:
        return "Everything is compared with the recorded run, so that the difference of layers before is in it."
    if found.reference.other is not None:
        return "Each layer is run on the subject's own streams before it; within the layer differences accumulate."
    return (
        "Each point is computed from the subject's own values before it, so that no difference hides or "
        "imitates another."
    )


def _cell(found: list[Difference], point: str) -> str:
    return next((_figures(d) for d in found if d.point == point), "·")


def _figures(d: Difference) -> str:
    _, error, floor = d.worst
    shown = f"{error:.1e} / {floor:.1e}" if math.isfinite(error) else f"∞ / {floor:.1e}"
    return f"**{shown}**" if d.found else shown


def _accumulated(d: Difference | None) -> str:
    return "·" if d is None else "{:.1e} / {:.1e}".format(*d.at(0.5))


# ---- plot -------------------------------------------------------------------------------------


def plot(found: Bisection) -> str:
    """An SVG: a row a layer, a column a point, the ratio to the floor as number and colour."""
    points = [p for p in POINTS if any(d.point == p for r in found.layers for d in r.found)]
    rows = [(f"layer {r.index}", r.found) for r in found.layers]
    width, height = LEFT + CELL[0] * len(points) + 10, TOP + CELL[1] * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">Difference as a multiple of the noise floor (1 = at the floor)</text>',
    ]
    for column, point in enumerate(points):
        x = LEFT + CELL[0] * (column + 0.5)
        parts.append(f'<text x="{x:g}" y="{TOP - 8}" text-anchor="middle">{html.escape(point)}</text>')
    for row, (label, differences) in enumerate(rows):
        y = TOP + CELL[1] * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{label}</text>')
        for d in differences:
            parts.append(_tile(LEFT + CELL[0] * points.index(d.point), y, d.ratio))
    parts.append(
        f'<text x="{LEFT}" y="{height - 10}" fill="#555">white to grey: within the floor; orange to red: above '
        "it, by "
        "powers of ten</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _tile(x: float, y: float, ratio: float) -> str:
    if ratio <= 1:
        level = 255 - round(45 * ratio)
        fill = f"rgb({level},{level},{level})"
    else:
        heat = min(1.0, math.log10(ratio) / 4) if math.isfinite(ratio) else 1.0
        fill = f"rgb({round(250 - 60 * heat)},{round(190 - 150 * heat)},{round(90 - 60 * heat)})"
    shown = "∞" if not math.isfinite(ratio) else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CELL[0] - 2}" height="{CELL[1] - 2}" fill="{fill}" stroke="#ccc"/>'
        f'<text x="{x + CELL[0] / 2 - 1:g}" y="{y + 17:g}" text-anchor="middle">{shown}</text>'
    )
