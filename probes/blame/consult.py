"""Finds the module whose swap for the oracle's removes a difference, by the means of `bisect`.

Probes use it for a difference that none of their known mistakes explains.
"""

import torch

from dsv4.kernels.errors import Dsv4Error
from dsv4.probes.blame.bisect import block_of
from dsv4.probes.blame.by_layer import differences, expected, rounded
from dsv4.probes.blame.causes import MODULES
from dsv4.probes.blame.swaps import supports, swapped
from dsv4.probes.compare import oracle_of
from dsv4.probes.oracle import kinds
from dsv4.probes.subject import Subject

PARTS = {  # module → the part that probes call it
    "attn.wo_a": "output projection",
    "attn.wo_b": "output projection",
    "attn.attn_sink": "sink",
    "attn.rope": "rotation",
    "attn.indexer.wq_b": "indexer queries",
    "attn.indexer.weights_proj": "indexer weights",
    "attn.indexer": "indexer scores",
    "ffn.gate": "router",
    "ffn.experts": "experts",
    "ffn.shared_experts": "shared expert",
    "ffn_norm": "ffn_norm",
}
TOKENS = 200


def culprit(subject: Subject, i: int, point: str, seed: int = 0) -> tuple[str, str] | None:
    """(part, why) for layer i whose `point` is wrong; None if no swap of one module removes the difference.

    The layer runs alone on random streams, once for each module behind the point. The point is compared with the
    oracle's result from the layer's own values before it.
    """
    if "block" not in subject.can or getattr(subject, "files", None) is None or not supports(subject, "attn"):
        return None
    oracle, c = oracle_of(subject), subject.config
    oracle.cache = None
    g = torch.Generator().manual_seed(seed)
    tokens = min(
        max(TOKENS, kinds.CSA * (c.index_topk + 2) if kinds.CSA in c.compress_ratios else 0), c.max_position_embeddings
    )
    ids = torch.randint(0, c.vocab_size, (1, tokens), generator=g)
    before = torch.randn(1, tokens, c.hc_mult, c.hidden_size, generator=g).bfloat16().float()

    def wrong() -> bool:
        points = block_of(subject, i, before, ids)
        layer = oracle.layer(i)
        exact = expected(layer, before, ids, points)
        noisy = expected(rounded(layer, subject.numerics), before, ids, points)
        found = differences(i, points, exact, noisy, oracle.config, subject.numerics)
        return any(d.found for d in found if d.point == point)

    try:
        if not wrong():
            return None
        for module in MODULES[point]:
            if module not in PARTS or not supports(subject, module):
                continue
            with swapped(subject, i, module, oracle.layer(i), ids):
                left = wrong()
            if not left:
                return PARTS[module], f"bisect: it vanishes with the oracle's layers.{i}.{module}"
    except (Dsv4Error, RuntimeError, IndexError, ValueError, TypeError):  # a broken layer may not run in pieces
        return None
    return None


def left_of(errors: dict[str, float], whole: float, most: int = 3) -> str:
    """The share of a difference of `whole` that the nearest mistakes leave. A mistake that leaves all of it or more
    explains nothing, and is not named."""
    shares = {name: error / max(whole, 1e-30) for name, error in errors.items()}
    told = sorted((share, name) for name, share in shares.items() if share < 0.995)[:most]
    if not told:
        return "no known mistake explains any of it"
    return "left of the difference by mistake: " + "; ".join(f"{name} {share:.2g}" for share, name in told)
