"""The lightning indexer's scores and selection (paper eqs. 13–17)."""

import torch

from dsv4.kernels.cache_rows import PackedRows, decode_rows

SCRATCH_BYTES = 64 << 20  # scores of every head exist only for one tile of entries


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """score(t, e) = Σ_h w[t, h] · relu(q[t, h] · k[e]); invisible entries −inf.

    q [B, T, H, D]; weights fp32 [B, T, H], both scale factors included; keys [B, n, D] or
    PackedRows of a batch, one key an entry for all heads; visible int64 [B, T]: query t sees entries e < visible.
    Returns fp32 [B, T, n]. Products in fp32.
    """
    B, T, H, D = q.shape
    keys = decode_rows(keys) if isinstance(keys, PackedRows) else keys
    n = keys.shape[1]
    scores = torch.empty(B, T, n, dtype=torch.float32, device=q.device)
    queries, weights = q.reshape(B, T * H, D).float(), weights.unsqueeze(2)
    tile = max(64, SCRATCH_BYTES // max(1, 4 * B * T * H))
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        dots = torch.bmm(queries, keys[:, start:stop].float().transpose(1, 2)).relu_()
        scores[:, :, start:stop] = torch.matmul(weights, dots.view(B, T, H, stop - start)).squeeze(2)
    entry = torch.arange(n, device=q.device)
    return scores.masked_fill_(entry >= visible.unsqueeze(-1), float("-inf"))


def topk_entries(scores: torch.Tensor, k: int, visible: torch.Tensor | None = None) -> torch.Tensor:
    """The k best entries of each query; among equal scores the lowest entry index wins.

    scores fp32 [B, T, n], −inf where invisible. Returns int64 [B, T, min(k, n)], −1 for picks that are not visible;
    best first here, in any order elsewhere. visible int64 [B, T], if given: scores from there on need not be read.

    Score and index are packed into one int64 without ties: the score's bits, made monotone
    as a signed integer, above the complement of the index.
    """
    n = scores.shape[-1]
    if visible is not None:
        scores = scores.masked_fill(torch.arange(n, device=scores.device) >= visible.unsqueeze(-1), float("-inf"))
    bits = (scores + 0.0).view(torch.int32)  # −0.0 + 0.0 = +0.0: both zeros tie
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    entry = torch.arange(n, device=scores.device)
    packed = (monotone.long() << 32) | (n - 1 - entry)
    best = torch.topk(packed, min(k, n), dim=-1).values
    index = (n - 1) - (best & 0xFFFFFFFF)
    return index.masked_fill_(scores.gather(-1, index) == float("-inf"), -1)
