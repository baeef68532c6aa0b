"""Model configuration, in the official field names (config.json of DeepSeek-V4).

`dsv4.loaders.config_files` turns each published form (official, `inference/config.json`,
transformers) into the official dictionary; this file turns that into checked values.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import cast

from dsv4.errors import ConfigError


class LayerKind(enum.Enum):
    """What a layer attends to beside its sliding window."""

    WINDOW = "window"  # nothing
    CSA = "csa"  # top-k of entries of `ratio` tokens, overlapping (paper §2.3.1)
    HCA = "hca"  # every visible entry of `ratio` tokens (paper §2.3.2)


KIND_OF_RATIO = {0: LayerKind.WINDOW, 4: LayerKind.CSA, 128: LayerKind.HCA}
MAX_NUMBER = 1e12  # nothing in a config is larger; beyond it a number is a mistake
MAX_MTP_BLOCKS = 64


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency interpolation (no mscale in V4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Checked configuration. Field names are those of the official config.json.

    `compress_ratios` has one entry per backbone layer; those of the MTP blocks are in
    `mtp_compress_ratios`. `num_mtp_layers` is how many MTP blocks the config announces;
    a release with DSpark draft stages announces 1 and ships 3 of another kind.
    """

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
    n_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    compress_ratios: tuple[int, ...]
    mtp_compress_ratios: tuple[int, ...]
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    weight_block_size: tuple[int, int]
    num_mtp_layers: int
    never_read: tuple[str, ...] = field(default=(), compare=False)

    def kind(self, layer: int) -> LayerKind:
        """Kind of backbone layer `layer`."""
        return KIND_OF_RATIO[self.compress_ratios[layer]]

    def mtp_kind(self, block: int) -> LayerKind:
        return KIND_OF_RATIO[self.mtp_compress_ratios[block]]

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @classmethod
    def from_official(cls, raw: Mapping) -> "ModelConfig":
        """Build from the official dictionary. Raises ConfigError naming the key."""
        reader = Reader(raw)
        reader.expect("model_type", "deepseek_v4")
        values = {
            f.name: reader.number(f.name, f.type)
            for f in fields(cls)
            if f.type in (int, float) and f.name != "num_mtp_layers"
        }
        layers = values["num_hidden_layers"]
        ratios = reader.get("compress_ratios")
        if not isinstance(ratios, (list, tuple)) or len(ratios) < layers:
            raise ConfigError(
                f"compress_ratios has {len(ratios) if isinstance(ratios, (list, tuple)) else repr(ratios)[:60]} "
                f"entries for num_hidden_layers {layers}; expected one per layer plus one per MTP block"
            )
        for layer, ratio in enumerate(ratios):
            if type(ratio) is not int or ratio not in KIND_OF_RATIO:
                raise ConfigError(
                    f"layer {layer} has compress_ratio {ratio!r:.60}; expected 0 (window), 4 (CSA) or 128 (HCA)"
                )
        mtp = number("num_nextn_predict_layers", reader.optional("num_nextn_predict_layers", 0) or 0, int)
        if mtp not in range(MAX_MTP_BLOCKS + 1):
            raise ConfigError(f"num_nextn_predict_layers is {mtp}; expected 0 … {MAX_MTP_BLOCKS}")
        mtp_ratios = tuple(ratios[layers : layers + mtp])
        if len(mtp_ratios) < mtp:  # transformers-saved configs carry no entry for MTP blocks, which are window layers
            mtp_ratios += (0,) * (mtp - len(mtp_ratios))
        quant = mapping("quantization_config", reader.optional("quantization_config", None))
        block = quant.get("weight_block_size", (128, 128))
        if not isinstance(block, (list, tuple)) or len(block) != 2:
            raise ConfigError(f"weight_block_size is {block!r:.60}; expected two numbers")
        eos = reader.optional("eos_token_id", None)
        eos = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        bos = reader.optional("bos_token_id", None)
        config = cls(
            **values,
            compress_ratios=tuple(ratios[:layers]),
            mtp_compress_ratios=mtp_ratios,
            num_mtp_layers=mtp,
            yarn=_yarn(mapping("rope_scaling", reader.optional("rope_scaling", None))),
            bos_token_id=None if bos is None else number("bos_token_id", bos, int),
            eos_token_id=tuple(number("eos_token_id", e, int) for e in eos),
            weight_block_size=tuple(number("weight_block_size", n, int) for n in block),
            never_read=(),
        )
        reader.optional("expert_dtype", None)  # held against the tensors when a checkpoint is loaded
        reader.expect("scoring_func", "sqrtsoftplus")
        reader.expect("topk_method", "noaux_tc")
        reader.expect("norm_topk_prob", True)
        reader.expect("hidden_act", "silu")
        reader.expect("num_key_value_heads", 1)
        reader.expect("tie_word_embeddings", False)
        reader.expect("attention_bias", False)
        object.__setattr__(config, "never_read", tuple(sorted(set(raw) - reader.read)))
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError where fields contradict each other."""

        def need(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "q_lora_rank",
            "o_groups",
            "o_lora_rank",
            "sliding_window",
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "hc_mult",
            "hc_sinkhorn_iters",
            "max_position_embeddings",
            "rope_theta",
            "compress_rope_theta",
            "rms_norm_eps",
            "swiglu_limit",
        ):
            need(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; expected a positive number")
        need(
            self.num_attention_heads % self.o_groups == 0,
            f"num_attention_heads {self.num_attention_heads} is not divisible by o_groups {self.o_groups}",
        )
        need(
            self.qk_rope_head_dim % 2 == 0 and self.qk_rope_head_dim <= self.head_dim,
            f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and at most head_dim {self.head_dim}",
        )
        need(
            self.num_experts_per_tok <= self.n_routed_experts,
            f"num_experts_per_tok {self.num_experts_per_tok} exceeds n_routed_experts {self.n_routed_experts}",
        )
        need(self.n_shared_experts == 1, f"n_shared_experts is {self.n_shared_experts}; this model has exactly 1")
        need(
            0 <= self.num_hash_layers <= self.num_hidden_layers,
            f"num_hash_layers {self.num_hash_layers} exceeds num_hidden_layers {self.num_hidden_layers}",
        )
        need(
            all(ratio == 0 for ratio in self.mtp_compress_ratios),
            f"an MTP block has compress_ratio {self.mtp_compress_ratios}; MTP blocks are window layers (ratio 0)",
        )
        if LayerKind.CSA in {self.kind(i) for i in range(self.num_hidden_layers)}:
            need(self.index_topk > 0 and self.index_n_heads > 0, "CSA layers need index_topk and index_n_heads above 0")
            need(
                self.qk_rope_head_dim <= self.index_head_dim,
                f"qk_rope_head_dim {self.qk_rope_head_dim} exceeds index_head_dim {self.index_head_dim}",
            )
            need(
                self.index_head_dim & (self.index_head_dim - 1) == 0,
                f"index_head_dim {self.index_head_dim} is not a power of two, which the Hadamard transform needs",
            )
        need(min(self.weight_block_size) > 0, f"weight_block_size {self.weight_block_size} is not two positive numbers")


def number(key: str, value, kind: type):
    """`value` of config key `key` as an int or float. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_NUMBER:
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected a number")
    if kind is int and value != int(value):
        raise ConfigError(f"config.json has {key} = {value!r}; expected a whole number")
    return kind(value)


