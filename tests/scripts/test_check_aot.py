"""The compile check: a kernel that does not compile fails it, and products in TF32 are seen."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CASES = """
import triton
import triton.language as tl

@triton.jit
def copy(X, Y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i, mask=i < n), mask=i < n)

@triton.jit
def broken(X, B: tl.constexpr):
    tl.store(X, no_such_name)

def cases_for(capability):
    types = {"X": "*bf16", "Y": "*bf16", "n": "i32", "B": "constexpr"}
    return [("copies", copy, types, {"B": 256}, {"num_warps": 4}),
            ("breaks", broken, {"X": "*bf16", "B": "constexpr"}, {"B": 1}, {})]
"""


def test_a_kernel_that_does_not_compile_fails_the_check(tmp_path):
    folder = tmp_path / "aot_cases"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "some.py").write_text(CASES)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    ran = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "check_aot.py",
            "--modules",
            "aot_cases",
            "--capabilities",
            "80",
            "--jobs",
            "1",
            "--json",
            str(tmp_path / "aot.json"),
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 1, ran.stderr
    rows = {r["name"]: r for r in json.loads((tmp_path / "aot.json").read_text())["rows"]}
    assert not rows["copies"]["error"] and rows["copies"]["registers"] > 0 and rows["copies"]["shared"] == 0
    assert (
        "no_such_name" in rows["breaks"]["error"]
        and "| breaks | FAILED |" in ran.stdout
        and "1 of 2 compiled" in ran.stdout
    )


def test_every_kernel_that_a_launcher_launches_is_compiled():
    """In a process of its own, in which Triton compiles and does not interpret."""
    ask = "from scripts.aot.launches import unlaunched; print(unlaunched([(8, 0), (9, 0)]))"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(Path.home())}
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ran.returncode == 0 and ran.stdout == "[]\n", ran.stdout + ran.stderr


def test_tf32_is_seen_in_every_kind_of_product():
    from scripts import check_aot

    for line in (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1};",
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%f1};",
        "@%p1 tcgen05.mma.cta_group::1.kind::tf32 [ %r1 ], %rd1;",
    ):
        assert check_aot.re.search(check_aot.TF32, line)
    assert not check_aot.re.search(
        check_aot.TF32, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}; cvt.rna.tf32.f32 %r1;"
    )
