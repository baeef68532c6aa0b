"""Possible causes of a difference at a point: the modules behind it, and mistakes that explain it.

MODULES lists, for each point, the modules whose swap is tried, the finest first. `explanations` are the oracle's own
values of a point under known mistakes: if one of them equals the subject's values, the report can say what is wrong,
not only where.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4.probes.blame.by_layer import attend, entries_only, expected
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import Layer, rms
from dsv4.probes.oracle.blocks import expert, hyper_post, hyper_pre, moe
from dsv4.probes.oracle.config import Rotation
from dsv4.probes.oracle.weights import Weights

MODULES = {
    "attn_in": ("embed", "hc_attn", "attn_norm"),
    "q_after_rope": ("attn.wq_a", "attn.q_norm", "attn.wq_b", "attn.rope", "attn.queries", "attn"),
    "kv_window": ("attn.wkv", "attn.kv_norm", "attn.rope", "attn.latent", "attn"),
    "compressed_kv": ("attn.compressor", "attn"),
    "index_keys": ("attn.indexer.compressor", "attn.indexer", "attn"),
    "index_scores": ("attn.indexer.wq_b", "attn.indexer.weights_proj", "attn.indexer", "attn"),
    "selection": ("attn.indexer", "attn"),
    "attn_out": ("attn.wo_a", "attn.wo_b", "attn.attn_sink", "attn.rope", "attn"),
    "ffn_out": ("ffn.gate", "ffn.experts", "ffn.shared_experts", "hc_attn", "hc_ffn", "hc", "ffn_norm", "ffn"),
    "streams": ("hc_ffn", "hc_attn", "hc"),
    "logits": ("hc_head", "norm", "head"),
}
INSIDE = {  # points that a swap does not change, because it replaces only the module's output
    "attn": ("q_after_rope", "kv_window", "compressed_kv", "index_keys", "index_scores", "selection"),
    "attn.indexer": ("index_keys",),
}
WORDS = {
    "attn.rope": "every rotation of the layer",
    "attn.queries": "from attn_in to the rotated queries",
    "attn.latent": "from attn_in to the rotated window rows",
    "hc": "both hyper-connections of the layer",
    "attn": "the whole attention",
}  # of modules without a tensor
Change = Callable[[Layer], Layer]


def official(i: int, module: str) -> str:
    """'layers.3.attn.wkv'; modules outside the layers by their own name."""
    return module if module in ("embed", *MODULES["logits"]) else f"layers.{i}.{module}"


def explanations(
    layer: Layer, point: str, before: torch.Tensor | None, ids: torch.Tensor, given: dict
) -> dict[str, torch.Tensor]:
    """Words → the value of the point by that mistake, on the subject's own values before it (see `local.expected`)."""
    found = {}
    for words, change in _changes(layer, point).items():
        value = expected(change(layer), before, ids, given).get(point)
        if value is not None:
            found[words] = value
    return found | _special(layer, point, before, ids, given)


def _changes(layer: Layer, point: str) -> dict[str, Change]:
    """Mistakes that equal another config or other tensor values."""
    other_base = lambda l: _Turned(l, steps.frequencies(l.config, l.ratio == 0))
    rotation = {
        "rotated by the base of the other layer kind": other_base,
        "not rotated": lambda l: _Turned(l, 0 * l.frequencies),
        "rotated backwards": lambda l: _Turned(l, -l.frequencies),
    }
    if layer.ratio and layer.config.compress.kind != "default":
        plain = Rotation(layer.config.compress.theta).frequencies(layer.config.qk_rope_head_dim)
        rotation["rotated without its scaling (YaRN)"] = lambda l: _Turned(l, plain)
    ones = lambda name: lambda l: _with(l, name, torch.ones_like)
    zeros = lambda name: lambda l: _with(l, name, torch.zeros_like)
    match point:
        case "attn_in":
            return {"attn_norm has no weight": ones("attn_norm.weight")}
        case "q_after_rope":
            return rotation | {"q_norm has no weight": ones("attn.q_norm.weight")}
        case "kv_window":
            return rotation | {"kv_norm has no weight": ones("attn.kv_norm.weight")}
        case "compressed_kv" | "index_keys":
            name = "attn.compressor" if point == "compressed_kv" else "attn.indexer.compressor"
            return rotation | {
                "the position bias is missing": zeros(f"{name}.ape"),
                "its norm has no weight": ones(f"{name}.norm.weight"),
            }
        case "attn_out":
            return {
                "the sinks are ignored": lambda l: _with(l, "attn.attn_sink", lambda t: t - math.inf),
                "the sinks are counted twice": lambda l: _with(l, "attn.attn_sink", lambda t: t + math.log(2)),
                "the sinks are zero": zeros("attn.attn_sink"),
            }
        case "ffn_out":
            none = {} if layer.hashed else {"the gate's bias is ignored": zeros("ffn.gate.bias")}
            limit = lambda l: replace(l, config=replace(l.config, swiglu_limit=math.inf))
            scale = lambda l: replace(l, config=replace(l.config, routed_scaling_factor=1.0))
            return none | {
                "every expert's clamp is missing": limit,
                "the routed experts are not scaled": scale,
                "the shared expert is missing": zeros("ffn.shared_experts.w2.weight"),
            }
    return {}


