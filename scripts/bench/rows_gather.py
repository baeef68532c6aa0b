"""Grouped-query attention over long caches: dense decode beside each of torch's SDPA backends, and gather-decode
(choice and attention) beside the fastest of them.

Ours and each peer are replayed in turns (`Row.interleaved`), so that a drift of the machine falls on both.
"""

from collections.abc import Iterator

import torch

from dsv4.kernels.block_choice import Policy, block_bounds, block_scores, choose_blocks
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import Termination, grouped_attention
from dsv4.kernels.grouped_attention.contract import CONTEXTS
from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.widths import LLAMA, QWEN, Widths
from scripts.bench.inputs import difference
from scripts.bench.row import Beside, Row

KEPT = 4096  # tokens
# relative Frobenius error against the reference in fp32; averages of 1M random values are small beside their rounding
TOLERANCE = 8e-3
DENSE_US = {
    ("8K", 1): 15.0,
    ("32K", 1): 35.2,
    ("128K", 1): 99.7,
    ("1M", 1): 699.0,
    ("8K", 8): 55.9,
    ("32K", 8): 184.0,
    # torch's best SDPA, measured on an H100 (28 query and 4 KV heads of 128)
    ("128K", 8): 706.0,
    ("1M", 8): 5524.0,
}
# times faster than that: the published figures to beat
REFERENCE = {("128K", 1): 2.3, ("1M", 1): 10.2, ("1M", 8): 41.9}
FREE = Beside(1 / 1.013, "^without termination$")  # what a rule that never ends may cost
GOALS = {("128K", 1): 12.0, ("128K", 8): 75.0}  # µs with Llama's w, choice included
SEEN = 4  # a row that stops attends to the newest 1 / SEEN of its tokens
STOPPED = 1e-3  # relative error that stopping may cost
# µs of 128K at batch 8 with Llama's heads without termination, measured on an H100; how much faster stopping must be
NEVER_US, FASTER = 1399.0, 1.3


def rows(device: str) -> Iterator[Row]:
    names = {slots: name for name, slots in CONTEXTS.items()}
    for shape in contract_of("grouped_attention").production.sizes(QWEN)["bench"]:
        S, B, context = shape["slots"], shape["batch"], names[shape["slots"]]
        yield _dense(context, S, B, device)
        goal = DENSE_US[context, B] / REFERENCE[context, B] if (context, B) in REFERENCE else None
        yield _gather("gqa_gather", context, S, B, QWEN, goal, device)
    for B in (1, 8):
        yield _gather("gqa_gather", "128K", CONTEXTS["128K"], B, LLAMA, GOALS["128K", B], device)
    for context in ("8K", "128K"):
        yield _never_stopping(context, CONTEXTS[context], 8, LLAMA, device)
    for B in (1, 8):
        yield _gathered_never_stopping("128K", CONTEXTS["128K"], B, LLAMA, device)
    yield _stopping("128K", CONTEXTS["128K"], 8, LLAMA, device)
    for shape in contract_of("choose_blocks").production.sizes(QWEN)["bench"]:
        yield _choice(shape, QWEN, device)


def inputs(i: int, S: int, B: int, w: Widths, device: str):
    """bf16 q [B, 1, H, D], keys and values [B, KV, S, D]; the last token is the query's."""
    return contract_of("grouped_attention").production.drawn(w, i, device, slots=S, batch=B)[:4]


def _facts(S: int, B: int, w: Widths) -> dict:
    return dict(batch=B, tokens=S, **dict(zip(("heads", "kv_heads", "width"), sizes(w))))


def _name(w: Widths) -> str:
    return "{}q/{}kv/{}".format(*sizes(w))


