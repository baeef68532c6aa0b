"""Which blocks of a long cache a query reads: scores of the distant blocks, and the keep-set."""

import torch
from einops import rearrange

from dsv4.kernels.block_choice.policy import Policy
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer.reference import topk_entries


def distant_blocks(start: torch.Tensor, tokens: int, policy: Policy) -> torch.Tensor:
    """The distant blocks of each query are those from `sink` up to this number − 1: int64 [B, T], (position // block) −
    local + 1."""
    position = start.unsqueeze(1) + torch.arange(tokens, device=start.device)
    return position // policy.block - policy.local + 1


def block_scores(
    q: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    mean: torch.Tensor | None,
    start: torch.Tensor,
    policy: Policy,
) -> torch.Tensor:
    """Scores of the distant blocks: fp32 [B, T, KV, N], −inf for all other blocks. Products in fp32.

    bound: max over the query heads h of the group of Σ_d max(q_hd·low_d, q_hd·high_d) = [relu(q), −relu(−q)]·[high;
    low], which no q_h·k of the block exceeds. mean: the group's mean query · mean. q [B, T, H, D]; low, high, mean [B,
    KV, N, D] as `summarise_blocks` writes them (those that the selector does not use may be None); start int64 [B] as
    in `grouped_attention`.
    """
    (B, T, H, D), (KV, N) = q.shape, (mean if policy.selector == "mean" else low).shape[1:3]
    heads = rearrange(q.float(), "b t (kv g) d -> b kv t g d", kv=KV)
    if policy.selector == "mean":
        scores = heads.mean(3) @ mean.float().transpose(-1, -2)
    else:
        signed, extremes = torch.cat((heads.relu(), -(-heads).relu()), -1), torch.cat((high, low), -1).float()
        scores = (signed.flatten(2, 3) @ extremes.transpose(-1, -2)).unflatten(2, (T, -1)).amax(3)  # [B, KV, T, N]
    number, until = torch.arange(N, device=q.device), distant_blocks(start, T, policy).view(B, 1, T, 1)
    return scores.masked_fill((number < policy.sink) | (number >= until), float("-inf")).transpose(1, 2)


def choose_blocks(
    q: torch.Tensor,
    kv_heads: int,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    mean: torch.Tensor | None,
    start: torch.Tensor,
    policy: Policy,
    by_importance: bool = False,
) -> torch.Tensor:
    """The keep-set of every query: int32 [B, T, KV, policy.kept], ascending, −1 at the end if there are fewer blocks.

    Arguments as in `block_scores`. It holds the sink blocks, the local blocks, and the topk distant blocks of the
    highest score; of equal scores the lowest block wins. by_importance: the order is sinks, local blocks from the
    newest on, then distant blocks by falling score.
    """
    if policy.dense:
        raise UnsupportedInput("choose_blocks: the dense policy keeps every block; use grouped_attention")
    if policy.once:
        raise UnsupportedInput(f"choose_blocks: {policy.name} chooses tokens once, after a prompt; use choose_tokens")
    B, T = q.shape[:2]
    current = distant_blocks(start, T, policy).view(B, T, 1, 1) + policy.local - 1
    sink, local = torch.arange(policy.sink, device=q.device), current - torch.arange(policy.local, device=q.device)
    kept = [torch.where(sink <= current, sink, -1), torch.where(local >= policy.sink, local, -1)]
    kept = [part.expand(B, T, kv_heads, -1) for part in kept]
    if policy.topk:
        scores = block_scores(q, low, high, mean, start, policy)
        best = topk_entries(scores.flatten(1, 2), policy.topk).view(B, T, kv_heads, -1)
        kept.append(torch.nn.functional.pad(best, (0, policy.topk - best.shape[-1]), value=-1))
    blocks = torch.cat(kept, -1)
    last = torch.iinfo(torch.int64).max
    order = (blocks < 0).long() if by_importance else torch.where(blocks < 0, last, blocks)
    return blocks.gather(-1, order.argsort(dim=-1, stable=True)).int()
