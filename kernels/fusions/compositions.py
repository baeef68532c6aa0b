"""Sequences of operations that a decode step runs as one kernel if the backend has it. `op`: the bound operations."""

from functools import partial
from typing import NamedTuple

import torch

from dsv4.kernels.cache_rows import PackedRows

# block of the simulation and of the packed rows: with equal blocks packing loses nothing
from dsv4.kernels.cache_rows.formats import KEY_BLOCK as INDEX_KEY_BLOCK
from dsv4.kernels.cache_rows.formats import KV_BLOCK
from dsv4.kernels.quantize.coded import CodedRows, Rows, plain
from dsv4.kernels.quantize.weights import PackedWeight
from dsv4.kernels.rope.reference import rotation


def linears(
    op,
    x: Rows,
    norm: torch.Tensor | None,
    eps: float,
    weights: tuple[PackedWeight, ...],
    simulate: tuple[bool, ...],
    dtypes: tuple[torch.dtype | None, ...],
) -> tuple[torch.Tensor, ...]:
    """Several linear maps of one input: x [N, K], normalised by rms_norm(x, norm, eps) first unless norm [K] is None.

    weights[i] [O_i, K]; simulate[i] as in `linear`; dtypes[i]: torch.float32 for a result that is not rounded to
    x.dtype (products of x as it is, sums in fp32), None for x.dtype. Returns tensors [N, O_i]. An implementation may
    multiply what comes with x where x would be rounded to FP8.
    """
    x = plain(x)
    if norm is not None:
        x = op.rms_norm(x, norm, eps)
    return tuple(
        op.linear(x if dtype is None else x.to(dtype), w, sim)
        for w, sim, dtype in zip(weights, simulate, dtypes, strict=True)
    )


def query_heads(op, q: torch.Tensor, cis: torch.Tensor, eps: float) -> torch.Tensor:
    """RoPE(rms(q)) of each head, no weight: q [N, H, D], cis complex64 [N, d/2] → [N, H, D] in q.dtype. May overwrite
    q."""
    return op.rotate(op.rms_norm(q, None, eps), cis.unsqueeze(1))


def latent(op, kv: torch.Tensor, weight: torch.Tensor, eps: float, cis: torch.Tensor, simulate: bool) -> torch.Tensor:
    """RoPE(rms(kv)): kv [N, D], cis complex64 [N, d/2] → [N, D] in kv.dtype; through FP8 (all but the rotated dims) if
    `simulate`."""
    kv = op.rotate(op.rms_norm(kv, weight, eps), cis)
    return op.simulate_fp8_blocks(kv, KV_BLOCK, 2 * cis.shape[-1]) if simulate else kv


def index_queries(op, q: torch.Tensor, cis: torch.Tensor, simulate: bool) -> torch.Tensor:
    """Index queries [N, H, D], rotated by cis complex64 [N, d/2]; through Hadamard and FP4 if `simulate`. May overwrite
    q."""
    q = op.rotate(q, cis.unsqueeze(1))
    return op.simulate_fp4_blocks(op.hadamard(q), INDEX_KEY_BLOCK) if simulate else q


