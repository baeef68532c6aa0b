"""What counts as evidence: places that do not move with what was measured, verdicts, and runs that are long enough."""

import json
from datetime import date

import pytest

from dsv4.errors import InputError
from dsv4.outputs import writable
from dsv4.probes.catalogue import influence
from dsv4.probes.catalogue.load_ledger import named
from dsv4.probes.compare import heavy_tailed, oracle_of
from dsv4.probes.report import json_report, junit, markdown, page, sarif
from dsv4.probes.report.difference import difference
from dsv4.probes.report.document import Report, Section
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.scenes.gqa.steps import Tally
from dsv4.probes.subjects.ours import OurSubject
from tests.probes.test_report import PROVENANCE

TODAY = date(2026, 3, 10)


def report(*checks: Check, probe: str = "influence") -> Report:
    return Report("r", PROVENANCE, [Section(probe, probe, list(checks), 0.0)])


def document(*checks: Check, probe: str = "influence") -> dict:
    return json.loads(json_report.render(report(*checks, probe=probe), "s"))


def sink(head: int, measured: float = 0.1) -> Check:
    return compare("sink", measured, "<=", 0.5, "x", 8, where="layer 2, decode", found=f"head {head}")


# ---- a place is no measurement ------------------------------------------------------------------


def test_another_worst_head_is_no_vanished_evidence():
    found = difference(document(sink(6)), document(sink(0)), [], TODAY)
    assert (found.exit_code, found.unchanged) == (0, 1) and not found.new and not found.vanished


def test_what_was_found_is_told_and_identifies_nothing_in_any_format():
    a, b = report(sink(6, 0.9)), report(sink(0, 0.8))
    assert "layer 2, decode, head 6" in junit.render(a, "s") and "layer 2, decode, head 6" in sarif.render(a, "s")
    names = [line for line in junit.render(a, "s").splitlines() if "<testcase" in line]
    assert names == [line for line in junit.render(b, "s").splitlines() if "<testcase" in line]
    prints = [sarif.document(r)["runs"][0]["results"][0]["partialFingerprints"] for r in (a, b)]
    assert prints[0] == prints[1]
    assert "at head 6" in difference(document(sink(6)), document(sink(6, 0.9)), [], TODAY).to_markdown()


def test_the_probe_of_sinks_puts_the_head_beside_the_place(official):
    """In one layer with a window: sinks of other layers go the same way."""
    subject, key = OurSubject(official), lambda checks: {(c.name, c.where) for c in checks if "sink" in c.name}
    T = influence.length(subject, 1.0)
    x = heavy_tailed(subject, T, 0, rows=2)

    def looked():
        case = influence.choose(subject, oracle_of(subject).layer(0), 0, x, 0)
        plan = influence.schedules(T, subject.config.sliding_window)
        return [c for name, steps in plan.items() for c in influence.scheduled(case, steps, f"layer 0, {name}")]

    sound = looked()
    subject.model.layers[0].attn.attn_sink.data[-1] = 0.0
    faulty = looked()
    assert key(sound) == key(faulty) and all("head" not in where for _, where in key(sound))
    assert {c.found for c in faulty if c.status is Status.FAIL and "sink" in c.name} == {
        f"head {subject.config.num_attention_heads - 1}"
    }


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_tally_stays_in_its_place_whatever_fails(wrong):
    tally = Tally()
    tally.see(wrong, 5, "layer 3, row 1")
    check = tally.counted("x", "part", "source", "block-16 mean")
    assert check.where == "block-16 mean" and check.found == ("layer 3, row 1" if wrong else "")


def test_a_tensor_that_is_mended_is_fixed_and_has_not_vanished():
    bad, good = (list(named("is written", names, 9, "x")) for names in (["layers.0.w", "layers.1.w"], []))
    found = difference(document(*bad, probe="load_ledger"), document(*good, probe="load_ledger"), [], TODAY)
    assert found.exit_code == 0 and len(found.fixed) == 3 and not found.vanished
    back = difference(document(*good, probe="load_ledger"), document(*bad, probe="load_ledger"), [], TODAY)
    assert [c.where for c in back.regressions] == ["layers.0.w", "layers.1.w", ""] or len(back.regressions) == 3


# ---- verdicts ------------------------------------------------------------------------------------

