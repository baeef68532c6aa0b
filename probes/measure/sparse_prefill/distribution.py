"""How the loss is distributed: over the texts that were read, over places of a chunk, and over what a position needs.

A text is one row of `context` tokens. Losses are nats a token beyond dense prefill, of the positions that the
perplexities are of: those from the second chunk on.
"""

import math
from statistics import median

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.base.logits import Positions
from dsv4.probes.measure.sparse_prefill.quality import GOAL

LEAST_MET = 0.5  # share of texts that are to lose less than GOAL
QUARTERS = 4  # of a chunk
# where the pair of tokens (this one, the next) last stood before: in the own chunk, among the local tokens of the
# memory, before those (where only heavy tokens are seen), or nowhere
ORIGINS = ("own chunk", "local", "before local", "nowhere")


def lost(of: Positions) -> torch.Tensor:
    """Nats that each position loses: float64 [n]."""
    return of.nll - of.exact_nll


def row_figures(of: Positions) -> dict:
    """Of one text, as JSON values: perplexity lost, and whether that is below GOAL."""
    loss = math.expm1(lost(of).mean().item())
    return {"positions": len(of.nll), "loss": loss, "verdict": "met" if loss < GOAL else "MISSED"}


def texts_below(losses: list[float]) -> dict:
    """Of the losses of texts, as JSON values: how many are below GOAL, and whether at least LEAST_MET of them are."""
    met = sum(loss < GOAL for loss in losses)
    return {
        "texts": len(losses),
        "below": met,
        "share": met / len(losses),
        "least": min(losses),
        "median": median(losses),
        "most": max(losses),
        "verdict": "met" if met >= LEAST_MET * len(losses) else "MISSED",
    }


def origins(ids: torch.Tensor, cut: Chunking, first: int) -> torch.Tensor:
    """Indices into ORIGINS, int64 [T − first], of positions first … T − 1 of ids int64 [T + 1].

    Position p predicts ids[p + 1]. If the pair (ids[p], ids[p + 1]) stood at j, j + 1 ≤ p, the key at j + 1 says what
    follows; the last such j counts.
    """
    tokens, last, found = ids.tolist(), {}, []
    for p, pair in enumerate(zip(tokens, tokens[1:])):
        begin, seen = p - p % cut.chunk, last.get(pair)
        if seen is None:
            found.append(3)
        else:
            found.append(0 if seen >= begin else 1 if seen >= begin - cut.local else 2)
        last[pair] = p + 1
    return torch.tensor(found[first:], dtype=torch.int64)


def quarters(cut: Chunking, first: int, count: int) -> torch.Tensor:
    """The quarter of its chunk that each of positions first … first + count − 1 is in: int64 [count]."""
    return (torch.arange(first, first + count) % cut.chunk) * QUARTERS // cut.chunk


def by_class(nats: torch.Tensor, classes: torch.Tensor, names: tuple) -> list[dict]:
    """As JSON values, of each class: its positions, mean nats lost (None without positions), and its share of all nats
    lost (None where nothing is lost in all)."""
    rows, total = [], nats.sum().item()
    for i, name in enumerate(names):
        of = nats[classes == i]
        rows.append(
            {
                "class": name,
                "positions": len(of),
                "lost": of.mean().item() if len(of) else None,
                "share": of.sum().item() / total if total > 0 else None,
            }
        )
    return rows
