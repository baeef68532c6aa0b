"""What limits a row that missed its goal: each kernel's time, registers, spills, shared memory and machine
instructions.

Profiling may slow what is timed after it in the same process, so rows are looked at only when all have been timed.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.bench.timing import Machine, device_kernels

INSTRUCTIONS = {  # what a reader asks of the SASS → pattern of its mnemonics
    "wgmma": r"\b[HIQ]GMMA\b",
    "mma": r"\b[HIQ]MMA\b",
    "fma": r"\b(FFMA|HFMA2)\b",
    "load 16 B": r"\bLDG\.E\S*\.128\b",
    "load 8 B": r"\bLDG\.E\S*\.64\b",
    "load ≤ 4 B": r"\bLDG\.E(?!\S*\.(64|128)\b)\S*",
    "async copy": r"\bLDGSTS\b",
    "shared": r"\b(LDS|STS|LDSM|STSM)\b",
    "shuffle": r"\bSHFL\b",
    "barrier": r"\bBAR\b",
    "special": r"\bMUFU\b",
    "local": r"\b(LDL|STL)\b",
}


@dataclass
class Kernel:
    """One kernel of a run. us: time of all its launches, as the profiler has it; sass: instructions as they stand in
    the code, loops counted once. Fields after `us` are None for kernels that are not Triton's."""

    name: str
    launches: int
    us: float
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    warps: int | None = None
    sass: dict[str, int] = field(default_factory=dict)


def count_instructions(sass: str) -> dict[str, int]:
    """Instructions by kind, those that occur."""
    found = {kind: len(re.findall(pattern, sass)) for kind, pattern in INSTRUCTIONS.items()}
    return {kind: count for kind, count in found.items() if count}


def compiled_kernels(run: Callable[[], object]) -> dict:
    """name → Triton's compiled kernel, of every kernel that run launches: what was compiled before is forgotten first,
    and comes back from the cache on disk."""
    from triton.runtime.jit import JITFunction

    functions = {
        id(f): f
        for name, module in list(sys.modules.items())
        if name.startswith("dsv4.kernels.")
        for f in vars(module).values()
        if isinstance(f, JITFunction)
    }.values()
    for function in functions:
        function.device_caches.clear()
    run()
    return {
        kernel.name: kernel
        for function in functions
        for caches in function.device_caches.values()
        for kernel in caches[0].values()
    }


def look(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of one run, slowest first."""
    compiled = compiled_kernels(run)
    count, us = Counter(), Counter()
    for name, took, _ in device_kernels(run):
        count[name] += 1
        us[name] += took
    return [_described(name, count[name], took, compiled.get(name)) for name, took in us.most_common()]


def _described(name: str, launches: int, us: float, kernel) -> Kernel:
    if kernel is None:
        return Kernel(re.sub(r"^void |<.*|\(.*", "", name)[:60], launches, us)
    meta = kernel.metadata
    return Kernel(
        name,
        launches,
        us,
        kernel.n_regs,
        kernel.n_spills,
        meta.shared,
        meta.num_warps,
        count_instructions(kernel.asm["sass"]),
    )


def launch_us(machine: Machine, kernels: int | None) -> float:
    """µs that a chain of so many empty kernels takes."""
    return machine.empty_us + machine.dependent_us * ((kernels or 1) - 1)


def _line(r, k: Kernel) -> str:
    built = " | ".join("–" if value is None else str(value) for value in (k.registers, k.spills, k.shared, k.warps))
    instructions = ", ".join(f"{kind} {n}" for kind, n in k.sass.items())
    return f"| `{r.op}` {r.shape} | `{k.name}` | {k.launches} | {k.us:.1f} | {built} | {instructions} |"


def markdown(results, machine: Machine) -> list[str]:
    """The section on goals missed: where each row's time goes, and what its kernels are made of."""
    missed = [r for r in results if r.verdict == "MISSED"]
    if not missed:
        return []
    lines = [
        "## Goals missed, and what limits them",
        "",
        "Launches: what as many empty kernels take. Reached: bytes and products of the row over the whole time. "
        "Attempts are in `audits/kernel_log.md`.",
        "",
        "| row | cold µs | goal µs | launches µs | floor µs | both, of the time | TB/s | TFLOPS |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in missed:
        cold, empty = r.timing.cold_us, launch_us(machine, r.timing.kernels)
        lines.append(
            f"| `{r.op}` {r.shape} | {cold:.1f} | {r.goal_us:.1f} | {empty:.1f} | {r.floor_us:.2f} | "
            f"{(empty + r.floor_us) / cold:.0%} | {r.bytes / cold / 1e6:.2f} | {r.flops / cold / 1e6:.0f} |"
        )
    seen = [(r, k) for r in missed for k in r.limits]
    if seen:
        lines += [
            "",
            "| row | kernel | launches | µs | registers | spills | shared B | warps | instructions in the code |",
            "|---|---|---:|---:|---:|---:|---:|---:|---|",
        ]
        lines += [_line(r, k) for r, k in seen]
    return [*lines, ""]
