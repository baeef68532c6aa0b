"""Model configuration, in the official field names (config.json of DeepSeek-V4).

`dsv4.loaders.config_files` turns each published form (official, `inference/config.json`,
transformers) into the official dictionary; this file turns that into checked values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar, cast

from dsv4.errors import ConfigError
from dsv4.model.config_keys import FIXED, HARMLESS, IN_QUANTIZATION, NO_ORACLE
from dsv4.model.spec import LayerKind, LayerSpec

# ratio → kind, windows that an entry pools
KINDS = {0: (LayerKind.WINDOW, 0), 4: (LayerKind.CSA, 2), 128: (LayerKind.HCA, 1)}
MAX_NUMBER = 1e12  # nothing in a config is larger; a larger number is a mistake
MAX_MTP_BLOCKS = 64


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency interpolation (no mscale in V4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's interpolation by wavelength."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Checked configuration. Field names are those of the official config.json.

    `compress_ratios` has one entry per backbone layer; those of the MTP blocks are in
    `mtp_compress_ratios`. `num_mtp_layers` is how many MTP blocks the config announces;
    a release with DSpark draft stages announces 1 and ships 3 of another kind. `yarn` or `stretch`
    (another form of rope_scaling) belongs to the layers that compress. `hash_layers` names the
    hash-routed layers where they are not the first `num_hash_layers`.
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
    stretch: Linear | Llama3 | None = None
    hash_layers: tuple[int, ...] | None = None
    tie_word_embeddings: bool = False
    never_read: tuple[str, ...] = field(default=(), compare=False)
    family: ClassVar[str] = "deepseek_v4"

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Of the backbone."""
        return tuple(
            _spec(f"layer {i}", f"layers.{i}", ratio, self.hashed(i)) for i, ratio in enumerate(self.compress_ratios)
        )

    @cached_property
    def mtp_layers(self) -> tuple[LayerSpec, ...]:
        """Of the MTP blocks."""
        return tuple(_spec(f"mtp {i}", f"mtp.{i}", ratio, False) for i, ratio in enumerate(self.mtp_compress_ratios))

    def hashed(self, layer: int) -> bool:
        """Whether backbone layer `layer` chooses its experts by token id."""
        return layer < self.num_hash_layers if self.hash_layers is None else layer in self.hash_layers

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
            if type(ratio) is not int or ratio not in KINDS:
                raise ConfigError(
                    f"layer {layer} has compress_ratio {ratio!r:.60}; expected 0 (window), 4 (CSA) or 128 (HCA)"
                )
        mtp = number("num_nextn_predict_layers", reader.optional("num_nextn_predict_layers", 0) or 0, int)
        if mtp not in range(MAX_MTP_BLOCKS + 1):
            raise ConfigError(f"num_nextn_predict_layers is {mtp}; expected 0 … {MAX_MTP_BLOCKS}")
        mtp_ratios = tuple(ratios[layers : layers + mtp])
        if len(mtp_ratios) < mtp:  # transformers-saved configs carry no entry for MTP blocks, which are window layers
            mtp_ratios += (0,) * (mtp - len(mtp_ratios))
        eos = reader.optional("eos_token_id", None)
        eos = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        bos = reader.optional("bos_token_id", None)
        scaling = _rope_scaling(reader)
        config = cls(
            **values,
            compress_ratios=tuple(ratios[:layers]),
            mtp_compress_ratios=mtp_ratios,
            num_mtp_layers=mtp,
            yarn=scaling if isinstance(scaling, Yarn) else None,
            stretch=None if isinstance(scaling, Yarn) else scaling,
            hash_layers=_hash_layers(reader.optional("mlp_layer_types", None), layers),
            tie_word_embeddings=_flag(reader, "tie_word_embeddings"),
            bos_token_id=None if bos is None else number("bos_token_id", bos, int),
            eos_token_id=tuple(number("eos_token_id", e, int) for e in eos),
            weight_block_size=_block_size(mapping("quantization_config", reader.optional("quantization_config", None))),
            never_read=(),
        )
        reader.optional("expert_dtype", None)  # checked against the tensors when a checkpoint is loaded
        reader.expect("norm_topk_prob", True, NO_ORACLE)
        for key, wanted in FIXED.items():
            reader.expect(key, wanted)
        object.__setattr__(config, "never_read", reader.harmless(HARMLESS))
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError if fields contradict each other."""

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
        need(self.n_shared_experts == 1, f"n_shared_experts is {self.n_shared_experts}; expected 1 ({NO_ORACLE})")
        need(
            0 <= self.num_hash_layers <= self.num_hidden_layers,
            f"num_hash_layers {self.num_hash_layers} exceeds num_hidden_layers {self.num_hidden_layers}",
        )
        need(
            all(ratio == 0 for ratio in self.mtp_compress_ratios),
            f"an MTP block has compress_ratio {self.mtp_compress_ratios}; MTP blocks are window layers (ratio 0)",
        )
        if any(layer.selects for layer in self.layers):
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


def _spec(label: str, prefix: str, ratio: int, hashed: bool) -> LayerSpec:
    """Layers that compress rotate by a base of their own; each reads its own entries by its own selection."""
    kind, overlap = KINDS[ratio]
    rope, own = ("compress", label) if ratio else ("main", None)
    return LayerSpec(label, prefix, kind, ratio, overlap, rope, hashed, own, label if kind is LayerKind.CSA else None)


def number(key: str, value, kind: type):
    """`value` of config key `key` as an int or float. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected a number")
    if not abs(value) < MAX_NUMBER:
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected a number below {MAX_NUMBER:.0e}")
    if kind is int and value != int(value):
        raise ConfigError(f"config.json has {key} = {value!r}; expected a whole number")
    return kind(value)


