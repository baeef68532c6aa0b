"""Which kernels a computation launches, without a GPU: it runs on tensors of the device `meta`, which have shapes and
addresses and no memory, and each launch is kept as Triton would specialise it instead of being run."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from dsv4.kernels.launch import GPU, assumed


class Launch(NamedTuple):
    """One launch: its arguments, and options as `kernel[grid](…)` was given them. key: what it is specialised by."""

    kernel: JITFunction
    args: tuple
    options: dict[str, Any]
    key: str = ""


class Recording:
    """Launches that were made, all of them in `made`; `distinct` are those that Triton compiles separately."""

    def __init__(self, target: GPUTarget):
        self.made: list[Launch] = []
        self._distinct: dict[tuple[int, str], Launch] = {}
        self._backend = make_backend(target)
        self._binder = cache(lambda kernel: create_function_from_signature(kernel.signature, kernel.params, backend))
        backend = self._backend

    @property
    def distinct(self) -> list[Launch]:
        return list(self._distinct.values())

    def add(self, launch: Launch) -> None:
        _, specialization, options = self._binder(launch.kernel)(*launch.args, **launch.options)
        launch = launch._replace(key=f"{specialization} {options}")
        self.made.append(launch)
        self._distinct.setdefault((id(launch.kernel), launch.key), launch)

    def specialised(self, launch: Launch) -> tuple[dict, dict, dict]:
        """(signature, constexprs, options): what Triton compiles for it. `attrs` of the options are those of
        arguments."""
        bound, specialization, given = self._binder(launch.kernel)(*launch.args, **launch.options)
        _, signature, constants, attributes = launch.kernel._pack_args(
            self._backend, launch.options, bound, specialization, given
        )
        return signature, constants, {**given, "attrs": {place: what for place, what in attributes.items() if what}}


def target_of(gpu: GPU) -> GPUTarget:
    """What Triton compiles for."""
    return GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)


@contextmanager
def recorded(gpu: GPU) -> Iterator[Recording]:
    """The launches of the block, which asks of a GPU what this one answers. None is run."""
    found = Recording(target_of(gpu))

    def run(kernel, *args, grid, warmup, **options):
        found.add(Launch(kernel, args, options))

    with assumed(gpu), patch.object(JITFunction, "run", run):
        yield found
