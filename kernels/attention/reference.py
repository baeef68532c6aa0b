"""Attention of one shared latent (K = V) with a sink in the denominator.

o = Σ_j p_j·kv_j with p_j = exp(l_j) / (Σ exp(l_j) + exp(sink)), l_j = scale·q·kv_j. The sink
is not scaled and has no value.
"""

import torch
from einops import rearrange

from dsv4.kernels.cache_rows import PackedRows, decode_rows, read_rows

SCRATCH_BYTES = 64 << 20


def gather_rows(pool: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of pool [R, D] at index [N, K] as fp32 [N, K, D] (zeros where −1), and the mask index < 0."""
    absent = index < 0
    if isinstance(pool, PackedRows):
        return read_rows(pool, index.clamp(min=0)).masked_fill_(absent.unsqueeze(-1), 0), absent
    rows = pool.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, pool.shape[-1]).float()
    return rows.masked_fill_(absent.unsqueeze(-1), 0), absent


def _dense(pool: torch.Tensor | PackedRows, index: torch.Tensor) -> torch.Tensor | PackedRows:
    """A packed pool as fp32 [rows, D] if that decodes fewer rows than reading it at `index`, that is for one pool of a
    long step."""
    return decode_rows(pool) if isinstance(pool, PackedRows) and index.numel() > pool.count else pool


def sparse_attention(
    q, window, window_index, entries, entry_index, sink, scale: float, complete: bool = False, together: int = 1
) -> torch.Tensor:
    """Window rows ∪ selected entries, each query with its own list.

    q [N, H, D]; window [R, D] and entries [E, D]: pools of rows, or PackedRows; window_index int64 [N, W] and
    entry_index int64 [N, K]: rows of the pools, −1 anywhere is skipped; entries and entry_index None for a window
    layer; sink fp32 [H]; complete: the caller knows that no index is −1 (a hint that may be ignored); together: the
    number of queries of each batch row. While it is small, it must not change the order of a query's sums. Returns [N,
    H, D] in q.dtype; softmax in fp32.
    """
    N, H, D = q.shape
    window = _dense(window, window_index)
    K = window_index.shape[1] + (0 if entry_index is None else entry_index.shape[1])
    tile = max(1, SCRATCH_BYTES // (4 * K * (D + 2 * H)))
    if N <= tile:
        return _sparse_tile(q, window, window_index, entries, entry_index, sink, scale)
    out = torch.empty_like(q)
    for i in range(0, N, tile):
        s = slice(i, min(i + tile, N))
        out[s] = _sparse_tile(
            q[s], window, window_index[s], entries, None if entry_index is None else entry_index[s], sink, scale
        )
    return out


def _sparse_tile(q, window, window_index, entries, entry_index, sink, scale):
    N, H, _ = q.shape
    queries = q.float() * scale
    parts = [gather_rows(window, window_index)]
    if entry_index is not None:
        parts.append(gather_rows(entries, entry_index))
    logits = torch.empty(N, H, sum(rows.shape[1] for rows, _ in parts) + 1, dtype=torch.float32, device=q.device)
    logits[:, :, -1] = sink
    start = 0
    for rows, absent in parts:
        stop = start + rows.shape[1]
        logits[:, :, start:stop] = torch.bmm(queries, rows.transpose(1, 2)).masked_fill_(
            absent.unsqueeze(1), float("-inf")
        )
        start = stop
    p = torch.softmax(logits, -1)
    W = window_index.shape[1]
    out = torch.bmm(p[:, :, :W], parts[0][0])
    if entry_index is not None:
        out = torch.baddbmm(out, p[:, :, W:-1], parts[1][0])
    return out.to(q.dtype)


def hca_attention(
    q, window, window_index, entries, visible, sink, scale: float, complete: bool = False
) -> torch.Tensor:
    """Window rows ∪ every visible entry of the row (HCA: entries are shared by all queries).

    q [B, T, H, D]; window [R, D] and window_index int64 [B·T, W] as in `sparse_attention`;
    entries [B, n, D] or PackedRows of a batch, read in place; visible int64 [B, T]: query t sees entries e < visible;
    sink fp32 [H]; complete: the caller knows that no window index is −1 and every query sees all n
    entries. Returns [B, T, H, D] in q.dtype; softmax in fp32.
    """
    B, T, H, D = q.shape
    window, entries = _dense(window, window_index), decode_rows(entries) if isinstance(entries, PackedRows) else entries
    W, n = window_index.shape[1], entries.shape[1]
    tile = max(1, SCRATCH_BYTES // (4 * B * (H * (W + n + 1) + W * D)))
    if T <= tile:
        return _hca_tile(q, window, window_index, entries, visible, sink, scale)
    out = torch.empty_like(q)
    window_index = window_index.view(B, T, W)
    for i in range(0, T, tile):
        s = slice(i, min(i + tile, T))
        out[:, s] = _hca_tile(q[:, s], window, window_index[:, s].flatten(0, 1), entries, visible[:, s], sink, scale)
    return out


def _hca_tile(q, window, window_index, entries, visible, sink, scale):
    B, T, H, D = q.shape
    W, n = window_index.shape[1], entries.shape[1]
    queries = q.float() * scale
    rows, absent = gather_rows(window, window_index)
    logits = torch.empty(B, T, H, W + n + 1, dtype=torch.float32, device=q.device)
    logits[..., -1] = sink
    near = torch.bmm(rearrange(queries, "b t h d -> (b t) h d"), rows.transpose(1, 2))
    near.masked_fill_(absent.unsqueeze(1), float("-inf"))
    logits[..., :W] = rearrange(near, "(b t) h w -> b t h w", b=B)
    entry = torch.arange(n, device=q.device)
    seen = visible.amax(1)
    step = max(64, SCRATCH_BYTES // (8 * B * D))
    for e in range(0, n, step):
        tile = slice(e, min(e + step, n))
        far = torch.bmm(queries.view(B, T * H, D), _live_rows(entries[:, tile], entry[tile], seen).transpose(1, 2))
        unseen = (entry[tile] >= visible.unsqueeze(-1)).unsqueeze(2)
        logits[..., W + tile.start : W + tile.stop] = far.view(B, T, H, -1).masked_fill_(unseen, float("-inf"))
    p = torch.softmax(logits, -1)
    out = rearrange(torch.bmm(rearrange(p[..., :W], "b t h w -> (b t) h w"), rows), "(b t) h d -> b (t h) d", b=B)
    for e in range(0, n, step):
        tile = slice(e, min(e + step, n))
        far = p[..., W + tile.start : W + tile.stop].reshape(B, T * H, -1)
        out = torch.baddbmm(out, far, _live_rows(entries[:, tile], entry[tile], seen))
    return rearrange(out, "b (t h) d -> b t h d", h=H).to(q.dtype)


def _live_rows(entries: torch.Tensor, entry: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Entries [B, n, D] as fp32, with zeros in slots that no query of the row sees (0 · NaN is NaN)."""
    return torch.where((entry < seen.unsqueeze(1)).unsqueeze(-1), entries.float(), 0)
