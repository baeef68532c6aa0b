"""Sequences of operations that a decode step runs as one kernel where the backend can. `op`: the bound operations."""

import torch

from kernels.quantize.weights import PackedWeight

KV_BLOCK = 64         # FP8 simulation of main KV: one scale for 64 of the dims that RoPE leaves alone
INDEX_KEY_BLOCK = 32  # FP4 simulation of index queries and keys


def linears(op, x: torch.Tensor, norm: torch.Tensor | None, eps: float, weights: tuple[PackedWeight, ...], simulate: tuple[bool, ...],
            dtypes: tuple[torch.dtype | None, ...]) -> tuple[torch.Tensor, ...]:
    """Several linear maps of one input: x [N, K], normalised by rms_norm(x, norm, eps) first unless norm [K] is None.

    weights[i] [O_i, K]; simulate[i] as in `linear`; dtypes[i]: torch.float32 for a result that is not rounded to
    x.dtype (products of x as it is, sums in fp32), None for x.dtype. Returns tensors [N, O_i].
    """
    if norm is not None:
        x = op.rms_norm(x, norm, eps)
    return tuple(op.linear(x if dtype is None else x.to(dtype), w, sim) for w, sim, dtype in zip(weights, simulate, dtypes, strict=True))


def query_heads(op, q: torch.Tensor, cis: torch.Tensor, eps: float) -> torch.Tensor:
    """RoPE(rms(q)) of each head, no weight: q [N, H, D], cis complex64 [N, d/2] → [N, H, D] in q.dtype. May overwrite q."""
    return op.rotate(op.rms_norm(q, None, eps), cis.unsqueeze(1))


def latent(op, kv: torch.Tensor, weight: torch.Tensor, eps: float, cis: torch.Tensor, simulate: bool) -> torch.Tensor:
    """RoPE(rms(kv)): kv [N, D], cis complex64 [N, d/2] → [N, D] in kv.dtype; through FP8 (all but the rotated dims) if `simulate`."""
    kv = op.rotate(op.rms_norm(kv, weight, eps), cis)
    return op.simulate_fp8_blocks(kv, KV_BLOCK, 2 * cis.shape[-1]) if simulate else kv


def index_queries(op, q: torch.Tensor, cis: torch.Tensor, simulate: bool) -> torch.Tensor:
    """Index queries [N, H, D], rotated by cis complex64 [N, d/2]; through Hadamard and FP4 if `simulate`. May overwrite q."""
    q = op.rotate(q, cis.unsqueeze(1))
    return op.simulate_fp4_blocks(op.hadamard(q), INDEX_KEY_BLOCK) if simulate else q


def store_rows(op, raw: torch.Tensor, ape: torch.Tensor, phase: torch.Tensor, ring: torch.Tensor, slots: torch.Tensor) -> None:
    """Compressor rows into their ring: raw fp32 [N, 2·w] (kv ‖ gate), gate + ape[phase], to ring fp32 [R, 2·w] at slots.

    ape fp32 [ratio, w]; phase, slots int64 [N]. Overwrites raw.
    """
    raw[:, ape.shape[1]:].add_(ape.index_select(0, phase))
    ring.index_copy_(0, slots, raw)


def pool_entries(op, pool: torch.Tensor, slots: torch.Tensor, overlap: int, dtype: torch.dtype, weight: torch.Tensor, eps: float,
                 cis: torch.Tensor, simulate: str | None) -> torch.Tensor:
    """Windows of compressor rows → entries: gated pooling, norm, RoPE, and the cache's simulation.

    pool fp32 [R, 2·c·D] (kv ‖ gate, c = overlap pieces of D each); slots int64 [M, S]: rows of each window, −1 absent; with
    c = 2 the first S/2 slots give their pieces 0, the others their pieces 1. Pooled in fp32, cast to `dtype`, normalised by
    weight [D], rotated by cis complex64 [M, d/2]. simulate: None, "kv" (FP8 but for the rotated dims) or "key"
    (Hadamard, then FP4). Returns [M, D] in `dtype`. A slot of −1 has no part, whatever the pool holds; a window of none is 0.
    """
    M, S = slots.shape
    D = pool.shape[1] // (2 * overlap)
    absent = (slots < 0).unsqueeze(-1)
    piece = torch.arange(S, device=slots.device) // (S // overlap)
    rows = (slots.clamp(min=0) * (2 * overlap) + piece).flatten()
    kv, gate = pool.view(-1, D).index_select(0, torch.cat((rows, rows + overlap))).view(2, M, S, D).unbind()
    pooled = op.gated_pool(kv.masked_fill(absent, 0), gate.masked_fill(absent, float("-inf"))).masked_fill(absent.all(1), 0)
    entries = op.rotate(op.rms_norm(pooled.to(dtype), weight, eps), cis)
    if simulate == "kv":
        return op.simulate_fp8_blocks(entries, KV_BLOCK, 2 * cis.shape[-1])
    return op.simulate_fp4_blocks(op.hadamard(entries), INDEX_KEY_BLOCK) if simulate == "key" else entries


def select_entries(op, q, weights, keys, visible, k: int) -> torch.Tensor:
    """The k best entries of each query by index score: `topk_entries` of `index_scores`, int64 [B, T, min(k, n)]."""
    return op.topk_entries(op.index_scores(q, weights, keys, visible), k)


def project_heads(op, o: torch.Tensor, cis: torch.Tensor, w: PackedWeight, groups: int) -> torch.Tensor:
    """Output heads o [N, H, D], rotated by cis complex64 [N, d/2] (the inverse rotation), through the grouped projection
    w [G·R, H·D/G] → [N, G·R]. May overwrite o."""
    o = op.rotate(o, cis.unsqueeze(1))
    return op.grouped_linear(o.reshape(o.shape[0], groups, -1), w).flatten(1)


def mhc_pre_norm(op, streams, fn, scale, base, iters: int, eps: float, norm_eps: float, weight, rms_eps: float):
    """`mhc_pre`, its first result normalised by weight [d]: returns (x [N, d], post, comb)."""
    x, post, comb = op.mhc_pre(streams, fn, scale, base, iters, eps, norm_eps)
    return op.rms_norm(x, weight, rms_eps), post, comb


def mhc_post_pre_norm(op, out, streams, post, comb, fn, scale, base, iters: int, eps: float, norm_eps: float, weight, rms_eps: float):
    """A sublayer's output back into the streams, and the next sublayer's input: returns (streams, x, post, comb)."""
    streams = op.mhc_post(out, streams, post, comb)
    return streams, *mhc_pre_norm(op, streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps)


def moe(op, x, indices, routing, w13: PackedWeight, w2: PackedWeight, shared: tuple[PackedWeight, PackedWeight, PackedWeight],
        limit: float, simulate: bool, simulate_shared: bool) -> torch.Tensor:
    """Routed experts plus the shared one (w1, w3, w2), summed in fp32 and cast once: x [N, d] → [N, d] in x.dtype."""
    routed = op.experts(x, indices, routing, w13, w2, limit, simulate)
    return (routed + op.shared_expert(x, *shared, limit, simulate_shared)).to(x.dtype)
