"""Products, experts and router to compile ahead of time, at the shapes of V4-Flash.

Cases come from the launchers themselves, called on tensors without memory, so they are what production compiles.
"""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from dsv4.kernels.experts import triton as experts
from dsv4.kernels.experts import triton_order, triton_prefill, triton_stream
from dsv4.kernels.linear import triton as linear
from dsv4.kernels.linear import triton_fused, triton_streams
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.quantize import triton as quantize
from dsv4.kernels.rms_norm import triton as rms_norm
from dsv4.kernels.rope import triton as rope
from dsv4.kernels.router import triton as router

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
E, HIDDEN, INTERMEDIATE, K, LIMIT = 256, 4096, 2048, 6, 10.0
F32, BF16 = torch.float32, torch.bfloat16
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


def weight(form: str, *shape: int, parts: int = 1) -> PackedWeight:
    *lead, O, columns = shape
    codes = lambda per: empty(*lead, O, columns // per, dtype=torch.uint8)
    match form:
        case "bf16" | "fp32":
            return PackedWeight(WeightFormat.DENSE, empty(*shape, dtype=BF16 if form == "bf16" else F32))
        case "fp8" | "fp8 fp32 scales":
            scale = empty(*lead, -(-O // 128), -(-columns // 128), dtype=F32 if form != "fp8" else torch.float8_e8m0fnu)
            return PackedWeight(WeightFormat.FP8, empty(*shape, dtype=torch.float8_e4m3fn), scale)
        case "mxfp4":
            return PackedWeight(
                WeightFormat.MXFP4, codes(2), empty(*lead, O, columns // 32, dtype=torch.float8_e8m0fnu)
            )
        case "nvfp4":
            scale = empty(*lead, O, columns // 16, dtype=torch.float8_e4m3fn)
            return PackedWeight(WeightFormat.NVFP4, codes(2), scale, empty(*lead, parts, dtype=F32))


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


def _linears():
    csa = tuple(
        weight(form, O, HIDDEN)
        for form, O in (("fp8", 1024), ("fp8", 512), ("bf16", 2048), ("bf16", 512), ("bf16", 64))
    )
    queries = weight("fp8", 32768, 1024), weight("fp8", 8192, 1024)
    for N in (1, 10):
        for simulate in (True, False):
            flags = (simulate, simulate, False, False, False)
            yield from launches(
                f"maps of a CSA layer, {N} tokens, simulate {simulate}",
                lambda: triton_fused.linears(empty(N, HIDDEN), None, 0.0, csa, flags, (None, None, F32, F32, None)),
            )
            yield from launches(
                f"maps of queries, {N} tokens, simulate {simulate}",
                lambda: triton_fused.linears(
                    empty(N, 1024), empty(1024), 1e-6, queries, (simulate, simulate), (None, None)
                ),
            )
        yield from launches(
            f"output heads, {N} tokens",
            lambda: triton_fused.project_heads(
                empty(N, 64, 512), empty(N, 32, dtype=torch.complex64), weight("fp8", 8192, HIDDEN), 8
            ),
        )
    for form in ("bf16", "fp32", "fp8", "fp8 fp32 scales", "mxfp4", "nvfp4"):
        for N, dtype in ((1, BF16), (16, BF16), (32, BF16), (4096, BF16), (1, F32), (16, F32), (100, F32)):
            simulate = form[0] in "mn" or form == "fp8"
            if form[0] in "bmn" or dtype is BF16 or N == 1:
                yield from launches(
                    f"linear {form}, {N} tokens of {dtype}",
                    lambda: linear.linear(empty(N, HIDDEN, dtype=dtype), weight(form, HIDDEN, HIDDEN), simulate),
                )
    yield from launches("linear of the demo, fp8", lambda: linear.linear(empty(1, 160), weight("fp8", 256, 160), True))
    yield from launches(
        "linear of the demo, mxfp4", lambda: linear.linear(empty(3, 160), weight("mxfp4", 256, 160), True)
    )
    yield from launches("linear of the demo, odd", lambda: linear.linear(empty(3, 100), weight("fp8", 30, 100), False))


def _experts():
    for form, shared_form in (("mxfp4", "fp8"), ("nvfp4", "nvfp4"), ("fp8", "fp8"), ("bf16", "bf16")):
        w13, w2 = weight(form, E, 2 * INTERMEDIATE, HIDDEN, parts=2), weight(form, E, HIDDEN, INTERMEDIATE)
        shared = tuple(
            weight(shared_form, *shape)
            for shape in ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
        )
        for N in (1, 8, 16, 64, 300, 1500, 6000) if form == "mxfp4" else (1, 12, 1500):
            for simulate in (False, True) if form == "mxfp4" else (False,):
                yield from launches(
                    f"moe {form}, {N} tokens, simulate {simulate}",
                    lambda: experts.moe(
                        empty(N, HIDDEN),
                        empty(N, K, dtype=torch.int64),
                        empty(N, K, dtype=F32),
                        w13,
                        w2,
                        shared,
                        LIMIT,
                        simulate,
                        simulate,
                    ),
                )
        yield from launches(
            f"experts {form}, fp32 tokens",
            lambda: experts.experts(
                empty(8, HIDDEN, dtype=F32),
                empty(8, K, dtype=torch.int64),
                empty(8, K, dtype=F32),
                w13,
                w2,
                LIMIT,
                False,
            ),
        )
        yield from launches(
            f"shared expert {shared_form}", lambda: experts.shared_expert(empty(1, HIDDEN), *shared, LIMIT, False)
        )
    yield from launches(
        "experts of the demo",
        lambda: experts.experts(
            empty(1, 256),
            empty(1, 4, dtype=torch.int64),
            empty(1, 4, dtype=F32),
            weight("mxfp4", 16, 320, 256),
            weight("mxfp4", 16, 256, 160),
            LIMIT,
            True,
        ),
    )


def _router():
    for N in (1, 16, 100):
        for dtype in (BF16, F32):
            for count in (E, 384):
                yield from launches(
                    f"router of {count}, {N} tokens, gate {dtype}",
                    lambda: router.route_scored(
                        empty(N, HIDDEN), empty(count, HIDDEN, dtype=dtype), empty(count, dtype=F32), K, 1.5
                    ),
                )
    yield from launches(
        "router by hash",
        lambda: router.route_hashed(
            empty(1, HIDDEN), empty(E, HIDDEN), empty(129280, K, dtype=torch.int64), empty(1, dtype=torch.int64), 1.5
        ),
    )
