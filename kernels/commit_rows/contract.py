"""Calls of the end of a round at production sizes. There is no contract: a call updates the state of many rows at once,
and what it returns is the smaller part; `tests/kernels/test_triton_commit_rows.py` compares all of it, bit for bit."""

import torch

from dsv4.kernels.commit_rows.reference import HEAD
from dsv4.kernels.contract import Production

ROOM, TOKENS, ROUNDS = 1024, 9, 64  # of an output, of a round at most, of the records


def commit_inputs(w, draw, batch, tokens, stops) -> tuple:
    """Rows of which all go on."""
    rows, (token, left, written) = _rows(draw, batch, tokens), (draw.below(ROOM, batch) for _ in range(3))
    done, out = torch.zeros(batch, dtype=torch.bool, device=draw.device), draw.below(9, batch, ROOM + TOKENS)
    log, round = draw.below(9, ROOM + 8, 3, batch), draw.below(9, 1)
    return *rows, draw.below(9, stops), ROOM, token, left, written, done, out, log, round


def record_inputs(w, draw, batch, tokens) -> tuple:
    """As `commit_inputs`; sizes of the next round."""
    chosen, count, wanted = _rows(draw, batch, tokens)
    offered, left, sizes = (draw.below(TOKENS, batch) for _ in range(3))
    done, records = (
        torch.zeros(batch, dtype=torch.bool, device=draw.device),
        draw.below(9, ROUNDS, batch, HEAD + TOKENS),
    )
    return chosen, count, wanted, offered, left, done, sizes, draw.below(9, 1), records


def _rows(draw, batch: int, tokens: int) -> tuple:
    """Chosen tokens, and two numbers of each row that are at most as many."""
    return draw.below(9, batch, tokens), draw.below(tokens, batch), draw.below(tokens, batch)


SHAPES = ((1, 1), (1, 9), (32, 5), (128, 9))
CONTRACTS = ()
PRODUCTIONS = {
    "commit": Production(
        commit_inputs, lambda w: {"compiled": [dict(batch=B, tokens=T, stops=S) for B, T in SHAPES for S in (1, 3, 8)]}
    ),
    "record": Production(record_inputs, lambda w: {"compiled": [dict(batch=B, tokens=T) for B, T in SHAPES]}),
}
