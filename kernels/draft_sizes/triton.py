"""Beliefs about drafts and the resulting sizes, equal bit for bit to those of `dsv4.speculation.cost_aware`.

Each operation is rounded by itself (compiled without fused multiply-add, divisions by IEEE) and sums are folded in
halves, as there. Shapes and meanings of the tables are those of `dsv4.speculation.cost_aware.Tables`; G = 8 hypotheses,
K sizes, B rows.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import next_power, require_device

GROUPS, OUTCOMES, PROPOSED = 8, 16, 9
EXACT = {"enable_fp_fusion": False}


@triton.jit
def fold_groups(P, T, at, mask):
    """Σ_g P[g] · T[g][at], halves added to each other: T holds GROUPS rows of `mask`-shaped tables, given as pointers
    for g = 0."""
    t0, t1 = (
        tl.load(P) * tl.load(T + at, mask=mask, other=0.0),
        tl.load(P + 1) * tl.load(T + at + 1, mask=mask, other=0.0),
    )
    t2, t3 = (
        tl.load(P + 2) * tl.load(T + at + 2, mask=mask, other=0.0),
        tl.load(P + 3) * tl.load(T + at + 3, mask=mask, other=0.0),
    )
    t4, t5 = (
        tl.load(P + 4) * tl.load(T + at + 4, mask=mask, other=0.0),
        tl.load(P + 5) * tl.load(T + at + 5, mask=mask, other=0.0),
    )
    t6, t7 = (
        tl.load(P + 6) * tl.load(T + at + 6, mask=mask, other=0.0),
        tl.load(P + 7) * tl.load(T + at + 7, mask=mask, other=0.0),
    )
    return ((t0 + t4) + (t2 + t6)) + ((t1 + t5) + (t3 + t7))


@triton.jit
def fold_last(x, N: tl.constexpr, K: tl.constexpr):
    """Sum of x [K, N] over its last dimension, a power of two, halves added to each other → [K]."""
    for i in tl.static_range(6):
        if N >> i > 1:
            first, second = tl.split(tl.permute(tl.reshape(x, [K, 2, N >> (i + 1)]), [0, 2, 1]))
            x = first + second
    return tl.reshape(x, [K])


@triton.jit
def observe_rows(BELIEF, LIKELIHOOD, STAY, MOVE, ACCEPTED, PROPOSED_, G: tl.constexpr, SIDE: tl.constexpr):
    """Program b: update the belief by the evidence, then drift over the accepted + 1 tokens. BELIEF fp32 [B, G], in
    place."""
    b, g = tl.program_id(0), tl.arange(0, G)
    accepted = tl.load(ACCEPTED + b)
    row = LIKELIHOOD + (tl.load(PROPOSED_ + b) * SIDE + accepted) * G
    weighed = tl.load(BELIEF + b * G + g) * tl.load(row + g)
    total = fold_last(tl.reshape(weighed, [1, G]), G, 1)
    kept = tl.math.div_rn(weighed, tl.broadcast_to(total, [G])) * tl.load(STAY + accepted)
    tl.store(BELIEF + b * G + g, kept + tl.load(MOVE + accepted * G + g))


@triton.jit
def weigh_rows(
    BELIEF,
    VALUE,
    LATER,
    PRICE,
    LIVE,
    NET,
    WORTH,
    K,
    RESPONSES: tl.constexpr,
    G: tl.constexpr,
    A: tl.constexpr,
    KP: tl.constexpr,
):
    """Program b: NET fp32 [B, KP of the pass, KP of the row], −inf beyond K, and the row's value at each width, WORTH
    fp32 [rows, KP]; a row at rest has 0. VALUE [K, G], LATER [A, RESPONSES, K, G]: hypotheses last."""
    b, k, a, w = tl.program_id(0), tl.arange(0, KP), tl.arange(0, A), tl.arange(0, KP)
    P, size = BELIEF + b * G, k < K
    value = fold_groups(P, VALUE, k * G, size)
    least = tl.full((KP, A), float("inf"), tl.float32)
    there = size[:, None] & (a >= 0)[None, :]
    for r in tl.static_range(RESPONSES):
        at = ((a[None, :] * RESPONSES + r) * K + k[:, None]) * G
        least = tl.minimum(least, fold_groups(P, LATER, at, there))
    lost = fold_last(least, A, KP)
    both = (w < K)[:, None] & size[None, :]
    price = tl.load(PRICE + w[:, None] * K + k[None, :], mask=both, other=float("inf"))
    net = tl.where(both, (value - lost)[None, :] - price, float("-inf"))
    tl.store(NET + b * (KP * KP) + w[:, None] * KP + k[None, :], net)
    worth = tl.where(w < K, tl.max(net, 1), 0.0)
    tl.store(WORTH + b * KP + w, tl.where(tl.load(LIVE + b) != 0, worth, 0.0))


@triton.jit
def choose_width(NET, WORTH, COST, SIZES, LIVE, PRESSURE, OUT, B, K, CAP, ROWS: tl.constexpr, KP: tl.constexpr):
    """The pass's width, and OUT int64 [B]: the size of each row, 0 at rest. Of equal scores the smaller size wins.
    WORTH [ROWS, KP] is 0 beyond B."""
    row, k = tl.arange(0, ROWS), tl.arange(0, KP)
    live = tl.load(LIVE + row, mask=row < B, other=0) != 0
    worth = fold_last(tl.load(WORTH + row[None, :] * KP + k[:, None]), ROWS, KP)
    size = tl.load(SIZES + k, mask=k < K, other=0)
    score = tl.sum(live.to(tl.int32), 0).to(tl.float32) * tl.load(COST + k, mask=k < K, other=0.0) - worth
    score = tl.where((k < K) & ((tl.load(PRESSURE) == 0) | (size <= CAP)), score, float("inf"))
    width = tl.min(tl.where(score == tl.min(score, 0), k, KP), 0)
    width = tl.minimum(width, KP - 1)  # NaN: there is no minimum
    net = tl.load(NET + row[:, None] * (KP * KP) + width * KP + k[None, :], mask=(row < B)[:, None], other=0.0)
    own = tl.min(tl.where(net == tl.max(net, 1)[:, None], k[None, :], KP - 1), 1)
    chosen = tl.load(SIZES + tl.minimum(own, K - 1))
    tl.store(OUT + row, tl.where(live, chosen, 0), mask=row < B)


def observe(
    belief: torch.Tensor,
    likelihood: torch.Tensor,
    stay: torch.Tensor,
    move: torch.Tensor,
    accepted: torch.Tensor,
    proposed: torch.Tensor,
) -> None:
    """belief fp32 [B, 8], updated in place; likelihood [81, 8], stay [9], move [9, 8]; accepted, proposed int64 or
    int32 [B]."""
    require_device("draft_sizes.observe", belief, likelihood, stay, move, accepted, proposed)
    observe_rows[(len(belief),)](
        belief, likelihood, stay, move, accepted, proposed, GROUPS, PROPOSED, num_warps=1, **EXACT
    )


def weigh(
    belief: torch.Tensor, value: torch.Tensor, later: torch.Tensor, price: torch.Tensor, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(net fp32 [B, W, W] by width of the pass and size of the row, −inf beyond K; its maxima fp32 [rows, W], 0 for
    rows at rest), W and rows powers of two."""
    B, K = len(belief), len(price)
    wide, rows = next_power(max(K, 2)), max(2, next_power(B))
    net = torch.empty(B, wide, wide, device=belief.device)
    worth = torch.zeros(rows, wide, device=belief.device)
    weigh_rows[(B,)](
        belief, value, later, price, live, net, worth, K, later.shape[1], GROUPS, OUTCOMES, wide, num_warps=4, **EXACT
    )
    return net, worth


def choose(
    belief: torch.Tensor,
    value: torch.Tensor,
    later: torch.Tensor,
    price: torch.Tensor,
    cost: torch.Tensor,
    sizes: torch.Tensor,
    live: torch.Tensor,
    pressure: torch.Tensor,
    cap: int,
) -> torch.Tensor:
    """Sizes int64 [B]. belief fp32 [B, 8]; value [K, 8], later [16, R, K, 8] (hypotheses last), price [K, K], cost [K]
    fp32; sizes int64 [K]; live bool [B], pressure bool scalar on the device; cap: the largest size under pressure."""
    require_device("draft_sizes.choose", belief, value, later, price, cost, sizes, live, pressure)
    B, K, live, pressure = len(belief), len(sizes), live.view(torch.uint8), pressure.view(torch.uint8)
    net, worth = weigh(belief, value, later, price, live)
    out = torch.empty(B, dtype=torch.int64, device=belief.device)
    choose_width[(1,)](net, worth, cost, sizes, live, pressure, out, B, K, cap, *worth.shape, num_warps=4, **EXACT)
    return out
