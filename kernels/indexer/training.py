"""Index scores of whole sequences, a chunk of queries at a time, and a selection without the tie rule."""

import torch

from dsv4.kernels.indexer import reference

SCRATCH_BYTES = 2 << 30  # of the products of one chunk, all heads


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    B, T, H, D = q.shape
    n = keys.shape[1]
    step = max(1, SCRATCH_BYTES // max(1, B * H * n * q.element_size()))
    keys, entry = keys.to(q.dtype).transpose(1, 2), torch.arange(n, device=q.device)
    parts = []
    for t in range(0, T, step):
        s = slice(t, t + step)
        dots = torch.bmm(q[:, s].flatten(1, 2), keys).view(B, -1, H, n)
        scores = torch.matmul(weights[:, s].unsqueeze(2).to(q.dtype), torch.relu(dots)).squeeze(2).float()
        parts.append(scores.masked_fill(entry >= visible[:, s].unsqueeze(-1), float("-inf")))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def topk_entries(scores: torch.Tensor, k: int) -> torch.Tensor:
    best, index = torch.topk(scores, min(k, scores.shape[-1]), dim=-1, sorted=False)
    return index.masked_fill(best == float("-inf"), -1)


index_scores.__doc__, topk_entries.__doc__ = reference.index_scores.__doc__, reference.topk_entries.__doc__
