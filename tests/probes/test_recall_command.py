"""`dsv4 recall`: what it refuses, the gate, the text, the report and the command line."""

import json
from dataclasses import replace

import pytest

from dsv4.probes.measure.base import plots
from dsv4.probes.measure.base.text import Text, read_text, rows_of
from dsv4.probes.measure.recall import document, measure, settings
from dsv4.probes.measure.recall.settings import VacuousSetting, settle
from tests.checkpoints import SMALL
from tests.dsv4.test_cli import ROOT, demo, run  # noqa: F401  (fixtures)
from tests.probes.test_recall import SETTINGS, figures, path, subject, text  # noqa: F401  (fixtures)
from tests.texts import PROSE, PROSE_FILE

# ---- refusals and the gate ----------------------------------------------------------------


def test_vacuous_settings_are_refused(subject):
    with pytest.raises(
        VacuousSetting, match="n_comp = 47 entries, fewer than 8 · k = 48.*use --context 192 or more, or --vac"
    ):
        settle(subject.config, [188], None, 40, 2, 0, 0, vacuous=False)
    with pytest.raises(VacuousSetting, match="chance alone recalls 100%; use --k 128 or less"):
        settle(subject.config, [400], [2000], 40, 2, 0, 0, vacuous=False)
    assert settle(subject.config, None, None, 128, 2, 0, 0, vacuous=False).contexts == (192, 384)
    assert settle(subject.config, [188], None, 40, 2, 0, 0, vacuous=True).is_vacuous(188, 6)


def test_vacuous_rows_say_so(subject, text):
    """Nothing is left out when every visible entry is selected: recall is 1, and so is chance."""
    found = figures(subject, text, replace(SETTINGS, contexts=(24,), queries=8))
    assert {r["status"] for r in found.values()} == {"VACUOUS"}
    assert (
        found[None, 24, 6]["recall_fp32"] == found[None, 24, 6]["chance"] == found[None, 24, 6]["recall_matched"] == 1.0
    )


def gate_row(n_comp: int, recall: float, k: int = 512) -> dict:
    return {
        "layer": 2,
        "context": 4 * n_comp,
        "n_comp": n_comp,
        "k": k,
        "what_if": False,
        "queries": 10,
        "recall_fp32": recall,
        "chance": k / n_comp,
        "status": "VACUOUS" if n_comp < 8 * k else "MEASURED",
    }


@pytest.mark.parametrize(
    "rows, status",
    [
        ([gate_row(4096, 0.995)], "PASS"),
        ([gate_row(4096, 0.985)], "FAIL"),
        ([gate_row(1024, 0.995)], "VACUOUS"),
        ([gate_row(1024, 0.985)], "FAIL"),
        ([gate_row(4096, 0.995), gate_row(4096, 0.5)], "FAIL"),
        ([gate_row(1000, 1.0)], "VACUOUS"),
        ([gate_row(8192, 1.0, k=64)], "VACUOUS"),
    ],
    ids=["good", "bad", "good at twice k", "bad at twice k", "one bad layer", "too few entries", "another k"],
)
def test_the_classic_gate(rows, status):
    check = measure.gate(rows)
    assert check.status.value == status and check.chance is not None and (check.note or status == "PASS")


@pytest.mark.parametrize(
    "rows, status, said",
    [
        ([gate_row(1024, 0.995), gate_row(1024, 0.991)], "PASS", "98.2% of what chance, 50%, leaves"),
        ([gate_row(1024, 0.995), gate_row(1024, 0.989)], "FAIL", "97.8% of what chance, 50%, leaves"),
        ([gate_row(1025, 0.9), gate_row(4096, 0.9), gate_row(1024, 0.9, k=64)], "VACUOUS", "--context 4096"),
    ],
    ids=["good", "one bad layer", "other entries and another k"],
)
def test_the_gate_at_exactly_1024_entries(rows, status, said):
    check = measure.exact_gate(rows)
    assert check.status.value == status and said in check.note and check.chance == 0.5
    assert check.name.endswith("n_comp = 1024")


@pytest.mark.parametrize(
    "contexts, ks, queries, found",
    [
        ((4096,), (64,), 16, ((4096, 64), (4096, 512))),
        ((8192, 16384), (512,), 16, ((4096, 512), (8192, 512), (16384, 512))),
        ((4096,), (512,), 16, ((4096, 512),)),
        ((2048, 4095), (64,), 16, ((2048, 64), (4095, 64))),
        ((4100, 8192), (64,), 16, ((4100, 64), (8192, 64))),  # its last queries would be those of 4100 too
    ],
    ids=str,
)
def test_where_the_exact_gate_is_measured(contexts, ks, queries, found):
    about = dict(rows=1, needles=0, seed=0)
    assert settings.Settings(contexts=contexts, ks=ks, queries=queries, **about).measured == found


