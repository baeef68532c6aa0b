"""Scores and selection of a single query on a host processor."""

import torch

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.indexer import reference

MAX_DOTS = 1 << 20  # products held at once; above this the reference computes by tiles
MAX_SCORES = 1 << 12  # above this, sorting everything costs more than the additional operations of the reference


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    B, T, H, D = q.shape
    if isinstance(keys, PackedRows):
        return reference.index_scores(q, weights, keys, visible)
    n = keys.shape[1]
    if B * T != 1 or H * n > MAX_DOTS:
        return reference.index_scores(q, weights, keys, visible)
    scores = torch.mm(weights[0], torch.mm(q.view(H, D).float(), keys[0].float().t()).relu_())
    scores[:, visible.item() :] = float("-inf")
    return scores.unsqueeze(0)


def topk_entries(scores: torch.Tensor, k: int) -> torch.Tensor:
    if scores.numel() > MAX_SCORES:
        return reference.topk_entries(scores, k)
    # stable: the lowest entry first among equals
    best, index = torch.sort(scores, dim=-1, descending=True, stable=True)
    return index[..., :k].masked_fill(best[..., :k] == float("-inf"), -1)


index_scores.__doc__, topk_entries.__doc__ = reference.index_scores.__doc__, reference.topk_entries.__doc__
