"""DeepGEMM's and SGLang's scores; vLLM's, FlashInfer's and torch's top-k."""

from functools import partial

import torch
import torch.nn.functional as F

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat
from dsv4.probes.kernel_audit.adapters import Adapter
from dsv4.probes.kernel_audit.adapters.installed import at_least, hopper, library, processors, require

H, D, WORKSPACE = 64, 128, 1 << 20
ALIGNED = 4  # scores: rows start at multiples of 16 bytes
E4M3_MAX = 448.0


def keys_in(form: RowFormat):
    """takes(case) of a kernel for packed keys of one format."""

    def takes(case) -> str | None:
        q, _, keys, _ = case.arguments
        if not isinstance(keys, PackedRows) or keys.format is not form:
            return f"it takes {form.value}"
        if q.dtype is not torch.bfloat16:
            return "it takes bf16 queries"
        return None if q.shape[-2:] == (H, D) else f"it takes 64 heads of 128 dims, not {list(q.shape[-2:])}"

    return takes


def in_fp8(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [N, H, D] as E4M3 and its power-of-two scale fp32 [N, H], which a server folds into the head weights."""
    top = q.float().abs().amax(-1).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(top / E4M3_MAX)))
    return (q.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def pages_of(keys: PackedRows, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages uint8 [B·pages, page bytes], table int32 [B·T, pages]) of one run of pages a batch row."""
    B, pages, _ = keys.data.shape
    table = torch.arange(B * pages, dtype=torch.int32, device=keys.data.device).view(B, pages)
    return keys.data.flatten(0, 1), table.repeat_interleave(T, 0)


def deep_gemm(device: str):
    """The published kernel; its schedule is made by `prepare`, as a server makes it once a step."""
    hopper()
    gemm = require("deep_gemm")
    schedule = lambda lengths: gemm.get_paged_mqa_logits_metadata(lengths, PAGE, processors())
    return in_deep_gemm(gemm.fp8_fp4_paged_mqa_logits, device, schedule)


def in_deep_gemm(function, device: str, schedule=lambda lengths: None):
    """function((q E4M3 [N, 1, H, 128], None), pages [·, 64, 1, 132], weights [N, H], lengths [N, 1], table, schedule,
    n) → scores [N, n]. Each token is a query of its own; what is behind a length is filled with −inf afterwards."""

    def prepare(q, weights, keys, visible):
        B, T = q.shape[:2]
        codes, scale = in_fp8(q.flatten(0, 1))
        lengths = visible.flatten().int().unsqueeze(1)
        pages, table = pages_of(keys, T)
        fixed = (codes.unsqueeze(1), None), pages.view(-1, PAGE, 1, D + 4), weights.flatten(0, 1) * scale, lengths
        plan = schedule(lengths)
        run = lambda: function(*fixed, table, plan, keys.count)
        return run, lambda found: behind(found[:, : keys.count].view(B, T, keys.count), visible)

    return prepare


def behind(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """−inf from `visible` on."""
    entry = torch.arange(scores.shape[-1], device=scores.device)
    return scores.float().masked_fill(entry >= visible.unsqueeze(-1), float("-inf"))


def sglang_fp4(device: str):
    """fp4_index_logits_decode(q bf16 [N, 64, 128], weights, slots int64 [N, n], lengths, pages [·, 4352], 64)."""
    at_least(8, 9)
    module = require("sglang.kernels.ops.attention.dsv4.fp4_indexer")

    def prepare(q, weights, keys, visible):
        B, T = q.shape[:2]
        pages, _ = pages_of(keys, T)
        first = torch.arange(B, device=q.device).repeat_interleave(T).unsqueeze(1) * keys.data.shape[1] * PAGE
        slots = torch.arange(keys.count, device=q.device) + first
        fixed = q.flatten(0, 1), weights.flatten(0, 1).contiguous(), slots, visible.flatten().int(), pages, PAGE
        run = lambda: module.fp4_index_logits_decode(*fixed)
        return run, lambda found: behind(found[:, : keys.count].view(B, T, keys.count), visible)

    return prepare


def of_rows(select):
    """prepare of a top-k of rows: select(scores [N, n], lengths int32 [N], k) → run of int32 [N, k]."""

    def prepare(scores, k, visible):
        B, T, n = scores.shape
        run = select(scores.reshape(B * T, n), visible.flatten().int(), k)
        return run, lambda found: found[:, : min(k, n)].long().view(B, T, min(k, n))

    return prepare


def vllm(name: str, device: str):
    """torch.ops._C.NAME(scores, lengths, out, workspace, k, longest)."""
    at_least(9)
    op = getattr(library("_C_stable_libtorch", "_C"), name)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)

    def select(scores, lengths, k):
        scores = F.pad(scores, (0, -scores.shape[1] % ALIGNED))  # a server's logits have such rows

        def run():
            out = torch.full((len(lengths), k), -1, dtype=torch.int32, device=scores.device)
            op(scores, lengths, out, workspace, k, scores.shape[1])
            return out

        return run

    return of_rows(select)


def vllm_per_row(device: str):
    """torch.ops._C.top_k_per_row_decode(scores, 1, lengths, out, rows, strides, k)."""
    at_least(8)
    op = library("_C_stable_libtorch", "_C").top_k_per_row_decode

    def select(scores, lengths, k):
        def run():
            out = torch.full((len(lengths), k), -1, dtype=torch.int32, device=scores.device)
            op(scores, 1, lengths, out, len(lengths), *scores.stride(), k)
            return out

        return run

    return of_rows(select)


def flashinfer(device: str):
    """The published kernel."""
    at_least(8)
    return in_flashinfer(require("flashinfer.topk").top_k_ragged_transform, device)


def in_flashinfer(function, device: str):
    """function(scores [N, n], offsets int32 [N], lengths int32 [N], k) → int32 [N, k]."""

    def select(scores, lengths, k):
        offsets = torch.zeros_like(lengths)
        return lambda: function(scores, offsets, lengths, k)

    return of_rows(select)


def torch_topk(device: str):
    """torch.topk of scores that are −inf behind a length; picks of −inf become −1."""

    def select(scores, lengths, k):
        hidden = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)

        def run():
            best = scores.masked_fill(hidden, float("-inf")).topk(min(k, scores.shape[1]), -1)
            return best.indices.masked_fill(best.values == float("-inf"), -1)

        return run

    return of_rows(select)


