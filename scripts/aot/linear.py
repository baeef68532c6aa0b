"""What a launcher launches, without a GPU: its kernels' signatures and constants, from calls on tensors without memory.

So a case of `scripts/check_aot.py` is what production compiles, and cannot drift from it.
"""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

MULTIPROCESSORS = 132  # of an H100
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64",
            torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(name: str, modules: list, call) -> list[tuple]:
    """Cases of the kernels that call() launches; `modules` are those whose launchers it runs."""
    cases: list[tuple] = []

    def record(kernel, *args, grid, warmup, **options):
        names = [p.name for p in kernel.params]
        given = dict(zip(names, args)) | {k: options.pop(k) for k in list(options) if k in names}
        signature, constants, divisible = {}, {}, []
        for p in kernel.params:
            value = given[p.name]
            if p.is_constexpr or value is None or (type(value) is int and value == 1 and not p.do_not_specialize):
                signature[p.name], constants[p.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[p.name] = POINTERS[value.dtype]
            elif isinstance(value, int):
                signature[p.name] = "i32" if -2**31 <= value < 2**31 else "i64"
                if value % 16 == 0 and not p.do_not_specialize:
                    divisible.append(p.name)
            else:
                signature[p.name] = "fp32"
        cases.append((f"{name} · {kernel.__name__.lstrip('_')}", kernel, signature, constants, options | {"divisible": divisible}))

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", record))
        for module in modules:
            for attribute, stand_in in (("require_device", lambda *_: None), ("processors", lambda _: MULTIPROCESSORS),
                                        ("capability", lambda _: (9, 0))):
                if hasattr(module, attribute):
                    stack.enter_context(patch.object(module, attribute, stand_in))
        call()
    return cases
