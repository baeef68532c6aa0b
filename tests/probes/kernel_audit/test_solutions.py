"""Solutions of FlashInfer-Trace as subjects of an audit."""

import json
from functools import cache
from pathlib import Path
from shutil import which

import pytest
import torch

from dsv4.kernels.contract import tensors
from dsv4.kernels.contracts import contract_of, contracts
from dsv4.kernels.drawing import Draw
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.widths import SMALL
from dsv4.probes.kernel_audit.acceptance import truth_of
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.errors import KernelAuditError, SubjectFailed
from dsv4.probes.kernel_audit.harness import Harness
from dsv4.probes.kernel_audit.solutions import describe, load_solution, takes
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.kernel_audit.trace.dataset import solution_of
from dsv4.probes.kernel_audit.trace.definitions import Exporter

NORM = "dsv4_rms_norm_bf16_h256"
BODY = "    x32 = x.float()\n    y = x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * weight\n"
RETURNS = f"import torch\n\ndef run(x, weight, eps):\n{BODY}    return y.to(x.dtype)\n"
WRITES = f"import torch\n\ndef run(x, weight, eps, y_out):\n{BODY}    y_out.copy_(y)\n"


@cache
def cases(operation: str):
    return list(contract_of(operation).cases(SMALL, Draw(0, torch.bfloat16)))


@pytest.fixture
def solution(tmp_path):
    """Function: a Solution's file with this spec and main source; other keywords are further sources."""

    def write(text: str, definition: str = NORM, document: dict | None = None, **spec) -> str:
        spec = {"entry_point": "main.py::run", "target_hardware": ["LOCAL"]} | spec
        made = {"name": "mine", "definition": definition, "author": "me", "spec": spec}
        made |= {"sources": [{"path": spec["entry_point"].split("::")[0], "content": text}]} | (document or {})
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(made))
        return str(file)

    return write


def norm(path: str) -> torch.Tensor:
    return load_solution(path)(*cases("rms_norm")[0].arguments)


def right(found: torch.Tensor) -> bool:
    contract, case = contract_of("rms_norm"), cases("rms_norm")[0]
    return truth_of(contract, case, "fp32").judge([found]).ratio <= 1


@pytest.mark.parametrize("operation", list(contracts()))
def test_our_references_are_solutions_of_every_definition(operation, tmp_path):
    contract, kernels = contract_of(operation), {}
    for one in Exporter(contract, SMALL).cases():
        file = tmp_path / f"{one.call.name}.json"
        if file not in kernels:
            file.write_text(json.dumps(solution_of(one, "fib")))
            kernels[file] = load_solution(file), takes(file)
        kernel, why = kernels[file]
        assert why(one.case) is None
        found = list(tensors(kernel(*one.case.arguments)))
        judged = truth_of(contract, one.case, contract.default(one.dtype)).judge(found)
        assert judged.ratio <= 1, (one.call.name, one.case.family, judged)


@pytest.mark.parametrize(
    "spec, text, dialect, results",
    [
        (dict(language="python"), WRITES, "fib", "written"),
        (dict(language="python", destination_passing_style=False), RETURNS, "fib", "returned"),
        (dict(languages=["pytorch"]), WRITES, "sol", "written"),
        (dict(languages=["triton"]), WRITES, "sol", "written"),
        (dict(languages=["triton"], target_hardware=["hopper"]), RETURNS, "flashinfer", "returned"),
        (
            dict(languages=["python"], destination_passing_style=True),
            WRITES.replace("y_out", "y"),
            "flashinfer",
            "written",
        ),
    ],
)
def test_dialects_and_how_they_are_called(solution, spec, text, dialect, results):
    if dialect == "flashinfer":  # by keyword: the order does not matter
        text = text.replace("(x, weight, eps", "(eps, x, weight").replace("y.copy_(y)", "out.copy_(y)")
        text = (
            text.replace("weight, y)", "weight, y)")
            .replace("    y = x32", "    found = x32")
            .replace("return y", "return found")
        )
        text = text.replace("out.copy_(y)", "y.copy_(found)")
    path = solution(text, **spec)
    said = describe(path)
    assert (said["dialect"], said["results"], said["operation"]) == (dialect, results, "rms_norm")
    assert said["inputs"] == ("by keyword" if dialect == "flashinfer" else "by position")
    assert right(norm(path))


