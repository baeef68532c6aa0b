"""Kernels that crash, hang, raise or refuse: the audit goes on, and says so in one line."""

import multiprocessing
import subprocess
import sys

import pytest
import torch

from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.errors import SubjectFailed
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.result import Status
from tests.probes.kernel_audit.kernels import SOURCE, written

LINE = 1 + next(i for i, line in enumerate(SOURCE.split("\n")) if "the third tile" in line)


def audited(folder, function: str, only=("gate",), limit: float = 30, **more):
    spec = SubjectSpec("rms_norm", f"{written(folder)}:{function}", **more)
    one = lambda case: None if case.family in ("coded", "one number") or "heads" in case.label else "one is enough"
    return audit_kernel(spec, seed=1, dtypes=(torch.bfloat16,), only=only, takes=one, limit=limit)


@pytest.mark.every
@pytest.mark.parametrize(
    "function,said",
    [
        ("exits", "its process ended with exit code 3"),
        ("raises", f"RuntimeError at mine.py:{LINE}: the third tile is missing"),
        ("hangs", "no answer within 1 s; its process was ended"),
    ],
)
def test_a_kernel_that_gives_no_answer_is_an_error_of_every_case(tmp_path, function, said):
    found = audited(tmp_path, function, limit=1 if function == "hangs" else 30)
    assert found.verdict == "ERROR"
    assert {c.note for c in found.checks} == {said}
    assert not multiprocessing.active_children()


def test_a_refused_case_is_a_warning_and_the_verdict_is_limited(tmp_path):
    found = audited(tmp_path, "refuses")
    refused = [c for c in found.checks if c.status is Status.WARN]
    assert found.verdict == "PASS, limited"
    assert [c.note for c in refused] == ["NotImplementedError: a weight is needed"]


def test_a_kernel_that_refuses_every_case_has_no_verdict(tmp_path):
    assert audited(tmp_path, "refuses_all").verdict == "ERROR"


def test_what_a_kernel_prints_is_not_shown(tmp_path, capfd):
    assert audited(tmp_path, "prints").verdict == "PASS, limited"
    shown = capfd.readouterr()
    assert "xxx" not in shown.out + shown.err


@pytest.mark.parametrize("source,said", [("def good(:", "line 1: invalid syntax"), (SOURCE + "\n1 / 0\n", "division")])
def test_a_file_that_cannot_be_imported_is_refused_in_one_line(tmp_path, source, said):
    path = written(tmp_path, source)
    with pytest.raises(SubjectFailed) as error:
        audit_kernel(SubjectSpec("rms_norm", f"{path}:good"), seed=1)
    text = str(error.value)
    assert said in text and "\n" not in text and not text.startswith("KernelNotLoaded")


def test_results_may_be_passed_behind_the_arguments(tmp_path):
    only = ("gate", "written", "guard", "inputs")
    assert audited(tmp_path, "written", only, out_arguments=True).caught == []
    assert audited(tmp_path, "written", ("gate",)).verdict == "ERROR"  # called without memory for its result


def test_a_kernel_of_too_few_arguments_is_refused_with_the_names_of_those_it_must_take(tmp_path):
    with pytest.raises(SubjectFailed) as error:
        audited(tmp_path, "two")
    assert "it takes 2 positional arguments, expected those of the contract: x, weight, eps" in str(error.value)


def test_hints_at_the_end_may_be_left_out():
    from dsv4.kernels.contracts import contract_of
    from dsv4.probes.kernel_audit.harness import taken

    contract = contract_of("sparse_attention")
    hints = [a.name for a in contract.arguments if a.hint]
    assert hints
    needed = [a.name for a in contract.arguments if not a.hint]
    function = eval(f"lambda {', '.join(needed)}: None")
    assert taken(function, contract, False) == len(needed)
    assert taken(lambda *a: None, contract, False) == len(contract.arguments)


def test_a_script_needs_no_guard():
    script = """
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.subject import SubjectSpec
print(audit_kernel(SubjectSpec("rms_norm", "reference"), only=("gate",)).verdict)
"""
    found = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=False)
    assert found.stdout == "PASS, limited\n" and "Traceback" not in found.stderr, found.stderr


def test_a_process_whose_parent_has_gone_ends_without_a_word():
    code = (
        "from multiprocessing import Pipe\n"
        "from dsv4.probes.kernel_audit.subject import SubjectSpec\n"
        "from dsv4.probes.kernel_audit.worker import serve\n"
        "kept, gone = Pipe()\ngone.close()\nserve(kept, SubjectSpec('rms_norm', 'reference'), 1, '.')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
