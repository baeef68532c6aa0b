"""Models that several ranks hold together, as threads."""

from dataclasses import replace

import pytest
import torch

from dsv4.parallel.threads import together


def run(models, what) -> list:
    """what(model) of every rank; each model joins the group of this run."""

    def one(ranks):
        model = models[ranks.rank]
        for module in model.modules():
            if hasattr(module, "ranks"):
                module.ranks = replace(ranks, by_expert=module.ranks.by_expert)
        return what(model)

    return together(len(models), one)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def alike(found, wanted, least: float = 1e-12) -> bool:
    """Whether two documents are equal up to rounding of fp32. least: a difference of numbers that means nothing."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], value, least) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(alike(f, w, least) for f, w in zip(found, wanted))
    return found == (pytest.approx(wanted, rel=1e-5, abs=least) if isinstance(wanted, float) else wanted)
