"""The report as one HTML page that needs nothing else: grids of layers by capture point and by probe, filters, every
check with details.

Filters stand in the part of the address after '#', so that a filtered view is a link:
`#status=FAIL&probe=rope&layer=3&point=attn_out&text=index keys`. Style and script are beside this file in page.css and
page.js.
"""

import html
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.probes.report import margins, words
from dsv4.probes.report.points import point_of
from dsv4.probes.result import Check, Status, worst
from dsv4.probes.subject import POINTS

if TYPE_CHECKING:
    from dsv4.probes.report.document import Report, Section

HERE = Path(__file__).parent
NEAR = 0.5  # of the threshold: a PASS beyond it is drawn darker
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render(report: "Report", stem: str) -> str:
    """The page. Everything that a report says is escaped; nothing is loaded from anywhere."""
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    title = escape(report.title)
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{title}</title><style>{style}</style></head><body>',
        f"<h1>{title}</h1>",
        _verdict(report),
        f"<h2>Layers and capture points</h2>{_points(report)}",
        f"<h2>Layers and probes</h2>{_probes(report)}",
        f'<h2 id="checks">Checks</h2>{_filters(report)}{_checks(report)}',
        "<h2>Margins</h2><p>A mark is a check: measured over threshold. Beyond the red line is red; marks at an end "
        "lie further out.</p>",
        _margins(report),
        _provenance(report),
        f"<script>{script}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def escape(text) -> str:
    return html.escape(str(text), quote=True)


def _verdict(report: "Report") -> str:
    why = f"<br>{escape(report.not_shown)}" if report.not_shown else ""
    kind = {"clean": "PASS", "findings": "FAIL"}.get(report.verdict, "VACUOUS")
    chips = [
        f'<a class="chip {status.value}" href="#status={status.value}">{n:,} {status.value}</a>'
        for status, n in reversed(report.totals.items())
        if n
    ]
    about = report.provenance
    facts = [str(about[key]) for key in ("subject", "numerics", "backend", "device", "date") if about.get(key)]
    return (
        f'<p class="verdict {kind}"><b>{escape(report.verdict)}</b> (exit code {report.exit_code}){why}</p>'
        f"<p>{' '.join(chips)}</p><p>{escape(' · '.join(facts))}</p>"
    )


def _points(report: "Report") -> str:
    """A row a layer, a column a capture point, in the order in which a layer computes them."""
    cells: dict[tuple[int | None, str], list[Check]] = {}
    for _, check in report.checks:
        layer, point = margins.layer_of(check), point_of(check)
        if layer is not None and point is not None:
            cells.setdefault((layer, point), []).append(check)
    return _grid(cells, [p for p in POINTS if any(p == of for _, of in cells)], "point")


def _probes(report: "Report") -> str:
    """A row a layer, a column a probe."""
    cells: dict[tuple[int | None, str], list[Check]] = {}
    for section, check in report.checks:
        cells.setdefault((margins.layer_of(check), section.probe), []).append(check)
    legend = "".join(f'<span class="key {s.value}">{s.value}</span>' for s in Status)
    note = "Number: the worst margin, where 1 is the threshold; = is exact or has no margin; F, E, V, W: not passed."
    grid = _grid(cells, list(dict.fromkeys(section.probe for section in report.sections)), "probe")
    return f'{grid}<p class="keys">{legend} {note}</p>'


def _grid(cells: dict[tuple[int | None, str], list[Check]], columns: list[str], kind: str) -> str:
    """The worst status of each cell, and the worst margin where there is one. kind: the filter that a column sets."""
    if not cells:
        return "<p>No check speaks of one.</p>"
    layers = sorted({layer for layer, _ in cells}, key=lambda layer: -1 if layer is None else layer)
    head = "".join(
        f'<th><a href="#{kind}={escape(c)}"><span>{escape(c.replace("_", " "))}</span></a></th>' for c in columns
    )
    rows = [f"<tr><th></th>{head}</tr>"]
    for layer in layers:
        name = "model" if layer is None else f"layer {layer}"
        link = "none" if layer is None else layer
        found = "".join(_cell(cells.get((layer, column)), kind, column, link) for column in columns)
        rows.append(f'<tr><th><a href="#layer={link}">{name}</a></th>{found}</tr>')
    return f'<div class="wide"><table class="grid">{"".join(rows)}</table></div>'