class _Turned(Layer):
    """A layer with other frequencies."""

    def __init__(self, layer: Layer, freqs: torch.Tensor):
        super().__init__(
            layer.config, layer.weights, layer.prefix, layer.ratio, layer.hashed, layer.simulate, layer.cache
        )
        self._freqs = freqs

    @property
    def frequencies(self) -> torch.Tensor:
        return self._freqs


def _with(layer: Layer, name: str, change: Callable) -> Layer:
    """The layer with one tensor changed."""
    real, changed = layer.weights, layer.prefix + name
    value = lambda key: change(real(key)) if key == changed else real(key)
    return replace(layer, weights=Weights(real.config, value, real.quantised))


def _special(layer: Layer, point: str, before, ids, given: dict) -> dict[str, torch.Tensor]:
    """Mistakes that no other tensor value gives."""
    match point:
        case "kv_window":
            kv = layer.linear("attn.wkv", given["attn_in"].double())
            return {
                "kv_norm is skipped": steps.main_kv(
                    layer, steps.rotate(kv, torch.arange(kv.shape[1]), layer.frequencies)
                )
            }
        case "index_scores" if "index_keys" in given:
            return _scores(layer, given)
        case "attn_out":
            return _outputs(layer, expected(layer, None, ids, given) | given)
        case "ffn_out" | "streams" if before is not None:
            return _connections(layer, point, before.double(), ids, given)
    return {}


def _scores(layer: Layer, given: dict) -> dict[str, torch.Tensor]:
    x, keys = given["attn_in"].double(), given["index_keys"].double()
    c, positions = layer.config, torch.arange(x.shape[1])
    q, w = steps.index_queries(layer, steps.queries(layer, x, positions)[0], positions), steps.index_weights(layer, x)
    hidden = ~steps.visible(positions, keys.shape[1], layer.ratio)
    raw = torch.einsum("bth,bthd,bnd->btn", w, q, keys).masked_fill(hidden, -math.inf)
    hot = steps.index_scores(q, w * (c.index_head_dim * c.index_n_heads) ** 0.5, keys, positions, layer.ratio)
    return {"ReLU is missing": raw, "the scale of the head weights is missing": hot}


def _outputs(layer: Layer, points: dict) -> dict[str, torch.Tensor]:
    """attn_out over other keys than the specified ones."""
    points = {name: v.double() if v.is_floating_point() else v for name, v in points.items()}
    q = points["q_after_rope"]
    none = torch.full((*q.shape[:2], 1), -1)
    found = {"nothing is attended to": torch.zeros_like(points["attn_out"])}
    if layer.ratio:
        found["only the window is attended to"] = attend(layer, points, none)
    else:
        found["every token is attended to"] = attend(layer, points, none, window=q.shape[1])
    picks = entries_only(points["selection"], points["index_keys"].shape[1]) if layer.ratio == kinds.CSA else None
    if layer.ratio == kinds.CSA:
        found["every entry is attended to, not the selected ones"] = attend(layer, points, None)
    found["the output is not rotated back"] = attend(_Turned(layer, 0 * layer.frequencies), points, picks)
    return found


def _connections(
    layer: Layer, point: str, before: torch.Tensor, ids: torch.Tensor, given: dict
) -> dict[str, torch.Tensor]:
    """Streams mixed by the transposed matrix, in the first or the second connection; the routed experts without a
    clamp."""
    _, post, C = hyper_pre(layer, before, "hc_attn")
    out = given.get("attn_out")
    if out is None:
        return {}
    wrong = hyper_post(out.double(), before, post, C.transpose(-1, -2))
    right = hyper_post(out.double(), before, post, C)
    if point == "ffn_out":
        weight, shared = layer.w("ffn_norm.weight"), "ffn.shared_experts"
        x, other = (rms(hyper_pre(layer, s, "hc_ffn")[0], weight, layer.config.rms_norm_eps) for s in (right, wrong))
        free = replace(layer, config=replace(layer.config, swiglu_limit=math.inf))
        routed = moe(free, x, ids) - expert(free, shared, x, 1.0)
        return {
            "comb of hc_attn is transposed": moe(layer, other, ids),
            "the routed experts' clamp is missing": routed + expert(layer, shared, x, 1.0),
        }
    if "ffn_out" not in given:
        return {}
    _, post, C = hyper_pre(layer, right, "hc_ffn")
    return {"comb of hc_ffn is transposed": hyper_post(given["ffn_out"].double(), right, post, C.transpose(-1, -2))}
