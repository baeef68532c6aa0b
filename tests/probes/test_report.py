"""A report says the same in every format, and nothing that is no evidence counts as passed in any."""

import errno
import json
import os
import re
from html import unescape
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from dsv4.errors import InputError
from dsv4.loaders.errors import WriteError
from dsv4.probes.report import json_report, schema
from dsv4.probes.report.document import Report, Section
from dsv4.probes.report.files import write
from dsv4.probes.report.markdown import escape, fence
from dsv4.probes.result import Check, Status, compare, vacuous

NASTY = 'a|b <script>x</script> & "q"\nsecond `line` *bold* [link](x) \\|'
PROVENANCE = {
    "subject": "ours",
    "can": ["run"],
    "commit": "abc",
    "dirty": False,
    "device": "cpu",
    "numerics": "fp32",
    "backend": "reference",
    "checkpoint": {
        "name": "demo",
        "layout": "official",
        "config_sha256": "0" * 64,
        "headers_sha256": "1" * 64,
        "files": 4,
    },
    "versions": {"dsv4": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "triton": None, "transformers": "5.23.0"},
    "dispatch": [
        {"operation": "sparse_attention", "implementation": "reference", "why": "reference backend", "calls": 7}
    ],
    "seeds": {"weights": 3},
    "command": "dsv4 audit demo --out OUT",
    "date": "2026-01-02T03:04:05Z",
    "seconds": 1.5,
}
FULL = Check(
    "recall", Status.FAIL, "layer 2", "indexer keys", 0.91, "fraction", ">=", 0.999, "spec section 3", 0.25, 1200, NASTY
)


def a_report() -> Report:
    """One check of each status, in two sections."""
    decoded = compare("decode", 3, "==", 3, "format", 12, where="layers.0.w")
    no_sinks = vacuous("sink", "no sinks", where="layer 1")
    slow = Check("slow", Status.WARN, measured=9.0, unit="s", samples=1)
    crash = Check("crash", Status.ERROR, note="ValueError: <x>")
    first = Section("P1", "bits | bytes", [decoded, FULL, no_sinks], 0.25, "Some *text*.", {"by layer": "<svg>1</svg>"})
    return Report("Audit of a|b & <c>", PROVENANCE, [first, Section("P2", "time", [slow, crash], 1.0)])


@pytest.fixture
def written(tmp_path):
    write(a_report(), tmp_path / "new" / "folder", "audit")
    return tmp_path / "new" / "folder"


def only(*statuses: Status) -> Report:
    return Report("r", PROVENANCE, [Section("P", "p", [Check("c", s, samples=1) for s in statuses], 0.0)])


# the model


def test_totals_by_status():
    assert a_report().totals == dict.fromkeys(Status, 1)
    assert a_report().seconds == 1.25


@pytest.mark.parametrize(
    "statuses,code",
    [
        ([Status.PASS], 0),
        ([Status.PASS, Status.WARN], 0),
        ([Status.PASS, Status.VACUOUS], 0),
        ([Status.PASS, Status.FAIL], 1),
        ([Status.PASS, Status.ERROR], 1),
        ([Status.VACUOUS], 2),
        ([Status.VACUOUS, Status.FAIL], 1),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else str(value),
)
def test_exit_code(statuses, code):
    assert only(*statuses).exit_code == code


def test_a_report_or_a_probe_without_checks_is_not_clean():
    assert Report("r", PROVENANCE).exit_code == 2
    silent = Report("r", PROVENANCE, [Section("P", "p", [], 0.0)])
    assert silent.exit_code == 2 and silent.totals[Status.VACUOUS] == 1


# writing


def test_all_files_are_written(written):
    names = ["audit-P1-by-layer.svg", "audit.html", "audit.json", "audit.md", "audit.sarif", "audit.xml"]
    assert sorted(p.name for p in written.iterdir()) == names
    assert (written / "audit-P1-by-layer.svg").read_text() == "<svg>1</svg>"


def test_plots_with_names_alike_get_files_of_their_own(tmp_path):
    plots = [{"a b": "1", "a/b": "2", "A-b": "3"}, {"a b": "4"}]
    report = Report("r", PROVENANCE, [Section("P1", "p", [FULL], 0.0, plots=p) for p in plots])
    write(report, tmp_path, "a b")
    files = report.plot_files("a b")
    assert len({f.lower() for f in files.values()}) == 4
    assert [(tmp_path / files[key]).read_text() for key in files] == ["1", "2", "3", "4"]
    text = (tmp_path / "a b.md").read_text()
    assert all(f"]({quote(file)})" in text for file in files.values())


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_full_disk_leaves_the_old_report_whole(tmp_path, monkeypatch, step):
    write(a_report(), tmp_path, "audit")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def half(path, data, real=type(tmp_path).write_bytes):
        real(path, data[:10])
        if path.name == "audit.sarif":
            full()

    monkeypatch.setattr(*((type(tmp_path), "write_bytes", half) if step == "write" else (os, "replace", full)))
    with pytest.raises(WriteError, match="No space left on device.*no file is half-written"):
        write(only(Status.PASS), tmp_path, "audit")
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_target_that_is_a_directory_changes_nothing(tmp_path):
    (tmp_path / "audit.json").mkdir()
    with pytest.raises(WriteError, match="audit.json is a directory"):
        write(a_report(), tmp_path, "audit")
    assert [p.name for p in tmp_path.iterdir()] == ["audit.json"]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="writing the report to .* failed"):
        write(a_report(), tmp_path / "file" / "under", "audit")


