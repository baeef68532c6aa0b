"""`dsv4 kernel audit` on the command line: exit codes, files, JSON, options, one line an error."""

import json
from multiprocessing import forkserver
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from tests.probes.kernel_audit.kernels import written
from tests.terminal import in_terminal

GATE = ("--clause", "gate", "--seed", 1)


@pytest.fixture
def audit(command_line, tmp_path):
    """Function: audit a kernel of the file → (exit code, stdout, stderr)."""
    path = written(tmp_path)
    return lambda name, *more: command_line("kernel", "audit", "rms_norm", "--kernel", f"{path}:{name}", *more)


@pytest.fixture
def terminal(tmp_path):
    """Function: run the command in a forked process, which starts a fork server of its own."""
    forkserver._forkserver._stop()  # a forked process cannot wait for its parent's
    return lambda *words, **how: in_terminal(*words, folder=tmp_path, **how)


@pytest.mark.every
@pytest.mark.parametrize("name,code,verdict", [("good", 0, "PASS"), ("wrong", 1, "FAIL"), ("exits", 2, "ERROR")])
def test_exit_codes_and_files(audit, tmp_path, name, code, verdict):
    folder = tmp_path / "found"
    found, out, err = audit(name, *GATE, "--out", folder)
    report = json.loads((folder / "audit.json").read_text())
    assert found == code and report["verdict"].startswith(verdict)
    assert sorted(f.name for f in folder.iterdir()) == ["audit.json", "audit.md", "audit.sarif", "audit.xml"]
    assert (folder / "audit.md").read_text().startswith(f"# {report['verdict']} rms_norm")
    assert out.strip().startswith(f"{report['verdict']} rms_norm") and "Traceback" not in out + err


def test_json_is_one_document_and_a_seed_repeats_it(audit):
    reports = []
    for _ in range(2):
        code, out, _ = audit("wrong", *GATE, "--json")
        report = json.loads(out)
        assert code == 1 and report["seed"] == 1
        reports.append({k: v for k, v in report.items() if k != "about"})
    assert reports[0] == reports[1]


def test_machines_read_the_findings_as_junit_and_sarif(audit, tmp_path):
    waivers = [dict(probe="gate", name="*", where="random*", reason="known", expires="2999-01-01")]
    waivers[0]["name"] = "results are those of fp64, as near as an honest kernel's"
    (tmp_path / "waivers.json").write_text(json.dumps(waivers))
    _, out, _ = audit("wrong", *GATE, "--out", tmp_path / "found", "--waivers", tmp_path / "waivers.json", "--json")
    report = json.loads(out)
    gate = next(row for row in report["clauses"] if row["clause"] == "gate")
    suites = ElementTree.parse(tmp_path / "found" / "audit.xml").getroot()
    suite = next(s for s in suites if s.get("name") == "gate")
    assert int(suite.get("tests")) == gate["checks"] and int(suite.get("failures")) == gate["findings"] > 0
    assert int(suite.get("skipped")) == len(report["waived"]) > 0
    [run] = json.loads((tmp_path / "found" / "audit.sarif").read_text())["runs"]
    assert sum(r["level"] == "error" for r in run["results"]) == gate["findings"]


def test_one_case_of_a_report_is_run_again(audit, command_line, tmp_path, monkeypatch):
    audit("wrong", *GATE, "--out", tmp_path / "found")
    again = lambda *more: command_line("kernel", "replay", tmp_path / "found" / "audit.json", *more)
    monkeypatch.chdir(tmp_path)  # where the kernel lies: reports have no paths
    code, out, _ = again("--out", tmp_path / "case")
    findings = [line for line in out.splitlines() if line.startswith("gate:")]
    assert code == 1 and len(findings) == 1 and "1 row, float32" in findings[0]  # the smallest
    held = load_file(tmp_path / "case" / "case.safetensors")
    assert {"argument.x", "argument.weight", "expected.y", "found.y"} == set(held)
    x, weight = held["argument.x"].double(), held["argument.weight"].double()
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(exact, held["expected.y"]) and not torch.allclose(exact, held["found.y"].double(), rtol=1e-5)
    assert f"found    {held['found.y'][0, 0]:.5g} " in out and f"expected {held['expected.y'][0, 0]:.5g} " in out
    code, out, _ = again("--kernel", "mine.py:good")
    assert code == 0 and "no finding of gate" in out
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "\n")
    assert "mine.py has changed since the report was written" in again()[2]


