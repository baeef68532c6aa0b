"""Calls of the cost-aware policy at production sizes. There is no contract: the belief is updated in place, and the
definition of both is `dsv4.speculation`, with which tests compare them."""

import torch

from dsv4.kernels.contract import Production
from dsv4.kernels.draft_sizes.triton import GROUPS, OUTCOMES, PROPOSED

SIZES, RESPONSES = 9, 5


def observe_inputs(w, draw, batch) -> tuple:
    """Beliefs of so many rows, and what became of their last drafts."""
    tables = (draw.uniform(0, 1, *shape) for shape in ((PROPOSED**2, GROUPS), (PROPOSED,), (PROPOSED, GROUPS)))
    return draw.uniform(0, 1, batch, GROUPS), *tables, draw.below(SIZES, batch), draw.below(SIZES, batch)


def choose_inputs(w, draw, batch) -> tuple:
    """All rows go on, and there is no pressure."""
    shapes = (batch, GROUPS), (SIZES, GROUPS), (OUTCOMES, RESPONSES, SIZES, GROUPS), (SIZES, SIZES), (SIZES,)
    live, pressure = torch.ones(batch, dtype=torch.bool, device=draw.device), torch.zeros((), device=draw.device).bool()
    sizes = torch.arange(SIZES, device=draw.device)
    return *(draw.uniform(0, 1, *shape) for shape in shapes), sizes, live, pressure, 2


COMPILED = lambda w: {"compiled": [dict(batch=B) for B in (1, 32)]}
CONTRACTS = ()
PRODUCTIONS = {"observe": Production(observe_inputs, COMPILED), "choose": Production(choose_inputs, COMPILED)}