def mapping(key: str, value) -> Mapping:
    """`value` of config key `key` as an object, empty for null. Raises ConfigError."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected an object")
    return value or {}


def _flag(reader: "Reader", key: str) -> bool:
    value = reader.optional(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected true or false")
    return value


def _block_size(quantization: Mapping) -> tuple[int, int]:
    """Rows and columns of an FP8 block. Raises ConfigError, also for an unknown key."""
    strange = sorted(map(str, set(quantization) - set(IN_QUANTIZATION) - {"weight_block_size", "expert_dtype"}))
    if strange:
        raise ConfigError(
            f"quantization_config has {strange[0]!r:.60}, which nothing here reads; it may change what is computed: "
            "remove it if it does not"
        )
    block = quantization.get("weight_block_size", (128, 128))
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise ConfigError(f"weight_block_size is {block!r:.60}; expected two numbers")
    rows, columns = (number("weight_block_size", n, int) for n in block)
    return rows, columns


def _hash_layers(kinds, layers: int) -> tuple[int, ...] | None:
    """Hash-routed layers of `mlp_layer_types`; only configs where they are not the first layers have this key here."""
    if kinds is None:
        return None
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers or not {*map(str, kinds)} <= {"hash_moe", "moe"}:
        raise ConfigError(f"mlp_layer_types is {kinds!r:.60}; expected {layers} of 'hash_moe' and 'moe'")
    return tuple(i for i, kind in enumerate(kinds) if kind == "hash_moe")


SCALINGS = {"yarn": Yarn, "linear": Linear, "llama3": Llama3}
YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}  # of transformers and of the paper


def _rope_scaling(reader: "Reader") -> Yarn | Linear | Llama3 | None:
    raw = mapping("rope_scaling", reader.optional("rope_scaling", None))
    # transformers writes a base of its own into this object, and overwrites it with compress_rope_theta
    bases = [reader.optional(key, None) for key in ("rope_theta", "compress_rope_theta")]
    kind = raw.get("type", raw.get("rope_type"))
    if "rope_type" in raw and raw["rope_type"] != kind:
        raise ConfigError(f"rope_scaling has type {kind!r:.30} and rope_type {raw['rope_type']!r:.30}; remove one")
    if kind is not None and (not isinstance(kind, str) or kind not in ("default", *SCALINGS)):
        raise ConfigError(f"rope_scaling type is {kind!r:.60}; expected 'default', 'yarn', 'linear' or 'llama3'")
    scaling = None if kind in (None, "default") else SCALINGS[kind]
    wanted = {f.name: cast(type, f.type) for f in fields(scaling)} if scaling else {}
    for key, value in raw.items():
        if key in ("type", "rope_type", *wanted):
            continue
        if key == "attention_factor" and value in (None, 1) or key == "truncate" and value is True:
            continue
        if key == "rope_theta" and value in bases:
            continue
        if key in ("attention_factor", "mscale", "mscale_all_dim", "truncate"):
            raise ConfigError(
                f"rope_scaling has {key} = {value!r:.60}; V4 scales neither cos/sin nor the softmax, and its ramp "
                "begins and ends at whole pairs: remove it"
            )
        raise ConfigError(f"rope_scaling of type {kind!r} has {key!r:.60}, which it does not use; remove it")
    return scaling(**_scaling_numbers(str(kind), raw, wanted)) if scaling else None


def _scaling_numbers(kind: str, raw: Mapping, wanted: dict[str, type]) -> dict:
    values = {}
    for name, number_type in wanted.items():
        value = raw.get(name)
        value = YARN_DEFAULTS.get(name) if value is None and kind == "yarn" else value
        if value is None:
            raise ConfigError(f"rope_scaling of type {kind!r} has no {name!r}; expected {', '.join(wanted)}")
        values[name] = number(f"rope_scaling.{name}", value, number_type)
        if not values[name] > 0:
            raise ConfigError(f"rope_scaling has {name} = {values[name]}; expected a positive number")
    if kind == "llama3" and not values["high_freq_factor"] > values["low_freq_factor"]:
        raise ConfigError(
            f"rope_scaling has high_freq_factor {values['high_freq_factor']} and low_freq_factor "
            f"{values['low_freq_factor']}; expected the first to be larger"
        )
    return values


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

    def expect(self, key: str, wanted, why: str = "this model is defined for no other value") -> None:
        found = self.optional(key, wanted)
        if found != wanted:
            raise ConfigError(f"config.json has {key} = {found!r:.60}; expected {wanted!r} ({why})")

    def harmless(self, known: Mapping) -> tuple[str, ...]:
        """Keys that were not read, all of which are `known` to change nothing. Raises ConfigError naming another."""
        left = sorted(set(self.raw) - self.read)
        strange = [key for key in left if key not in known]
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise ConfigError(
                f"config.json has {strange[0]!r:.60}{more}, which nothing here reads; it may change what the model "
                "computes: remove it if it does not"
            )
        return tuple(left)
