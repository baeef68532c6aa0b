"""compute-sanitizer on a call: accesses beyond allocations, races in shared memory, barriers that not all reach.

The call is made in a process of its own whose tensors are allocations of their own: inside torch's pool every access
looks valid to the tool.

Reports of races and barriers are findings of kernels that were given as a file or a function. Of a published kernel
they are leads: cuBLAS gets such reports too, because the tool does not follow bulk copies that an mbarrier awaits."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from dsv4.probes.kernel_audit.scene import Scene, held, not_run
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.kernel_audit.worker import packed, unpacked
from dsv4.probes.result import Check, Status

TOOLS = {
    "memcheck": "no access is beyond its allocation",
    "racecheck": "shared memory has no race",
    "synccheck": "barriers are reached by all of their threads",
}
LIMIT, ERRORS = 300, 66  # seconds of one tool; its exit code where it found something
HINT = re.compile(
    r"=+ (Invalid .*|(?:Error|Warning): (?!process ).*|Race .*|Barrier error .*|Program hit .*|.*hazard.*)"
)
COUNT = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")
LEAD = "the tool does not know every order that asynchronous copies and mbarriers make: a lead, no finding"


def installed() -> str | None:
    """The tool's path."""
    folders = os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def checked(program: str, tool: str, spec: SubjectSpec, arguments: tuple, templates) -> tuple[str, str]:
    """('', '') of a call without findings, (what was found, '') of one with, ('', why) where the tool did not run."""
    with tempfile.TemporaryDirectory() as folder:
        call, log = Path(folder) / "call", Path(folder) / "log"
        call.write_bytes(packed((spec, arguments, templates)))
        command = [program, "--tool", tool, "--error-exitcode", str(ERRORS), "--log-file", str(log)]
        # Libraries ask the driver for functions that it has not: errors of calls to it are no accesses.
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += [sys.executable, "-m", __name__, str(call)]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
        try:
            done = subprocess.run(command, capture_output=True, env=environment, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return "", f"{tool} gave no answer in {LIMIT} s"
        text = log.read_text(errors="replace") if log.is_file() else ""
    counted = COUNT.search(text)
    none = counted is not None and int(counted[1]) == 0
    if done.returncode == ERRORS and not none:  # with none, the process ended by a fault of its own
        return next((m[1].strip() for m in map(HINT.match, text.splitlines()) if m), "errors")[:200], ""
    if done.returncode == 0 and none:
        return "", ""
    said = (done.stderr.decode(errors="replace").strip().splitlines() or text.splitlines() or [""])[-1]
    return "", f"{tool} ended with exit code {done.returncode}: {said[:160]}"


def run(scene: Scene) -> Iterator[Check]:
    """The first right case, with each tool."""
    if not scene.device.startswith("cuda"):
        yield not_run("sanitizer", "compute-sanitizer needs a CUDA device")
        return
    program = installed()
    if program is None:
        yield not_run("sanitizer", "compute-sanitizer is not installed")
        return
    for truth in scene.few(1):
        for tool, statement in TOOLS.items():
            if scene.late:
                yield not_run("sanitizer", f"the budget was spent before {tool}")
                continue
            spec, name, where = scene.worker.spec, f"{tool}: {statement}", scene.label(truth)
            found, why = checked(program, tool, spec, truth.case.arguments, scene.templates(truth))
            if why:
                yield not_run("sanitizer", why)
            elif found and tool != "memcheck" and not spec.given:
                yield Check(name, Status.WARN, where, "sanitizer", samples=1, note=f"{found}; {LEAD}")
            else:
                yield held("sanitizer", name, where, not found, found)


def main(path: str) -> None:
    """One call, in the process that the tool watches."""
    from dsv4.probes.kernel_audit.harness import Harness

    spec, arguments, templates = unpacked(Path(path).read_bytes())
    harness = Harness(spec)
    harness.call(harness.place(arguments), templates)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
