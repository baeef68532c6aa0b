"""`dsv4 sparse-prefill`: what it writes, and what it refuses."""

import contextlib
import copy
import io
import json

import pytest

from dsv4.probes.measure.base import plots as base_plots
from dsv4.probes.measure.sparse_prefill import document, markdown, plots
from dsv4.probes.report import schema
from tests.commands import exit_code
from tests.dsv4.test_cli import demo  # noqa: F401  (fixture: a DeepSeek-V4 checkpoint)
from tests.texts import PROSE

SMALL = ("--context", "180,300", "--cuts", "32,4,8 32,4,20 64,8,24", "--tail", 40, "--every", 4)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    file.write_text(PROSE * 4)
    return file


# Over 5 s: the whole command at two contexts and three cuts, with needles; once for all tests of it.
@pytest.fixture(scope="module")
def report(gqa_path, prose, tmp_path_factory):
    """(JSON document, markdown, folder) of a small run with needles."""
    tmp_path, out, err = tmp_path_factory.mktemp("report"), io.StringIO(), io.StringIO()
    given = (
        "sparse-prefill",
        gqa_path,
        *SMALL,
        "--text",
        prose,
        "--asked-context",
        800,
        "--needles",
        1,
        "--in-prompt",
        1,
        "--json",
        "--out",
        tmp_path,
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exit_code(*given)
    assert code == 0, err.getvalue()
    found = json.loads(out.getvalue())
    assert found == json.loads((tmp_path / "sparse_prefill_gqa.json").read_text())
    return found, (tmp_path / "sparse_prefill_gqa.md").read_text(), tmp_path


def test_a_report(report):
    found, shown, folder = report
    assert schema.problems(found, json.loads(document.KIND.schema.read_text())) == [] and str(folder) not in json.dumps(
        found
    )
    rows = {(r["chunk"], r["heavy"], r["context"], r["text"]): r for r in found["rows"]}
    assert len(rows) == 3 * 2 * 2
    assert (
        rows[32, 8, 300, "prose.txt"]["positions"] == 300 - 1 - 32
        and rows[64, 24, 180, None]["positions"] == 180 - 1 - 64
    )
    assert all(
        r["tail"]["positions"] == 40 and r["verdict"] in ("met", "MISSED") and r["kl"] > 0 for r in found["rows"]
    )
    assert rows[32, 20, 300, None]["kl"] < rows[32, 8, 300, None]["kl"]
    assert len(found["mass"]) == len(found["stability"]) == 3 * 3 and len(found["mass"][0]["kept"]) == 6
    assert [r["updates"] for r in found["stability"]] == [9] * 6 + [4] * 3 and len(
        found["stability"][0]["jaccard"]
    ) == 8
    assert [r["row"] for r in found["by_text"]] == [0] * 6 and all(
        r["loss"] == pytest.approx(rows[r["chunk"], r["heavy"], r["context"], r["text"]]["loss"])
        for r in found["by_text"]
    )
    assert [(r["texts"], r["context"]) for r in found["texts_below"]] == [(1, 180), (1, 300)] * 3
    for r in found["rows"]:
        classes = [c for c in found["by_class"] if (c["chunk"], c["heavy"]) == (r["chunk"], r["heavy"])]
        assert len(classes) == 4 + 4 and sum(c["positions"] for c in classes) == 2 * (300 - 1 - r["chunk"])
    kinds = [(r["kind"], r["chunk"]) for r in found["needles"]["rows"]]
    assert len(kinds) == 4 * 4 and {chunk for _, chunk in kinds} == {None, 32, 64}
    assert found["batch"]["verdict"] == "met" and found["batch"]["lengths"] == [127, 96, 74]
    assert len(found["memory"]) == 3 * 2 and all(r["measured"] is None for r in found["memory"])
    for part in (
        "## Loss by text",
        "## Which positions lose",
        "## Attention mass",
        "## Heavy hitters",
        "## Needles and facts",
        "## Memory",
        "## Provenance",
        "MISSED",
        "| all |",
    ):
        assert part in shown, part
    pictures = sorted(f.name for f in folder.glob("*.svg"))
    assert len(pictures) == 9 and all(name in shown and "<svg" in (folder / name).read_text() for name in pictures)


def test_verdicts_are_printed_by_setting(report):
    """Each row says met or MISSED as its loss does, and the summary counts them."""
    found = copy.deepcopy(report[0])
    for r in found["rows"]:
        r["loss"], r["verdict"] = (0.5, "MISSED") if r["chunk"] == 64 and r["context"] == 300 else (0.01, "met")
    said = markdown.render(found, {})
    assert (
        "chunks of 64, all texts: **met in 1, MISSED in 1** of 2 settings; from 1.00 % (64: 8 + 24, 180 "
        "tokens) to 50.00 %" in said
    )
    assert "chunks of 32, prose.txt: **met in 4, MISSED in 0** of 4" in said
    columns, cells = markdown.perplexity(found)
    shown = {
        (row[0], row[columns.index(">context")]): (row[columns.index(">loss")], row[columns.index("below 5 %")])
        for row in cells
    }
    assert shown.pop(("64", "300")) == ("50.00 %", "**MISSED**") and set(shown.values()) == {("1.00 %", "met")}


# Over 5 s: draws each figure of the report once more.
def test_plots_are_the_same_every_time(report):
    """Those of the report are drawn again from its JSON."""
    found, _, folder = report
    maps = {"made up": {layer: plots.torch.arange(40.0).view(5, 8) * layer for layer in range(4)}}
    drawn = plots.draw(found, maps)
    mine = drawn.pop("Kept, made up")
    assert mine == plots.kept("made up", maps["made up"]) and all(part in mine for part in ("made up", "layer 3"))
    written = {file.read_text() for file in folder.glob("*.svg")}
    assert len(drawn) == 6 and written >= set(drawn.values())


def test_without_matplotlib_it_says_so(run, gqa_path, prose, tmp_path, monkeypatch):
    monkeypatch.setattr(base_plots, "available", lambda: False)
    code, out, err = run(
        "sparse-prefill",
        gqa_path,
        "--context",
        180,
        "--cuts",
        "64,8,24",
        "--text",
        prose,
        "--tail",
        20,
        "--needles",
        0,
        "--in-prompt",
        0,
        "--out",
        tmp_path,
    )
    assert code == 0 and sorted(f.suffix for f in tmp_path.iterdir()) == [".json", ".md"], err
    assert "met" in out and "chunks of 64" in out
    shown = (tmp_path / "sparse_prefill_gqa.md").read_text()
    assert "matplotlib is not installed" in shown and "turned off (--needles 0)" in shown and "## Needles" not in shown
