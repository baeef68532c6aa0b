"""config.json of Qwen2, Llama and Mistral models, read strictly.

Both spellings of transformers are read: the older (`rope_theta`, `rope_scaling`) and that of transformers 5
(`rope_parameters`). A key that would change the computation and is not understood here is refused; keys that change
nothing are listed as never read.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dsv4.errors import ConfigError
from dsv4.loaders.config_files import DECODERS
from dsv4.model.config import Reader, mapping, number
from dsv4.model.config_keys import HARMLESS
from dsv4.model.gqa.rope import VARIANTS, Rope, mscale
from dsv4.model.spec import LayerSpec

DEFAULT_THETA = 10000.0  # of transformers, where a config states none
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
ROPE_KEYS = {  # keys beside rope_type and rope_theta
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
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


class AttentionKind(enum.Enum):
    """What a layer attends to."""

    FULL = "full"  # every token before
    SLIDING = "sliding"  # the last `window` of them


@dataclass(frozen=True)
class GQAConfig:
    """Checked configuration; names are those of config.json where it has one.

    windows: for each layer, how many last tokens a query sees (itself included), or None for all.
    max_position_embeddings: with YaRN at least its original context × factor. qkv_bias, output_bias, mlp_bias: which
    maps have one.
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
        if kind not in DECODERS:
            raise ConfigError(f"config.json has model_type {kind!r:.60}; expected one of {', '.join(DECODERS)}")
        for key, wanted in FIXED.items():
            reader.expect(key, wanted)
        values = {name: reader.number(name, int) for name in SIZES}
        heads, kv = values["num_attention_heads"], reader.optional("num_key_value_heads", None)
        if kv is None and kind != "llama":  # Llama's first configs have no such key: every head has its own keys
            reader.get("num_key_value_heads")
        head_dim = reader.optional("head_dim", None)
        if head_dim is None and (heads < 1 or values["hidden_size"] % heads):
            raise ConfigError(
                f"config.json has no head_dim, and hidden_size {values['hidden_size']} is not a multiple of "
                f"num_attention_heads {heads}; state head_dim"
            )
        rope = _rope(raw, reader, values["max_position_embeddings"])
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
            **_biases(kind, reader),
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


def _biases(kind: str, reader: Reader) -> dict[str, bool]:
    """Which maps have biases: Qwen2's queries, keys and values always, Mistral's none, Llama's as stated."""
    if kind == "qwen2":
        reader.expect("attention_bias", True)
        reader.expect("mlp_bias", False)
        return {"qkv_bias": True, "output_bias": False, "mlp_bias": False}
    if kind == "mistral":
        reader.expect("attention_bias", False)
        reader.expect("mlp_bias", False)
    attention = _flag(reader, "attention_bias", False)
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": _flag(reader, "mlp_bias", False)}


def _windows(kind: str, reader: Reader, layers: int) -> tuple[int | None, ...]:
    """Window of each layer. Qwen2: from layer_types, else layers from max_window_layers on, and only if
    use_sliding_window; Mistral:
    sliding_window of all layers; Llama: none."""
    types = reader.optional("layer_types", None)
    if types is not None and (not isinstance(types, list) or len(types) != layers or not set(types) <= {SLIDING, FULL}):
        raise ConfigError(f"config.json has layer_types = {types!r:.60}; expected {layers} of {SLIDING!r} and {FULL!r}")
    if kind == "llama":
        reader.expect("sliding_window", None)
    if kind != "qwen2":
        reader.expect("use_sliding_window", kind == "mistral")
    window = None if kind == "llama" else reader.get("sliding_window") if kind == "mistral" else _qwen2_window(reader)
    window = None if window is None else number("sliding_window", window, int)
    if kind == "qwen2" and types is None and window is not None:
        first = reader.number("max_window_layers", int)
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    reader.optional("max_window_layers", None)
    of_all = FULL if window is None else SLIDING
    types = [of_all] * layers if types is None else types
    if window is None and SLIDING in types or kind != "qwen2" and set(types) != {of_all}:
        raise ConfigError(
            f"config.json has layer_types with {SLIDING if window is None else FULL!r} layers, but a {kind} model "
            f"with sliding_window {window} has only {of_all!r}; correct one of them"
        )
    return tuple(window if t == SLIDING else None for t in types)


def _qwen2_window(reader: Reader) -> int | None:
    if _flag(reader, "use_sliding_window", False):
        return reader.get("sliding_window")
    reader.optional("sliding_window", None)  # stated, and switched off
    return None