def _cell(checks: list[Check] | None, kind: str, column: str, layer) -> str:
    if not checks:
        return "<td></td>"
    status, found = worst(checks), margins.worst(checks)
    value = None if found is None else found[0]
    near = " near" if status is Status.PASS and value is not None and value > NEAR else ""
    shown = status.value[0] if status is not Status.PASS else "=" if not value else f"{value:.1g}"
    said = f"{column}, {len(checks)} checks, {status.value}" + ("" if value is None else f", worst margin {value:.3g}")
    link = f"#{kind}={escape(column)}&amp;layer={layer}"
    return f'<td class="{status.value}{near}"><a href="{link}" title="{escape(said)}">{shown}</a></td>'


def _filters(report: "Report") -> str:
    options = lambda values: "".join(f"<option>{escape(v)}</option>" for v in values)
    layers = sorted({layer for _, c in report.checks if (layer := margins.layer_of(c)) is not None})
    probes = dict.fromkeys(s.probe for s in report.sections)
    return (
        '<form id="filters"><label>status <select name="status"><option value="">all</option>'
        f'<option value="open">not PASS</option>{options(s.value for s in Status)}</select></label>'
        f'<label>probe <select name="probe"><option value="">all</option>{options(probes)}</select></label>'
        '<label>layer <select name="layer"><option value="">all</option><option value="none">model</option>'
        f"{options(layers)}</select></label>"
        f'<label>point <select name="point"><option value="">all</option>{options(POINTS)}</select></label>'
        '<label>text <input name="text" type="search"></label><a href="#">reset</a> <output></output></form>'
    )


def _checks(report: "Report") -> str:
    """Every check, those that did not pass first."""
    rows = sorted(report.checks, key=lambda pair: -pair[1].status.rank)
    head = "<tr><th>status</th><th>probe</th><th>check</th><th>where</th><th>measured</th><th>required</th></tr>"
    return (
        f'<table class="checks"><thead>{head}</thead><tbody>'
        + "".join(_row(s, c) for s, c in rows)
        + "</tbody></table>"
    )


def _row(section: "Section", check: Check) -> str:
    layer = margins.layer_of(check)
    cells = [
        f'<td><span class="mark">{check.status.value}</span></td>',
        f"<td>{escape(section.probe)}</td>",
        f"<td><details><summary>{escape(check.name)}</summary>{_details(check)}</details></td>",
        f"<td>{escape(check.at)}</td>",
        f"<td>{escape(words.measured(check))}</td>",
        f"<td>{escape(words.required(check))}</td>",
    ]
    about = f'data-p="{escape(section.probe)}" data-l="{"none" if layer is None else layer}"'
    about += f' data-c="{point_of(check) or ""}"'
    return f'<tr class="{check.status.value}" {about}>{"".join(cells)}</tr>\n'


def _details(check: Check) -> str:
    value = margins.margin(check)
    facts = {
        "part": check.part,
        "margin": "" if value is None else "exact" if value == 0 else f"{value:.3g}",
        "threshold from": check.source,
        "chance": "" if check.chance is None else words.number(check.chance),
        "samples": f"{check.samples:,}",
        "note": check.note,
    }
    return f"<dl>{''.join(f'<dt>{key}</dt><dd>{escape(v)}</dd>' for key, v in facts.items() if v)}</dl>"


def _margins(report: "Report") -> str:
    parts = []
    for section in report.sections:
        drawn = margins.strip(section.checks)
        if drawn:
            parts.append(
                f"<figure><figcaption>{escape(section.probe)}: {escape(section.title)}</figcaption>{drawn}</figure>"
            )
    return f'<div class="strips">{"".join(parts)}</div>' if parts else "<p>No check has one.</p>"


def _provenance(report: "Report") -> str:
    about = report.provenance
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in words.flat(about))
    ran = "".join(
        "<tr>"
        + "".join(f"<td>{escape(row.get(k, ''))}</td>" for k in ("operation", "implementation", "calls", "why"))
        + "</tr>"
        for row in about.get("dispatch") or []
    )
    left = "".join(f"<li>{escape(probe)} {escape(why)}</li>" for probe, why in report.left_out.items())
    return (
        (f"<h2>Left out</h2><ul>{left}</ul>" if left else "")
        + f'<h2>Provenance</h2><div class="wide"><table class="plain">{rows}</table></div>'
        + (
            f'<details><summary>what ran</summary><div class="wide"><table class="plain">{ran}</table></div></details>'
            if ran
            else ""
        )
    )
