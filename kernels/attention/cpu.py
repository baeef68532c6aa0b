"""Attention of a single query on a host processor.

One query and a few hundred keys cost less arithmetic than the tensor operations around it. All keys go into one buffer,
with the sink as one more key of zeros: its logit is then set, and its value adds nothing.
"""

import torch

from dsv4.kernels.attention import reference
from dsv4.kernels.cache_rows import PackedRows

MAX_KEYS = 2048  # copied together; above this the reference reads entries in place


def sparse_attention(
    q, window, window_index, entries, entry_index, sink, scale: float, complete: bool = False, together: int = 1
) -> torch.Tensor:
    K = 0 if entry_index is None else entry_index.shape[1]
    W = window_index.shape[1]
    if not complete or q.shape[0] != 1 or W + K > MAX_KEYS or packed(window, entries):
        return reference.sparse_attention(q, window, window_index, entries, entry_index, sink, scale)
    rows = window.new_zeros(W + K + 1, window.shape[1])
    torch.index_select(window, 0, window_index[0], out=rows[:W])
    if K:
        torch.index_select(entries, 0, entry_index[0], out=rows[W:-1])
    return _attend_all(q[0], rows, sink, scale).unsqueeze(0)


def hca_attention(
    q, window, window_index, entries, visible, sink, scale: float, complete: bool = False
) -> torch.Tensor:
    B, T, _, D = q.shape
    W = window_index.shape[1]
    if not complete or B * T != 1 or packed(window, entries) or W + entries.shape[1] > MAX_KEYS:
        return reference.hca_attention(q, window, window_index, entries, visible, sink, scale)
    n = entries.shape[1]
    rows = window.new_zeros(W + n + 1, D)
    torch.index_select(window, 0, window_index[0], out=rows[:W])
    rows[W:-1] = entries[0]
    return _attend_all(q[0, 0], rows, sink, scale).view(q.shape)


def packed(*pools) -> bool:
    """Whether any pool holds bytes, which the reference decodes."""
    return any(isinstance(pool, PackedRows) for pool in pools)


sparse_attention.__doc__, hca_attention.__doc__ = reference.sparse_attention.__doc__, reference.hca_attention.__doc__


def _attend_all(q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, D] against rows [K + 1, D], of which the last is the sink → [H, D] in q.dtype."""
    rows = rows.float()
    # with beta 0 the first argument is not read
    logits = torch.addmm(sink[0], q.float(), rows.t(), beta=0, alpha=scale)
    logits[:, -1] = sink
    return torch.mm(torch.softmax(logits, -1), rows).to(q.dtype)
