"""Routing of many tokens, differentiable through the weights of the chosen experts."""

import torch
import torch.nn.functional as F

from dsv4.kernels.router import reference

STRAIGHT = -40.0  # below it log(softplus(x)) is x in fp64


def route_scored(x, weight, bias, topk: int, routed_scaling_factor: float):
    logits = _logits(x, weight)
    scores = F.softplus(logits.detach()).sqrt_()
    indices = torch.topk(scores.float() + bias, topk, dim=-1, sorted=False).indices
    return indices, _weights(logits, indices, routed_scaling_factor)


def route_hashed(x, weight, tid2eid, ids, routed_scaling_factor: float):
    indices = tid2eid.index_select(0, ids)
    return indices, _weights(_logits(x, weight), indices, routed_scaling_factor)


route_scored.__doc__, route_hashed.__doc__ = reference.route_scored.__doc__, reference.route_hashed.__doc__


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp64 [N, E], from products in the dtype of x."""
    return F.linear(x, weight.to(x.dtype)).double()


def _weights(logits: torch.Tensor, indices: torch.Tensor, factor: float) -> torch.Tensor:
    """sqrt(softplus(l)) of the chosen over its sum, times factor, fp32 [N, k].

    It is taken as softmax(½ log softplus(l)): the quotient and its gradient stay finite where sqrt(softplus(l))
    underflows, however low the logits are.
    """
    chosen = logits.gather(1, indices)
    above = chosen.clamp(min=STRAIGHT)
    logs = torch.where(chosen < STRAIGHT, chosen, F.softplus(above).log())
    return ((logs / 2).softmax(-1) * factor).float()