def mapping(key: str, value) -> Mapping:
    """`value` of config key `key` as an object, empty for null. Raises ConfigError."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected an object")
    return value or {}


def _yarn(raw: Mapping) -> Yarn | None:
    kind = raw.get("type", raw.get("rope_type"))
    if kind in (None, "default"):
        return None
    if kind != "yarn":
        raise ConfigError(f"rope_scaling type is {kind!r}; expected 'yarn'")
    values = {}
    for part in fields(Yarn):
        if part.name not in raw:
            raise ConfigError(f"rope_scaling has no {part.name!r}; expected {', '.join(f.name for f in fields(Yarn))}")
        values[part.name] = number(f"rope_scaling.{part.name}", raw[part.name], cast(type, part.type))
        if not values[part.name] > 0:
            raise ConfigError(f"rope_scaling has {part.name} = {values[part.name]}; expected a positive number")
    return Yarn(**values)


class Reader:
    """Reads keys of a raw config and remembers which were read."""

    def __init__(self, raw: Mapping):
        self.raw = raw
        self.read: set[str] = set()

    def optional(self, key: str, default):
        self.read.add(key)
        return self.raw.get(key, default)

    def get(self, key: str):
        self.read.add(key)
        if key not in self.raw:
            raise ConfigError(f"config.json has no {key!r}, which this model needs")
        return self.raw[key]

    def number(self, key: str, kind: type):
        return number(key, self.get(key), kind)

    def expect(self, key: str, wanted) -> None:
        found = self.optional(key, wanted)
        if found != wanted:
            raise ConfigError(f"config.json has {key} = {found!r:.60}; this model is defined for {wanted!r} only")
