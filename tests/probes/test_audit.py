"""`dsv4 audit`: exit codes, budget, subjects, what it writes."""

import json

import pytest

from dsv4.errors import InputError
from dsv4.kernels.errors import Dsv4Error
from dsv4.probes.audit import audit, open_subject, seconds
from dsv4.probes.probe import CATALOGUE
from dsv4.probes.report import json_report
from dsv4.probes.result import Status


def test_a_clean_probe_ends_with_0_and_writes_every_format(run, official, tmp_path):
    code, err = run(official, "--probe", "isolation", "--out", tmp_path)
    assert code == 0 and "PASS" in err and "isolation" in err
    assert {f.suffix for f in tmp_path.iterdir()} == {".md", ".html", ".json", ".xml", ".sarif"}
    [file] = tmp_path.glob("*.json")
    report = json_report.load(file)
    assert [section["probe"] for section in report["sections"]] == ["isolation"] and report["verdict"] == "clean"
    code, err = run("report", file, "--out", tmp_path / "again", "--baseline", file)
    assert (
        code == 0
        and "clean" in err
        and {f.suffix for f in (tmp_path / "again").iterdir()} == {f.suffix for f in tmp_path.iterdir() if f.is_file()}
    )
    assert "nothing got worse" in (tmp_path / "again" / f"{file.stem}.md").read_text()


def test_another_backend_does_not_write_over_the_first(run, official, tmp_path):
    for backend in ("cpu", "reference"):
        assert run(official, "--probe", "config_ledger", "--backend", backend, "--out", tmp_path)[0] == 0
    stem = f"{official.name}_ours_fp32"
    assert {f.name for f in tmp_path.glob("*.md")} == {f"{stem}.md", f"{stem}_reference.md"}


def test_what_a_subject_cannot_do_is_no_success(run, official):
    code, err = run(official, "--subject", "files", "--probe", "isolation")
    assert code == 2 and "VACUOUS" in err


@pytest.mark.parametrize(
    "args,message",
    [
        (("--probe", "nonsense"), "probe 'nonsense' is unknown"),
        (("--subject", "x"), "subject 'x' is unknown"),
        (("--budget", "soon"), "--budget is 'soon'"),
    ],
)
def test_bad_input_is_one_line_and_2(run, official, args, message):
    code, err = run(official, *args)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_the_budget_leaves_nothing_out_silently(official):
    report = audit(open_subject(official, "files"), ["isolation", "schedules"], budget=-1.0)
    assert [c.status for _, c in report.checks] == [Status.VACUOUS] * 2
    assert all("budget" in c.note for _, c in report.checks)


def test_every_probe_of_the_catalogue_is_in_a_report(official):
    report = audit(open_subject(official, "files"), budget=-1.0)
    assert [s.probe for s in report.sections] == [n for n in CATALOGUE if n not in report.left_out]
    assert len(report.sections) >= 25 and report.exit_code == 2


def test_seconds():
    assert seconds("60s") == 60 and seconds("2m") == 120 and seconds("90") == 90
    with pytest.raises(InputError):
        seconds("-3")
    assert issubclass(InputError, Dsv4Error)


def test_two_audits_are_compared(run, official, tmp_path, capsys):
    run("run", official, "--probe", "isolation", "--out", tmp_path)
    [file] = tmp_path.glob("*.json")
    code, _ = run("diff", file, file)
    assert code == 0
    report = json_report.load(file)
    report["sections"][0]["checks"][0]["status"] = "FAIL"
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(report))
    code, _ = run("diff", file, worse, "--out", tmp_path / "diff.md")
    assert code == 1 and "a row in a batch equals the row alone" in (tmp_path / "diff.md").read_text()
    code, err = run("diff", file, tmp_path / "absent.json")
    assert code == 2 and len(err.strip().splitlines()) == 1
    (tmp_path / "w.json").write_text("{}")
    code, err = run("diff", file, file, "--waivers", tmp_path / "w.json")
    assert code == 2 and "expected a list" in err
