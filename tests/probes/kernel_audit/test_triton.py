"""A Triton kernel of rms_norm, which Triton's interpreter runs on a CPU: right, and without the mask of its loads."""

import os
import subprocess
import sys

import pytest
import torch

from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.subject import SubjectSpec
from tests.conftest import ROOT

pytest.importorskip("triton")
SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def norm(x, weight, y, stride, width, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    v = tl.load(x + row * stride + n, mask=n < width, other=0.0).to(tl.float32)
    v = v / tl.sqrt(tl.sum(v * v) / width + eps)
    if HAS_WEIGHT:
        v = v * tl.load(weight + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + n, v, mask=n < width)


def rms_norm(x, weight, eps):
    x, width = x.contiguous(), x.shape[-1]
    weight = None if weight is None else weight.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        given = x if weight is None else weight
        norm[(x.numel() // width,)](x, given, y, width, width, eps, weight is not None, 2 * width)
    return y
"""


def audited(folder, source: str):
    path = folder / "mine.py"
    path.write_text(source)
    few = lambda case: None if case.family in ("random", "sizes") else "two families are enough"
    only = ("gate", "written", "guard", "inputs", "empty")
    spec = SubjectSpec("rms_norm", f"{path}:rms_norm")
    return audit_kernel(spec, seed=1, dtypes=(torch.bfloat16,), only=only, takes=few)


def test_a_triton_kernel_is_audited_through_the_interpreter(tmp_path):
    found = audited(tmp_path, SOURCE)
    assert found.verdict == "PASS, limited", [(c.part, c.note) for c in found.findings]  # families were left out


def test_a_load_without_its_mask_is_found(tmp_path):
    found = audited(tmp_path, SOURCE.replace("+ row * stride + n, mask=n < width, other=0.0)", "+ row * stride + n)"))
    assert "gate" in found.caught


def test_a_triton_kernel_is_interpreted_without_a_variable_of_the_user(tmp_path):
    """In a process of its own that does not ask for the interpreter, as a user's shell does not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "norm.py").write_text(SOURCE)
    command = [sys.executable, "-m", "dsv4", "kernel", "audit", "rms_norm", "--kernel", "norm.py:rms_norm"]
    done = subprocess.run(
        [*command, "--clause", "gate", "--seed", "1"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("PASS, limited rms_norm")