def _dense(context: str, S: int, B: int, device: str) -> Row:
    H, KV, D = sizes(QWEN)

    def make(i):
        q, keys, values, start = inputs(i, S, B, QWEN, device)

        def run():
            return grouped_attention(q, keys, values, start, None, D**-0.5, backend="triton")

        def check():  # the reference holds fp32 copies: one row at a time
            wanted = [
                grouped_attention(
                    q[b : b + 1].float(), keys[b : b + 1], values[b : b + 1], start[b : b + 1], None, D**-0.5
                )
                for b in {0, B - 1}
            ]
            return difference(run()[sorted({0, B - 1})], torch.cat(wanted)), TOLERANCE

        return run, check

    return Row(
        "gqa_decode",
        f"{context} B{B} {_name(QWEN)}",
        make,
        4 * B * (KV * S + H) * D,
        4 * B * H * D * S,
        DENSE_US[context, B],
        facts=_facts(S, B, QWEN),
        interleaved=True,
    )


def _held(keys: torch.Tensor, policy: Policy) -> list[torch.Tensor]:
    """low and high of every block."""
    B, KV, S, D = keys.shape
    held = [torch.empty(B, KV, S // policy.block, D, dtype=keys.dtype, device=keys.device) for _ in range(2)]
    summarise_blocks(
        keys, torch.zeros(B, dtype=torch.int64, device=keys.device), S, *held, None, policy.block, backend="triton"
    )
    return held


def lost(scores: torch.Tensor, blocks: torch.Tensor, policy: Policy) -> float:
    """How far the worst chosen score is below the k-th best, relative to the largest; NaN where a choice is missing or
    double.

    scores fp32 [B, T, KV, N] of the reference; blocks int32 [B, T, KV, kept] of a position with that many blocks."""
    distant = blocks[..., policy.sink : policy.kept - policy.local].long()
    if (blocks.diff(dim=-1) <= 0).any() or (blocks < 0).any():
        return float("nan")
    kth = scores.topk(policy.topk, -1).values[..., -1]
    return (
        ((kth - scores.gather(-1, distant).amin(-1)) / scores.nan_to_num(neginf=0.0).abs().amax(-1))
        .amax()
        .clamp(min=0)
        .item()
    )


def _gather(op: str, context: str, S: int, B: int, w: Widths, goal: float | None, device: str) -> Row:
    (H, KV, D), policy = sizes(w), block_bounds(KEPT)

    def make(i):
        q, keys, values, start = inputs(i, S, B, w, device)
        held = _held(keys, policy)

        def run():
            blocks = choose_blocks(q, KV, *held, None, start, policy, backend="triton")
            return gather_attention(q, keys, values, blocks, start, None, D**-0.5, policy.block, backend="triton")

        def check():
            blocks = choose_blocks(q, KV, *held, None, start, policy, backend="triton")
            if lost(block_scores(q, *held, None, start, policy), blocks, policy) > 1e-5:
                return float("nan"), TOLERANCE
            return difference(
                run(), gather_attention(q.float(), keys, values, blocks, start, None, D**-0.5, policy.block)
            ), TOLERANCE

        return run, check

    moved = 4 * B * (KV * min(KEPT, S) + H) * D + 4 * B * KV * (S // policy.block) * D
    return Row(
        op,
        f"{context} B{B} {_name(w)}, {KEPT} kept",
        make,
        moved,
        4 * B * H * D * (min(KEPT, S) + S // policy.block),
        goal,
        facts=_facts(S, B, w),
        interleaved=True,
        beside=_published(context, B, w),
    )


def _published(context: str, B: int, w: Widths) -> tuple[Beside, ...]:
    """The published figure beside the fastest SDPA backend of the same run."""
    return (Beside(REFERENCE[context, B], "^SDPA "),) if w == QWEN and (context, B) in REFERENCE else ()


def _beside_plain(q, keys, values, start, rule: Termination | None, tolerance: float):
    """(run, check) of dense attention under a rule (None: without one), against attention without one."""
    scale = q.shape[-1] ** -0.5
    plain = lambda: grouped_attention(q, keys, values, start, None, scale, backend="triton")
    run = (
        plain
        if rule is None
        else lambda: grouped_attention(q, keys, values, start, None, scale, rule, backend="triton")[0]
    )
    return run, lambda: (difference(run(), plain()), tolerance)


def _never_stopping(context: str, S: int, B: int, w: Widths, device: str) -> Row:
    """What termination costs where it never stops; its peer is the same attention without it, timed in turn, and the
    goal 1.013 of its time."""
    make = lambda i, rule: _beside_plain(*inputs(i, S, B, w, device), rule, 0.0)
    return _terminating(
        "gqa_decode_never_stopping",
        context,
        S,
        S,
        B,
        w,
        lambda i: make(i, Termination(tau=0)),
        lambda i: make(i, None),
        beside=(FREE,),
    )


def _gathered_never_stopping(context: str, S: int, B: int, w: Widths, device: str) -> Row:
    """What termination costs over kept blocks, most important first, where it never stops. Blocks are chosen before the
    time is taken."""
    (_, KV, D), policy = sizes(w), block_bounds(KEPT)

    def make(i, rule):
        q, keys, values, start = inputs(i, S, B, w, device)
        blocks = choose_blocks(q, KV, *_held(keys, policy), None, start, policy, True, backend="triton")
        attend = lambda *rules: gather_attention(
            q, keys, values, blocks, start, None, D**-0.5, policy.block, *rules, backend="triton"
        )
        run = (lambda: attend()) if rule is None else lambda: attend(rule)[0]
        return run, lambda: (difference(run(), attend()), 0.0)

    return _terminating(
        "gqa_gather_never_stopping",
        context,
        S,
        KEPT,
        B,
        w,
        lambda i: make(i, Termination(tau=0)),
        lambda i: make(i, None),
        beside=(FREE,),
        more=f", {KEPT} kept",
    )


def _stopping(context: str, S: int, B: int, w: Widths, device: str) -> Row:
    """What termination gains where attention is to the newest quarter alone, newest first: every older key is 34 below
    in the exponent."""

    def make(i, rule):
        q, keys, values, start = inputs(i, S, B, w, device)
        q[..., 0], keys[:, :, : -S // SEEN, 0] = 8.0, -48.0
        return _beside_plain(q, keys, values, start, rule, STOPPED)

    return _terminating(
        "gqa_decode_stopping",
        context,
        S,
        S // SEEN,
        B,
        w,
        lambda i: make(i, Termination()),
        lambda i: make(i, None),
        NEVER_US / FASTER,
    )


def _terminating(
    op: str,
    context: str,
    S: int,
    read: int,
    B: int,
    w: Widths,
    make,
    plain,
    goal: float | None = None,
    beside: tuple[Beside, ...] = (),
    more: str = "",
) -> Row:
    """read: tokens that must be read of S; more: of the shape, in words."""
    H, KV, D = sizes(w)
    return Row(
        op,
        f"{context} B{B} {_name(w)}{more}",
        make,
        4 * B * (KV * read + H) * D,
        4 * B * H * D * read,
        goal,
        peers={"without termination": plain},
        facts=_facts(S, B, w),
        interleaved=True,
        beside=beside,
    )


def _choice(shape: dict, w: Widths, device: str) -> Row:
    """The price of finding alone: c₁ of the bill."""
    (H, KV, D), S, B, policy = sizes(w), shape["slots"], shape["batch"], shape["policy"]

    def make(i):
        q, _, *held, start, _, ranked = contract_of("choose_blocks").production.drawn(w, i, device, **shape)
        held[2] = None
        run = lambda: choose_blocks(q, KV, *held, start, policy, ranked, backend="triton")
        return run, lambda: (lost(block_scores(q, *held, start, policy), run().sort(-1).values, policy), 1e-5)

    N, order = S // policy.block, f", {policy.kept} by importance" if shape.get("by_importance") else ""
    return Row("block_choice", f"{N} blocks B{B} {_name(w)}{order}", make, 4 * B * KV * N * D, 4 * B * H * N * D)