def store_rows(
    op, raw: torch.Tensor, ape: torch.Tensor, phase: torch.Tensor, ring: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write compressor rows into their ring: raw fp32 [N, 2·w] (kv ‖ gate), with gate + ape[phase], to ring fp32 [R,
    2·w] at slots.

    ape fp32 [ratio, w]; phase, slots int64 [N]. Overwrites raw.
    """
    raw[:, ape.shape[1] :].add_(ape.index_select(0, phase))
    ring.index_copy_(0, slots, raw)


def pool_entries(
    op,
    pool: torch.Tensor,
    slots: torch.Tensor,
    overlap: int,
    dtype: torch.dtype,
    weight: torch.Tensor,
    eps: float,
    cis: torch.Tensor,
    simulate: str | None,
) -> torch.Tensor:
    """Windows of compressor rows → entries [M, D] in `dtype`: `pool_windows`, cast, normalised by weight [D],
    `finish_entries`."""
    pooled = pool_windows(op, pool, slots, overlap).to(dtype)
    return finish_entries(op, op.rms_norm(pooled, weight, eps), cis, simulate)


def pool_windows(op, pool: torch.Tensor, slots: torch.Tensor, overlap: int) -> torch.Tensor:
    """Gated pooling of windows of compressor rows: pool fp32 [R, 2·c·D] (kv ‖ gate, c = overlap pieces of D each) →
    fp32 [M, D].

    slots int64 [M, S]: rows of each window, −1 absent; with c = 2 the first S/2 slots give their pieces 0, the others
    their pieces 1. A slot of −1 contributes nothing, whatever the pool holds; a window without slots is 0.
    """
    M, S = slots.shape
    D = pool.shape[1] // (2 * overlap)
    absent = (slots < 0).unsqueeze(-1)
    piece = torch.arange(S, device=slots.device) // (S // overlap)
    rows = (slots.clamp(min=0) * (2 * overlap) + piece).flatten()
    kv, gate = pool.view(-1, D).index_select(0, torch.cat((rows, rows + overlap))).view(2, M, S, D).unbind()
    kv, gate = kv.masked_fill(absent, 0), gate.masked_fill(absent, float("-inf"))  # 0 · NaN would be NaN
    return op.gated_pool(kv, gate).masked_fill(absent.all(1), 0)


def finish_entries(op, entries: torch.Tensor, cis: torch.Tensor, simulate: str | None) -> torch.Tensor:
    """Normalised entries [M, D], rotated by cis complex64 [M, d/2], and through the cache's simulation: None, "kv" (FP8
    but for the rotated dims) or "key" (Hadamard, then FP4)."""
    entries = op.rotate(entries, cis)
    if simulate == "kv":
        return op.simulate_fp8_blocks(entries, KV_BLOCK, 2 * cis.shape[-1])
    return op.simulate_fp4_blocks(op.hadamard(entries), INDEX_KEY_BLOCK) if simulate == "key" else entries


def select_entries(
    op, q, weights, keys, visible, k: int, rounded: bool = False, run: int | None = None
) -> torch.Tensor:
    """The k best entries of each query by index score: `topk_entries` of `index_scores`, int64 [B, T, min(k, n)].

    rounded: the caller knows that q, and keys that are not packed, were rounded by `simulate_fp4_blocks` (a hint that
    may be ignored). run: an entry of batch row b is given as row b · run + entry of a pool.
    """
    entry = op.topk_entries(op.index_scores(q, weights, keys, visible), k)
    return entry if run is None else chosen_rows(op, entry, run).view_as(entry)


def project_heads(
    op, o: torch.Tensor, cis: torch.Tensor, w: PackedWeight, groups: int, coded: bool = False
) -> torch.Tensor | CodedRows:
    """Output heads o [N, H, D], rotated by cis complex64 [N, d/2] (the inverse rotation), through the grouped
    projection w [G·R, H·D/G] → [N, G·R]. May overwrite o. coded: the result may be `CodedRows`."""
    heads = op.rotate(o, cis.unsqueeze(1)).flatten(1).unflatten(1, (groups, -1))
    return op.grouped_linear(heads, w).flatten(1)


def mhc_pre_norm(
    op, streams, fn, scale, base, iters: int, eps: float, norm_eps: float, weight, rms_eps: float,
    coded: bool = False, rounded: bool = False,
):  # fmt: skip
    """`mhc_pre`, its first result normalised by weight [d]: returns (x [N, d], post, comb). coded: x may be
    `CodedRows`; rounded: it may be `RoundedRows`."""
    x, post, comb = op.mhc_pre(streams, fn, scale, base, iters, eps, norm_eps)
    return op.rms_norm(x, weight, rms_eps), post, comb


def mhc_post_pre_norm(
    op, out, streams, post, comb, fn, scale, base, iters: int, eps: float, norm_eps: float, weight, rms_eps: float,
    coded: bool = False, rounded: bool = False,
):  # fmt: skip
    """Merge a sublayer's output into the streams, and compute the next sublayer's input: returns (streams, x, post,
    comb). coded, rounded: as of `mhc_pre_norm`."""
    streams = op.mhc_post(out, streams, post, comb)
    return streams, *mhc_pre_norm(op, streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps, coded, rounded)


def moe(
    op,
    x,
    indices,
    routing,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: tuple[PackedWeight, PackedWeight, PackedWeight],
    limit: float,
    simulate: bool,
    simulate_shared: bool,
    dtype: torch.dtype | None = None,
    combine: bool = True,
) -> torch.Tensor:
    """Routed experts plus the shared one (w1, w3, w2), summed in fp32 and cast once: x [N, d] → [N, d] in dtype (None:
    of x). Without `combine` it is fp32, and an implementation may leave the sum to who reads the result."""
    routed = op.experts(x, indices, routing, w13, w2, limit, simulate)
    total = routed + op.shared_expert(x, *shared, limit, simulate_shared)
    return total.to(dtype or x.dtype) if combine else total


# A decode step
# ---------------------------------------------------------------------------------------------------------


class Latents(NamedTuple):
    """Each token's key and value before they enter the window: kv [N, D] and the other arguments of `latent`, and the
    rows `slots` int64 [N] of `pool` (a tensor [R, D], or flat PackedRows) to write."""

    kv: torch.Tensor
    weight: torch.Tensor
    simulate: bool
    pool: torch.Tensor | PackedRows
    slots: torch.Tensor


class IndexHeads(NamedTuple):
    """The indexer's queries and weights: q [N, H, D] as in `index_queries`; head weights [N, H], to be multiplied by
    `scale` in fp32."""

    q: torch.Tensor
    weights: torch.Tensor
    scale: float
    simulate: bool


class Windows(NamedTuple):
    """One compressor's part of a step: rows into their ring, then windows of rows into entries.

    raw, ape, phase, ring, slots as in `store_rows`; rows, overlap, weight, cis, simulate as in `pool_entries`. live
    bool [M]: windows that this step completes; entries of incomplete windows are not written, because on pages they may
    belong to another row. Entries go to rows `entry_slots` int64 [M] of `entries` (a tensor [R, D], or flat
    PackedRows). If M > 0, tokens and windows of a batch row are adjacent.
    """

    raw: torch.Tensor
    ape: torch.Tensor
    phase: torch.Tensor
    ring: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    live: torch.Tensor
    overlap: int
    weight: torch.Tensor
    cis: torch.Tensor
    simulate: str | None
    entries: torch.Tensor | PackedRows
    entry_slots: torch.Tensor


def attention_inputs(
    op,
    batch: int,
    q: torch.Tensor,
    cis: torch.Tensor,
    eps: float,
    latents: Latents,
    index: IndexHeads | None,
    windows: tuple[Windows, ...],
) -> tuple[torch.Tensor, ...]:
    """Everything between a layer's linear maps and its attention, of a step of `batch` rows of equally many tokens.

    q [N, H, D] as in `query_heads`; the window, the index queries and the compressors' rows belong to the same tokens.
    eps: of all norms. Returns queries, index queries and head weights fp32 [N, H] if there is an indexer, and the
    buffers that were written: the window, then ring and entries of each compressor. May overwrite q, index.q and raw.
    """
    found = [_part(op, "query_heads")(q, cis, eps)]
    if index is not None:
        found += [_part(op, "index_queries")(index.q, cis, index.simulate), index.weights.float() * index.scale]
    _put(op, latents.pool, latents.slots, _part(op, "latent")(latents.kv, latents.weight, eps, cis, latents.simulate))
    for w in windows:
        _part(op, "store_rows")(w.raw, w.ape, w.phase, w.ring, w.slots)
        entries = _part(op, "pool_entries")(w.ring, w.rows, w.overlap, q.dtype, w.weight, eps, w.cis, w.simulate)
        _put(op, w.entries, w.entry_slots[w.live], entries[w.live])
    pools = (latents.pool, *(pool for w in windows for pool in (w.ring, w.entries)))
    return *found, *(pool.data if isinstance(pool, PackedRows) else pool for pool in pools)


def _part(op, name: str):
    """Composition `name` as it was bound; its definition if only operations were bound."""
    return getattr(op, name, None) or partial(globals()[name], op)


def _put(op, pool: torch.Tensor | PackedRows, slots: torch.Tensor, values: torch.Tensor) -> None:
    if not len(slots):
        return
    if isinstance(pool, PackedRows):
        op.write_rows(pool, slots, values)
    else:
        pool.index_copy_(0, slots, values.to(pool.dtype))


class Kept(NamedTuple):
    """The buffers of the compressors of one ratio: raw rows in rings of `ring` rows a batch row; entries of each
    compressor in pools of entries[i] a batch row. overlap: as in `pool_entries`."""

    ratio: int
    overlap: int
    ring: int
    entries: tuple[int, ...]


def place(
    op,
    start: torch.Tensor,
    tokens: int,
    frequencies: tuple[torch.Tensor, ...],
    window: tuple[int, int],
    kept: tuple[Kept, ...],
) -> tuple[torch.Tensor, ...]:
    """The values that layers derive from positions alone, for a step of `tokens` tokens a row from start int64 [B] on.
    N = B·tokens.

    window: (tokens W, rows R of the ring a batch row). Returns rows of the ring int64 [N, W] of the last W positions of
    each token, −1 before position 0, and its own [N]; for each frequencies fp32 [d/2] the rotation and the inverse one,
    fp32 [N, d/2, 2] (cos, sin); and of each `kept`, with C windows that a row may complete and M = B·C: visible entries
    int64 [B, tokens], place in the window [N], row of the ring [N], new windows [B, C], whether each is complete and
    has room in every pool bool [M], rows of the ring of their tokens [M, overlap·ratio] (−1: none), the last
    frequencies' rotation fp32 [M, d/2, 2], and rows [M] of each pool. So a start beyond the cache, which only the
    device knows, writes nothing outside of its batch row.
    """
    W, R = window
    row = torch.arange(len(start), device=start.device).unsqueeze(1)
    pos = start.unsqueeze(1) + torch.arange(tokens, device=start.device)
    near = pos.unsqueeze(-1) + torch.arange(1 - W, 1, device=start.device)
    found = [torch.where(near < 0, -1, near % R + row.unsqueeze(-1) * R).flatten(0, 1), (pos % R + row * R).flatten()]
    for f in frequencies:
        cis = rotation(pos.flatten(), f)
        found += [torch.view_as_real(cis), torch.view_as_real(cis.conj().resolve_conj())]
    for k in kept:
        C, S = (tokens + k.ratio - 1) // k.ratio, k.overlap * k.ratio
        new = start.unsqueeze(1) // k.ratio + torch.arange(C, device=start.device)
        live = ((new + 1) * k.ratio <= start.unsqueeze(1) + tokens) & (new < min(k.entries))
        offset = torch.arange(k.ratio - S, k.ratio, device=start.device)
        at = (new * k.ratio).unsqueeze(-1) + offset
        rows = torch.where((at < 0) | ~live.unsqueeze(-1), -1, at % k.ring + row.unsqueeze(-1) * k.ring)
        cis = rotation((new * k.ratio).flatten(), frequencies[-1])
        found += [
            (pos + 1) // k.ratio,
            (pos % k.ratio).flatten(),
            (pos % k.ring + row * k.ring).flatten(),
            new,
            live.flatten(),
            rows.flatten(0, 1),
            torch.view_as_real(cis),
            *((new + row * n).flatten() for n in k.entries),
        ]
    return tuple(found)


def embed_streams(op, ids: torch.Tensor, table: torch.Tensor, streams: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows ids int64 [N] of the embedding [vocab, d] in `dtype`, each `streams` times: [N, streams, d]."""
    rows = table.index_select(0, ids).to(dtype)
    return rows.unsqueeze(1).expand(-1, streams, -1).contiguous()


def chosen_rows(op, entry: torch.Tensor, run: int) -> torch.Tensor:
    """Entries int64 [B, T, K] (−1 absent) of batch rows whose runs of `run` entries are consecutive → rows [B·T, K], −1
    where absent."""
    base = torch.arange(entry.shape[0], device=entry.device).view(-1, 1, 1) * run
    return torch.where(entry < 0, entry, entry + base).flatten(0, 1)


def mhc_post_head_norm(
    op, out, streams, post, comb, fn, scale, base, eps: float, norm_eps: float, weight, rms_eps: float
):
    """Merge the last sublayer's output into the streams, and compute the head's normalised input: returns (streams, x
    [N, d])."""
    streams = op.mhc_post(out, streams, post, comb)
    return streams, op.rms_norm(op.mhc_head(streams, fn, scale, base, eps, norm_eps), weight, rms_eps)