def test_the_exact_gate_stands_in_the_report(run, demo, tmp_path, monkeypatch):
    """With a gate of 48 entries, which this model's text reaches. The other gate speaks of what was asked for alone."""
    for module in (settings, measure):
        for name, value in (("GATE_K", 12), ("GATE_ENTRIES", 48), ("GATE_CONTEXT", 192)):
            monkeypatch.setattr(module, name, value, raising=False)
    given = ("--context", "224", "--rows", 1, "--queries", 8, "--needles", 0, "--out", tmp_path)
    code, out, err = run("recall", demo, *given)
    assert code == 0, err
    found = document.valid(json.loads((tmp_path / "recall.json").read_text()))
    rows = [r for r in found["rows"] if r["k"] == 12]
    assert {(r["context"], r["n_comp"], r["status"], r["what_if"]) for r in rows} == {(192, 48, "VACUOUS", True)}
    layers = [r for r in rows if r["layer"] is not None]
    assert found["gate_exact"]["measured"] == min(r["recall_fp32"] for r in layers)
    assert found["gate_exact"]["status"] in ("PASS", "FAIL") and found["gate_exact"]["samples"] == 8 * len(layers)
    assert found["gate"]["status"] == "VACUOUS" and "measured were k = 6 " in found["gate"]["note"]
    for shown in (out, (tmp_path / "recall.md").read_text()):
        assert "n_comp = 1024" in shown and "n_comp ≥ 1024" in shown


# ---- the report ---------------------------------------------------------------------------


def test_the_command_line_writes_a_report(run, demo, tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text(PROSE * 2)
    code, out, err = run(
        "recall",
        demo,
        "--text",
        file,
        "--needles",
        2,
        "--rows",
        1,
        "--queries",
        16,
        "--context",
        "192,224",
        "--out",
        tmp_path / "report",
    )
    assert code == 0, err
    for part in (
        "prose.txt",
        "MEASURED  192 tokens, n_comp 48, k = 6",
        "all CSA",
        "VACUOUS  classic gate",
        "prose, window only",
        "0 of 2",
    ):
        assert part in out, part
    found = json.loads((tmp_path / "report" / "recall.json").read_text())
    assert document.valid(found)["settings"]["contexts"] == [192, 224] and found["needles"]["beyond"] == 40
    assert found["text"]["name"] == "prose.txt" and len(found["text"]["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(found)
    shown = (tmp_path / "report" / "recall.md").read_text()
    for part in ("attention mass kept **", "## By distance", "## Needles", "97.5 %", "## Provenance", "100 by 96.4 %"):
        assert part in shown, part
    for name in ("by-layer", "by-distance", "needles"):
        assert f"recall-{name}.svg" in shown and "<svg" in (tmp_path / "report" / f"recall-{name}.svg").read_text()


def test_the_command_line_in_other_words(run, demo, tmp_path, monkeypatch):
    """JSON on stdout; no plots without matplotlib, and a note; the gate's exit code; a vacuous setting."""
    monkeypatch.setattr(plots, "available", lambda: False)
    given = ("recall", demo, "--rows", 1, "--queries", 8, "--needles", 0, "--json", "--out", tmp_path)
    code, out, err = run(*given, "--context", 192, "--gate")
    found = json.loads(out)
    assert code == 2 and found["gate"]["status"] == "VACUOUS" and plots.MISSING in found["notes"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["recall.json", "recall.md"]
    code, out, err = run(*given, "--context", 100)
    assert (
        code == 2
        and err.startswith("error: a context of 100 tokens has n_comp = 25")
        and err.count("\n") == 1
        and not out
    )
    code, out, err = run(*given, "--context", 100, "--vacuous")
    assert code == 0 and {r["status"] for r in json.loads(out)["rows"]} == {"VACUOUS"}


def test_random_ids_without_a_tokenizer(path, text):
    assert text.sha256 is None and "no tokenizer.json" in text.name and text.ids.max() < SMALL["vocab_size"]
    with pytest.raises(Exception, match="cannot be read; copy the model's there"):
        read_text(PROSE_FILE, path, 320, 10, 0)
    with pytest.raises(Exception, match="a context of 2000 needs 1999"):
        rows_of(text, 2000, 1, bos=0)
    rows = rows_of(Text("t", None, text.ids), 301, 9, bos=7)
    assert rows.shape == (3, 301) and (rows[:, 0] == 7).all() and rows[1, 1:].tolist() == text.ids[333:633].tolist()


def test_the_schema_refuses_what_it_does_not_know(subject, text):
    found = document.measured(subject, replace(SETTINGS, contexts=(192,), rows=1), text, ["dsv4", "recall"])
    assert found["provenance"]["checkpoint"]["name"] == "dense"
    assert found["needles"] is None and "turned off" in found["notes"][0]
    with pytest.raises(Exception, match="extra is unknown"):
        document.valid(found | {"rows": [found["rows"][0] | {"extra": 1}]})
    with pytest.raises(Exception, match="no chance"):
        document.valid(found | {"rows": [{k: v for k, v in found["rows"][0].items() if k != "chance"}]})
