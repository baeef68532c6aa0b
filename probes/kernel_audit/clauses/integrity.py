"""The process is as it was: clocks, threads, global settings; results are plain tensors (every call looks at that)."""

import threading
from collections.abc import Iterator

import torch

from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import clocks
from dsv4.probes.kernel_audit.scene import Scene, held
from dsv4.probes.result import Check


def state(harness, arguments, templates):
    """(functions that were replaced since before the kernel was loaded, threads that it left, settings that a call
    changed)."""
    settings = _settings()
    harness.call(harness.place(arguments), templates)
    changed = [k for k, v in _settings().items() if settings[k] != v]
    replaced = [k for k, v in clocks().items() if harness.honest_clocks[k] is not v]
    return replaced, threading.active_count() - harness.threads, changed


def _settings() -> dict:
    return {
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
    }


def run(scene: Scene) -> Iterator[Check]:
    """After all other clauses."""
    for truth in scene.few(1):
        where = ""
        try:
            replaced, threads, changed = scene.worker.ask(state, truth.case.arguments, scene.templates(truth))
        except (SubjectFailed, SubjectDied) as error:
            yield held("integrity", "the process answers", where, False, str(error))
            return
        yield held("integrity", "clocks and comparisons are as they were", where, not replaced, ", ".join(replaced))
        yield held("integrity", "no thread is left behind", where, threads <= 0, f"{threads} threads")
        yield held("integrity", "global settings of torch are as they were", where, not changed, ", ".join(changed))
