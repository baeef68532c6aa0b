"""The output of a layer's experts under mistakes that implementations really made. Comparison with these names a
fault."""

import math
from collections.abc import Callable

import torch

from dsv4.probes.blame.consult import left_of
from dsv4.probes.oracle.attention import Layer, rms
from dsv4.probes.oracle.blocks import expert, hyper_pre, router
from dsv4.probes.scenes.sublayers import Sublayers

MOST = 64  # tokens looked at
EXPLAINED = 0.3  # share of a difference that may be left if a mistake explains it


def routed(layer: Layer, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [N, d], experts int64 [N, k], weights [N, k] → the weighted sum of their outputs [N, d]."""
    out = torch.zeros_like(x)
    for e in experts.unique().tolist():
        token, slot = torch.nonzero(experts == e, as_tuple=True)
        out.index_add_(0, token, expert(layer, f"ffn.experts.{e}", x[token], weights[token, slot].unsqueeze(-1)))
    return out


def blame(part: Sublayers, wanted: torch.Tensor) -> tuple[str, str]:
    """(part, note): the mistake that makes the ffn_out that is seen, if one leaves at most `EXPLAINED` of the
    difference."""
    cut = lambda t: t[:, :MOST].flatten(0, 1)
    found, x, ids = cut(part.seen["ffn_out"]), cut(part.ffn_in), cut(part.ids)
    away = lambda made: torch.nan_to_num((found - made).norm(), nan=math.inf, posinf=math.inf).item()
    whole = away(cut(wanted))
    if whole == math.inf or whole == 0:
        return "experts", "NaN" if whole else f"the first {MOST} tokens are right"
    known = mistakes(part, x, ids)
    errors = {name: away(make()) for name, (_, make) in known.items()}
    best = min(errors, key=errors.get)
    if errors[best] > EXPLAINED * whole:
        return reweighed(part, x, ids, found, whole) or ("experts", left_of(errors, whole))
    return known[best][0], left_of(errors, whole)


def reweighed(
    part: Sublayers, x: torch.Tensor, ids: torch.Tensor, found: torch.Tensor, whole: float
) -> tuple[str, str] | None:
    """Whether the right experts with any other weights explain the output: then it is a fault of the router.

    The weights of each token are found by least squares: as many numbers as experts, out of as many as dims.
    """
    layer = part.layer
    experts, weights = (t[0] for t in router(layer, x[None], ids[None]))
    if 3 * weights.shape[1] > x.shape[1]:
        return None  # any output would be a sum of so many
    one = torch.ones(len(x), 1, dtype=x.dtype)
    outs = torch.stack([routed(layer, x, experts[:, j : j + 1], one) for j in range(weights.shape[1])], -1)
    rest = (found - expert(layer, "ffn.shared_experts", x, 1.0)).unsqueeze(-1)
    fit = (torch.linalg.pinv(outs, rtol=1e-9) @ rest).squeeze(-1)
    left = (rest.squeeze(-1) - (outs @ fit.unsqueeze(-1)).squeeze(-1)).norm().item()
    if not left <= EXPLAINED * whole:
        return None
    off = (fit - weights).abs().sum(-1) / weights.sum(-1)
    said = f"weights off by {off.median():.1%} of a token's sum, at most {off.max():.1%}"
    return "routing weights", f"the right experts with other weights leave {left / whole:.2g} of the difference; {said}"


def mistakes(part: Sublayers, x: torch.Tensor, ids: torch.Tensor) -> dict[str, tuple[str, Callable]]:
    """Name → (part at fault, how to make ffn_out [N, d] by that mistake)."""
    layer, c = part.layer, part.layer.config
    one = lambda rows, ids=ids: tuple(t[0] for t in router(layer, rows[None], ids[None]))
    (experts, weights), shared = one(x), expert(layer, "ffn.shared_experts", x, 1.0)
    factor, E = c.routed_scaling_factor, c.n_routed_experts
    plain, raw = routed(layer, x, experts, weights), all_scores(layer, x).gather(-1, experts)
    equal = torch.full_like(weights, factor / weights.shape[1])
    share = lambda w: w / w.sum(-1, keepdim=True) * factor
    inputs = lambda x: routed(layer, x, *one(x)) + expert(layer, "ffn.shared_experts", x, 1.0)
    collapsed = hyper_pre(layer, part.between, "hc_attn")[0][:, :MOST].flatten(0, 1)
    own = layer.w("ffn_norm.weight")
    known = {
        "shared expert missing": ("shared expert", lambda: plain),
        "shared expert scaled": ("shared expert", lambda: plain + factor * shared),
        "shared expert twice": ("shared expert", lambda: plain + 2 * shared),
        "routed experts missing": ("routing weights", lambda: shared),
        "scaling factor missing": ("routing weights", lambda: plain / factor + shared),
        "scaling factor twice": ("routing weights", lambda: plain * factor + shared),
        "equal weights": ("routing weights", lambda: routed(layer, x, experts, equal) + shared),
        "routing weights twice": ("routing weights", lambda: routed(layer, x, experts, weights**2) + shared),
        "weights not normalised": ("routing weights", lambda: routed(layer, x, experts, raw * factor) + shared),
        "one expert fewer": (
            "routing weights",
            lambda: routed(layer, x, experts[:, :-1], share(weights[:, :-1])) + shared,
        ),
        "experts one off": ("expert order", lambda: routed(layer, x, (experts + 1) % E, weights) + shared),
        "experts of the first half": ("expert order", lambda: routed(layer, x, experts % (E // 2), weights) + shared),
        "ffn_norm twice": ("ffn_norm", lambda: inputs(rms(x, own, c.rms_norm_eps))),
        "ffn_norm's weight missing": ("ffn_norm", lambda: inputs(x / own)),
        "input by hc_attn": ("mHC pre", lambda: inputs(rms(collapsed, own, c.rms_norm_eps))),
    }
    return known | (_hashed if layer.hashed else _scored)(layer, x, ids, one, shared)


def _hashed(layer: Layer, x: torch.Tensor, ids: torch.Tensor, one: Callable, shared: torch.Tensor) -> dict:
    """Mistakes in looking experts up by token id."""
    vocab, c = layer.config.vocab_size, layer.config
    by = lambda ids: lambda: routed(layer, x, *one(x, ids)) + shared

    def by_score() -> torch.Tensor:
        scores, best = all_scores(layer, x).topk(c.num_experts_per_tok, -1)
        return routed(layer, x, best, scores / scores.sum(-1, keepdim=True) * c.routed_scaling_factor) + shared

    return {
        "every token as id 0": ("hash table", by(torch.zeros_like(ids))),
        "next token id": ("hash table", by((ids + 1) % vocab)),
        "token ids in bf16": ("hash table", by(ids.bfloat16().long().clamp(max=vocab - 1))),
        "experts by score": ("hash table", by_score),
    }


def _scored(layer: Layer, x: torch.Tensor, ids: torch.Tensor, one: Callable, shared: torch.Tensor) -> dict:
    """Mistakes in what the bias does."""
    c, bias = layer.config, layer.w("ffn.gate.bias")
    scores = all_scores(layer, x)

    def with_(chosen: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        return routed(layer, x, chosen, picked / picked.sum(-1, keepdim=True) * c.routed_scaling_factor) + shared

    best, biased = scores.topk(c.num_experts_per_tok, -1), (scores + bias).topk(c.num_experts_per_tok, -1)
    return {
        "bias does not select": ("router", lambda: with_(best.indices, best.values)),
        "bias weighs": ("router", lambda: with_(biased.indices, biased.values)),
    }


def all_scores(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    z = layer.linear("ffn.gate", x, quantise=False)
    return torch.sqrt(torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0))
