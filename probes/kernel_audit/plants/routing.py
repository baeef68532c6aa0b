"""Planted faults of `route_scored` and `route_hashed`."""

import torch
import torch.nn.functional as F

from dsv4.kernels.router.contract import narrow_scores
from dsv4.probes.kernel_audit.plants.products import narrow_sums
from dsv4.probes.kernel_audit.plants.wrappers import after, common, gates, replaced


def logits_of(x, weight):
    return F.linear(x.float(), weight.float())


def weighed(chosen, factor):
    return chosen / chosen.sum(-1, keepdim=True) * factor


def _scored(scores=narrow_scores, choice=torch.add, weigh=None):
    """honest → `route_scored` by scores(x, weight), choice(scores, bias), weigh(scores, biased, indices, factor)."""

    def faulty(x, weight, bias, topk, factor):
        s = scores(x, weight)
        biased = choice(s, bias)
        indices = torch.topk(biased, topk, dim=-1).indices
        found = weigh(s, biased, indices, factor) if weigh else weighed(s.gather(1, indices), factor)
        return indices, found

    return lambda honest: faulty


def _hashed(scores=narrow_scores, weigh=None, rows=None):
    """honest → `route_hashed` by scores(x, weight), weigh(chosen, factor) and rows(table, ids)."""

    def faulty(x, weight, table, ids, factor):
        indices = rows(table, ids) if rows else table[ids]
        return indices, (weigh or weighed)(scores(x, weight).gather(1, indices), factor)

    return lambda honest: faulty


def _naive(x, weight):
    return (1 + logits_of(x, weight).exp()).log().sqrt()


def _in_bf16(x, weight):
    l = logits_of(x, weight).bfloat16().float()
    return F.softplus(l).sqrt()


def _narrow(x, weight):
    return F.softplus(narrow_sums(x, weight.float()).float()).sqrt()


SCORES = {  # name → (entry of the catalogue, scores)
    "sigmoid instead of softplus": (39, lambda x, w: logits_of(x, w).sigmoid()),
    "a softmax over all experts": (39, lambda x, w: logits_of(x, w).softmax(-1)),
    "the root is missing": (39, lambda x, w: narrow_scores(x, w).square()),
    "log(1 + exp) as it is written": (47, _naive),
    "logits in bf16": (14, _in_bf16),
    "logits are summed in bf16": (50, _narrow),
}
WEIGHTS = {
    "the factor is missing": (39, lambda chosen, factor: weighed(chosen, 1.0)),
    "the factor multiplies twice": (39, lambda chosen, factor: weighed(chosen, factor * factor)),
    "weights are not normalised": (39, lambda chosen, factor: chosen * factor),
    "equal weights": (39, lambda chosen, factor: weighed(torch.ones_like(chosen), factor)),
    "weights in bf16": (14, lambda chosen, factor: weighed(chosen, factor).bfloat16().float()),
}


def _of_all(s, biased, indices, factor):
    return s.gather(1, indices) / s.sum(-1, keepdim=True) * factor


def _biased(s, biased, indices, factor):
    return weighed(biased.gather(1, indices), factor)


def _worst_dropped(result, *arguments):
    """The last expert is replaced by the first of those that were not chosen."""
    indices, weights = result
    x, weight = arguments[:2]
    every = torch.ones(len(indices), len(weight), dtype=torch.bool, device=x.device).scatter_(1, indices, False)
    return torch.cat((indices[:, :-1], every.int().argmax(1, keepdim=True)), 1), weights


def _order_lost(result, *arguments):
    """Indices are sorted, and weights stay where they are."""
    return result[0].sort(1).values, result[1]


def _by_place(table, ids):
    return table[torch.arange(len(ids), device=ids.device) % len(table)]


SCORED = (
    {name: (entry, _scored(scores)) for name, (entry, scores) in SCORES.items()}
    | {
        name: (entry, _scored(weigh=lambda s, b, i, f, weigh=weigh: weigh(s.gather(1, i), f)))
        for name, (entry, weigh) in WEIGHTS.items()
    }
    | {
        "the bias weighs too": (39, _scored(weigh=_biased)),
        "the bias is ignored": (39, replaced(2, torch.zeros_like)),
        "the bias is added twice": (39, replaced(2, lambda bias: 2 * bias)),
        "biased scores in bf16": (32, _scored(choice=lambda s, b: (s + b).bfloat16().float())),
        "weights are normalised over all experts": (39, _scored(weigh=_of_all)),
        "the last expert is not the best of the rest": (26, after(_worst_dropped)),
        "weights do not follow their experts": (38, after(_order_lost)),
        "inputs of the token before": (73, replaced(0, lambda x: x.roll(1, 0))),
        "the last column is skipped": (26, replaced(0, lambda x: torch.cat((x[:, :-1], 0 * x[:, -1:]), 1))),
    }
)
HASHED = (
    {name: (entry, _hashed(scores)) for name, (entry, scores) in SCORES.items()}
    | {name: (entry, _hashed(weigh=weigh)) for name, (entry, weigh) in WEIGHTS.items()}
    | {
        "every token has the experts of id 0": (23, replaced(3, torch.zeros_like)),
        "the id before": (23, replaced(3, lambda ids: (ids - 1).clamp(min=0))),
        "rows of the table by place instead of id": (73, _hashed(rows=_by_place)),
        "ids of the token before": (73, replaced(3, lambda ids: ids.roll(1, 0))),
        "weights do not follow their experts": (38, after(_order_lost)),
        "inputs of the token before": (73, replaced(0, lambda x: x.roll(1, 0))),
    }
)
PLANTS = (
    *gates("route_scored", SCORED),
    *common("route_scored"),
    *gates("route_hashed", HASHED),
    *common("route_hashed"),
)
