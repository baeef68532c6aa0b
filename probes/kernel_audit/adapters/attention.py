"""FlashMLA and SGLang's Triton kernels for `sparse_attention` and `hca_attention`."""

from functools import partial

import torch
import torch.nn.functional as F

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, pack_layout
from dsv4.probes.kernel_audit.adapters import Adapter, as_it_is
from dsv4.probes.kernel_audit.adapters.installed import at_least, hopper, processors, require

D, ROPE, WIDTH = 512, 64, 64  # list widths are multiples of 64
CONTRACT_HEADS = (64, 128)


def cache_view(rows: PackedRows) -> torch.Tensor:
    """Pages of a flat pool, or of all runs of a batch, as [pages, 64, 1, 584] with the stride of a padded page."""
    layout = pack_layout(RowFormat.KV_FP8, rows.width, rows.rope)
    data = rows.data.flatten(0, -2)
    return data.as_strided((data.shape[0], PAGE, 1, layout.row), (data.stride(0), layout.row, layout.row, 1))


def listed(index: torch.Tensor) -> torch.Tensor:
    """An index list [N, K] as int32 [N, 1, K'], padded with −1 to a multiple of 64."""
    return F.pad(index, (0, -index.shape[1] % WIDTH), value=-1).int().unsqueeze(1)


def packed_only(case) -> str | None:
    """FP8 rows of 512 dims and 64 or 128 heads in bf16."""
    q, window = case.arguments[:2]
    if q.dtype is not torch.bfloat16:
        return "it takes bf16 queries"
    if not isinstance(window, PackedRows):
        return "it takes rows of 584 bytes"
    if q.shape[-1] != D or q.shape[-2] not in CONTRACT_HEADS:
        return f"it takes 512 dims and 64 or 128 heads, not {q.shape[-1]} and {q.shape[-2]}"
    return None


def plain_only(case) -> str | None:
    """bf16 rows of 512 dims, both pools."""
    q, window, _, entries = case.arguments[:4]
    if q.dtype is not torch.bfloat16 or isinstance(window, PackedRows):
        return "it takes bf16 queries and rows"
    if q.shape[-1] != D:
        return f"it takes 512 dims, not {q.shape[-1]}"
    return "it takes two pools" if entries is None else None


def flash_mla(device: str):
    """The published kernel; the schedule is made by the first run after `prepare`, as a server makes it once a step."""
    hopper()
    interface = require("flash_mla.flash_mla_interface")
    use = partial(interface.flash_mla_with_kvcache, use_legacy=True)
    return in_flash_mla(use, device, lambda: interface.get_mla_metadata()[0])


def in_flash_mla(function, device: str, schedule=lambda: None):
    """function(q [N, 1, H, 512], window [pages, 64, 1, 584], None, None, 512, plan, softmax_scale=, is_fp8_kvcache=,
    attn_sink=, indices= int32 [N, 1, W], extra_k_cache=, extra_indices_in_kvcache=) → (out [N, 1, H, 512], …)."""

    def prepare(q, window, window_index, entries, entry_index, sink, scale, *hints):
        lists = {"indices": listed(window_index)}
        if entries is not None:
            lists |= {"extra_k_cache": cache_view(entries), "extra_indices_in_kvcache": listed(entry_index)}
        fixed = q.unsqueeze(1), cache_view(window), None, None, D, schedule()
        more = dict(softmax_scale=scale, is_fp8_kvcache=True, attn_sink=sink) | lists
        return lambda: function(*fixed, **more)[0], lambda out: out.squeeze(1)

    return prepare


def sglang(device: str):
    """The published kernel."""
    at_least(8, 9)
    module = require("sglang.kernels.ops.attention.dsv4.triton_sparse_decode")
    return in_sglang(module.triton_fp8_attention_fwd, device)


def in_sglang(function, device: str):
    """function(q [N, 1, H, 512], window, 512, scale, indices, sink, entries, indices) → (out, …)."""

    def prepare(q, window, window_index, entries, entry_index, sink, scale, *hints):
        more = () if entries is None else (cache_view(entries), listed(entry_index))
        fixed = q.unsqueeze(1), cache_view(window), D, scale, listed(window_index), sink, *more
        return lambda: function(*fixed)[0], lambda out: out.view(q.shape)

    return prepare


def whole(attend):
    """prepare of `hca_attention` by one of `sparse_attention`: every visible entry is listed."""

    def prepare(q, window, window_index, entries, visible, sink, scale, *hints):
        B, T, H, _ = q.shape
        runs = entries.data.shape[1] * PAGE  # rows from one batch row's run to the next
        entry = torch.arange(entries.count, device=q.device)
        first = torch.arange(B, device=q.device).view(B, 1, 1) * runs
        index = torch.where(entry < visible.unsqueeze(-1), entry + first, -1).flatten(0, 1)
        run, finish = attend(q.flatten(0, 1), window, window_index, entries, index, sink, scale)
        return run, lambda out: finish(out).view(B, T, H, D)

    return prepare


def sglang_paged(device: str):
    """sparse_attn_v4_paged_decode(q [N, H, 512], rows bf16, indices, indptr, sink, scale): lists are ragged, so −1 are
    taken out of them beforehand."""
    at_least(8)
    module = require("sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_decode")
    module._cu_count = processors  # asks an AMD package otherwise

    def prepare(q, window, window_index, entries, entry_index, sink, scale, *hints):
        index = torch.cat((window_index, torch.where(entry_index < 0, -1, entry_index + len(window))), 1)
        live = index >= 0
        order = (~live).to(torch.int8).sort(dim=1, stable=True).indices
        counts = live.sum(1)
        flat = index.gather(1, order)[torch.arange(index.shape[1], device=q.device) < counts.unsqueeze(1)].int()
        fixed = q, torch.cat((window, entries)), flat, F.pad(counts.cumsum(0), (1, 0)).int(), sink, scale
        return lambda: module.sparse_attn_v4_paged_decode(*fixed), as_it_is

    return prepare


MLA = "sgl-flash-mla 1.0.0 flash_mla_with_kvcache(use_legacy=True)"
SGL = "sglang 0.5.23 triton_fp8_attention_fwd"
ADAPTERS = (
    Adapter("flash_mla", "sparse_attention", MLA, flash_mla, packed_only, layout=in_flash_mla),
    Adapter("sglang", "sparse_attention", SGL, sglang, packed_only, layout=in_sglang),
    Adapter(
        *("sglang-paged", "sparse_attention", "sglang 0.5.23 sparse_attn_v4_paged_decode", sglang_paged, plain_only),
        differs="lists are ragged: the adapter takes −1 out of them, with a wait for the device",
        prepared=("window", "window_index", "entries", "entry_index"),
    ),
    Adapter(
        *("flash_mla", "hca_attention", MLA, lambda d: whole(flash_mla(d)), packed_only),
        layout=lambda f, d: whole(in_flash_mla(f, d)),
    ),
    Adapter(
        *("sglang", "hca_attention", SGL, lambda d: whole(sglang(d)), packed_only),
        layout=lambda f, d: whole(in_sglang(f, d)),
    ),
)
