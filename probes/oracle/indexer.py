"""The indexer of a CSA layer (§3), with its intermediate values held as activations are, and its known mistakes."""

import math

import torch

from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.oracle.formats import hadamard, simulate_fp4

# parts to blame
KEYS, QUERIES, WEIGHTS, SCORES = "indexer keys", "indexer queries", "indexer weights", "indexer scores"


def indexed(layer: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """attn_in [1, T, d] → index keys, queries, weights, scores, by the oracle."""
    x, positions = x.double(), torch.arange(x.shape[1])
    parts = {
        "keys": keys(layer, x),
        "queries": queries(layer, x, positions),
        "weights": held(layer, steps.index_weights(layer, x)),
    }
    return parts | {"index_scores": score(layer, parts)}


def held(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x as activations hold it before FP4: a matched oracle quantises the same numbers, or values at the boundaries
    flip."""
    return layer.store(x) if layer.simulate else x


def form(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """`steps.index_form`, with what Hadamard gives held before FP4."""
    return simulate_fp4(held(layer, hadamard(held(layer, x))), 32) if layer.simulate else x


def keys(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Index keys [B, n, Di] of attn_in x [B, T, d], as the cache holds them."""
    w = lambda leaf: layer.w(f"attn.indexer.compressor.{leaf}")
    pooled = held(layer, steps.pool(x, w("wkv.weight"), w("wgate.weight"), w("ape"), layer.ratio, overlap=True))
    entries = held(layer, steps.rms(pooled, w("norm.weight"), layer.config.rms_norm_eps))
    return layer.store(
        form(layer, steps.rotate(entries, layer.ratio * torch.arange(entries.shape[1]), layer.frequencies))
    )


def queries(layer: Layer, x: torch.Tensor, positions: torch.Tensor, turn: bool = True) -> torch.Tensor:
    """Index queries [B, T, Hi, Di] of attn_in x [B, T, d], with activations held in the cache's dtype if simulated."""
    c = layer.config
    a = held(layer, layer.linear("attn.wq_a", x))
    qr = held(layer, steps.rms(a, layer.w("attn.q_norm.weight"), c.rms_norm_eps))
    q = held(layer, layer.linear("attn.indexer.wq_b", qr)).unflatten(-1, (c.index_n_heads, c.index_head_dim))
    return form(layer, steps.rotate_heads(q, positions, layer.frequencies) if turn else q)


def score(layer: Layer, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    positions = torch.arange(parts["queries"].shape[1])
    return steps.index_scores(parts["queries"], parts["weights"], parts["keys"], positions, layer.ratio)


# ---- mistakes -----------------------------------------------------------------------------


def mistakes(
    layer: Layer, x: torch.Tensor, right: dict[str, torch.Tensor], own: torch.Tensor | None
) -> dict[str, tuple]:
    """Name → (part at fault, scores [1, T, n]) of what implementations got wrong; own: keys that the subject holds."""
    scores, weights = lambda **other: score(layer, right | other), right["weights"]
    hide, size = right["index_scores"] == -math.inf, weights.shape[-1] * right["keys"].shape[-1]
    raw = torch.einsum("bth,bthd,bnd->btn", weights, right["queries"], right["keys"])
    half = torch.arange(weights.shape[-1]) < weights.shape[-1] // 2
    everywhere = torch.arange(x.shape[1])
    found = {
        "ReLU missing": (SCORES, raw.masked_fill(hide, -math.inf)),
        "ReLU after the sum over heads": (SCORES, torch.relu(raw).masked_fill(hide, -math.inf)),
        "temperature missing": (WEIGHTS, scores(weights=weights * size**0.5)),
        "temperature twice": (WEIGHTS, scores(weights=weights / size**0.5)),
        "sigmoid of the weights": (WEIGHTS, scores(weights=torch.sigmoid(weights * size**0.5) / size**0.5)),
        "weights missing": (WEIGHTS, scores(weights=torch.ones_like(weights))),
        "weights of the token before": (WEIGHTS, scores(weights=weights.roll(1, 1))),
        "mean over the heads": (SCORES, scores() / weights.shape[-1]),
        "mean over the heads, without weights": (SCORES, scores(weights=torch.ones_like(weights) / weights.shape[-1])),
        "keys pooled by their mean": (KEYS, scores(keys=mean_pooled(layer, x.double()))),
        "half the heads": (QUERIES, scores(weights=weights * half)),
        "queries not rotated": (QUERIES, scores(queries=queries(layer, x.double(), everywhere, False))),
        "queries of the token before": (QUERIES, scores(queries=right["queries"].roll(1, 1))),
    }
    for name, keys in misread(right["keys"]).items():
        found[name] = KEYS, scores(keys=keys)
    if own is not None and own.shape == right["keys"].shape:
        found["the subject's own keys"] = KEYS, scores(keys=own.double())
    if layer.simulate:
        found["Hadamard of queries missing"] = QUERIES, scores(queries=hadamard(right["queries"]))
        found["Hadamard of keys missing"] = KEYS, scores(keys=hadamard(right["keys"]))
    return found


def mean_pooled(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Index keys [B, n, Di] whose windows are averaged instead of weighed by their gates."""
    w = lambda leaf: layer.w(f"attn.indexer.compressor.{leaf}")
    still = lambda t: torch.zeros_like(t)
    pooled = steps.pool(x, w("wkv.weight"), still(w("wgate.weight")), still(w("ape")), layer.ratio, overlap=True)
    entries = held(layer, steps.rms(held(layer, pooled), w("norm.weight"), layer.config.rms_norm_eps))
    turned = steps.rotate(entries, layer.ratio * torch.arange(entries.shape[1]), layer.frequencies)
    return layer.store(form(layer, turned))


def misread(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys [1, n, Di] as a kernel sees them that reads another row, or another layout than they were written in."""
    found = {"keys of the entry before": keys.roll(1, 1), "keys of the entry after": keys.roll(-1, 1)}
    blocks = (b for b in (2, 4, 8, 16, 32, 64) if b < keys.shape[-1] and keys.shape[-1] % b == 0)
    shuffled = lambda b: keys.unflatten(-1, (-1, b)).transpose(-1, -2).flatten(-2)
    return found | {f"keys read in blocks of {b} dims": shuffled(b) for b in blocks}
