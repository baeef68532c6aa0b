"""Indexer peers: DeepGEMM's FP8 scores, SGLang's FP4 scores, vLLM's top-k kernels."""

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat
from dsv4.kernels.indexer.reference import index_scores
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import difference, normal, packed
from scripts.bench.peers import at_least, hopper, library, peer, processors, require
from scripts.bench.peers_torch import same_values

H, D = FLASH.index_n_heads, FLASH.index_head_dim
TOLERANCE = 1e-2  # relative Frobenius error of scores of the same quantised queries and keys
LOST_SCORE = 1e-3  # mean score of a selection below that of the best one, relative to it
WORKSPACE = 1 << 20  # bytes that vLLM's top-k kernels are given


def score_inputs(f: dict, i: int, format: RowFormat, dtype: torch.dtype):
    """Queries [B, 64, 128] of a dtype, fp32 head weights [B, 64], keys of B runs, int32 lengths [B]."""
    B, n = f["batch"], f["entries"]
    q = normal(3 * i, B, H, D).to(dtype)
    weights = normal(3 * i + 1, B, H, dtype=torch.float32).abs() / H
    keys = packed(format, D, 0, n, 3 * i + 2, batch=B)
    return q, weights, keys, torch.full((B,), n, dtype=torch.int32, device="cuda")


def want_scores(q, weights, keys: PackedRows) -> torch.Tensor:
    """Reference scores [B, n] of the same quantised values."""
    visible = torch.full((q.shape[0], 1), keys.count, device="cuda")
    return index_scores(q.float().unsqueeze(1), weights.unsqueeze(1), keys, visible).squeeze(1)


def against_scores(run, q, weights, keys):
    return lambda: (difference(run()[:, : keys.count], want_scores(q, weights, keys)), TOLERANCE)


def selected(scores: torch.Tensor, index: torch.Tensor) -> tuple[float, float]:
    """How far the mean score of a selection is below the best possible, relative to it. Scores are 0 of entries that a
    query cannot see, so of a query that sees none the best is 0, and any selection is as good."""
    best = scores.topk(index.shape[-1], -1).values.mean(-1)
    got = scores.gather(-1, index.long().clamp(min=0)).where(index >= 0, 0.0).mean(-1)
    return ((best - got) / best.abs()).where(best != got, 0.0).max().item(), LOST_SCORE


def deepgemm_scores(f: dict, i: int):
    """deep_gemm (in vllm 0.33.0): fp8_fp4_paged_mqa_logits((q fp8 [B, 1, 64, 128], None), keys [pages, 64, 1, 132],
    weights f32 [B, 64], lengths [B, 1], table [B, pages], schedule, n). Its schedule is made beforehand, as a server
    does once a step."""
    hopper()
    gemm = require("deep_gemm")
    q, weights, keys, lens = score_inputs(f, i, RowFormat.INDEX_FP8, torch.float8_e4m3fn)
    B, pages = keys.data.shape[:2]
    cache = keys.data.view(B * pages, PAGE, 1, D + 4)
    table = torch.arange(B * pages, dtype=torch.int32, device="cuda").view(B, pages)
    per_query = lens.unsqueeze(1)
    schedule = gemm.get_paged_mqa_logits_metadata(per_query, PAGE, processors())
    heads = q.unsqueeze(1)

    def run():
        return gemm.fp8_fp4_paged_mqa_logits((heads, None), cache, weights, per_query, table, schedule, keys.count)

    return run, q, weights, keys, lens


@peer("DeepGEMM FP8", "index_scores")
def deepgemm(row, i):
    run, q, weights, keys, _ = deepgemm_scores(row.facts, i)
    return run, against_scores(run, q, weights, keys)


def fp4_inputs(f: dict, i: int):
    q, weights, keys, lens = score_inputs(f, i, RowFormat.INDEX_FP4, torch.bfloat16)
    B, pages, size = keys.data.shape
    first = torch.arange(B, device="cuda").unsqueeze(1) * pages * PAGE
    return q, weights, keys, lens, keys.data.view(B * pages, size), torch.arange(keys.count, device="cuda") + first