def test_what_was_assumed_is_said(solution):
    said = describe(solution(WRITES, languages=["triton"]))["assumed"]
    assert said == [
        "dialect sol, for its target hardware LOCAL",
        "results are passed behind the inputs and written, the default of the dialect sol",
    ]
    assert describe(solution(WRITES, language="python", destination_passing_style=True))["assumed"] == []


def test_results_by_name_and_sources_that_import_each_other(solution):
    text = "from helper import scaled\nfrom .helper import scaled as again\n\ndef run(x, weight, eps):\n"
    text += "    return {'y': scaled(x, weight, eps)}\n"
    helper = f"import torch\n\ndef scaled(x, weight, eps):\n{BODY}    return y.to(x.dtype)\n"
    sources = [{"path": "src/main.py", "content": text.replace("from helper", "from src.helper")}]
    sources.append({"path": "src/helper.py", "content": helper})
    spec = dict(language="python", destination_passing_style=False, entry_point="src/main.py::run")
    assert right(norm(solution("", document={"sources": sources}, **spec)))


def test_packed_rows_arrive_as_int8_pages_and_indices_as_int32(solution):
    text = """import torch
def run(q, weights, keys, visible, scores):
    assert keys.dtype is torch.int8 and keys.shape[1:] == (4, 4352) and visible.dtype is torch.int32
    scores.fill_(1.0)
"""
    path = solution(text, "dsv4_index_scores_fp8_h4_d64_ps64", language="python")
    case = next(c for c in cases("index_scores") if "FP8" in c.label)
    found = load_solution(path)(*case.arguments)
    assert found.shape == (4, 2, case.arguments[2].count) and found.dtype is torch.float32 and (found == 1).all()
    for dialect, dtype in (("languages", "uint8"), ("language", "int8")):
        text = "def run(q, weights, keys, visible):\n    raise ValueError(str(keys.dtype))\n"
        value = ["cutedsl"] if dialect == "languages" else "python"
        path = solution(text, "dsv4_index_scores_fp8_h4_d64_ps64", destination_passing_style=False, **{dialect: value})
        with pytest.raises(ValueError, match=f"torch.{dtype}"):
            load_solution(path)(*case.arguments)


def test_results_with_an_axis_that_no_input_has_are_sized_by_the_name(solution):
    text = "def run(scores, k, visible, entries):\n    entries.copy_(scores.topk(32).indices)\n"
    path = solution(text, "dsv4_topk_entries_fp32_k32", language="python")
    case = next(
        c for c in contract_of("topk_entries").cases(SMALL, Draw(0, torch.float32)) if c.label.startswith("259")
    )
    assert load_solution(path)(*case.arguments).shape == (2, 3, 32)


def test_inputs_of_another_definition_are_refused_before_anything_runs(solution):
    path = solution("def run(*inputs):\n    raise ValueError('ran')\n", language="python")
    kernel, other = load_solution(path), next(c for c in cases("rms_norm") if "heads" in c.label)
    with pytest.raises(UnsupportedInput, match=f"is for {NORM}; these inputs are dsv4_rms_norm_bf16_no_weight_h128"):
        kernel(*other.arguments)
    assert "dsv4_rms_norm_bf16_no_weight_h128" in takes(path)(other) and takes(path)(cases("rms_norm")[0]) is None


def test_a_solution_is_called_once_in_one_way(solution, tmp_path):
    log = tmp_path / "calls"
    text = f"def run(x, weight, eps):\n    open({str(log)!r}, 'a').write('1')\n    raise TypeError('in it')\n"
    with pytest.raises(TypeError, match="in it"):
        norm(solution(text, language="python", destination_passing_style=False))
    assert log.read_text() == "1"


