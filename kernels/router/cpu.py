"""Routing of a single token on a host processor: a dozen tensor operations on a few numbers, done on Python numbers
instead."""

import math

import torch
import torch.nn.functional as F

from dsv4.kernels.router import reference

MAX_EXPERTS = 64  # beyond this the tensor form is faster


def route_scored(x, weight, bias, topk: int, routed_scaling_factor: float):
    if x.shape[0] != 1 or weight.shape[0] > MAX_EXPERTS:
        return reference.route_scored(x, weight, bias, topk, routed_scaling_factor)
    scores = _scores(x, weight)
    biased = [score + b for score, b in zip(scores, bias.tolist())]
    chosen = sorted(range(len(scores)), key=biased.__getitem__, reverse=True)[:topk]
    return torch.tensor([chosen]), _weights([scores[e] for e in chosen], routed_scaling_factor)


def route_hashed(x, weight, tid2eid, ids, routed_scaling_factor: float):
    if x.shape[0] != 1 or weight.shape[0] > MAX_EXPERTS:
        return reference.route_hashed(x, weight, tid2eid, ids, routed_scaling_factor)
    indices, scores = tid2eid.index_select(0, ids), _scores(x, weight)
    return indices, _weights([scores[e] for e in indices[0].tolist()], routed_scaling_factor)


route_scored.__doc__, route_hashed.__doc__ = reference.route_scored.__doc__, reference.route_hashed.__doc__


def _scores(x: torch.Tensor, weight: torch.Tensor) -> list[float]:
    """sqrt(softplus(W·x)) in fp64, softplus(l) = max(l, 0) + log1p(e^−|l|)."""
    logits = F.linear(x.float(), weight.float())[0].tolist()
    return [math.sqrt((l if l > 0 else 0.0) + math.log1p(math.exp(-abs(l)))) for l in logits]


def _weights(chosen: list[float], factor: float) -> torch.Tensor:
    factor /= sum(chosen)
    return torch.tensor([[score * factor for score in chosen]])