def test_a_replay_that_cannot_run_says_why_in_one_line(audit, command_line, tmp_path, monkeypatch):
    audit("wrong", *GATE, "--out", tmp_path / "found")
    audit("good", *GATE, "--out", tmp_path / "sound")
    (tmp_path / "other.json").write_text("[]")
    for words, why in (
        (("found/audit.json",), "mine.py is not here; name the kernel"),
        (
            ("found/audit.json", "no such case", "--kernel", tmp_path / "mine.py:wrong"),
            "has 'no such case' in its name",
        ),
        (("sound/audit.json", "--kernel", tmp_path / "mine.py:good"), "the report has no finding; name a case"),
        (("other.json",), "is none of dsv4 kernel audit"),
        (("absent.json",), "cannot be read: No such file"),
    ):
        code, out, err = command_line("kernel", "replay", tmp_path / words[0], *words[1:])
        assert code == 2 and not out and why in err and err.count("\n") == 1, err


def test_only_the_named_cases_are_asked(audit):
    code, out, _ = audit("good", *GATE, "--case", "heads", "--json")
    report = json.loads(out)
    assert code == 0 and report["verdict"] == "PASS, limited" and report["case"] == "heads"
    assert report["checks"] and all("heads" in c["where"] for c in report["checks"])


def test_clauses_that_were_not_asked_for_are_not_run(audit):
    _, out, _ = audit("good", "--clause", "inputs", "--clause", "empty", "--seed", 1, "--json")
    rows = json.loads(out)["clauses"]
    assert [r["clause"] for r in rows if r["checks"]] == ["gate", "inputs", "empty"]
    assert next(r for r in rows if r["clause"] == "layout")["not_run"] == "not asked for"


def test_clauses_beyond_the_budget_are_said_to_be_not_run(audit):
    code, out, _ = audit("good", "--budget", "0.001s", "--seed", 1)
    assert code == 0 and "PASS, limited rms_norm" in out  # the gate is asked in any case
    assert "NOT RUN: poison, written, guard" in out and "integrity: the budget of 0 s was spent" in out


def test_a_waived_finding_is_listed_and_does_not_count(audit, tmp_path):
    name, file = "results are those of fp64, as near as an honest kernel's", tmp_path / "waivers.json"

    def waived(where: str, expires: str = "2999-01-01"):
        file.write_text(json.dumps([dict(probe="gate", name=name, where=where, reason="known", expires=expires)]))
        code, out, err = audit("wrong", *GATE, "--waivers", file, "--json")
        return code, json.loads(out), err

    code, report, _ = waived("random*")
    assert code == 1 and {w["reason"] for w in report["waived"]} == {"known"}
    assert all("random" in w["finding"] for w in report["waived"])
    code, report, _ = waived("*")
    assert code == 0 and report["verdict"] == "PASS, limited"
    code, report, err = waived("*", "2020-01-01")
    assert code == 1 and report["waived"] == [] and "a waiver of gate expired on 2020-01-01" in err
    file.write_text("{}")
    code, out, err = audit("wrong", *GATE, "--waivers", file)
    assert code == 2 and "waivers waivers.json holds a dict; expected a list" in err


@pytest.mark.every
@pytest.mark.parametrize(
    "words,said",
    [
        (("nope", "--kernel", "reference"), "operation 'nope' has no contract"),
        (("rms_norm", "--kernel", "nope.py:f"), "nope.py"),
        (("rms_norm", "--kernel", "nope"), "kernel 'nope' is no adapter for rms_norm"),
        (("rms_norm", "--kernel", "reference", "--accuracy", "fp4"), "no accuracy class 'fp4'; expected one of fp32"),
        (("rms_norm", "--kernel", "reference", "--device", "tpu"), "--device is 'tpu'; expected cpu, cuda or cuda:N"),
        (("rms_norm", "--kernel", "reference", "--clause", "tea"), "--clause takes gate, poison"),
    ],
)
def test_a_wrong_word_is_one_line_and_nothing_is_written(command_line, tmp_path, words, said):
    folder = tmp_path / "found"
    code, out, err = command_line("kernel", "audit", *words, "--out", folder)
    assert code == 2 and not out.strip()
    assert said in err and err.startswith("error: ") and err.count("\n") == 1
    assert not folder.exists() or not list(folder.iterdir())


def test_a_terminal_shows_what_a_file_gets(terminal, tmp_path):
    words = ("kernel", "audit", "rms_norm", "--kernel", f"{written(tmp_path)}:wrong", *GATE)
    shown = terminal(*words)
    piped = terminal(*words, out=False, err=False)
    assert shown.code == piped.code == 1
    assert "FAIL rms_norm" in shown.shown and "FAIL rms_norm" in piped.out
    assert "\x1b" not in piped.out + piped.err and "Traceback" not in shown.shown + piped.err


def test_an_interrupted_audit_ends_without_a_traceback_and_writes_nothing(terminal, tmp_path):
    words = (
        "kernel",
        "audit",
        "rms_norm",
        "--kernel",
        f"{written(tmp_path)}:hangs",
        *GATE,
        "--out",
        tmp_path / "found",
    )
    done = terminal(*words, interrupt="gate")
    assert done.code == 130 and "Traceback" not in done.shown
    assert not (tmp_path / "found").exists() or not list((tmp_path / "found").iterdir())
