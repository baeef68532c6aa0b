"""What every launcher launches at the sizes of its contract, as the compiler sees it.

Launchers are called on tensors of the device `meta`, which have shapes and no memory, and Triton's own binder reads
the arguments of each launch: types, constants and what divides by 16 are those of a launch on a GPU.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from triton.runtime.jit import JITFunction

from dsv4.kernels.attention import triton as attention
from dsv4.kernels.block_choice import block_scores
from dsv4.kernels.cache_rows import STREAM_FORMATS, PackedRows, RowFormat, pack_layout
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.kernels.collectives.triton_shares import Shares
from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.commit_rows import triton as commit_rows
from dsv4.kernels.contracts import productions
from dsv4.kernels.draft_sizes import triton as draft_sizes
from dsv4.kernels.experts import hopper_launch
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.experts.triton_stream import Routed
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.hyper_connections.triton import mhc_post_pre_norm
from dsv4.kernels.indexer import triton as indexer
from dsv4.kernels.launch import GPU
from dsv4.kernels.linear import triton_fp8
from dsv4.kernels.linear.drawn import FP8, MXFP4
from dsv4.kernels.linear.triton_fused import project_heads
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS, TIER_OPERATIONS
from dsv4.kernels.recording import recorded
from dsv4.kernels.widths import FLASH, LLAMA, QWEN, Widths

PROCESSORS = 132  # of an H100
RANKS = (2, 8)
SMALL = Widths(512, 8, 64, moe_intermediate_size=704, num_key_value_heads=2)
ODD = replace(SMALL, num_attention_heads=6, head_dim=80)
GQA = (LLAMA, QWEN, SMALL, ODD)
TINY = replace(FLASH, num_attention_heads=8, head_dim=64, sliding_window=64, index_n_heads=8, index_head_dim=64)
DEMO = replace(FLASH, hidden_size=256, moe_intermediate_size=160, n_routed_experts=16, num_experts_per_tok=4)
TESTED = (
    (replace(SMALL, num_attention_heads=4, head_dim=16), Chunking(32, 8, 12)),
    (replace(SMALL, num_attention_heads=4, head_dim=16, num_key_value_heads=4), Chunking(48, 16, 20)),
)
# launched for tensors of CUDA alone, so not for those of `meta`; `scripts/gpu_tests.sh` compiles and runs them
WAIVED = tuple(
    f"{folder}.training." for folder in ("attention", "experts", "hyper_connections", "rms_norm", "rope", "rotary_rows")
)
SPECIAL = (  # calls of small models, whose kernels have other tiles, and of layers without entries
    ("sparse_attention", FLASH, dict(tokens=1, window="bf16", kept=None)),
    ("hca_attention", TINY, dict(batch=1, entries=33, window="bf16", kept="bf16")),
    *(("index_scores", TINY, dict(keys=keys, entries=2048)) for keys in STREAM_FORMATS["index"]),
    *(("select_entries", TINY, dict(keys=keys, entries=2048, k=512)) for keys in STREAM_FORMATS["index"]),
    ("linear", DEMO, dict(form=FP8, rows=256, columns=160, tokens=1, simulate=True)),
    ("linear", DEMO, dict(form=MXFP4, rows=256, columns=160, tokens=3, simulate=True)),
    ("linear", DEMO, dict(form=FP8, rows=30, columns=100, tokens=3)),
    *(
        ("chunked_prefill", tested, dict(batch=2, tokens=200, chunking=chunking, dtype=dtype))
        for tested, chunking in TESTED
        for dtype in (torch.bfloat16, torch.float32)
    ),
    ("experts", DEMO, dict(form=MXFP4, tokens=1, simulate=True)),
)


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each kernel that differs, on a GPU of that capability."""
    found, names = {}, set()
    with recorded(GPU(capability, PROCESSORS)) as launched:
        for label, call in calls():
            launched.made.clear()
            call()
            for launch in launched.made:
                case, kernel = launched.specialised(launch), launch.kernel
                if (key := repr((kernel.module, kernel.__name__, *case))) not in found:
                    name = f"{label} · {kernel.__name__.lstrip('_')}"
                    alike = sum(other == name or other.startswith(f"{name} #") for other in names)
                    names.add(name := f"{name} #{alike + 1}" if alike else name)
                    found[key] = (name, kernel, *case)
    return list(found.values())


def kernel_modules() -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("dsv4.kernels.")]


