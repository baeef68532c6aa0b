"""What a decode step does between its products, to compile ahead of time, at the shapes of V4-Flash.

Cases come from the launchers themselves, called on tensors without memory, as those of `scripts.aot.linear`.
"""

from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout
from dsv4.kernels.fusions import triton_step, triton_step_inputs
from dsv4.kernels.fusions.compositions import IndexHeads, Kept, Latents, Windows
from dsv4.kernels.widths import FLASH, VOCABULARY

F32, BF16, I64, COMPLEX = torch.float32, torch.bfloat16, torch.int64, torch.complex64
POINTERS = {BF16: "*bf16", F32: "*fp32", I64: "*i64", torch.uint8: "*u8"}
HEADS, WIDTH, INDEX_HEADS = FLASH.num_attention_heads, FLASH.head_dim, FLASH.index_n_heads
INDEX_WIDTH, HALF, EPS = FLASH.index_head_dim, FLASH.qk_rope_head_dim // 2, FLASH.rms_norm_eps


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each kernel that differs."""
    found: list[tuple] = []
    with (
        patch.object(
            JITFunction, "run", lambda kernel, *args, grid, warmup, **options: found.append((kernel, args, options))
        ),
        patch.multiple(triton_step, dependent_launch=lambda _: capability >= (9, 0), require_device=lambda *_: None),
        patch.multiple(
            triton_step_inputs, dependent_launch=lambda _: capability >= (9, 0), require_device=lambda *_: None
        ),
    ):
        named = [(name, len(found)) for name in _launch()]
    return [(name, *_signature(*found[i - 1])) for name, i in named]


def _signature(kernel, args: tuple, options: dict) -> tuple:
    """What the launcher's arguments are to the compiler."""
    constants, kinds = {}, {}

    def kind(value, place: tuple[int, ...]):
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        if isinstance(value, tuple):
            return tuple(kind(part, (*place, i)) for i, part in enumerate(value))
        if value is None:
            constants[place] = None
            return "constexpr"
        return "fp32" if isinstance(value, float) else "i32"

    for i, (p, value) in enumerate(zip(kernel.params, args, strict=True)):
        if p.is_constexpr or (type(value) is int and value == 1 and not p.do_not_specialize):
            kinds[p.name], constants[(i,)] = "constexpr", value
        else:
            kinds[p.name] = kind(value, (i,))
    return kernel, kinds, constants, options


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def pool(rows: int, width: int, rope: int, how) -> torch.Tensor | PackedRows:
    if isinstance(how, torch.dtype):
        return empty(rows, width, dtype=how)
    return PackedRows(
        how, empty(-(-rows // 64), pack_layout(how, width, rope).page, dtype=torch.uint8), width, rope, rows
    )


def windows(B: int, T: int, ratio: int, overlap: int, width: int, simulate: str | None, entries) -> Windows:
    N, M, w = B * T, B * -(-T // ratio), overlap * width
    return Windows(
        empty(N, 2 * w, dtype=F32),
        empty(ratio, w, dtype=F32),
        empty(N, dtype=I64),
        empty(300 * B, 2 * w, dtype=F32),
        empty(N, dtype=I64),
        empty(M, overlap * ratio, dtype=I64),
        empty(M, dtype=torch.bool),
        overlap,
        empty(width),
        empty(M, HALF, dtype=COMPLEX),
        simulate,
        entries,
        empty(M, dtype=I64),
    )


def _launch():
    """Launch each, and say what it was."""
    kv = {"bf16": BF16, "fp8": RowFormat.KV_FP8}
    keys = {"bf16": BF16, "fp8": RowFormat.INDEX_FP8, "fp4": RowFormat.INDEX_FP4}
    formats = ("fp8", "fp4"), ("fp8", "fp8"), ("bf16", "bf16")
    sizes = *(((B, T), formats[0]) for B, T in ((1, 1), (8, 1), (2, 5))), *(((1, 1), f) for f in formats[1:])
    for (B, T), (cache, index) in sizes:
        simulate = {"bf16": None, "fp8": "kv", "fp4": "key"}
        near = pool(256 * B, WIDTH, 2 * HALF, kv[cache])
        latents = Latents(empty(B * T, WIDTH), empty(WIDTH), cache == "fp8", near, empty(B * T, dtype=I64))
        entries = lambda ratio: pool(8192 // ratio * B, WIDTH, 2 * HALF, kv[cache])
        asked = IndexHeads(empty(B * T, INDEX_HEADS, INDEX_WIDTH), empty(B * T, INDEX_HEADS), 0.01, index == "fp4")
        csa = (
            windows(B, T, 4, 2, WIDTH, simulate[cache], entries(4)),
            windows(
                B, T, 4, 2, INDEX_WIDTH, "key" if index == "fp4" else None, pool(2048 * B, INDEX_WIDTH, 0, keys[index])
            ),
        )
        hca = (windows(B, T, 128, 1, WIDTH, simulate[cache], entries(128)),)
        for kind, heads, parts in (("CSA", asked, csa), ("HCA", None, hca), ("window", None, ())):
            q, cis = empty(B * T, HEADS, WIDTH), empty(B * T, HALF, dtype=COMPLEX)
            triton_step_inputs.attention_inputs(B, q, cis, EPS, latents, heads, parts)
            yield f"attention_inputs {kind}, {B}x{T} tokens, {cache} and {index}"
    for T in (1, 5):
        f = (empty(HALF, dtype=F32),) * 2
        triton_step.place(empty(8, dtype=I64), T, f, (128, 256), (Kept(4, 2, 136, (2048,)), Kept(128, 1, 256, (64,))))
        yield f"place, {T} a row"
    triton_step.embed_streams(empty(8, dtype=I64), empty(VOCABULARY, FLASH.hidden_size), FLASH.hc_mult, BF16)
    yield "embed_streams"
    triton_step.chosen_rows(empty(8, 1, FLASH.index_topk, dtype=I64), 2048)
    yield "chosen_rows"
