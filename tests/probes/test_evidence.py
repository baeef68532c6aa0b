"""What counts as evidence: places that do not move with what was measured, verdicts, and runs that are long enough."""

import json
from datetime import date

import pytest

from dsv4.probes.difference import difference
from dsv4.probes.formats import json_report, junit, sarif
from dsv4.probes.gqa.steps import Tally
from dsv4.probes.influence import Influence
from dsv4.probes.load_ledger import named
from dsv4.probes.probe import execute
from dsv4.probes.report import Report, Section
from dsv4.probes.result import Check, Status, compare
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
    subject = OurSubject(official)
    key = lambda checks: {(c.name, c.where) for c in checks if "sink" in c.name}
    sound = execute(Influence(), subject)[0]
    for block in subject.model.layers:
        block.attn.attn_sink.data[-1] = 0.0
    faulty = execute(Influence(), subject)[0]
    assert key(sound) == key(faulty) and all("head" not in where for _, where in key(sound))
    assert {c.found for c in faulty if c.status is Status.FAIL and c.part == "sink"} == {
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
