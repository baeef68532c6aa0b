"""Attention peers: FlashMLA, and SGLang's Triton kernels on the same cache."""

import torch

from dsv4.kernels.attention.reference import sparse_attention
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, pack_layout
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import choose, difference, normal, packed
from scripts.bench.peers import at_least, hopper, peer, processors, require

H, D, ROPE = FLASH.num_attention_heads, FLASH.head_dim, FLASH.qk_rope_head_dim
SCALE = D**-0.5
TOLERANCE = 2e-2  # relative Frobenius error of bf16 attention on the same quantised rows


def decode_inputs(f: dict, i: int):
    """Queries, a window pool and an entry pool in the 584-byte format, int64 indices into them (the pools hold the
    batch's rows one after another), and the sink."""
    B, W, K = f["batch"], f["window"], f["entries"]
    each = -(-max(4 * K, 8192) // PAGE) * PAGE  # entries that exist for one batch row
    window = packed(RowFormat.KV_FP8, D, ROPE, B * W, 4 * i)
    entries = packed(RowFormat.KV_FP8, D, ROPE, B * each, 4 * i + 1)
    row = torch.arange(B, device="cuda").unsqueeze(1)
    window_index = torch.arange(W, device="cuda") + row * W
    entry_index = choose(4 * i + 2, B, K, each) + row * each
    sink = torch.linspace(-2, 2, H, device="cuda")
    return normal(4 * i + 3, B, H, D), window, window_index, entries, entry_index, sink


def cache_view(rows: PackedRows, page: int) -> torch.Tensor:
    """[pages, 64, 1, 584] over the pages of a pool, `page` bytes apart: what FlashMLA and vLLM call the cache."""
    row = pack_layout(RowFormat.KV_FP8, D, ROPE).row
    return rows.data.as_strided((rows.data.shape[0], PAGE, 1, row), (page, row, row, 1))


def against_reference(run, q, window, window_index, entries, entry_index, sink):
    def check():
        want = sparse_attention(q, window, window_index, entries, entry_index, sink, SCALE)
        return difference(run().view(want.shape), want), TOLERANCE

    return check


@peer("FlashMLA FP8", "csa_decode", "hca_decode")
def flashmla_decode(row, i):
    """sgl-flash-mla 1.0.0: flash_mla_with_kvcache(q [B, 1, 64, 512], window [pages, 64, 1, 584], None, None, 512, meta,
    ..., extra_k_cache=...). The schedule is made by the first call and kept, as in a server."""
    hopper()
    interface = require("flash_mla.flash_mla_interface")
    inputs = q, window, window_index, entries, entry_index, sink = decode_inputs(row.facts, i)
    wide, near, far = q.unsqueeze(1), window_index.int().unsqueeze(1), entry_index.int().unsqueeze(1)
    page = pack_layout(RowFormat.KV_FP8, D, ROPE).page
    main, extra = cache_view(window, page), cache_view(entries, page)
    meta = interface.get_mla_metadata()[0]

    def run():
        return interface.flash_mla_with_kvcache(
            wide,
            main,
            None,
            None,
            D,
            meta,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=near,
            attn_sink=sink,
            extra_k_cache=extra,
            extra_indices_in_kvcache=far,
            use_legacy=True,
        )[0]

    return run, against_reference(run, *inputs)


@peer("SGLang Triton FP8", "csa_decode", "hca_decode", when=lambda facts: facts["cache"] == "fp8")
def sglang_fp8_decode(row, i):
    """sglang 0.5.23: triton_fp8_attention_fwd on the same cache as FlashMLA. It tunes itself at its first call."""
    at_least(8, 9)
    module = require("sglang.kernels.ops.attention.dsv4.triton_sparse_decode")
    inputs = q, window, window_index, entries, entry_index, sink = decode_inputs(row.facts, i)
    page = pack_layout(RowFormat.KV_FP8, D, ROPE).page
    main, extra = cache_view(window, page), cache_view(entries, page)
    wide, near, far = q.unsqueeze(1), window_index.int().unsqueeze(1), entry_index.int().unsqueeze(1)

    def run():
        return module.triton_fp8_attention_fwd(wide, main, D, SCALE, near, sink, extra, far)[0]

    return run, against_reference(run, *inputs)


@peer("SGLang Triton bf16", "csa_decode", "hca_decode", when=lambda facts: facts["cache"] == "bf16")
def sglang_paged_decode(row, i):
    """sglang 0.5.23: sparse_attn_v4_paged_decode(q, unified_kv [rows, 512] bf16, indices, indptr, sink, scale)."""
    module = require("sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_decode")
    module._cu_count = processors  # asks an AMD package otherwise
    f = row.facts
    B, W, K = f["batch"], f["window"], f["entries"]
    each = max(4 * K, 8192)
    q, pool = normal(3 * i, B, H, D), normal(3 * i + 1, B * (W + each), D)
    first = torch.arange(B, device="cuda").unsqueeze(1)
    near = torch.arange(W, device="cuda") + first * W
    far = choose(3 * i + 2, B, K, each) + B * W + first * each
    indices = torch.cat((near, far), 1).int().flatten()
    indptr = torch.arange(B + 1, device="cuda", dtype=torch.int32) * (W + K)
    sink = torch.linspace(-2, 2, H, device="cuda")

    def run():
        return module.sparse_attn_v4_paged_decode(q, pool, indices, indptr, sink, SCALE)

    return run, against_reference(run, q, pool, near, pool, far, sink)


def prefill_inputs(f: dict, i: int):
    """bf16 queries [T, 64, 512], a pool of window rows then entries, int32 lists [T, window + entries] into it, the
    sink."""
    T, W, K, pool = f["tokens"], f["window"], f["entries"], f["pool"]
    q, rows = normal(3 * i, T, H, D), normal(3 * i + 1, T + W + pool, D)
    t = torch.arange(T, device="cuda").unsqueeze(1)
    near = t + torch.arange(1, W + 1, device="cuda")
    far = torch.cat([choose(3 * i + 2 + c, min(1024, T - c), K, pool) for c in range(0, T, 1024)]) + T + W
    return q, rows, torch.cat((near, far), 1).int(), torch.linspace(-2, 2, H, device="cuda")


def against_some(run, q, rows, index, sink, some: int = 64):
    """The reference on `some` of the queries, spread over all."""

    def check():
        at = torch.linspace(0, q.shape[0] - 1, some, device="cuda").long()
        want = sparse_attention(q[at], rows, index[at].long(), None, None, sink, SCALE)
        return difference(run()[at], want), TOLERANCE

    return check


@peer("FlashMLA bf16", "csa_prefill")
def flashmla_prefill(row, i):
    """sgl-flash-mla 1.0.0: flash_mla_sparse_fwd(q [T, 64, 512], kv [rows, 1, 512], indices [T, 1, n], scale, 512,
    sink)."""
    hopper()
    interface = require("flash_mla.flash_mla_interface")
    q, rows, index, sink = prefill_inputs(row.facts, i)
    kv, lists = rows.unsqueeze(1), index.unsqueeze(1)

    def run():
        return interface.flash_mla_sparse_fwd(q, kv, lists, SCALE, D, sink, use_legacy=True)[0]

    return run, against_some(run, q, rows, index, sink)


@peer("SGLang Triton", "csa_prefill")
def sglang_prefill(row, i):
    """sglang 0.5.23: sparse_attn_v4_paged_prefill(q, earlier rows, indices, indptr, new rows, indices, indptr, sink,
    scale)."""
    module = require("sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_prefill")
    q, rows, index, sink = prefill_inputs(row.facts, i)
    T, W, K = q.shape[0], row.facts["window"], row.facts["entries"]
    far, near = index[:, W:].flatten(), index[:, :W].flatten()
    counted = torch.arange(T + 1, device="cuda", dtype=torch.int32)

    def run():
        return module.sparse_attn_v4_paged_prefill(q, rows, far, counted * K, rows, near, counted * W, sink, SCALE)

    return run, against_some(run, q, rows, index, sink)
