"""Routing of many tokens, differentiable through the weights of the chosen experts."""

import torch
import torch.nn.functional as F

from dsv4.kernels.router import reference


def route_scored(x, weight, bias, topk: int, routed_scaling_factor: float):
    scores = _scores(x, weight)
    indices = torch.topk(scores.detach() + bias, topk, dim=-1, sorted=False).indices
    return indices, _weights(scores, indices, routed_scaling_factor)


def route_hashed(x, weight, tid2eid, ids, routed_scaling_factor: float):
    indices = tid2eid.index_select(0, ids)
    return indices, _weights(_scores(x, weight), indices, routed_scaling_factor)


route_scored.__doc__, route_hashed.__doc__ = reference.route_scored.__doc__, reference.route_hashed.__doc__


def _scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.softplus(F.linear(x, weight.to(x.dtype)).float()).sqrt()


def _weights(scores: torch.Tensor, indices: torch.Tensor, factor: float) -> torch.Tensor:
    chosen = scores.gather(1, indices)
    return chosen / chosen.sum(-1, keepdim=True) * factor
