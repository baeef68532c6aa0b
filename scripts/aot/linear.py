"""Products, experts and router to compile ahead of time, at the shapes of V4-Flash.

Cases come from the launchers themselves, called on tensors without memory, so they are what production compiles.
"""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from dsv4.kernels.contracts import contract_of
from dsv4.kernels.experts import triton as experts
from dsv4.kernels.experts import triton_order, triton_prefill, triton_stream
from dsv4.kernels.experts.contract import MOE, SHARED_FORMS
from dsv4.kernels.linear import triton as linear
from dsv4.kernels.linear import triton_fused, triton_streams
from dsv4.kernels.linear.drawn import DENSE, DENSE_FP32, FP8, MXFP4
from dsv4.kernels.quantize import triton as quantize
from dsv4.kernels.rms_norm import triton as rms_norm
from dsv4.kernels.rope import triton as rope
from dsv4.kernels.router import triton as router
from dsv4.kernels.widths import FLASH

MODULES = (
    experts,
    triton_prefill,
    triton_order,
    triton_stream,
    linear,
    triton_fused,
    triton_streams,
    quantize,
    rms_norm,
    rope,
    router,
)
OTHERS = {"blocks", "rms_norm", "rotate"}  # kernels of other modules, which have cases of their own
MULTIPROCESSORS = 132  # of an H100
GPU = [(9, 0)]  # capability that cases are collected for, the last one
F32, BF16 = torch.float32, torch.bfloat16
NAMES = {DENSE: "bf16", DENSE_FP32: "fp32"}
POINTERS = {
    BF16: "*bf16",
    F32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each kernel that differs."""
    GPU.append(capability)
    different = {
        repr((kernel.__name__, signature, constants, options)): (name, kernel, signature, constants, options)
        for name, kernel, signature, constants, options in reversed([*_linears(), *_experts(), *_router()])
    }
    GPU.pop()
    return list(reversed(different.values()))


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(name: str, call) -> list[tuple]:
    """Cases of the kernels that call() launches."""
    found: list[tuple] = []

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
                signature[p.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not p.do_not_specialize:
                    divisible.append(p.name)
            else:
                signature[p.name] = "fp32"
        kind = kernel.__name__.lstrip("_")
        if kind not in OTHERS:
            found.append((f"{name} · {kind}", kernel, signature, constants, options | {"divisible": divisible}))

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", record))
        for module in MODULES:
            for attribute, stand_in in (
                ("require_device", lambda *_: None),
                ("processors", lambda _: MULTIPROCESSORS),
                ("capability", lambda _: GPU[-1]),
                ("dependent_launch", lambda _: GPU[-1] >= (9, 0)),
            ):
                if hasattr(module, attribute):
                    stack.enter_context(patch.object(module, attribute, stand_in))
        call()
    return found


def production(operation: str) -> list[tuple[dict, tuple]]:
    """(sizes, arguments without memory) of what is compiled of an operation at V4-Flash's widths."""
    made = MOE if operation == "moe" else contract_of(operation).production
    return [(sizes, made.drawn(FLASH, 0, "meta", **sizes)) for sizes in made.sizes(FLASH)["compiled"]]


def _linears():
    maps, heads = production("linears"), production("project_heads")
    for N in (1, 10):
        for sizes, arguments in maps:
            name = f"{sizes['kind']}, {N} tokens, simulate {sizes['simulate']}"
            if sizes["tokens"] == N:
                yield from launches(name, lambda: triton_fused.linears(*arguments))
        for sizes, arguments in heads:
            if sizes["tokens"] == N:
                yield from launches(f"output heads, {N} tokens", lambda: triton_fused.project_heads(*arguments))
    for sizes, arguments in production("linear"):
        name = f"linear {NAMES.get(sizes['form'], sizes['form'])}, {sizes['tokens']} tokens of {sizes['dtype']}"
        yield from launches(name, lambda: linear.linear(*arguments))
    for kind, form, O, K, N in (("fp8", FP8, 256, 160, 1), ("mxfp4", MXFP4, 256, 160, 3), ("odd", FP8, 30, 100, 3)):
        demo = dict(form=form, rows=O, columns=K, tokens=N, simulate=kind != "odd")
        arguments = contract_of("linear").production.drawn(FLASH, 0, "meta", **demo)
        yield from launches(f"linear of the demo, {kind}", lambda: linear.linear(*arguments))


def _experts():
    routed, fp32, shared = production("moe"), production("experts"), production("shared_expert")
    for form, shared_form in SHARED_FORMS.items():
        kind, shared_kind = (NAMES.get(f, f) for f in (form, shared_form))
        for sizes, arguments in routed:
            name = f"moe {kind}, {sizes['tokens']} tokens, simulate {sizes.get('simulate', False)}"
            if sizes["form"] == form:
                yield from launches(name, lambda: experts.moe(*arguments))
        arguments = next(arguments for sizes, arguments in fp32 if sizes["form"] == form)
        yield from launches(f"experts {kind}, fp32 tokens", lambda: experts.experts(*arguments))
        arguments = next(arguments for sizes, arguments in shared if sizes["form"] == shared_form)
        yield from launches(f"shared expert {shared_kind}", lambda: experts.shared_expert(*arguments))
    demo = replace(FLASH, hidden_size=256, moe_intermediate_size=160, n_routed_experts=16, num_experts_per_tok=4)
    arguments = contract_of("experts").production.drawn(demo, 0, "meta", form=MXFP4, tokens=1, simulate=True)
    yield from launches("experts of the demo", lambda: experts.experts(*arguments))


def _router():
    for sizes, arguments in production("route_scored"):
        name = f"router of {sizes['experts']}, {sizes['tokens']} tokens, gate {sizes['gate']}"
        yield from launches(name, lambda: router.route_scored(*arguments))
    for _, arguments in production("route_hashed"):
        yield from launches("router by hash", lambda: router.route_hashed(*arguments))
