"""Attention over rows that are named one by one: rows of a window's pool, and entries."""

import math

import torch

MINUS_INF = float("-inf")


def attend(
    q, window, near, entries, far, sink, scale: float, sinks: float = 1.0, absent: float = MINUS_INF
) -> torch.Tensor:
    """Queries [N, H, D] over window[near] and entries[far], −1 skipped, in fp64: the definition.

    By mistake: `sinks` times the sink in the denominator; rows of −1 as keys of zero that score `absent`.
    """
    pool = torch.cat((window, entries, entries.new_zeros(1, q.shape[-1]))).double()
    rows = torch.cat(
        (torch.where(near < 0, len(pool) - 1, near), torch.where(far < 0, len(pool) - 1, len(window) + far)), 1
    )
    missing, keys = torch.cat((near, far), 1) < 0, pool[rows]  # [N, K], [N, K, D]
    logits = (q.double() @ keys.transpose(1, 2) * scale).masked_fill(missing.unsqueeze(1), absent)
    own = (sink.double() + (math.log(sinks) if sinks else MINUS_INF)).view(1, -1, 1).expand(len(q), -1, 1)
    return torch.nan_to_num(torch.softmax(torch.cat((logits, own), -1), -1))[..., :-1] @ keys
