"""Attention in fp64, row by row of the list, and honest kernels of each accuracy class."""

from functools import partial

import torch

from dsv4.kernels.cache_rows import PackedRows, decode_rows
from dsv4.kernels.contract import doubles


def _listed(pool, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows fp64 [N, K, D] of a pool at an index list, present bool [N, K]); absent rows are zeros."""
    whole = PackedRows(*pool[:4], count=pool.data.shape[-2] * 64) if isinstance(pool, PackedRows) else pool
    rows = doubles(whole)[index.clamp(min=0)]
    return torch.where((index >= 0).unsqueeze(-1), rows, 0.0), index >= 0


def attend(q, rows, present, sink, scale: float) -> torch.Tensor:
    """o = Σ_j p_j · row_j, p_j = exp(l_j) / (Σ exp(l_j) + exp(sink)): q [N, H, D], rows [N, K, D], present bool
    [N, K], all in fp64. A query without rows gives zeros."""
    logits = torch.einsum("nhd,nkd->nhk", q.double() * scale, rows)
    logits = logits.masked_fill(~present.unsqueeze(1), float("-inf"))
    sinks = sink.double().view(1, -1, 1).expand(q.shape[0], -1, 1)
    top = torch.cat((logits, sinks), -1).amax(-1, keepdim=True).clamp(min=-1e300)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True) + (sinks - top).exp()
    return torch.einsum("nhk,nkd->nhd", weights / total.clamp(min=1e-300), rows)


def honest(q, rows, present, sink, scale: float, narrow: frozenset = frozenset()) -> torch.Tensor:
    """A right kernel: products of the values as they are, sums in fp32 over tiles of 64 rows with a running maximum,
    one rounding to q's dtype. `narrow` names what else it rounds to bf16: 'probabilities', 'logits'."""
    N, H, D = q.shape
    bf16 = lambda x: x.bfloat16().float()
    out, total = torch.zeros(N, H, D), torch.zeros(N, H, 1)
    top = sink.float().view(1, -1, 1).expand(N, -1, 1).clamp(min=-1e30)
    total = (sink.float().view(1, -1, 1) - top).exp()
    for start in range(0, rows.shape[1], 64):
        tile, live = rows[:, start : start + 64].float(), present[:, start : start + 64].unsqueeze(1)
        logits = torch.einsum("nhd,nkd->nhk", q.float(), tile) * scale
        logits = (bf16(logits) if "logits" in narrow else logits).masked_fill(~live, float("-inf"))
        new = torch.maximum(top, logits.amax(-1, keepdim=True))
        p, keep = (logits - new).exp(), (top - new).exp()
        total = total * keep + p.sum(-1, keepdim=True)
        out = out * keep + torch.einsum("nhk,nkd->nhd", bf16(p) if "probabilities" in narrow else p, tile)
        top = new
    return (out / total.clamp(min=1e-38)).to(q.dtype)


def sparse(compute, q, window, window_index, entries, entry_index, sink, scale, complete=False, together=1):
    """`compute` over the rows that `sparse_attention` lists."""
    rows, present = _listed(window, window_index)
    if entry_index is not None:
        more, there = _listed(entries, entry_index)
        rows, present = torch.cat((rows, more), 1), torch.cat((present, there), 1)
    return compute(q, rows, present, sink, scale)


def whole(compute, q, window, window_index, entries, visible, sink, scale, complete=False):
    """`compute` over the window rows and every visible entry, as `hca_attention`."""
    B, T, H, D = q.shape
    near, present = _listed(window, window_index)
    far = decode_rows(entries).double() if isinstance(entries, PackedRows) else entries.double()
    seen = (torch.arange(far.shape[1]) < visible.unsqueeze(-1)).flatten(0, 1)
    far = far.unsqueeze(1).expand(-1, T, -1, -1).flatten(0, 1)
    rows = torch.cat((near, torch.where(seen.unsqueeze(-1), far, 0.0)), 1)
    return compute(q.flatten(0, 1), rows, torch.cat((present, seen), 1), sink, scale).view(B, T, H, D)


CLASSES = {  # what an honest kernel may round to bf16 besides its result; the first is the default
    "p-bf16": partial(honest, narrow=frozenset({"probabilities"})),
    "fp32": honest,
    "logits-bf16": partial(honest, narrow=frozenset({"probabilities", "logits"})),
}
