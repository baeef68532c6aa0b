"""`dsv4 kernel list`, `show` and `export`."""

import json
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from dsv4.commands import kernel_list as listing
from dsv4.errors import InputError
from dsv4.kernels.cache_rows import KEY_FORMATS
from dsv4.kernels.contracts import contracts
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.kernel_audit import catalogue
from dsv4.probes.kernel_audit.errors import KernelAuditError

app = typer.Typer()
for name, function in {"list": listing.list_kernels, "show": listing.show, "export": listing.export}.items():
    app.command(name)(function)


def kernel(*words):
    """stdout of `dsv4 kernel` with these words; what it raises is raised."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_the_list_has_every_operation_and_says_what_has_no_contract():
    rows = {row["operation"]: row for row in json.loads(kernel("list", "--json"))["operations"]}
    assert set(rows) == set(OPERATIONS | GQA_OPERATIONS | COMPOSITIONS)
    assert {name for name, row in rows.items() if row["contract"]} == set(contracts())
    assert rows["sparse_attention"]["ours"] == ["reference", "cpu", "training", "triton"]
    assert rows["moe"]["kind"] == "composition of experts, shared_expert" and rows["moe"]["about"]
    lines = kernel("list").splitlines()
    assert lines[0].split()[:2] == ["operation", "contract"] and len(lines) == 1 + len(rows)
    assert not any(line != line.rstrip() for line in lines)


def test_published_kernels_are_listed_where_there_are_adapters(monkeypatch):
    monkeypatch.setattr(catalogue, "ADAPTERS", "there_are_none")
    assert catalogue.published("rms_norm") == []
    module = types.ModuleType("some_adapters")
    module.known = lambda operation: [("peer", False, f"{operation}: not here")]
    module.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "some_adapters", module)
    monkeypatch.setattr(catalogue, "ADAPTERS", "some_adapters")
    assert "peer (not here)" in kernel("list")
    assert "published: peer, not here: rms_norm: not here" in kernel("show", "rms_norm")


@pytest.mark.few(operation=["sparse_attention", "index_scores", "rotate", "write_rows", "mhc_pre", "silu_mul"])
@pytest.mark.parametrize("operation", list(contracts()))
def test_a_contract_is_shown(operation):
    found = json.loads(kernel("show", operation, "--json"))
    contract = contracts()[operation]
    assert [row["name"] for row in found["inputs"]] == [a.name for a in contract.arguments]
    assert [row["name"] for row in found["outputs"]] == [o.name for o in contract.outputs]
    assert found["accuracy"] == list(contract.classes) and found["edges"] == list(contract.edges) and found["work"]
    # an axis has no size where the first case does not say it, as of "any leading axes"
    assert all(size is None or size > 0 for row in found["inputs"] for _, size in row["shape"] or ())
    text = kernel("show", operation)
    assert all(a.name in text and a.about in text for a in contract.arguments)
    assert all(edge in text for edge in contract.edges)


def test_shapes_of_published_models_and_formats():
    text = kernel("show", "rms_norm", "--shapes", "pro")
    assert "[rows 9, hidden 7168]" in text and "pro shapes" in text
    text = kernel("show", "index_scores")
    keys = [form.option for form in KEY_FORMATS]
    assert f"formats: {', '.join(['bf16', *keys, 'fp32', *(f'{key}_fp32' for key in keys)])}" in text
    assert "activations: bfloat16 or float32, or packed rows" in text


def test_definitions_are_printed_as_json():
    for dialect, dtype in (("fib", "int8"), ("sol", "int8"), ("flashinfer", "uint8")):
        found = json.loads(kernel("show", "index_scores", "--format", dialect))
        kinds = {d["inputs"]["keys"]["dtype"] for d in found}
        assert kinds == {"bfloat16", "float32", dtype}


def test_operations_without_a_contract():
    without = next(name for name in sorted(OPERATIONS | GQA_OPERATIONS | COMPOSITIONS) if name not in contracts())
    assert "has no contract" in kernel("show", without)
    for words in (("show", without, "--format", "fib"), ("export", without, "--out", "nowhere")):
        with pytest.raises(InputError, match=f"{without} has no contract; expected one of"):
            kernel(*words)
    with pytest.raises(InputError, match="'nothing' is neither an operation nor a composition; see: dsv4 kernel list"):
        kernel("show", "nothing")


def test_export(tmp_path):
    text = kernel("export", "rms_norm", "topk_entries", "--out", tmp_path / "set")
    assert [line.split() for line in text.splitlines()][1] == ["dsv4_rms_norm_bf16_h256", "7"]
    assert (tmp_path / "set/definitions/dsv4_topk_entries/dsv4_topk_entries_fp32_k32.json").is_file()
    with pytest.raises(KernelAuditError, match="set is there already; expected the name of a new folder"):
        kernel("export", "rms_norm", "--out", tmp_path / "set")
    found = json.loads(kernel("export", "rms_norm", "--out", tmp_path / "sol", "--format", "sol", "--json"))
    assert found["definitions"]["dsv4_rms_norm_bf16_h256"] == 7 and found["not_exported"] == {}
    assert (tmp_path / "sol/dsv4_rms_norm_bf16_h256/reference.py").is_file()


def finding(**changes) -> dict:
    check = {"name": "results are those of fp64", "status": "FAIL", "where": "random, 9 rows, bfloat16"}
    check |= {"part": "gate", "measured": 3.5, "threshold": 1.0, "unit": "× limit"}
    return check | {"note": "relative L2 of a row", "found": "y[2]"} | changes


def test_findings_of_audits_become_traces(tmp_path):
    checks = [
        finding(),
        finding(where="zeros, 3 rows, bfloat16", status="ERROR", note="it raised"),
        finding(where="sizes, 9 rows, bfloat16", note="shape and dtype"),
        finding(where="coded, 9 rows, bfloat16", status="PASS"),
    ]
    report = {"operation": "rms_norm", "kernel": "mine.py:run", "shapes": "small", "seed": 3, "checks": checks}
    report["about"] = {"device": "cpu", "versions": {"torch": "2.11"}, "date": "2026-01-02"}
    file = tmp_path / "audit.json"
    file.write_text(json.dumps(report))
    words = "export", "rms_norm", "--report", file, "--out", tmp_path / "set"
    with pytest.raises(InputError, match="export with --shapes small --seed 3"):
        kernel(*words)
    with pytest.raises(InputError, match="SOL-ExecBench has no place for traces"):
        kernel(*words, "--format", "sol", "--seed", 3)
    assert "3 findings of 1 reports are traces" in kernel(*words, "--seed", 3)
    (lines,) = (tmp_path / "set/traces").rglob("*.jsonl")
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    statuses = [line["evaluation"]["status"] for line in found]
    assert statuses == ["INCORRECT_NUMERICAL", "INCORRECT_SHAPE", "RUNTIME_ERROR"]
    assert found[0]["evaluation"]["correctness"]["extra"]["dsv4"][0]["measured"] == 3.5
    assert {line["solution"] for line in found} == {"mine.py:run"}
    data = pytest.importorskip("flashinfer_bench.data")
    assert len(data.TraceSet.from_path(str(tmp_path / "set")).traces["dsv4_rms_norm_bf16_h256"]) == 3


def test_reports_that_are_none(tmp_path):
    for content, message in (("{", "cannot be read"), ("{}", "is none of dsv4 kernel audit")):
        (tmp_path / "audit.json").write_text(content)
        with pytest.raises(InputError, match=message):
            kernel("export", "--report", tmp_path / "audit.json", "--out", tmp_path / "set")
    assert not (tmp_path / "set").exists()
