"""scripts/kernel_table.py: reports of kernels become one table, are thinned, and are registered in audits/."""

import json
import re
from datetime import date

import pytest
import torch

from dsv4.kernels.contracts import contract_of
from dsv4.probes.kernel_audit.audit import KernelAudit
from dsv4.probes.kernel_audit.document import document, markdown, text
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.report.waivers import load_waivers, sorted_out
from dsv4.probes.result import Check, Status
from scripts import audit_kernels, audits_table, kernel_table

COMMAND = "python -m scripts.audit_kernels --device cuda --out audits/kernels"


def check(part: str, name: str, status: Status, measured=None) -> Check:
    return Check(name, status, part=part, where="9 tokens", measured=measured, unit="× limit")


CHECKS = [
    check("gate", "results are right", Status.PASS, 0.41),
    check("poison", "NaN that may not be read | is not", Status.FAIL, 37.0),
    *(check("poison", "NaN that may not be read | is not", Status.FAIL, 2.0) for _ in range(40)),
]


def audited(operation: str, kernel: str, checks: list[Check]) -> tuple[KernelAudit, dict]:
    spec = SubjectSpec(operation, kernel, "cpu")
    skipped = {"random, fp32": "it takes bf16", "zeros, fp32": "it takes bf16", "random, 3 dims": "it takes 64 dims"}
    audit = KernelAudit(spec, contract_of(operation), "flash", "default", 1, checks, skipped)
    return audit, document(audit, COMMAND, "2026-11-25")


def bench(operation: str, **ratios) -> dict:
    """A made-up report of a benchmark, one row a ratio."""
    time = lambda kernel, ratio: {"kernel": kernel, "verdict": "right" if ratio else "wrong", "ratio": ratio}
    rows = [{"label": f"{n} rows", "times": [time(k, ratio) for k, ratio in ratios.items()]} for n in (1, 32, 2048)]
    _, about = audited(operation, "ours", [])
    return {"about": about["about"], "operation": operation, "rows": rows}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """audits/ with two audits and one benchmark, thinned, as scripts/audit_kernels.py writes them."""
    for kernel, checks in (("torch", CHECKS), ("ours", CHECKS[:1])):
        audit, report = audited("rms_norm", kernel, checks)
        place = tmp_path / "kernels" / "rms_norm" / kernel / "cpu"
        place.mkdir(parents=True)
        (place / "audit.json").write_text(text(kernel_table.thinned(report)))
        (place / "audit.md").write_text(markdown(report, audit.checks, audit.findings))
    place = tmp_path / "kernels" / "rms_norm" / "bench" / "cpu"
    place.mkdir(parents=True)
    (place / "bench.json").write_text(json.dumps(bench("rms_norm", ours=[1, 1, 1], torch=[0.5, 0.48, 0.52], vllm=None)))
    (tmp_path / "index.json").write_text("{}\n")
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(audits_table, "AUDITS", tmp_path)
    monkeypatch.setattr(kernel_table, "AUDITS", tmp_path)
    return tmp_path


def test_a_thinned_report_is_small_and_says_so():
    _, report = audited("rms_norm", "torch", CHECKS)
    found = kernel_table.thinned(report)
    assert len(found["checks"]) == kernel_table.KEPT and {c["status"] for c in found["checks"]} == {"FAIL"}
    assert found["skipped_cases"] == 3 and sorted(found["skipped"].values()) == ["it takes 64 dims", "it takes bf16"]
    assert [r | {"about": a["about"]} for r, a in zip(found["clauses"], report["clauses"])] == report["clauses"]
    assert "left out" in found["thinned"] and "about" not in found["clauses"][0]
    assert len(text(found)) < 12_000


def test_the_table_has_a_row_a_kernel_with_its_findings_and_speed(folder, capsys):
    kernel_table.main([])
    head, _, ours, torchs = capsys.readouterr().out.strip().split("\n")
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in (head, ours, torchs)]
    assert [len(row) for row in cells] == [len(kernel_table.COLUMNS)] * 3
    assert cells[1][:2] == ["`rms_norm`", "ours"] and cells[1][3:5] == ["PASS, limited", "0.41 (gate)"]
    assert cells[1][-1] == "1"
    kernel, version, verdict, worst, _, words, speed = cells[2][1:]
    assert (kernel, version, verdict) == ("torch", "torch.nn.functional.rms_norm", "FAIL")
    assert worst == "37 (poison)" and words.count("may not be read \\|") == 1 and "3 cases not taken" in words
    assert speed == "0.50 [0.48, 0.52] (1 rows); 0.50 [0.48, 0.52] (2048 rows)"


