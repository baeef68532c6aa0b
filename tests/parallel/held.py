"""Models that several ranks hold together, as threads."""

from dataclasses import replace

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
