"""The self-test: a plant of each clause is caught, honest kernels are green, and a gap is reported."""

import json
from dataclasses import replace

import pytest

from dsv4.probes.kernel_audit import selftest
from dsv4.probes.kernel_audit.plants import plants

OF_CPU = ("written", "guard", "inputs", "layout", "empty", "batch", "state", "integrity")


@pytest.mark.few("clause")
@pytest.mark.parametrize("clause", OF_CPU)
def test_a_plant_of_each_clause_is_caught_by_it(clause):
    plant = next(p for p in selftest.chosen("rms_norm", None, clause, "cpu") if p.entry != 6)
    (outcome,) = selftest.run([plant])
    assert outcome.verdict == "caught", outcome


@pytest.mark.every
@pytest.mark.parametrize("operation", ["rms_norm", "topk_entries"])
def test_honest_kernels_are_green(operation):
    from dsv4.probes.kernel_audit.controls import controls

    honest = [c for c in controls() if c.operation == operation and c.liberty][:1]
    honest += [c for c in controls() if c.operation == operation and c.kernel == "honest"][:1]
    assert len(honest) == 2
    assert [o.verdict for o in selftest.run(honest)] == ["green", "green"]


def test_a_plant_that_its_clause_does_not_find_is_a_gap(command_line, monkeypatch, tmp_path):
    name = "an empty grid is launched"
    (plant,) = (p for p in plants() if p.operation == "rms_norm" and p.name == name)
    monkeypatch.setattr(selftest, "plants", lambda: [replace(plant, clause="guard")])
    words = ("kernel", "selftest", "--operation", "rms_norm", "--name", name)
    code, out, _ = command_line(*words, "--out", tmp_path)
    assert code == 1 and f"by luck: rms_norm: {name} (by empty)" in out
    found = json.loads((tmp_path / "kernel_selftest.json").read_text())
    assert found["gaps"] == [f"by luck: rms_norm: {name} (by empty)"]
    assert (tmp_path / "kernel_selftest.md").read_text().startswith("# Self-test of the kernel audit: 1 gaps")


def test_without_its_clause_a_plant_is_missed(command_line):
    words = ("kernel", "selftest", "--operation", "rms_norm", "--name", "empty grid")
    assert command_line(*words)[0] == 0
    code, out, _ = command_line(*words, "--without", "empty")
    assert code == 1 and "missed: rms_norm: an empty grid is launched" in out


def test_a_run_that_was_cut_off_goes_on_from_its_journal(command_line, monkeypatch, tmp_path):
    journal = tmp_path / "journal"
    words = ("kernel", "selftest", "--operation", "rms_norm", "--name", "empty", "--journal", journal)
    code, out, _ = command_line(*words)
    kept = journal.read_text()
    assert code == 0 and kept.count('["done", {"name": "an empty grid is launched"') == 1
    monkeypatch.setattr(selftest, "one", lambda *given: pytest.fail("a result of the journal was asked for again"))
    assert command_line(*words)[:2] == (0, out) and journal.read_text() == kept
    code, _, err = command_line(*words, "--without", "empty")
    assert code == 2 and "is the journal of another run (without differ)" in err


def test_a_name_that_no_plant_has_is_refused_in_one_line(command_line):
    code, out, err = command_line("kernel", "selftest", "--name", "no such fault")
    assert code == 2 and not out and err.startswith("error: no plant and no control") and err.count("\n") == 1
