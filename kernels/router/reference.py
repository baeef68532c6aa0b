"""Expert routing: which experts a token goes to, and with what weight."""

import torch
import torch.nn.functional as F


def router_scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """s = sqrt(softplus(W·x)): x [N, D], weight [E, D] → fp64 [N, E].

    Logits in fp32. The softplus is taken in fp64 so that it neither vanishes for logits
    below −17 (1 + eˣ = 1 in fp32) nor leaves a sum of 0 to divide by.
    """
    return F.softplus(F.linear(x.float(), weight.float()).double()).sqrt_()


def routing_weights(scores: torch.Tensor, indices: torch.Tensor, routed_scaling_factor: float) -> torch.Tensor:
    """Unbiased scores of the chosen experts, normalised so that their sum is routed_scaling_factor.

    scores fp64 [N, E]; indices int64 [N, k]. Returns fp32 [N, k].
    """
    chosen = scores.gather(1, indices)
    return (chosen / chosen.sum(-1, keepdim=True)).mul_(routed_scaling_factor).float()


def route_scored(x, weight, bias, topk: int, routed_scaling_factor: float):
    """Top-k by score + bias; the bias selects and does not weigh.

    x [N, D]; weight [E, D]; bias fp32 [E]. Returns (indices int64 [N, k], weights fp32 [N, k]).
    """
    scores = router_scores(x, weight)
    indices = torch.topk(scores.float() + bias, topk, dim=-1).indices
    return indices, routing_weights(scores, indices, routed_scaling_factor)


def route_hashed(x, weight, tid2eid, ids, routed_scaling_factor: float):
    """Experts by token id (the first num_hash_layers layers); the scores only weigh.

    x [N, D]; weight [E, D]; tid2eid int64 [vocab, k]; ids int64 [N]. Returns as `route_scored`.
    """
    indices = tid2eid.index_select(0, ids)
    return indices, routing_weights(router_scores(x, weight), indices, routed_scaling_factor)
