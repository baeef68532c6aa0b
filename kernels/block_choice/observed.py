"""Which tokens of a prompt decoding reads under `Observed`: chosen once a prompt and layer, in plain torch on every
device, one KV head at a time."""

import torch
import torch.nn.functional as F

from dsv4.kernels.block_choice.policy import Observed
from dsv4.kernels.indexer.reference import topk_entries


def token_scores(q: torch.Tensor, keys: torch.Tensor, before: int, scale: float, policy: Observed) -> torch.Tensor:
    """Scores of the first `before` tokens of a prompt, fp32 [KV, before], as `Observed` defines them.

    q [W, H, D]: rotated queries of the prompt's last W tokens; keys [KV, P, D]: of all its tokens. Query head h reads
    KV head h // (H // KV). Products and softmax in fp32.
    """
    (W, H, D), (KV, P) = q.shape, keys.shape[:2]
    heads, found = q.float().view(W, KV, H // KV, D), []
    ahead = torch.arange(P, device=q.device) > P - W + torch.arange(W, device=q.device).unsqueeze(1)
    for kv in range(KV):
        logits = torch.einsum("wgd,pd->gwp", heads[:, kv], keys[kv].float()) * scale
        mass = logits.masked_fill(ahead, float("-inf")).softmax(-1)[..., :before].sum(1)
        found.append(pooled(mass, policy).mean(0))
    return torch.stack(found)


def pooled(mass: torch.Tensor, policy: Observed) -> torch.Tensor:
    """mass fp32 [G, n] pooled over neighbouring tokens; an average counts zeros beyond the ends."""
    pool = F.avg_pool1d if policy.pooling == "avg" else F.max_pool1d
    return pool(mass, policy.kernel, stride=1, padding=policy.kernel // 2)


def choose_tokens(
    q: torch.Tensor, keys: torch.Tensor, scale: float, policy: Observed, layer: int, layers: int
) -> tuple[torch.Tensor, int]:
    """(tokens int64 [KV, k], since): what the `layer`-th of the `layers` layers that choose keeps of a prompt: these
    tokens, the highest score first and of equals the lowest token, and everything from position `since` on.

    Arguments as in `token_scores`; q may have fewer queries than the policy's window, the tokens of the window are kept
    all the same. A budget for the whole prompt chooses nothing: k = 0, since = 0.
    """
    KV, P = keys.shape[:2]
    budget = policy.budget(layer, layers, P)
    if budget >= P:
        return torch.empty(KV, 0, dtype=torch.int64, device=keys.device), 0
    since = P - policy.window
    scores = token_scores(q, keys, since, scale, policy)
    return topk_entries(scores.unsqueeze(0), budget - policy.window)[0], since
