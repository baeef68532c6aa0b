"""config.json of GQA models, read strictly; what each model_type fixes is in `VARIANTS`.

Both spellings of transformers are read: the older (`rope_theta`, `rope_scaling`) and that of transformers 5
(`rope_parameters`). A key that would change the computation and is not understood here is refused; keys that change
nothing are listed as never read.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dsv4.errors import ConfigError
from dsv4.model.config import Reader, number
from dsv4.model.config_keys import HARMLESS
from dsv4.model.gqa.rope import Rope
from dsv4.model.gqa.rope_config import read_rope
from dsv4.model.spec import LayerSpec

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# Keys of relatives of these models, or of other engines, that change the computation: only the value that changes
# nothing is accepted.
FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "dual_chunk_attention_config": None,
    "use_mrope": False,
    "use_qk_norm": False,
    "qk_norm": False,
    "clip_qkv": None,
    "attention_multiplier": None,
    "residual_multiplier": None,
    "embedding_multiplier": None,
    "logits_scaling": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": None,
    "num_local_experts": None,
    "attention_sink": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "rope_interleaved": False,
    "qk_layer_norms": False,
    "quantization": None,
    "sliding_window_pattern": None,
}
SLIDING, FULL = "sliding_attention", "full_attention"


class Windows(enum.Enum):
    """Which layers of a model have a sliding window."""

    NONE = "none"
    ALL = "all, unless sliding_window is null"
    SOME = "by layer_types, else from max_window_layers on; only if use_sliding_window"


@dataclass(frozen=True)
class Variant:
    """What a model_type fixes. attention_bias, mlp_bias: the only value that config.json may state, None for either.
    output_bias: whether attention_bias is also of the output projection. required: keys beside `SIZES` that
    config.json must state, though other variants have a default for them. head_norms: whether each head of q and of k
    has an RMS norm."""

    windows: Windows
    attention_bias: bool | None
    output_bias: bool
    mlp_bias: bool | None
    required: tuple[str, ...] = ("num_key_value_heads",)
    head_norms: bool = False


VARIANTS = {  # by model_type
    "qwen2": Variant(Windows.SOME, attention_bias=True, output_bias=False, mlp_bias=False),
    # Llama's first configs have no num_key_value_heads: every head has its own keys
    "llama": Variant(Windows.NONE, attention_bias=None, output_bias=True, mlp_bias=None, required=()),
    "mistral": Variant(Windows.ALL, attention_bias=False, output_bias=False, mlp_bias=False),
    "qwen3": Variant(  # whose heads are no part of hidden_size
        Windows.SOME,
        attention_bias=None,
        output_bias=True,
        mlp_bias=False,
        required=("num_key_value_heads", "head_dim"),
        head_norms=True,
    ),
}


class AttentionKind(enum.Enum):
    """What a layer attends to."""

    FULL = "full"  # every token before
    SLIDING = "sliding"  # the last `window` of them


@dataclass(frozen=True)
class GQAConfig:
    """Checked configuration; names are those of config.json where it has one.

    windows: for each layer, how many last tokens a query sees (itself included), or None for all.
    max_position_embeddings: with YaRN at least its original context × factor. qkv_bias, output_bias, mlp_bias: which
    maps have one. head_norms: whether q and k of each head are normalised, before they are rotated.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    never_read: tuple[str, ...] = field(default=(), compare=False)
    family: ClassVar[str] = "gqa"

    @property
    def softmax_scale(self) -> float:
        """Scale of q·k: D^(−1/2), and the rotation's factor of both q and k, so that the cache need not hold it."""
        return self.head_dim**-0.5 * self.rope.attention**2

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is."""
        kind = lambda window: AttentionKind.FULL if window is None else AttentionKind.SLIDING
        return tuple(LayerSpec(f"layer {i}", f"layers.{i}", kind(window)) for i, window in enumerate(self.windows))

    @classmethod
    def from_dict(cls, raw: Mapping) -> "GQAConfig":
        """Build from config.json. Raises ConfigError naming the key."""
        reader = Reader(raw)
        kind = reader.get("model_type")
        if kind not in VARIANTS:
            raise ConfigError(f"config.json has model_type {kind!r:.60}; expected one of {', '.join(VARIANTS)}")
        for key, wanted in FIXED.items():
            reader.expect(key, wanted)
        values = {name: reader.number(name, int) for name in SIZES}
        heads, kv = values["num_attention_heads"], reader.optional("num_key_value_heads", None)
        head_dim = reader.optional("head_dim", None)
        for key in VARIANTS[kind].required:
            reader.get(key)
        if head_dim is None and (heads < 1 or values["hidden_size"] % heads):
            raise ConfigError(
                f"config.json has no head_dim, and hidden_size {values['hidden_size']} is not a multiple of "
                f"num_attention_heads {heads}; state head_dim"
            )
        rope = read_rope(raw, reader, values["max_position_embeddings"])
        if rope.kind == "yarn":
            values["max_position_embeddings"] = max(values["max_position_embeddings"], int(rope.original * rope.factor))
        eos, bos = reader.optional("eos_token_id", None), reader.optional("bos_token_id", None)
        eos = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        config = cls(
            model_type=kind,
            **values,
            num_key_value_heads=heads if kv is None else number("num_key_value_heads", kv, int),
            head_dim=values["hidden_size"] // heads if head_dim is None else number("head_dim", head_dim, int),
            rms_norm_eps=reader.number("rms_norm_eps", float),
            rope=rope,
            windows=_windows(kind, reader, values["num_hidden_layers"]),
            **_biases(VARIANTS[kind], reader),
            head_norms=VARIANTS[kind].head_norms,
            tie_word_embeddings=_flag(reader, "tie_word_embeddings", False),
            bos_token_id=None if bos is None else number("bos_token_id", bos, int),
            eos_token_id=tuple(number("eos_token_id", e, int) for e in eos),
        )
        reader.optional("architectures", None)  # checked against model_type when the checkpoint is opened
        object.__setattr__(config, "never_read", reader.harmless(HARMLESS))
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError if fields contradict each other."""

        def need(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        for name in (*SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps"):
            need(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; expected a positive number")
        need(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{self.num_key_value_heads}",
        )
        need(
            self.head_dim % 2 == 0,
            f"head_dim is {self.head_dim}; rotation takes pairs of dims: expected an even number",
        )
        for window in set(self.windows) - {None}:
            need(window > 0, f"sliding_window is {window}; expected a positive number, or null for none")


def _flag(reader: Reader, key: str, default: bool) -> bool:
    value = reader.optional(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json has {key} = {value!r:.60}; expected true or false")
    return value


def _biases(variant: Variant, reader: Reader) -> dict[str, bool]:
    """Which maps have biases."""

    def stated(key: str, only: bool | None) -> bool:
        if only is None:
            return _flag(reader, key, False)
        reader.expect(key, only)
        return only

    attention, mlp = stated("attention_bias", variant.attention_bias), stated("mlp_bias", variant.mlp_bias)
    return {"qkv_bias": attention, "output_bias": attention and variant.output_bias, "mlp_bias": mlp}


def _windows(kind: str, reader: Reader, layers: int) -> tuple[int | None, ...]:
    """Window of each layer, of a model_type."""
    types, rule = reader.optional("layer_types", None), VARIANTS[kind].windows
    if types is not None and (not isinstance(types, list) or len(types) != layers or not set(types) <= {SLIDING, FULL}):
        raise ConfigError(f"config.json has layer_types = {types!r:.60}; expected {layers} of {SLIDING!r} and {FULL!r}")
    window = _window(rule, reader)
    if rule is Windows.SOME and types is None and window is not None:
        first = reader.number("max_window_layers", int)
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    reader.optional("max_window_layers", None)
    of_all = FULL if window is None else SLIDING
    types = [of_all] * layers if types is None else types
    if window is None and SLIDING in types or rule is not Windows.SOME and set(types) != {of_all}:
        raise ConfigError(
            f"config.json has layer_types with {SLIDING if window is None else FULL!r} layers, but a {kind} model "
            f"with sliding_window {window} has only {of_all!r}; correct one of them"
        )
    return tuple(window if t == SLIDING else None for t in types)


def _window(rule: Windows, reader: Reader) -> int | None:
    """The window of the layers that have one; None: no layer has."""
    if rule is Windows.NONE:
        reader.expect("sliding_window", None)
    if rule is not Windows.SOME:
        reader.expect("use_sliding_window", rule is Windows.ALL)
    if rule is Windows.ALL or rule is Windows.SOME and _flag(reader, "use_sliding_window", False):
        window = reader.get("sliding_window")
        return None if window is None else number("sliding_window", window, int)
    reader.optional("sliding_window", None)  # stated, and switched off
    return None
