"""config.json as the oracle reads it: an own table from each published form to the official names (§1).

Nothing here is taken from `dsv4.model.config` or from the loader's `config_files`, which are judged by it. A form that
this table does not know is an error, never a guess. The three forms: official (`compress_ratios`), inference
(`inference/config.json`: `dim`, `n_layers`), transformers (`layer_types`, `rope_parameters`).
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dsv4.errors import InputError

BY_INFERENCE = {  # official key → name in inference/config.json, where that is another
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "rms_norm_eps": "norm_eps",
    "num_hash_layers": "n_hash_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
}
RELEASED = {  # §1: what every release states, for forms that leave it out
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
}
RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True)
class Rotation:
    """One RoPE variant. kind: default, linear, llama3 or yarn; original: tokens of the context before scaling."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low: float = 1.0
    high: float = 4.0
    truncate: bool = True

    def frequencies(self, dims: int) -> torch.Tensor:
        """float64 [dims / 2] of `dims` rotated dimensions: θ^(−2i/dims), scaled as `kind` says."""
        f = self.theta ** (-2 * torch.arange(dims // 2, dtype=torch.float64) / dims)
        match self.kind:
            case "default":
                return f
            case "linear":
                return f / self.factor
            case "llama3":  # few turns within the original context: divided; many: kept; a line in between
                turns = self.original * f / (2 * math.pi)
                kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
                return kept * f + (1 - kept) * f / self.factor
        pair = lambda n: dims * math.log(self.original / (2 * math.pi * n)) / (2 * math.log(self.theta))
        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        ramp = ((torch.arange(dims // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)
        return f / self.factor * ramp + f * (1 - ramp)


@dataclass(frozen=True)
class OracleConfig:
    """What decides a computation, by official names. hashed: of each layer, whether it routes by token id; main,
    compress: the rotation of window layers and of layers that compress; tied: the head is the embedding."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    compress_ratios: tuple[int, ...]
    mtp_compress_ratios: tuple[int, ...]
    hashed: tuple[bool, ...]
    main: Rotation
    compress: Rotation
    tied: bool = False

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def output_weight(self) -> str:
        """Name of the matrix that makes logits."""
        return "embed.weight" if self.tied else "head.weight"

    @classmethod
    def of(cls, raw: dict) -> "OracleConfig":
        """From config.json in any form. Raises InputError for a form or a rotation that is not in the table."""
        return cls(**_values(raw))

    @classmethod
    def read(cls, root: str | Path) -> "OracleConfig":
        """Of a checkpoint directory."""
        return cls.of(json.loads((Path(root) / "config.json").read_text()))


NUMBERS = tuple(f.name for f in fields(OracleConfig) if f.type in (int, float))


def _values(raw: dict) -> dict:
    """Field of OracleConfig → value."""
    inference, theirs = "n_layers" in raw, "layer_types" in raw or "rope_parameters" in raw
    found = {}
    for key in NUMBERS:
        name = BY_INFERENCE.get(key, key) if inference else key
        found[key] = raw.get(name, raw.get(key, RELEASED.get(key)))
    if theirs and raw.get("partial_rotary_factor") is not None:
        found["qk_rope_head_dim"] = round(raw["head_dim"] * raw["partial_rotary_factor"])
    missing = sorted(key for key, value in found.items() if value is None and not key.startswith("index_"))
    if missing:
        raise InputError(f"config.json does not state {', '.join(missing)}; the oracle's table has no value for it")
    found |= _layers(raw, found["num_hidden_layers"], inference)
    main, compress = _rotations(raw, inference)
    return found | {"main": main, "compress": compress, "tied": bool(raw.get("tie_word_embeddings", False))}


def _layers(raw: dict, layers: int, inference: bool) -> dict:
    """Ratios and routing, layer by layer."""
    if "layer_types" in raw:
        ratios = [RATIOS.get(kind) for kind in raw["layer_types"]]
    else:
        ratios = list(raw.get("compress_ratios") or ())
    if len(ratios) < layers or None in ratios:
        raise InputError(
            f"config.json gives {len(ratios)} layers a kind of {sorted(RATIOS)} for {layers} layers; expected one each"
        )
    mtp = raw.get("n_mtp_layers" if inference else "num_nextn_predict_layers")
    mtp = RELEASED["num_nextn_predict_layers"] if mtp is None and inference else mtp or 0
    beyond = [*ratios[layers : layers + mtp], *[0] * mtp][:mtp]
    if "mlp_layer_types" in raw:
        hashed = [kind == "hash_moe" for kind in raw["mlp_layer_types"]]
    else:
        count = raw.get("n_hash_layers" if inference else "num_hash_layers", 0) or 0
        hashed = [i < count for i in range(layers)]
    return {
        "compress_ratios": tuple(ratios[:layers]),
        "mtp_compress_ratios": tuple(beyond),
        "hashed": tuple(hashed[:layers]),
    }


def _rotations(raw: dict, inference: bool) -> tuple[Rotation, Rotation]:
    """(of window layers, of layers that compress). §3: the first is never scaled unless it states that itself."""
    theta = lambda key: float(raw.get(key) or RELEASED[key])
    nested = raw.get("rope_parameters") or {}
    if "main" in nested and "compress" in nested:
        return tuple(_rotation(nested[name], float(nested[name]["rope_theta"]), raw) for name in ("main", "compress"))
    scaling = raw.get("rope_scaling") or nested or {}
    if inference:
        scaling = {
            "type": "yarn",
            "factor": raw.get("rope_factor", 16),
            "original_max_position_embeddings": raw.get("original_seq_len", 65536),
            "beta_fast": raw.get("beta_fast", 32),
            "beta_slow": raw.get("beta_slow", 1),
        }
    return Rotation(theta("rope_theta")), _rotation(scaling, theta("compress_rope_theta"), raw)


def _rotation(stated: dict, theta: float, raw: dict) -> Rotation:
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind == "default":
        return Rotation(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise InputError(f"config.json rotates by {kind!r:.60}; the oracle knows default, linear, llama3 and yarn")
    original = stated.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    own = {} if kind == "linear" else {"original": float(original)}
    if kind == "yarn":
        betas = {key: stated.get(key) for key in ("beta_fast", "beta_slow")}
        own |= {key: float(value) for key, value in betas.items() if value is not None}
        own |= {"truncate": bool(stated.get("truncate", True))}
    if kind == "llama3":
        own |= {"low": float(stated["low_freq_factor"]), "high": float(stated["high_freq_factor"])}
    return Rotation(theta, kind, float(stated["factor"]), **own)
