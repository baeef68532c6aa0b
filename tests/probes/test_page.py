"""The page holds every check of the JSON, escapes what it is told, and needs nothing from outside."""

import json
import re
from html.parser import HTMLParser

import pytest

from dsv4.probes.report import json_report, page
from dsv4.probes.report.points import point_of
from dsv4.probes.result import Check, Status
from tests.probes.test_report import NASTY, PROVENANCE, Report, Section, a_report

VOID = {"meta", "input", "br", "line", "circle"}


class Seen(HTMLParser):
    """Rows of checks as lists of cell texts, all tags with their attributes, and whether every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.rows, self.tags, self.open, self.cell = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr" and "data-p" in dict(attrs):
            self.rows.append([])
        if tag == "td" and "table" in self.open and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "tbody" in self.open and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_every_check_of_the_json_is_a_row():
    report = a_report()
    seen = Seen(page.render(report, "s"))
    assert not seen.open
    checks = [(s["probe"], c) for s in json_report.document(report, "s")["sections"] for c in s["checks"]]
    assert len(seen.rows) == len(checks) == 5
    for probe, check in checks:
        rows = [r for r in seen.rows if (r[0], r[1]) == (check["status"], probe) and r[2].startswith(check["name"])]
        assert len(rows) == 1, check
        assert rows[0][3] == check.get("where", "") and check.get("note", "") in rows[0][2]
    assert [row[0] for row in seen.rows] == ["ERROR", "FAIL", "VACUOUS", "WARN", "PASS"]  # the worst first


def test_nothing_is_loaded_from_anywhere():
    report = a_report()
    report.sections[0].checks[0] = Check("see https://example.org/x", Status.PASS, note="http://example.org", samples=1)
    text = page.render(report, "s")
    for tag, attributes in Seen(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes and not any(key.startswith("on") for key in attributes), (tag, attributes)
        assert attributes.get("href", "#").startswith("#"), attributes
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style and "default-src 'none'" in text


def test_nothing_a_check_says_becomes_markup():
    text = page.render(
        Report(
            NASTY,
            PROVENANCE | {"device": NASTY},
            [
                Section(
                    NASTY,
                    NASTY,
                    [
                        Check(
                            NASTY,
                            Status.FAIL,
                            NASTY,
                            NASTY,
                            NASTY,
                            NASTY,
                            "<=",
                            NASTY,
                            NASTY,
                            samples=1,
                            note=NASTY,
                            found=NASTY,
                        )
                    ],
                    0.0,
                )
            ],
            {NASTY: NASTY},
        ),
        "s",
    )
    assert "<script>x" not in text and text.count("<script>") == 1 and not Seen(text).open


def test_the_grid_has_the_worst_status_and_margin_of_each_layer_and_probe():
    checks = [
        Check("a", s, f"layer {i}", measured=m, relation="<=", threshold=1.0, samples=1)
        for i, s, m in ((0, Status.PASS, 0.25), (0, Status.PASS, 0.5), (1, Status.PASS, 0.1), (1, Status.FAIL, 3.0))
    ]
    text = page.render(Report("r", PROVENANCE, [Section("rope", "p", checks, 0.0)]), "s")
    cells = re.findall(r'<td class="([A-Z]+)(?: near)?"><a href="(#probe[^"]+)"[^>]*>([^<]+)', text)
    assert cells == [("PASS", "#probe=rope&amp;layer=0", "0.5"), ("FAIL", "#probe=rope&amp;layer=1", "F")]


def test_a_check_stands_at_the_capture_point_that_it_names_or_that_shows_its_part():
    checks = [
        Check(name, status, "layer 2, decode", measured=0.5, relation="<=", threshold=1.0, samples=1, part=part)
        for name, part, status in (
            ("kv_window: equal the oracle's", "rotation of window rows", Status.PASS),
            ("index keys equal the oracle's", "", Status.FAIL),
            ("path", "selection", Status.VACUOUS),
            ("weights of the chosen experts", "router", Status.PASS),
            ("logits equal those of one step", "caches", Status.PASS),
        )
    ]
    assert [point_of(c) for c in checks] == ["kv_window", "index_keys", "selection", "ffn_out", None]
    text = page.render(Report("r", PROVENANCE, [Section("rope", "p", checks, 0.0)]), "s")
    cells = re.findall(r'href="#point=(\w+)&amp;layer=(\d+)"[^>]*>([^<]+)', text)
    assert cells == [
        ("kv_window", "2", "0.5"),
        ("index_keys", "2", "F"),
        ("selection", "2", "V"),
        ("ffn_out", "2", "0.5"),
    ]


@pytest.mark.parametrize("name", ["status", "probe", "layer", "point", "text"])
def test_the_script_filters_by_what_the_form_offers(name):
    """The script reads the address by the names that the form's fields have."""
    text = page.render(a_report(), "s")
    assert f'name="{name}"' in text and f'"{name}"' in text[text.index("const names") :][:60]


def test_a_report_comes_back_from_its_json():
    report = a_report()
    document = json.loads(json_report.render(report, "s"))
    again = json_report.read(json_report.valid(document, "it"))
    assert list(again.checks)[1][1] == list(report.checks)[1][1] and again.totals == report.totals
    assert page.render(again, "s") == page.render(report, "s")