def _rope(raw: Mapping, reader: Reader, longest: int) -> Rope:
    """The rotary variant, from either spelling."""
    scaling, parameters = (mapping(key, reader.optional(key, None)) for key in ("rope_scaling", "rope_parameters"))
    if scaling and parameters and dict(scaling) != dict(parameters):
        raise ConfigError("config.json has both rope_scaling and rope_parameters, and they differ; remove one of them")
    found, where = (scaling, "rope_scaling") if scaling else (parameters, "rope_parameters")
    kind = found.get("rope_type", found.get("type", "default"))
    if found.get("type", kind) != kind:
        raise ConfigError(f"{where} has rope_type {kind!r} and type {found['type']!r}; correct one of them")
    if kind not in VARIANTS:
        follows = " (it follows the length of the text, so that cached keys would have to be rotated anew)"
        raise ConfigError(
            f"{where} has rope_type {kind!r:.60}{follows if kind in ('dynamic', 'longrope') else ''}; expected one of "
            f"{', '.join(VARIANTS)}"
        )
    strange = set(found) - ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if strange:
        raise ConfigError(
            f"{where} of type {kind!r} has {', '.join(sorted(map(str, strange)))}, which it does not use; expected "
            f"only {', '.join(sorted(ROPE_KEYS[kind] | {'rope_type', 'rope_theta'}))}"
        )
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{where} has partial_rotary_factor {found['partial_rotary_factor']!r:.60}; these models rotate whole "
            "heads (1.0)"
        )
    stated = [
        number("rope_theta", t, float)
        for t in (found.get("rope_theta"), reader.optional("rope_theta", None))
        if t is not None
    ]
    if len(set(stated)) > 1:
        raise ConfigError(f"{where} has rope_theta {stated[0]}, config.json itself {stated[1]}; remove one of them")
    theta = stated[0] if stated else DEFAULT_THETA
    if not theta > 1:
        raise ConfigError(f"rope_theta is {theta}; expected a number above 1")
    return Rope(kind, theta, **_scaled(kind, found, where, reader, longest))


def _scaled(kind: str, found: Mapping, where: str, reader: Reader, longest: int) -> dict:
    """Fields of the variants besides theta. `longest`: max_position_embeddings, the original context if none is
    stated."""

    def value(key: str, default: float | None = None, least: float = 0.0) -> float:
        got = found.get(key)
        got = default if got is None else got
        if got is None:
            raise ConfigError(f"{where} of type {kind!r} has no {key!r}, which it needs")
        got = number(f"{where}.{key}", got, float)
        if not got > least and not (key == "factor" and got == 1):
            raise ConfigError(f"{where} has {key} = {got}; expected a number above {least:g}")
        return got

    if kind == "default":
        return {}
    out = {"factor": value("factor", least=1.0)}
    if kind == "linear":
        return out
    own, outer = (
        found.get("original_max_position_embeddings"),
        reader.optional("original_max_position_embeddings", None),
    )
    if None not in (own, outer) and own != outer:
        raise ConfigError(
            f"{where} has original_max_position_embeddings {own!r:.20}, config.json itself {outer!r:.20}; "
            "remove one of them"
        )
    stated = next((v for v in (own, outer) if v is not None), longest)
    out["original"] = number("original_max_position_embeddings", stated, int)
    if out["original"] < 1:
        raise ConfigError(f"original_max_position_embeddings is {out['original']}; expected a positive number")
    if kind == "llama3":
        out |= {key: value(key) for key in ("low_freq_factor", "high_freq_factor")}
        if not out["high_freq_factor"] > out["low_freq_factor"]:
            raise ConfigError(
                f"{where} has high_freq_factor {out['high_freq_factor']} and low_freq_factor "
                f"{out['low_freq_factor']}; expected the first to be larger"
            )
        return out
    out |= {"beta_fast": value("beta_fast", 32.0), "beta_slow": value("beta_slow", 1.0)}
    truncate = found.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"{where} has truncate = {truncate!r:.60}; expected true or false")
    weights = [found.get("mscale"), found.get("mscale_all_dim")]
    scaled = mscale(out["factor"])
    if all(weights):
        scaled = mscale(out["factor"], value("mscale")) / mscale(out["factor"], value("mscale_all_dim"))
    return out | {"truncate": truncate, "attention": value("attention_factor", scaled)}