@peer("SGLang Triton FP4", "index_scores")
def sglang_fp4(row, i):
    """sglang 0.5.23: fp4_index_logits_decode(q bf16 [B, 64, 128], weights, slots int64 [B, n], lens, [pages, 4352],
    64)."""
    module = require("sglang.kernels.ops.attention.dsv4.fp4_indexer")
    q, weights, keys, lens, table, slots = fp4_inputs(row.facts, i)

    def run():
        return module.fp4_index_logits_decode(q, weights, slots, lens, table, PAGE)

    # it rounds to bf16 three times
    return run, lambda: (difference(run(), want_scores(q, weights, keys)), 2 * TOLERANCE)


@peer("SGLang Triton FP4 paged", "index_scores")
def sglang_fp4_paged(row, i):
    """sglang 0.5.23: fp4_index_logits_paged(q, weights, rows of the table, table of slots, lens, keys, 64, n, ratio
    1)."""
    run, q, weights, keys, _ = sglang_paged(row.facts, i)
    return run, lambda: (difference(run(), want_scores(q, weights, keys)), 2 * TOLERANCE)


def sglang_paged(f: dict, i: int):
    module = require("sglang.kernels.ops.attention.dsv4.fp4_indexer")
    q, weights, keys, lens, table, slots = fp4_inputs(f, i)
    request, slots = torch.arange(q.shape[0], device="cuda", dtype=torch.int32), slots.int()

    def run():
        return module.fp4_index_logits_paged(q, weights, request, slots, lens, table, PAGE, keys.count, 1)

    return run, q, weights, keys, lens


def vllm_topk(name: str, lens: torch.Tensor, k: int):
    """Function scores [B, n] → int32 [B, k] by vLLM 0.33.0: torch.ops._C.NAME(logits, lengths, out, workspace, k,
    longest)."""
    if name == "cooperative_topk":
        at_least(9)
    op = getattr(library("_C_stable_libtorch", "_C"), name)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    out = torch.full((lens.shape[0], k), -1, dtype=torch.int32, device="cuda")

    def select(scores: torch.Tensor) -> torch.Tensor:
        op(scores, lens, out, workspace, k, scores.shape[1])
        return out

    return select


def topk_peer(name: str):
    def make(row, i):
        f = row.facts
        scores = normal(i, f["batch"], f["entries"], dtype=torch.float32)
        select = vllm_topk(name, torch.full((f["batch"],), f["entries"], dtype=torch.int32, device="cuda"), f["k"])
        run = lambda: select(scores)
        return run, lambda: same_values(scores, run(), f["k"])

    return make


vllm_takes = lambda facts: facts.get("k") in (512, 1024, 2048)
cooperative_takes = lambda facts: vllm_takes(facts) and facts["batch"] <= 64
peer("vLLM cooperative_topk", "topk", when=cooperative_takes)(topk_peer("cooperative_topk"))
peer("vLLM persistent_topk", "topk", when=vllm_takes)(topk_peer("persistent_topk"))


@peer("vLLM top_k_per_row", "topk")
def per_row_topk(row, i):
    f = row.facts
    op = library("_C_stable_libtorch", "_C").top_k_per_row_decode
    scores = normal(i, f["batch"], f["entries"], dtype=torch.float32)
    lens = torch.full((f["batch"],), f["entries"], dtype=torch.int32, device="cuda")
    out = torch.full((f["batch"], f["k"]), -1, dtype=torch.int32, device="cuda")

    def run():
        op(scores, 1, lens, out, f["batch"], *scores.stride(), f["k"])
        return out

    return run, lambda: same_values(scores, run(), f["k"])


@peer("FlashInfer top-k", "topk")
def flashinfer_topk(row, i):
    """flashinfer 0.7.2: top_k_ragged_transform(scores, offsets, lengths, k) as vLLM calls it."""
    select = require("flashinfer.topk").top_k_ragged_transform
    f = row.facts
    scores = normal(i, f["batch"], f["entries"], dtype=torch.float32)
    lens = torch.full((f["batch"],), f["entries"], dtype=torch.int32, device="cuda")
    offsets = torch.zeros_like(lens)
    run = lambda: select(scores, offsets, lens, f["k"])
    return run, lambda: same_values(scores, run(), f["k"])


