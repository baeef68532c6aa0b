"""Launches of a model on the triton backend, on a CPU and without running a kernel: their names, and what Triton would
compile."""

import sys
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import checkpoints

# Rows of whole 16 bytes, as streamed products take them; two layers of each kind.
WIDE = dict(
    checkpoints.SMALL,
    hidden_size=256,
    moe_intermediate_size=128,
    q_lora_rank=128,
    hc_sinkhorn_iters=2,
    num_hidden_layers=6,
    compress_ratios=[0, 4, 128, 0, 4, 128, 0],
    num_hash_layers=1,
    index_n_heads=4,
)
HOPPER = {
    "capability": lambda device: (9, 0),
    "processors": lambda device: 132,
    "dependent_launch": lambda device: True,
    "dot_in_fp32": lambda x: x.dtype is torch.float32,
}


class Launches(TorchDispatchMode):
    """Names of kernels, which do not run, and of the torch operations that would be kernels on a GPU, in order; `keys`:
    by kernel what Triton would compile it for, each key once."""

    def __init__(self, monkeypatch):
        super().__init__()
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import KernelInterface

        self.names: list[str] = []
        self.keys: dict[str, dict[str, None]] = {}
        for kind in (KernelInterface, InterpretedFunction):
            monkeypatch.setattr(kind, "__getitem__", lambda kernel, grid: lambda *a, **k: self._launched(kernel, a, k))

    def compiled(self) -> dict[str, int]:
        """How many keys each kernel has."""
        return {name: len(keys) for name, keys in self.keys.items()}

    def _launched(self, kernel, args: tuple, options: dict) -> None:
        name = kernel.fn.__name__
        self.names.append(name)
        self.keys.setdefault(name, {})[key(kernel, args, options)] = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, made = function.name().removeprefix("aten::"), function(*args, **(kwargs or {}))
        held = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        new = any(t.untyped_storage().data_ptr() not in held for t in tree_leaves(made) if isinstance(t, torch.Tensor))
        memory = name.startswith(("empty", "new_empty"))
        if not memory and (new or name.partition(".")[0].endswith("_")):  # nor a view
            self.names.append(f"torch {name}")
        return made


def key(kernel, args: tuple, options: dict) -> str:
    """What Triton compiles a launch for: types, constants, and of each other number whether it is 1 or a multiple of
    16."""
    _, specialization, options = _binder(kernel)(*args, **options)
    return f"{specialization} {options}"


@cache
def _binder(kernel):
    """Triton's own, of a kernel that was defined for the interpreter."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    if not isinstance(kernel, JITFunction):
        kernel = JITFunction(
            kernel.fn,
            do_not_specialize=kernel.kwargs.get("do_not_specialize"),
            do_not_specialize_on_alignment=kernel.kwargs.get("do_not_specialize_on_alignment"),
        )
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))


def on_hopper(monkeypatch) -> None:
    """Launchers choose as on an H100."""
    for name, module in list(sys.modules.items()):
        for what, value in HOPPER.items():
            if name.startswith("dsv4.kernels.") and what in vars(module):
                monkeypatch.setattr(module, what, value)
