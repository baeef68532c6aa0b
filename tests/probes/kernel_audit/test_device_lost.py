"""A kernel that leaves the device unusable: a finding of the clause that saw it, and of no other."""

from types import SimpleNamespace

import pytest
import torch

from dsv4.probes.kernel_audit import worker
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.clauses import sanitizer, state
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.scene import held
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.result import Status

MISALIGNED = "CUDA error: misaligned address"
ALIGNED_ONLY = """
import torch
import triton
import triton.language as tl


@triton.jit
def far(at):
    tl.store(at + (1 << 44), 1.0)


def norm(x, weight, eps):
    if x.data_ptr() % 16:  # what a kernel with wide loads does: an access that faults
        far[(1,)](torch.zeros(1, device=x.device))
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)
"""


def unusable(*_):
    raise RuntimeError(MISALIGNED + "\nand more")


def test_a_device_that_answers_nothing_more_is_lost(monkeypatch):
    assert worker.lost(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert worker.lost(torch.device("cuda")) == ""
    monkeypatch.setattr(torch.cuda, "synchronize", unusable)
    assert worker.lost(torch.device("cuda")) == MISALIGNED


@pytest.mark.parametrize("gone,error", [("", SubjectFailed), (MISALIGNED, SubjectDied)])
def test_the_process_of_a_lost_device_is_ended_and_another_answers_the_next_question(monkeypatch, gone, error):
    """An exception is a failure of the call where the device still answers."""
    answers = [("lost", gone)] if gone else [("failed", "RuntimeError: too narrow")]
    subject, ended = worker.Worker(SubjectSpec("rms_norm", "honest")), []
    subject.process = SimpleNamespace(kill=lambda: ended.append("killed"), join=lambda _: None)
    subject.folder = SimpleNamespace(cleanup=lambda: ended.append("its files removed"))
    subject.connection = SimpleNamespace(poll=lambda _: True, recv_bytes=lambda: worker.packed(answers.pop()))
    with pytest.raises(error):
        subject._answer(1)
    assert (subject.process is None, subject.deaths, len(ended)) == ((True, 1, 2) if gone else (False, 0, 0))


def test_each_thread_of_the_state_clause_calls_the_kernel(monkeypatch):
    """A device without an index names the first one."""
    chosen, called = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append(index + 0))
    harness = SimpleNamespace(
        device=torch.device("cuda"),
        contract=SimpleNamespace(written=()),
        function=print,
        fresh=lambda problem: lambda: problem,
        steady=lambda fresh, template: fresh(),
        bits=lambda arguments, template: called.append(arguments) or arguments,
    )
    assert state.in_turn(harness, ("a", "b"), (None, None)) == ""
    assert (set(chosen), len(called)) == ({0}, 6 + 2 * 4)


@pytest.mark.parametrize(
    "tool,kernel,status",
    [
        ("racecheck", "marlin", Status.WARN),
        ("racecheck", "mine.py:norm", Status.FAIL),
        ("memcheck", "marlin", Status.FAIL),
    ],
)
def test_a_race_in_a_published_kernel_is_a_lead_and_an_access_beyond_memory_is_a_finding(
    monkeypatch, tool, kernel, status
):
    spec, told = SubjectSpec("rms_norm", kernel, "cuda"), {tool: ("Race reported", "")}
    scene = SimpleNamespace(
        device="cuda",
        late=False,
        few=lambda _: [SimpleNamespace(case=SimpleNamespace(arguments=()))],
        templates=lambda _: [],
        label=lambda _: "a case",
        worker=SimpleNamespace(spec=spec),
    )
    monkeypatch.setattr(sanitizer, "installed", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitizer, "checked", lambda _, name, *more: told.get(name, ("", "")))
    found = {c.name.split(":")[0]: c for c in sanitizer.run(scene)}
    assert found.pop(tool).status is status
    assert {c.status for c in found.values()} == {held("sanitizer", "", "", True, "").status}


@pytest.mark.parametrize(
    "log,found",
    [
        ("========= Error: Race reported between Read access at gemm+0xb30\n", "Error: Race reported"),
        ("========= Barrier error detected. Divergent thread(s) in block.\n", "Barrier error detected"),
        ("========= Program hit invalid argument (error 1)\n========= ERROR SUMMARY: 34 errors\n", "Program hit"),
        ("========= Error: process didn't terminate successfully\n========= ERROR SUMMARY: 34 errors\n", "errors"),
        ("========= Error: process didn't terminate successfully\n========= ERROR SUMMARY: 0 errors\n", ""),
    ],
)
def test_a_process_that_ended_on_its_own_is_no_finding_of_the_tool(tmp_path, log, found):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "{log.strip()}" > "$6"\nexit {sanitizer.ERRORS}\n')
    tool.chmod(0o755)
    said, why = sanitizer.checked(str(tool), "racecheck", SubjectSpec("rms_norm", "honest"), (), [])
    assert said.startswith(found) and bool(said) == bool(found) and bool(why) == (not found)


@pytest.mark.gpu
def test_a_fault_of_the_device_is_a_finding_of_the_layout_and_no_clause_behind_it_has_one(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "mine.py"
    path.write_text(ALIGNED_ONLY)
    spec = SubjectSpec("rms_norm", f"{path}:norm", "cuda")
    takes = lambda case: None if case.family == "random" and "heads" not in case.label else "one is enough"
    only = ("gate", "layout", "empty", "batch", "state")
    found = audit_kernel(spec, seed=1, dtypes=(torch.bfloat16,), only=only, takes=takes)
    assert {c.part for c in found.findings} == {"layout"}
    assert {c.name.removeprefix("the result is right with ") for c in found.findings} == {
        "x laid out with 4 bytes off",
        "x laid out with 8 bytes off",
    }
    assert all("left the device unusable" in c.note for c in found.findings)