def calls() -> Iterator[tuple[str, Callable]]:
    """(label, launch) of everything that has production calls, at the sizes that are compiled."""
    functions = launchers()
    each = [
        (name, widths, sizes)
        for name, production in productions().items()
        for widths in models(name)
        for sizes in production.compiled(widths)
    ]
    for name, widths, sizes in each + [*SPECIAL]:
        arguments = productions()[name].drawn(widths, 0, "meta", **sizes)
        yield f"{name} {shown(widths, sizes)}", partial(functions[name], *arguments)
    for ranks in RANKS:
        yield from exchanges(ranks)
    yield from sums_of_experts()
    yield "products of FP8 activations", products_of_fp8
    for tokens in (32, 64):
        yield f"heads with codes, {tokens} tokens", partial(heads_with_codes, tokens)
        yield f"inputs with codes, {tokens} tokens", partial(inputs_with_codes, tokens)
    yield "attention of many queries", attention_of_many
    for tokens in (1, 300, 1000, 2000, 4096):  # tiles of each number of tokens
        yield f"experts of codes, {tokens} tokens", partial(experts_of_codes, tokens)
    yield "selections by codes", selections_by_codes
    for entries, batch in ((512, 8), (2048, 32), (262144, 8), (2048, 300)):  # ways to select
        yield f"selected rows of {entries} entries, batch {batch}", partial(selected_rows, entries, batch)


def products_of_fp8() -> None:
    """On a GPU that has them."""
    w = productions()["linear"].drawn(FLASH, 0, "meta", form=FP8, rows=4096, columns=FLASH.hidden_size, tokens=1)[1]
    for N in (16, 128, 4096):
        x = torch.empty(N, FLASH.hidden_size, dtype=torch.bfloat16, device="meta")
        if triton_fp8.takes(held := hold("linear", w), x.device):
            codes = triton_fp8.quantised(x, torch.empty_like(x[0]), 1e-6) if N == 128 else triton_fp8.quantised(x)
            dtype = torch.float32 if N == 128 else x.dtype
            out = torch.empty_like(x, dtype=dtype)
            for tile in (None, *([triton_fp8.Tile(128, 128, False)] if N == 4096 else ())):
                triton_fp8.product(*codes, held, out, tile)
                triton_fp8.product(*codes, held, out, tile, held, out)


def heads_with_codes(tokens: int) -> None:
    """On a GPU whose products take codes; elsewhere without."""
    project_heads(*productions()["project_heads"].drawn(FLASH, 0, "meta", tokens=tokens), True)


def inputs_with_codes(tokens: int) -> None:
    """On the same GPUs."""
    drawn = productions()["mhc_post_pre_norm"].drawn(FLASH, 0, "meta", tokens=tokens)
    mhc_post_pre_norm(*drawn, True)
    mhc_post_pre_norm(*drawn, False, True)  # of more tokens, numbers


def attention_of_many() -> None:
    """By warps that copy and warps that multiply, where there is such a kernel."""
    N, H, D = 4096, FLASH.num_attention_heads, FLASH.head_dim
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")
    index = lambda *shape: empty(*shape, dtype=torch.int64)
    rows, sink = empty(8192, D), empty(H, dtype=torch.float32)
    q, window = empty(1, N, H, D), index(N, FLASH.sliding_window)
    attention.sparse_attention(q[0], rows, window, rows, index(N, FLASH.index_topk), sink, D**-0.5)
    attention.hca_attention(q, rows, window, rows[None], index(1, N), sink, D**-0.5)
    pages = empty(128, pack_layout(RowFormat.KV_FP8, D, FLASH.qk_rope_head_dim).page, dtype=torch.uint8)
    packed = PackedRows(RowFormat.KV_FP8, pages, D, FLASH.qk_rope_head_dim, 8192)
    attention.sparse_attention(q[0], packed, window, packed, index(N, FLASH.index_topk), sink, D**-0.5)


def sums_of_experts() -> Iterator[tuple[str, Callable]]:
    """Of one rank, while a sublayer's result is merged."""
    meta, d, k = torch.device("meta"), FLASH.hidden_size, FLASH.num_experts_per_tok
    for N in (1, 8, 64):
        rows = torch.empty(N * k, d, dtype=torch.bfloat16, device=meta)
        indices, shared = torch.empty(N, k, dtype=torch.int64, device=meta), torch.empty(N, d, device=meta)
        drawn = productions()["mhc_post_pre_norm"].drawn(FLASH, 0, "meta", tokens=N)
        later = Unsummed(ExpertRows(rows, indices, shared), torch.bfloat16, None)
        yield f"merged experts, {N} tokens", partial(mhc_post_pre_norm, later, *drawn[1:])


def experts_of_codes(tokens: int) -> None:
    """On a GPU that has them."""
    sizes = dict(form=MXFP4, tokens=tokens, simulate=True)
    x, indices, routing, w13, w2, limit, _ = productions()["experts"].drawn(FLASH, 0, "meta", **sizes)
    routed = Routed(indices, routing, hold("experts", w13), hold("experts", w2))
    if hopper_launch.unfit(x, routed) is None:
        hopper_launch.multiply_codes(x, routed, limit)