@pytest.mark.parametrize("stem", ["", "a/b", "../a"])
def test_a_stem_is_a_plain_name(tmp_path, stem):
    with pytest.raises(WriteError, match="not a plain file name"):
        write(a_report(), tmp_path, stem)


# JSON


def strict_json(text: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_every_field_and_validates(written):
    document = strict_json((written / "audit.json").read_text())
    assert json_report.load(written / "audit.json") == document
    assert document["schema_version"] == "1" and document["exit_code"] == 1 and document["provenance"] == PROVENANCE
    assert document["sections"][0]["checks"][1] == FULL.to_json()
    assert document["totals"] == dict.fromkeys(("PASS", "WARN", "VACUOUS", "FAIL", "ERROR"), 1)
    assert document["sections"][0]["plots"] == {"by layer": "audit-P1-by-layer.svg"}


@pytest.mark.parametrize("value,word", [(float("nan"), "NaN"), (float("inf"), "∞"), (float("-inf"), "−∞")])
def test_numbers_that_json_lacks_become_null_with_a_note(value, word):
    report = Report(
        "r",
        {**PROVENANCE, "seeds": {"x": value}},
        [
            Section(
                "P",
                "p",
                [
                    Check(
                        "c",
                        Status.FAIL,
                        measured=value,
                        threshold=value,
                        relation="<=",
                        chance=value,
                        samples=1,
                        note="why",
                    )
                ],
                0.0,
            )
        ],
    )
    document = strict_json(json_report.render(report, "s"))
    check = document["sections"][0]["checks"][0]
    assert check["measured"] is check["threshold"] is check["chance"] is None
    assert check["note"] == f"why; measured is {word}; threshold is {word}; chance is {word}"
    assert document["provenance"]["seeds"] == {"x": word}
    json_report.valid(document, "it")


def test_scalars_of_torch_are_numbers():
    import torch

    report = Report(
        "r", PROVENANCE, [Section("P", "p", [Check("c", Status.FAIL, measured=torch.tensor(2.5), samples=1)], 0.0)]
    )
    assert strict_json(json_report.render(report, "s"))["sections"][0]["checks"][0]["measured"] == 2.5


@pytest.mark.parametrize(
    "damage,message",
    [
        (
            lambda d: d["sections"][0]["checks"][0].update(status="GREEN"),
            r"\$.sections\[0\].checks\[0\].status: 'GREEN'",
        ),
        (lambda d: d["sections"][0]["checks"][0].pop("samples"), "no samples"),
        (lambda d: d["sections"][0]["checks"][0].update(samples=True), "samples: bool"),
        (lambda d: d["sections"][0]["checks"][0].update(samples=-1), "expected at least 0"),
        (lambda d: d["sections"][0].update(checks=[]), "0 items"),
        (lambda d: d["sections"][0].update(extra=1), "extra is unknown"),
        (lambda d: d["provenance"].pop("commit"), "no commit"),
        (lambda d: d["provenance"]["checkpoint"].update(name="/home/me/demo"), "does not match"),
        (lambda d: d["provenance"].update(command=""), "command: 0 characters"),
        (lambda d: d.update(exit_code=3), "expected one of"),
        (lambda d: d.update(schema_version="2"), "schema version '2'; expected '1'"),
        (lambda d: d.pop("schema_version"), "schema version None"),
    ],
)
def test_what_is_no_report_is_refused(damage, message):
    document = json.loads(json_report.render(a_report(), "s"))
    json_report.valid(document, "it")
    damage(document)
    with pytest.raises(InputError, match=message):
        json_report.valid(document, "it")


def test_files_that_are_no_report_are_one_line(tmp_path):
    for content, message in (("{", "not valid JSON"), ("[]", "schema version None"), ("[" * 100_000, "not valid JSON")):
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(InputError, match=message):
            json_report.load(tmp_path / "r.json")
    with pytest.raises(InputError, match="cannot read the report"):
        json_report.load(tmp_path / "absent.json")


def test_the_validator_refuses_keywords_that_it_does_not_check():
    with pytest.raises(ValueError, match="maxLength"):
        schema.problems("x", {"type": "string", "maxLength": 3})


# JUnit


def test_junit_counts_what_did_not_pass(written):
    root = ElementTree.parse(written / "audit.xml").getroot()
    assert [root.get(k) for k in ("tests", "failures", "errors", "skipped")] == ["5", "1", "1", "2"]
    cases = {case.get("name"): case for case in root.iter("testcase")}
    kinds = {name: [child.tag for child in case] for name, case in cases.items()}
    assert kinds == {
        "decode [layers.0.w]": [],
        "recall [layer 2]": ["failure"],
        "sink [layer 1]": ["skipped"],
        "slow": ["skipped"],
        "crash": ["error"],
    }
    assert cases["sink [layer 1]"][0].get("message") == "VACUOUS in layer 1: nothing measured; 0 samples. no sinks"
    assert cases["slow"][0].get("message").startswith("WARN: measured 9 s")
    assert NASTY in cases["recall [layer 2]"][0].get("message")  # came back through the XML unchanged
    suites = root.findall("testsuite")
    assert [(s.get("name"), s.get("tests"), s.get("time")) for s in suites] == [
        ("P1", "3", "0.250"),
        ("P2", "2", "1.000"),
    ]
    properties = {p.get("name"): p.get("value") for p in suites[0].iter("property")}
    assert properties["checkpoint.name"] == "demo" and properties["versions.triton"] == "–"


def test_junit_survives_characters_that_xml_forbids(tmp_path):
    report = Report("t", PROVENANCE, [Section("P", "p", [Check("c\x00\x1b[31m\ud800", Status.FAIL, samples=1)], 0.0)])
    write(report, tmp_path, "s")
    assert ElementTree.parse(tmp_path / "s.xml").getroot().find(".//testcase").get("name") == "c\ufffd\ufffd[31m\ufffd"


# SARIF


def test_sarif_has_a_rule_a_probe_and_a_result_a_finding(written):
    log = strict_json((written / "audit.sarif").read_text())
    assert log["version"] == "2.1.0" and "sarif-schema-2.1.0" in log["$schema"]
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [(r["id"], r["shortDescription"]["text"]) for r in rules] == [("P1", "bits | bytes"), ("P2", "time")]
    results = run["results"]
    assert [(r["properties"]["status"], r["level"]) for r in results] == [
        ("FAIL", "error"),
        ("VACUOUS", "note"),
        ("WARN", "warning"),
        ("ERROR", "error"),
    ]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in results)
    assert results[0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "layer 2"
    assert NASTY in results[0]["message"]["text"] and "required ≥ 0.999" in results[0]["message"]["text"]
    assert run["invocations"][0] == {
        "executionSuccessful": False,
        "exitCode": 1,
        "commandLine": PROVENANCE["command"],
        "startTimeUtc": PROVENANCE["date"],
    }


def test_a_fingerprint_is_of_the_check_not_of_what_it_measured():
    from dataclasses import replace

    from dsv4.probes.report.sarif import document

    def prints(*checks):
        results = document(Report("r", PROVENANCE, [Section("P", "p", list(checks), 0.0)]))["runs"][0]["results"]
        return [r["partialFingerprints"]["check/v1"] for r in results]

    assert prints(FULL) == prints(replace(FULL, measured=0.5, note="other"))
    assert len(set(prints(FULL, replace(FULL, where="layer 4"), replace(FULL, name="other")))) == 3


def test_a_probe_that_ran_twice_is_one_rule():
    from dsv4.probes.report.sarif import document

    run = document(Report("r", PROVENANCE, [Section("P", "p", [FULL], 0.0)] * 2))["runs"][0]
    assert len(run["tool"]["driver"]["rules"]) == 1 and [r["ruleIndex"] for r in run["results"]] == [0, 0]


# markdown


def rows_of(text: str) -> list[list[str]]:
    """Cells of each table line, split only at pipes that are not escaped."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]] for line in lines]


def test_markdown_says_findings_first(written):
    text = (written / "audit.md").read_text()
    order = [
        text.index(h)
        for h in (
            "\n**findings**",
            "\n| probe |",
            "## Findings",
            "### ERROR",
            "### FAIL",
            "### WARN",
            "### VACUOUS",
            "## P1: bits \\| bytes",
            "## Provenance",
        )
    ]
    assert order == sorted(order)
    assert (
        "**findings** (exit code 1). 1 ERROR, 1 FAIL, 1 VACUOUS, 1 WARN, 1 PASS; 1 without evidence: **not "
        "passed**" in text
    )
    line = next(line for line in text.splitlines() if line.startswith("- **recall**"))
    assert (
        "[P1] at **layer 2** (indexer keys): measured 0.91 fraction; required ≥ 0.999; threshold from spec section "
        "3; chance 0.25; 1,200 samples.<br>"
    ) in line
    assert (
        "dsv4 audit demo --out OUT" in text
        and "![by layer](audit-P1-by-layer.svg)" in text
        and "\nSome *text*.\n" in text
    )


def test_the_summary_table_counts_each_status(written):
    rows = rows_of((written / "audit.md").read_text())
    assert rows[0] == ["probe", "PASS", "WARN", "VACUOUS", "FAIL", "ERROR", "worst margin", "at", "seconds"]
    assert rows[2] == ["P1", "1", "·", "**1**", "**1**", "·", "90", "recall, layer 2", "0.2"]
    assert rows[3] == ["P2", "0", "**1**", "·", "·", "**1**", "·", "", "1.0"]
    assert rows[4] == ["**all**", "1", "**1**", "**1**", "**1**", "**1**", "", "", "1.2"]


def test_nothing_a_check_says_breaks_the_markdown(written):
    text = (written / "audit.md").read_text()
    assert "<script>" not in text and text.startswith("# Audit of a\\|b &amp; &lt;c&gt;\n")
    (line,) = [line for line in text.splitlines() if line.startswith("- **recall**")]
    shown = unescape(re.sub(r"\\([\\`*\[\]|~$_])", r"\1", line.partition("samples.<br>")[2])).replace("<br>", "\n")
    assert shown == NASTY


@pytest.mark.parametrize(
    "text,shown",
    [
        ("a|b", "a\\|b"),
        ("a\\|b", "a\\\\\\|b"),
        ("<b>", "&lt;b&gt;"),
        ("a & b", "a &amp; b"),
        ("a\r\nb\rc\nd", "a<br>b<br>c<br>d"),
        ("attn_in", "attn_in"),
        ("__init__", "\\_\\_init\\_\\_"),
        ("$x$ ~a~ `c`", "\\$x\\$ \\~a\\~ \\`c\\`"),
        ("a\u2028b", "a<br>b"),
    ],
)
def test_escape(text, shown):
    assert escape(text) == shown


def test_a_fence_is_longer_than_any_inside():
    assert fence("a ```` b").startswith("`````\n")


def test_findings_that_differ_only_in_place_are_one_line():
    same = [vacuous("sink", "no sinks", where=f"layer {i}") for i in range(9)]
    from dsv4.probes.report import markdown

    text = markdown.render(Report("r", PROVENANCE, [Section("P", "p", same, 0.0)]), "s")
    bullets = [line for line in text.splitlines() if line.startswith("- ")]
    assert [b for b in bullets if "sink" in b] == [
        "- **sink** [P] at "
        + ", ".join(f"**layer {i}**" for i in range(6))
        + " and 3 more (9 checks): nothing measured; 0 samples.<br>no sinks"
    ]


def test_a_clean_report_says_so_and_an_empty_one_does_not():
    from dsv4.probes.report import markdown

    assert "every check had evidence and passed" in markdown.render(only(Status.PASS), "s")
    empty = markdown.render(Report("r", PROVENANCE), "s")
    assert "passed" not in empty and "exit code 2" in empty
