"""Contract of `summarise_blocks`."""

import torch

from dsv4.kernels.block_summaries import reference
from dsv4.kernels.contract import BITS, Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.grouped_attention.exact import sizes

SLOTS = 384


def exact(keys, start, tokens: int, low, high, mean, block: int):
    """Summaries after the step, block by block: of all touched blocks over their keys up to the last new one."""
    low, high, mean = (t.double().clone() for t in (low, high, mean))
    for b, first in enumerate(start.tolist()):
        for number in range(first // block, (first + tokens - 1) // block + 1):
            rows = keys[b, :, number * block : min((number + 1) * block, first + tokens)].double()
            low[b, :, number], high[b, :, number] = rows.amin(1), rows.amax(1)
            mean[b, :, number] = rows.sum(1) / rows.shape[1]
    return low, high, mean


def cases(w, draw):
    """Both sizes of blocks that policies have; steps inside a block, over its end, and over whole blocks."""
    for block in (16, 128):
        for starts, tokens in (((0, 50), 1), ((15, 127), 1), ((3, 200), 5), ((125, 10), 9), ((0, 60), 70)):
            yield _case("random", starts, tokens, block, w, draw)
        yield _case("sizes", (100, 17), 3, block, w, draw)
        yield _case("negative", (100, 17), 3, block, w, draw)
        yield _case("cancellation", (127, 255), 1, block, w, draw)


def _case(family, starts, tokens, block, w, draw) -> Case:
    """Keys behind the last new one are larger and smaller than all others. Summaries hold other numbers before."""
    (_, KV, D), start = sizes(w), torch.tensor(starts)
    keys = draw.rand(2, KV, SLOTS, D)
    if family == "sizes":
        keys = keys * 2.0 ** (torch.arange(D) % 21 - 10)
    if family == "negative":
        keys = -1 - keys.abs()
    if family == "cancellation":
        keys = keys + torch.where(torch.arange(SLOTS) % block < block // 2, 64.0, -64.0).view(SLOTS, 1)
    behind = (torch.arange(SLOTS) >= (start + tokens).unsqueeze(1)).view(2, 1, SLOTS, 1)
    keys = torch.where(behind, 8 * keys, keys).to(draw.dtype)
    before = torch.arange(SLOTS) < (start // block * block).unsqueeze(1)
    summaries = [draw.act(2, KV, SLOTS // block, D) for _ in range(3)]
    label = f"{tokens} tokens from {starts[0]} and {starts[1]}, blocks of {block}"
    unread = {"keys": behind | before.view(2, 1, SLOTS, 1)}
    return Case(label, family, (keys, start, tokens, *summaries, block), unread)


def work(keys, start, tokens, low, high, mean, block) -> Work:
    """Keys of the touched blocks up to the last new one, and their three summaries."""
    (_, KV, _, D), rows, blocks = keys.shape, 0, 0
    for first in start.tolist():
        rows += first + tokens - first // block * block
        blocks += (first + tokens - 1) // block - first // block + 1
    moved = (rows + 2 * blocks) * KV * D * keys.element_size() + blocks * KV * D * mean.element_size()
    return Work(moved, 3 * rows * KV * D, "(keys + 3·blocks)·KV·D·b; 3·keys·KV·D")


def inputs(w, draw, slots, block) -> tuple:
    """One new token at the end of a full cache."""
    _, KV, D = sizes(w)
    held = (draw.large(1, KV, slots // block, D) for _ in range(3))
    start = torch.full((1,), slots - 1, device=draw.device)
    return draw.large(1, KV, slots, D), start, 1, *held, block


def production_sizes(w) -> dict:
    """Blocks and pages, in both dtypes."""
    return {
        "compiled": [dict(slots=4096, block=b, dtype=t) for b in (128, 16) for t in (torch.bfloat16, torch.float32)]
    }


SUMMARIES = ("batch", "kv_heads", "num_blocks", "head_dim")
CONTRACTS = (
    Contract(
        "summarise_blocks",
        "Least, largest and mean key of every block that the step touches, over its keys up to the last new one.",
        (
            Argument("keys", ("batch", "kv_heads", "slots", "head_dim"), "activation", "the token at p is row p"),
            Argument("start", ("batch",), "int64", "first new token of each row"),
            Argument("tokens", None, "int64", "new tokens of each row"),
            Argument("low", SUMMARIES, "activation", "written; with high it may be None", optional=True),
            Argument("high", SUMMARIES, "activation", "written", optional=True),
            Argument("mean", SUMMARIES, "activation", "written; any float; it may be None", optional=True),
            Argument("block", None, "int64", "tokens of a block"),
        ),
        (
            Output("low", SUMMARIES, "activation", "no rounding", rule=BITS, argument=3),
            Output("high", SUMMARIES, "activation", "no rounding", rule=BITS, argument=4),
            Output("mean", SUMMARIES, "activation", "fp32 sums, one rounding", argument=5),
        ),
        exact,
        {"fp32": reference.summarise_blocks},
        cases,
        work,
        ("blocks that are not touched keep their bits", "keys behind the last new one have no part"),
        production=Production(inputs, production_sizes),
    ),
)
