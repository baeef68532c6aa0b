"""Perplexity, KL and agreement of sparse prefill beside dense prefill, teacher-forced on the same rows."""

import math
from dataclasses import fields

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base import logits as measures
from dsv4.probes.measure.base.logits import Positions, joined
from dsv4.probes.measure.sparse_prefill.reading import SLICE, Reading, cut_by

GOAL = 0.05  # perplexity lost, at most
BLOCK = 256  # neighbouring positions that count as one observation in the error of a loss
Z = 1.96  # of a two-sided 95 % interval


def compared(model: CausalLM, exact: Reading, other: Reading, ids: torch.Tensor, first: int) -> Positions:
    """ids int64 [T + 1] of the one row that both have read T tokens of: what positions first … T − 1 say of their next
    tokens."""
    T, parts = len(ids) - 1, []
    for at in range(first, T, SLICE):
        places = slice(at, min(at + SLICE, T))
        following = ids[places.start + 1 : places.stop + 1]
        parts.append(measures.positions(exact.logits(model, 0, places), other.logits(model, 0, places), following))
    return joined(parts)


def decoded(
    model: CausalLM, exact: Reading, other: Reading, ids: torch.Tensor, tails: list[tuple[int, int]], chunk: int
) -> list[Positions]:
    """Positions first … last − 1 of each (first, last), longest texts first, decoded by attention to the whole cache
    that was read sparsely up to there. Leaves the cache of `other` rewound."""
    found = []
    with cut_by(model, None):
        for first, last in tails:
            other.cache.rewind(other.cache.lengths[0] - first)
            logits = model.append(ids[None, first:last], other.cache, chunk=chunk, prompt=False)[0]
            found.append(
                measures.positions(exact.logits(model, 0, slice(first, last)), logits, ids[first + 1 : last + 1])
            )
    return found


def until(of: Positions, count: int) -> Positions:
    """The first `count` of them."""
    return Positions(*(getattr(of, f.name)[:count] for f in fields(Positions)))


def figures(parts: list[Positions]) -> dict:
    """As JSON values: `dsv4.probes.measure.base.logits.figures` of all parts together, and the perplexity lost.

    loss: perplexity / exact perplexity − 1; loss_low, loss_high: 95 % interval, if means over BLOCK neighbouring
    positions are independent (None for fewer than two). verdict: whether the loss is below GOAL.
    """
    found = measures.figures(joined(parts))
    each = torch.cat([blocks(part.nll - part.exact_nll) for part in parts])
    lost = joined(parts)
    mean = (lost.nll - lost.exact_nll).mean().item()
    error = Z * each.std().item() / math.sqrt(len(each)) if len(each) > 1 else None
    loss = math.expm1(mean)
    return found | {
        "loss": loss,
        "loss_low": None if error is None else math.expm1(mean - error),
        "loss_high": None if error is None else math.expm1(mean + error),
        "verdict": "met" if loss < GOAL else "MISSED",
    }


def blocks(x: torch.Tensor) -> torch.Tensor:
    """Means of BLOCK neighbours; what is over at the end is left out, unless that is all."""
    whole = len(x) // BLOCK * BLOCK
    return x[:whole].view(-1, BLOCK).mean(-1) if whole else x.mean(-1, keepdim=True)


def by_chunk(of: Positions, cut: Chunking) -> list[float]:
    """Nats lost a token in each chunk from the second on; `of` begins there."""
    return [part.mean().item() for part in (of.nll - of.exact_nll).split(cut.chunk)]