def test_a_page_gets_the_table_between_its_marks(folder):
    page = folder / "page.md"
    page.write_text(f"# Kernels\n\n{kernel_table.BEGIN}\nold\n{kernel_table.END}\n\nrest\n")
    kernel_table.main(["--into", str(page)])
    kernel_table.main(["--into", str(page)])
    found = page.read_text()
    assert found.count("| `rms_norm` |") == 2 and "old" not in found and found.endswith("\nrest\n")
    page.write_text("# Kernels\n")
    with pytest.raises(SystemExit, match=r"page\.md has no lines"):
        kernel_table.main(["--into", str(page)])


def test_the_short_table_has_other_peoples_kernels_alone(folder, capsys):
    kernel_table.main(["--short"])
    head, _, row = capsys.readouterr().out.strip().split("\n")
    cells = re.split(r"(?<!\\) \| ", row[2:-2])
    assert len(cells) == len(kernel_table.SHORT) and head.startswith("| operation | kernel | clauses held |")
    assert cells[:3] == ["`rms_norm`", "torch.nn.functional.rms_norm", "1 of 2"]
    assert cells[5].startswith("poison: ") and cells[6].startswith("0.50 [0.48, 0.52]")


def test_reports_are_registered_and_stamped(folder, capsys):
    kernel_table.main(["--register"])
    new = capsys.readouterr().out.split()
    assert new == [f"kernels/rms_norm/{k}" for k in ("bench/cpu/bench", "ours/cpu/audit", "torch/cpu/audit")]
    kernel_table.main(["--register"])
    assert capsys.readouterr().out.strip() == ""
    entries = audits_table.index()
    assert entries[new[2]]["measures"] == ["kernels/rms_norm", "probes/kernel_audit"]
    assert audits_table.main([]) == 0, capsys.readouterr().err
    for path in audits_table.files():
        found = audits_table.header(path)
        assert audits_table.entry_of(path, entries) in new and found.command == COMMAND
        assert re.fullmatch(r"[0-9a-f]{7,40}", found.commit) and "torch" in found.versions
    assert set(audits_table.standing()) == set(new)


def test_a_kernel_that_is_not_here_is_one_line_of_a_benchmark(monkeypatch, tmp_path):
    monkeypatch.setenv("PEERS", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = audit_kernels.parsed(["--bench", "--out", str(tmp_path), "--operation", "mhc_post"])
    lines = audit_kernels.bench_one("mhc_post", options).split("\n")
    assert [line.split(": ")[0] for line in lines] == [
        "NOT RUN mhc_post · sglang",
        "NOT RUN mhc_post · flashinfer",
        "NOT RUN mhc_post",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_committed_audits_and_waivers_let_every_timed_kernel_be_timed(monkeypatch):
    """As the command of docs/kernels_of_others.md asks; the benchmarks' own verdicts are the other side."""
    monkeypatch.setattr(audit_kernels, "device", lambda given: "cuda (NVIDIA H100 80GB HBM3)")
    arguments = audit_kernels.parsed(
        ["--bench", "--device", "cuda", "--audited", str(kernel_table.AUDITS / "kernels"), "--out", "unused"]
    )
    file = kernel_table.AUDITS.parent / "scripts" / "kernel_waivers.json"
    waivers, _ = sorted_out(load_waivers(file), date(2026, 11, 26))
    benches = [json.loads(f.read_text()) for f in kernel_table.AUDITS.glob("kernels/*/bench/h100/bench.json")]
    asked = [(b["operation"], kernel, said) for b in benches for kernel, said in b["audits"].items()]
    passes = lambda verdict: (verdict or "").startswith("PASS")
    off = [(*at, said) for *at, said in asked if passes(audit_kernels.audited(*at, arguments, waivers)) != passes(said)]
    assert len(asked) > 40 and off == []


def test_findings_that_a_benchmark_needs_are_not_thinned():
    late = [check("capture", "it can be captured", Status.FAIL) for _ in range(20)]
    _, report = audited("rms_norm", "torch", CHECKS + late)
    kept = kernel_table.thinned(report)["checks"]
    assert sum(c["part"] == "capture" for c in kept) == 20 and sum(c["part"] == "poison" for c in kept) == 12


def test_the_newest_audit_of_a_kernel_is_its_row():
    _, old = audited("rms_norm", "torch", CHECKS)
    new = json.loads(json.dumps(old))
    old["about"]["date"], new["about"]["date"], new["verdict"] = "2026-11-26T10:00:00Z", "2026-11-29T06:00:00Z", "FAIL"
    for reports in ([old, new], [new, old]):
        assert [r["verdict"] for r in kernel_table.newest(reports)] == ["FAIL"]
        assert kernel_table.table(reports).count("`rms_norm`") == 1