@peer("DeepGEMM FP8 + cooperative_topk", "select_entries", when=cooperative_takes)
def deepgemm_select(row, i):
    scores, q, weights, keys, lens = deepgemm_scores(row.facts, i)
    select = vllm_topk("cooperative_topk", lens, row.facts["k"])
    run = lambda: select(scores())
    return run, lambda: selected(want_scores(q, weights, keys), run())


@peer("SGLang FP4 + cooperative_topk", "select_entries", when=cooperative_takes)
def sglang_select(row, i):
    scores, q, weights, keys, lens = sglang_paged(row.facts, i)
    select = vllm_topk("cooperative_topk", lens, row.facts["k"])
    run = lambda: select(scores())
    return run, lambda: selected(want_scores(q, weights, keys), run())


@peer("DeepGEMM FP8 + torch.topk", "select_entries")
def deepgemm_torch_select(row, i):
    scores, q, weights, keys, _ = deepgemm_scores(row.facts, i)
    run = lambda: torch.topk(scores()[:, : keys.count], row.facts["k"], -1, sorted=False).indices
    return run, lambda: selected(want_scores(q, weights, keys), run())


def deepgemm_prompt(f: dict, i: int):
    """(function that yields queries and their scores, as many at a time as have 2 GiB of scores, as its server does;
    first and last + 1 entry of each query; function of a selection int [T, k] that says how far it is off).

    deep_gemm: fp8_fp4_mqa_logits((q [T, 64, 128], None), (keys [n, 128], scales f32 [n]), weights [T, 64], from, to,
    n). The last T positions of a context of `entries` entries, one for 4 tokens."""
    hopper()
    gemm, T, n = require("deep_gemm"), f["tokens"], f["entries"]
    q = normal(3 * i, T, H, D).to(torch.float8_e4m3fn)
    weights = normal(3 * i + 1, T, H, dtype=torch.float32).abs() / H
    keys = normal(3 * i + 2, n, D).to(torch.float8_e4m3fn)
    scales = torch.ones(n, device="cuda")
    begin = torch.zeros(T, dtype=torch.int32, device="cuda")
    end = ((4 * n - T + 1 + torch.arange(T, device="cuda")) // 4).int()
    step = max(1, min(T, (2 << 30) // (4 * n)))

    def scores():
        for at in range(0, T, step):
            s = slice(at, min(at + step, T))
            yield s, gemm.fp8_fp4_mqa_logits((q[s], None), (keys, scales), weights[s], begin[s], end[s], n)

    def off(index: torch.Tensor):
        at = torch.linspace(0, T - 1, 16, device="cuda").long()
        batch = lambda t: t.unsqueeze(0)
        want = index_scores(batch(q[at].float()), batch(weights[at]), batch(keys.float()), batch(end[at].long()))
        return selected(want[0].nan_to_num(neginf=0.0), index[at])

    return scores, begin, end, off


@peer("DeepGEMM FP8, scores alone", "index_prefill")
def deepgemm_prefill_scores(row, i):
    """Nothing is selected."""
    scores, _, end, off = deepgemm_prompt(row.facts, i)

    def run():
        return [logits.shape for _, logits in scores()]

    def best(s: slice, logits: torch.Tensor) -> torch.Tensor:
        dead = torch.arange(row.facts["entries"], device="cuda") >= end[s, None]
        chosen = logits[:, : dead.shape[1]].masked_fill(dead, float("-inf")).topk(row.facts["k"], -1)
        return chosen.indices.masked_fill(chosen.values == float("-inf"), -1)

    return run, lambda: off(torch.cat([best(*part) for part in scores()]))


@peer("DeepGEMM FP8 + top_k_per_row", "index_prefill")
def deepgemm_prefill(row, i):
    """Its scores, then vLLM's top_k_per_row_prefill."""
    ops, k = library("_C_stable_libtorch", "_C"), row.facts["k"]
    scores, begin, end, off = deepgemm_prompt(row.facts, i)
    out = torch.empty(row.facts["tokens"], k, dtype=torch.int32, device="cuda")

    def run():
        for s, logits in scores():
            ops.top_k_per_row_prefill(logits, begin[s], end[s], out[s], logits.shape[0], *logits.stride(), k)
        return out

    return run, lambda: off(run())