@pytest.mark.parametrize(
    "text, message",
    [
        ("def run(x, weight):\n    pass", "called by position with x, weight, eps: too many positional arguments"),
        ("def run(x, weight, eps):\n    return x, x", "it returned Tensor, Tensor; expected 1 tensors: y"),
        ("def run(x, weight, eps):\n    return None", "it returned NoneType; expected 1 tensors: y"),
        ("def run(x, weight, eps):\n    return {'z': x}", "it returned results called z; expected y"),
        ("def run(x, weight, eps):\n    return x.float()", r"result y is float32 \[9, 256\], expected bfloat16"),
        (
            "def run(x, weight, eps):\n    return x[:1]",
            r"result y is bfloat16 \[1, 256\], expected bfloat16 \[9, 256\]",
        ),
    ],
)
def test_wrong_calls_and_results(solution, text, message):
    with pytest.raises(SubjectFailed, match=message):
        norm(solution(text, language="python", destination_passing_style=False))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(definition="rmsnorm_h7168"), "no definition of dsv4"),
        (dict(language="fortran"), "is in 'fortran'; expected one of cpp"),
        (dict(languages=["pytorch"], language="python"), "expected either language or languages"),
        (dict(entry_point="main.py"), "does not match"),
        (dict(entry_point="main.py::other"), "has no function other in main.py"),
        (dict(document={"sources": [{"path": "../main.py", "content": ""}]}), "expected a path without"),
        (dict(document={"sources": [{"path": "/main.py", "content": ""}]}), "does not match"),
        (dict(document={"sources": [{"path": "b.py", "content": ""}]}), "has no source main.py"),
        (dict(language="cuda"), "bound by tvm-ffi, which is not supported"),
    ],
)
def test_solutions_that_cannot_be_loaded(solution, change, message):
    path = solution(RETURNS, **({"language": "python"} | change))
    with pytest.raises(KernelAuditError, match=message):
        load_solution(path)


def test_files_and_sources_that_cannot_be_read(solution, tmp_path):
    with pytest.raises(KernelAuditError, match="cannot be read: No such file"):
        load_solution(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(KernelAuditError, match="it is not JSON"):
        load_solution(tmp_path / "bad.json")
    with pytest.raises(KernelAuditError, match="cannot be imported: ModuleNotFoundError: No module named 'nowhere'"):
        load_solution(solution("import nowhere\n", language="python"))


CPP = """#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
void run(at::Tensor x, at::Tensor weight, double eps, at::Tensor y) {
  auto x32 = x.to(at::kFloat);
  y.copy_(x32 * at::rsqrt(x32.square().mean(-1, true) + eps) * weight);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""


@pytest.mark.skipif(not (which("ninja") and which("c++")), reason="no compiler")
@pytest.mark.sweep  # a minute of compiling
def test_a_solution_in_cpp(solution):
    spec = dict(language="cpp", binding="torch", entry_point="main.cpp::run")
    with pytest.raises(KernelAuditError, match="does not compile: .*error: #error nothing"):
        norm(solution("#error nothing\n", **spec))
    assert right(norm(solution(CPP, **spec)))


def test_a_solution_returns_what_a_contract_writes_in_place(solution):
    """The schema has no state: the result is a new tensor, and the argument stays as it is."""
    one = next(iter(Exporter(contract_of("rotate"), SMALL).cases()))
    file = solution("", document=solution_of(one, "fib"))
    harness = Harness(SubjectSpec("rotate", file))
    placed = harness.place(one.case.arguments)
    (found,) = harness.call(placed)
    assert truth_of(contract_of("rotate"), one.case, "fp32").judge([found]).ratio <= 1
    assert torch.equal(placed[0], one.case.arguments[0])


def test_a_solution_is_audited_and_its_files_are_removed(solution, tmp_path):
    note = f"\nfrom pathlib import Path\nPath({str(tmp_path / 'note')!r}).write_text(__file__)\n"
    path = solution(WRITES + note, language="python")
    spec = SubjectSpec("rms_norm", path)
    found = audit_kernel(spec, only=("gate",), dtypes=(torch.bfloat16,), takes=takes(path))
    assert found.verdict == "PASS, limited" and found.findings == [] and found.skipped
    source = Path((tmp_path / "note").read_text())
    assert source.suffix == ".py" and not source.parent.parent.exists()
    wrong = solution(WRITES.replace("+ eps", "+ 2 * eps"), language="python")
    found = audit_kernel(SubjectSpec("rms_norm", wrong), only=("gate",), dtypes=(torch.bfloat16,), takes=takes(wrong))
    assert found.verdict == "FAIL" and any("where eps decides" in check.where for check in found.findings)
