"""Block choice on the GPU: scores in one pass, then exact top-k; all of fixed size, from positions on the device.

Up to 8192 blocks (1M tokens in blocks of 128) one program holds all scores of a query and KV head and writes the
keep-set. More blocks (pages of 16 of more than 128K tokens) are searched by the indexer's kernels: one program took
longer for 32768 pages than those take for 65536. Many kept blocks are ordered by a kernel of their own, whose programs
share a row: in one program, 1600 pages took 160 µs.
"""

import torch
import triton

from dsv4.kernels.block_choice import reference
from dsv4.kernels.block_choice.policy import Policy
from dsv4.kernels.block_choice.triton_choice import arrange_rows, choose_rows, order_rows, score_blocks
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer.triton_choose import choose, plan
from dsv4.kernels.launch import capability, dependent_launch, dot_in_fp32, next_power, processors, require_device

HELD = 1 << 13  # blocks that one program holds
BLOCKS = 64  # of a tile of scores
ALONE = 256  # kept blocks that the program which found them orders by score
PLACED, COMPARED = 64, 64  # blocks of a program that orders, and of those that it compares them with at a time


def block_scores(
    q: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    mean: torch.Tensor | None,
    start: torch.Tensor,
    policy: Policy,
) -> torch.Tensor:
    """Computes what the reference does; products of bf16 are exact, summed in fp32. Takes contiguous summaries of bf16
    or fp32; raises UnsupportedInput beyond."""
    (B, T), pair = q.shape[:2], _summaries("block_scores", q, low, high, mean, start, policy)
    KV, N = pair[0].shape[1:3]
    scores = torch.empty(B, T, KV, N, dtype=torch.float32, device=q.device)
    if scores.numel():
        _score(q, *pair, start, policy, scores, True)
    return scores


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
    """Computes what the reference does; raises UnsupportedInput as `block_scores` and the indexer's `topk_entries`
    do."""
    (B, T), kept, early = q.shape[:2], policy.kept, dependent_launch(q.device)
    if policy.dense:
        raise UnsupportedInput("choose_blocks: the dense policy keeps every block; use grouped_attention")
    if policy.once:
        raise UnsupportedInput(f"choose_blocks: {policy.name} chooses tokens once, after a prompt; use choose_tokens")
    require_device("choose_blocks", q, start)
    out, rows = torch.empty(B, T, kv_heads, kept, dtype=torch.int32, device=q.device), B * T * kv_heads
    if not rows:
        return out
    sizes = policy.sink, policy.local, policy.topk, kept, policy.block
    if not policy.topk:
        arrange_rows[(rows,)](
            start,
            start,
            out,
            T,
            kv_heads,
            *sizes,
            next_power(kept),
            False,
            by_importance,
            early,
            num_warps=1,
            launch_pdl=early,
        )
        return out
    first, second = _summaries("choose_blocks", q, low, high, mean, start, policy)
    if first.shape[1] != kv_heads:
        raise UnsupportedInput(f"choose_blocks: {kv_heads} KV heads, but summaries of {first.shape[1]}")
    N = first.shape[2]
    scores = torch.empty(rows, 1, N, dtype=torch.float32, device=q.device)
    visible = _score(q, first, second, start, policy, scores, False)
    alone = N <= HELD and (kept <= ALONE or not by_importance)
    loose = out if alone else torch.empty_like(out)
    if N <= HELD:
        candidates, classes = max(64, next_power(N)), next_power(policy.topk)
        choose_rows[(rows,)](
            scores,
            start,
            loose,
            T,
            kv_heads,
            N,
            *sizes,
            candidates,
            classes if 2 * classes <= candidates else 0,
            next_power(kept),
            min(32, next_power(kept)),
            by_importance,
            by_importance and alone,
            early,
            num_warps=min(16, max(4, candidates // 512)),
            launch_pdl=early,
        )
    else:
        best = torch.empty(rows, 1, policy.topk, dtype=torch.int64, device=q.device)
        choose(plan(rows, N, policy.topk), scores, N, policy.topk, visible.view(rows, 1), best)
        arrange_rows[(rows,)](
            start,
            best,
            loose,
            T,
            kv_heads,
            *sizes,
            next_power(kept),
            True,
            by_importance,
            early,
            num_warps=4,
            launch_pdl=early,
        )
    if not alone:
        order_rows[(rows, triton.cdiv(kept, PLACED))](
            scores,
            start,
            loose,
            out,
            T,
            kv_heads,
            N,
            *sizes,
            PLACED,
            COMPARED,
            by_importance,
            early,
            num_warps=4,
            launch_pdl=early,
        )
    return out


block_scores.__doc__ = f"{reference.block_scores.__doc__}\n\n    On a GPU: {block_scores.__doc__}"
choose_blocks.__doc__ = f"{reference.choose_blocks.__doc__}\n\n    On a GPU: {choose_blocks.__doc__}"


def _score(q, first, second, start, policy: Policy, scores, every: bool) -> torch.Tensor:
    """Launch the kernel of the scores. Returns the ends of the distant blocks, int64 [rows]."""
    (B, T, H, D), (KV, N), early = q.shape, first.shape[1:3], dependent_launch(q.device)
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, tiles, width = B * T * KV, triton.cdiv(N, BLOCKS), max(16, next_power(D))
    visible = torch.empty(rows, dtype=torch.int64, device=q.device)
    programs = min(tiles, max(1, 2 * processors(q.device) // rows))
    stages = 2 if capability(q.device)[0] in (9, 10) or width <= 128 else 1
    score_blocks[(rows, programs)](
        q,
        first,
        second,
        start,
        scores,
        visible,
        T,
        KV,
        N,
        policy.sink,
        policy.local,
        *q.stride()[:3],
        H // KV,
        D,
        width,
        max(16, next_power(H // KV)),
        BLOCKS,
        policy.block,
        policy.selector == "bound",
        every,
        any(dot_in_fp32(t) for t in (q, first)),
        stages,
        early,
        num_warps=4,
        launch_pdl=early,
    )
    return visible


def _summaries(name: str, q, low, high, mean, start, policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """The summaries that the policy's selector reads. Raises UnsupportedInput."""
    pair = (mean, mean) if policy.selector == "mean" else (high, low)
    if policy.selector is None or any(t is None for t in pair):
        raise UnsupportedInput(
            f"{name}: policy {policy.name} has selector {policy.selector!r}, but its summaries are not given"
        )
    require_device(name, q, *pair, start)
    (B, T, H, D), (KV, N) = q.shape, pair[0].shape[1:3]
    for t in pair:
        if t.shape != (B, KV, N, D) or H % KV or not t.is_contiguous():
            raise UnsupportedInput(
                f"{name} takes contiguous summaries [B, KV, N, D]; found {tuple(t.shape)} with strides {t.stride()} "
                f"for queries {tuple(q.shape)}"
            )
    if any(t.dtype not in (torch.bfloat16, torch.float32) for t in (q, *pair)) or pair[0].dtype is not pair[1].dtype:
        raise UnsupportedInput(f"{name} takes bf16 and fp32; found {q.dtype}, {pair[0].dtype} and {pair[1].dtype}")
    if start.dtype is not torch.int64 or start.shape != (B,):
        raise UnsupportedInput(f"{name} takes start as int64 [{B}]; found {start.dtype} {tuple(start.shape)}")
    return pair