def widths(case) -> str | None:
    """vLLM's kernels are compiled for some k."""
    return (
        None if case.arguments[1] in (512, 1024, 2048) else f"it takes k of 512, 1024 or 2048, not {case.arguments[1]}"
    )


ANY, VLLM = "any-of-equals", "vllm 0.33.0 torch.ops._C."
ADAPTERS = (
    Adapter(
        *("deep_gemm", "index_scores", "deep_gemm (in vllm 0.33.0) fp8_fp4_paged_mqa_logits", deep_gemm),
        takes=keys_in(RowFormat.INDEX_FP8),
        layout=in_deep_gemm,
        accuracy="fp8-sums",
        differs="queries are E4M3; what is behind a length is not defined there, and filled here",
    ),
    Adapter(
        *("sglang", "index_scores", "sglang 0.5.23 fp4_index_logits_decode", sglang_fp4),
        takes=keys_in(RowFormat.INDEX_FP4),
        accuracy="bf16-throughout",
        differs="it rounds to bf16 on the way",
    ),
    Adapter("vllm", "topk_entries", f"{VLLM}cooperative_topk", partial(vllm, "cooperative_topk"), widths, ANY),
    Adapter("vllm-persistent", "topk_entries", f"{VLLM}persistent_topk", partial(vllm, "persistent_topk"), widths, ANY),
    Adapter("vllm-per-row", "topk_entries", f"{VLLM}top_k_per_row_decode", vllm_per_row, accuracy=ANY),
    Adapter(
        "flashinfer",
        "topk_entries",
        "flashinfer 0.7.2 top_k_ragged_transform",
        flashinfer,
        accuracy=ANY,
        layout=in_flashinfer,
    ),
    Adapter("torch", "topk_entries", "torch.topk", torch_topk, accuracy=ANY),
)