def selected_rows(entries: int, batch: int) -> None:
    """Rows of a pool of equally many for each row of a batch."""
    sizes = dict(keys="fp4", entries=entries, batch=batch, k=min(entries // 2, FLASH.index_topk))
    indexer.select_entries(*productions()["select_entries"].drawn(FLASH, 0, "meta", **sizes), entries)


def selections_by_codes() -> None:
    """Of rounded queries of a prompt, with keys in each format, where there is such a kernel."""
    for keys in STREAM_FORMATS["index"]:
        sizes = dict(keys=keys, entries=8192, prompt=True, k=FLASH.index_topk)
        *given, _ = productions()["select_entries"].drawn(FLASH, 0, "meta", **sizes)
        indexer.select_entries(*given, True)


def exchanges(ranks: int) -> Iterator[tuple[str, Callable]]:
    """Exchanges of so many ranks, by themselves and while a sublayer's result is merged: of numbers and of experts'
    rows."""
    meta, d, k = torch.device("meta"), FLASH.hidden_size, FLASH.num_experts_per_tok
    few, many = OneShot(0, [0] * ranks, meta, PROCESSORS), Shares(0, [0] * ranks, meta)
    ids = torch.empty(8, dtype=torch.int64, device=meta)
    yield f"gather, {ranks} ranks", partial(few.gather, ids)
    yield f"same, {ranks} ranks", partial(few.same, ids, torch.empty(1, dtype=torch.int32, device=meta))
    yield f"sum of 512 tokens, {ranks} ranks", partial(many.sum, torch.empty(512, d, device=meta), torch.bfloat16)
    for N in (1, 4, 32):
        rows = torch.empty(N * k, d, dtype=torch.bfloat16, device=meta)
        indices, numbers = torch.empty(N, k, dtype=torch.int64, device=meta), torch.empty(N, d, device=meta)
        parts = {"numbers": numbers, "experts": ExpertRows(rows, indices, numbers)}
        drawn = productions()["mhc_post_pre_norm"].drawn(FLASH, 0, "meta", tokens=N)
        for what, part in parts.items():
            yield f"sum of {what}, {N} tokens, {ranks} ranks", partial(few.sum, part, torch.bfloat16)
            later = Unsummed(part, torch.bfloat16, few)
            yield f"merged {what}, {N} tokens, {ranks} ranks", partial(mhc_post_pre_norm, later, *drawn[1:])


def models(name: str) -> tuple[Widths, ...]:
    """Those that call it; of norms and maps, which all of them call, a DeepSeek-V4 model."""
    if name == "fetch":
        return FLASH, *GQA
    if name == "chunked_prefill":  # heads of powers of two
        return GQA[:3]
    return GQA if name == "block_scores" or name in GQA_OPERATIONS.keys() - OPERATIONS.keys() else (FLASH,)


def launchers() -> dict[str, Callable]:
    """What has production calls → what launches it on a GPU."""
    every = {**OPERATIONS, **GQA_OPERATIONS, **TIER_OPERATIONS, **COMPOSITIONS, "block_scores": block_scores}
    found = {name: op.implementations["triton"] for name, op in every.items() if "triton" in op.implementations}
    others = {f.__name__: f for f in (commit_rows.commit, commit_rows.record, draft_sizes.observe, draft_sizes.choose)}
    return found | others


def shown(widths: Widths, sizes: Mapping) -> str:
    """Sizes in words, and of a GQA model its heads."""
    heads = [f"{widths.num_attention_heads}q/{widths.num_key_value_heads}kv/{widths.head_dim}"]
    words = [f"{name} {_word(value)}" for name, value in sizes.items()]
    return ", ".join((heads if widths.num_key_value_heads else []) + words)


def _word(value) -> str:
    return str(getattr(value, "value", getattr(value, "name", value))).removeprefix("torch.")


def unlaunched(capabilities: Iterable[tuple[int, int]]) -> list[str]:
    """ "module.name" of kernels of the imported modules, Triton functions that no other one calls, without a case on
    any of those GPUs, but for those that are waived."""
    each = {f for module in kernel_modules() for f in vars(module).values() if isinstance(f, JITFunction)}
    called = {f.__globals__.get(name) for f in each for name in f.fn.__code__.co_names if name != f.fn.__name__}
    launched = {kernel for capability in capabilities for _, kernel, *_ in cases_for(capability)}
    names = sorted(f"{f.module}.{f.__name__}" for f in each - called - launched)
    return [name for name in names if not any(name.startswith(f"dsv4.kernels.{waived}") for waived in WAIVED)]