PATH = Check("path", Status.PASS, "layer 2, decode", samples=3)
LOST = Check("path", Status.VACUOUS, "layer 2, decode", note="the paths differ by 1e-7 only")


@pytest.mark.parametrize(
    "checks,verdict,code",
    [
        ([PATH], "clean", 0),
        ([PATH, LOST], "not shown", 0),
        ([PATH, LOST, sink(6, 0.9)], "findings", 1),
        ([LOST], "nothing was measured that could have failed", 2),
    ],
    ids=["shown", "not shown", "red", "nothing"],
)
def test_a_run_that_does_not_show_its_paths_is_not_clean(checks, verdict, code):
    made = report(*checks)
    assert (made.verdict, made.exit_code) == (verdict, code) and json_report.document(made, "s")["verdict"] == verdict
    for text in (markdown.render(made, "s"), page.render(made, "s")):
        assert ("clean" in text.replace("nothing got worse", "")) == (verdict == "clean")
        assert verdict in text
        if verdict == "not shown":
            assert "the path of layer 2, decode is not shown: the paths differ by 1e-7 only" in text


def test_a_probe_of_paths_that_could_not_run_shows_none():
    other = Section("isolation", "i", [Check("a", Status.PASS, samples=1)], 0.0)
    blind = Report(
        "r", PROVENANCE, [other, Section("influence", "i", [vacuous("attend", "the budget was spent")], 0.0)]
    )
    assert blind.verdict == "not shown" and "the budget was spent" in blind.not_shown
    assert Report("r", PROVENANCE, [other]).verdict == "clean"  # nobody asked for a path
    recorded = Section("recorded", "r", [Check("path", Status.PASS, "layer 0", samples=3)], 0.0)
    assert Report("r", PROVENANCE, [other, blind.sections[1], recorded]).verdict == "clean"  # a dump shows it otherwise


@pytest.mark.parametrize("fail_on,codes", [("fail", (0, 0, 1)), ("vacuous", (0, 1, 1)), ("warn", (1, 1, 1))])
def test_what_is_a_finding_is_chosen(run, official, tmp_path, fail_on, codes):
    good = Check("a", Status.PASS, samples=1)
    for status, code in zip((Status.WARN, Status.VACUOUS, Status.ERROR), codes):
        file = tmp_path / f"{status.value}.json"
        file.write_text(json_report.render(report(good, Check("b", status, samples=1), probe="edges"), "s"))
        ended, said = run("report", file, "--out", tmp_path / "out", "--fail-on", fail_on)
        assert ended == code and f"exit code {code}" in said and ("findings" in said) == (code == 1)
        assert json_report.load(tmp_path / "out" / f"{status.value}.json")["exit_code"] == code


def test_a_probe_with_a_fault_ends_an_audit_with_1_and_a_wrong_level_is_refused(run, official, tmp_path):
    assert run(official, "--subject", "files", "--probe", "isolation", "--fail-on", "vacuous")[0] == 1
    code, said = run(official, "--fail-on", "red")
    assert code == 2 and "red" in said


# ---- --out is tried before the work --------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "audit run {0} --out {1}",
        "audit record {0} --out {1}/run.safetensors",
        "audit selftest --out {1}",
        "audit bisect {0} --out {1}",
        "audit diff {0} {0} --out {1}/diff.md",
        "audit report {0} --out {1}",
        "recall {0} --out {1}",
        "fidelity {0} --out {1}",
        "termination {0} --out {1}",
        "sparse-prefill {0} --out {1}",
        "regime measure --out {1}",
    ],
)
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_loaded(command, tmp_path, command_line):
    """The checkpoint does not exist either: it is not what the error is about."""
    (tmp_path / "file").write_text("")
    given = command.format(tmp_path / "absent", tmp_path / "file" / "under").split()
    code, _, err = command_line(*given)
    assert code == 2 and "cannot be written" in err and "absent" not in err and len(err.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_trial_leaves_nothing(tmp_path):
    assert writable(tmp_path / "a" / "b") == tmp_path / "a" / "b" and not (tmp_path / "a").exists()
    assert writable(tmp_path / "a" / "b.md", file=True) and not (tmp_path / "a").exists()
    with pytest.raises(InputError, match="it is a folder, not a file"):
        writable(tmp_path, file=True)
    assert writable(None) is None and not list(tmp_path.iterdir())
