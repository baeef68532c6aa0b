"""GQA models in float64, written from their definitions alone: config.json and tensors as they lie in the files, none
of the code that is judged.

Vaswani et al. 2017 (attention), Ainslie et al. 2023 (grouped queries), Su et al. 2021 (rotation; halves of a head are
pairs, as transformers has it), Peng et al. 2023 (YaRN), Llama 3.1's scaled frequencies, Zhang and Sennrich 2019 (RMS
norm), Shazeer 2020 (SwiGLU), Yang et al. 2025 (Qwen3: RMS norms of the heads of q and k).
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsv4.probes.oracle.weights import decode, read_header

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of config.json. windows: of each layer, None for all tokens before; factor: of cos and
    sin (YaRN)."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]
    frequencies: Tensor
    factor: float
    tied: bool

    @property
    def scale(self) -> float:
        """Of q·k, both rotated without `factor`."""
        return self.head_dim**-0.5 * self.factor**2


def config_at(root: Path) -> dict:
    """config.json as it lies there; model_type from the architectures where it states none."""
    raw = json.loads((root / "config.json").read_text())
    return {"model_type": (raw.get("architectures") or [""])[0].removesuffix("ForCausalLM").lower()} | raw


def shape_of(raw: dict) -> Shape:
    """From config.json as transformers reads it."""
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    dims = raw.get("head_dim") or raw["hidden_size"] // heads
    f, factor = frequencies(raw, dims)
    return Shape(
        heads,
        raw.get("num_key_value_heads") or heads,
        dims,
        raw["rms_norm_eps"],
        windows(raw, layers),
        f,
        factor,
        raw.get("tie_word_embeddings", False),
    )


def windows(raw: dict, layers: int) -> tuple[int | None, ...]:
    window, kind = raw.get("sliding_window"), raw["model_type"]
    qwen = kind in ("qwen2", "qwen3")
    if kind == "llama" or window is None or qwen and not raw.get("use_sliding_window", False):
        return (None,) * layers
    if kind == "mistral":
        return (window,) * layers
    types = raw.get("layer_types")
    sliding = (
        [t == "sliding_attention" for t in types] if types else [i >= raw["max_window_layers"] for i in range(layers)]
    )
    return tuple(window if slides else None for slides in sliding)


def rotary(raw: dict) -> dict:
    """The rotary variant in one spelling: rope_type, rope_theta and the variant's own keys."""
    found = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", raw.get("rope_theta", 10000.0))
    key = "original_max_position_embeddings"
    return found | {
        "rope_type": kind,
        "rope_theta": float(theta),
        key: found.get(key) or raw.get(key) or raw["max_position_embeddings"],
    }


def frequencies(raw: dict, dims: int) -> tuple[Tensor, float]:
    """(float64 [D/2], factor of cos and sin)."""
    r = rotary(raw)
    base = torch.tensor([r["rope_theta"] ** (-2 * i / dims) for i in range(dims // 2)], dtype=torch.float64)
    kind, s = r["rope_type"], r.get("factor", 1.0)
    if kind == "linear":
        return base / s, 1.0
    if kind == "llama3":
        return _llama3(base, r), 1.0
    if kind == "yarn":
        low, high = (r.get(key) for key in ("mscale", "mscale_all_dim"))
        stretched = lambda weight: 0.1 * weight * math.log(s) + 1 if s > 1 else 1.0
        stated = r.get("attention_factor")
        return _yarn(base, r, dims), stated if stated is not None else stretched(low) / stretched(
            high
        ) if low and high else stretched(1.0)
    return base, 1.0


def _llama3(base: Tensor, r: dict) -> Tensor:
    """A pair that turns more than `high` times within the original context stays; fewer than `low`: divided; else in
    between."""
    out, s, low, high = base.clone(), r["factor"], r["low_freq_factor"], r["high_freq_factor"]
    for i, f in enumerate(base.tolist()):
        turns = r["original_max_position_embeddings"] * f / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        out[i] = (1 - smooth) * f / s + smooth * f
    return out


def _yarn(base: Tensor, r: dict, dims: int) -> Tensor:
    theta, s, original = r["rope_theta"], r["factor"], r["original_max_position_embeddings"]
    pair = lambda turns: dims * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))
    low, high = pair(r.get("beta_fast") or 32), pair(r.get("beta_slow") or 1)
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    out = base.clone()
    for i, f in enumerate(base.tolist()):
        ramp = min(1.0, max(0.0, (i - low) / ((high - low) or 0.001)))
        out[i] = f / s * ramp + f * (1 - ramp)
    return out


def tensor_shapes(raw: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a config.json asks for, written out here and not taken from the loader."""
    d, I, D = (
        raw["hidden_size"],
        raw["intermediate_size"],
        raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
    )
    H, KV = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    of_qkv = raw["model_type"] == "qwen2" or raw.get("attention_bias", False)
    of_output = raw["model_type"] in ("llama", "qwen3") and raw.get("attention_bias", False)
    of_mlp = raw.get("mlp_bias", False)
    maps = {
        "self_attn.q_proj": (H * D, d, of_qkv),
        "self_attn.k_proj": (KV * D, d, of_qkv),
        "self_attn.v_proj": (KV * D, d, of_qkv),
        "self_attn.o_proj": (d, H * D, of_output),
        "mlp.gate_proj": (I, d, of_mlp),
        "mlp.up_proj": (I, d, of_mlp),
        "mlp.down_proj": (d, I, of_mlp),
    }
    found = {"model.embed_tokens.weight": (raw["vocab_size"], d), "model.norm.weight": (d,)}
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found |= {f"{at}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        if raw["model_type"] == "qwen3":
            found |= {f"{at}self_attn.{name}.weight": (D,) for name in ("q_norm", "k_norm")}
        for name, (rows, columns, biased) in maps.items():
            found |= {f"{at}{name}.weight": (rows, columns)} | ({f"{at}{name}.bias": (rows,)} if biased else {})
    return found | ({} if raw.get("tie_word_embeddings", False) else {"lm_head.weight": (raw["vocab_size"], d)})


# ---- steps --------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def turn(x: Tensor, at: Tensor, f: Tensor, halves: bool = True) -> Tensor:
    """x [B, T, heads, D] at positions [T]: pair i turns by at · f_i; a pair is (i, i + D/2), or (2i, 2i + 1) without
    `halves`."""
    angle = (at.double().unsqueeze(-1) * f).unsqueeze(1)  # [T, 1, D/2]
    a, b = x.double().chunk(2, -1) if halves else (x.double()[..., 0::2], x.double()[..., 1::2])
    found = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat(found, -1) if halves else torch.stack(found, -1).flatten(-2)


def mask(T: int, window: int | None, ahead: int = 0) -> Tensor:
    """bool [T, T]: whether a query (row) sees a key: up to `ahead` beyond itself, the last `window` before that."""
    back = torch.arange(T).unsqueeze(1) - torch.arange(T)
    seen = back >= -ahead
    return seen if window is None else seen & (back < window)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, group_of=None) -> Tensor:
    """q [B, T, H, D], keys and values [B, T, KV, D], seen bool [T, T] → [B, T, H, D]; 0 for a query that sees nothing.

    Query head h reads KV head group_of(h), by default h // (H / KV).
    """
    H, KV = q.shape[2], keys.shape[2]
    heads = [(group_of or (lambda h: h // (H // KV)))(h) for h in range(H)]
    k, v = (t.double()[:, :, heads].transpose(1, 2) for t in (keys, values))
    logits = (q.double().transpose(1, 2) @ k.mT * scale).masked_fill(~seen, float("-inf"))
    p = torch.softmax(logits, -1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return (p @ v).transpose(1, 2)


@dataclass(frozen=True)
class GQAOracle:
    """The model on a checkpoint directory. cache: the dtype that keys and values are stored in; None: as computed."""

    root: Path
    shape: Shape
    raw: dict
    tensors: dict
    cache: torch.dtype | None = None

    @classmethod
    def open(cls, root: str | Path, cache: torch.dtype | None = None) -> "GQAOracle":
        root, tensors = Path(root), {}
        raw = config_at(root)
        for file in sorted(root.glob("*.safetensors")):
            tensors |= read_header(file)
        return cls(root, shape_of(raw), raw, tensors, cache)

    def w(self, name: str) -> Tensor | None:
        """A tensor in float64; None for one that the file does not hold."""
        return torch.from_numpy(decode(self.tensors, name, (128, 128))) if name in self.tensors else None

    def map(self, name: str, x: Tensor, bias: bool = True) -> Tensor:
        """W x (+ b, where the file has one)."""
        y, b = x @ self.w(f"{name}.weight").T, self.w(f"{name}.bias") if bias else None
        return y if b is None else y + b

    def heads(self, i: int, which: str, x: Tensor, bias: bool = True) -> Tensor:
        """'q', 'k' or 'v' of normalised x [B, T, d], not rotated: [B, T, heads, D]."""
        at = f"model.layers.{i}.self_attn.{which}"
        y = self.map(f"{at}_proj", x, bias).unflatten(-1, (-1, self.shape.head_dim))
        if self.raw["model_type"] == "qwen3" and which in "qk":
            y = rms(y, self.w(f"{at}_norm.weight"), self.shape.eps)
        return y

    def normed(self, i: int, which: str, x: Tensor, weight: bool = True, eps: float | None = None) -> Tensor:
        """By 'input' or 'post_attention' norm of layer i."""
        w = self.w(f"model.layers.{i}.{which}_layernorm.weight") if weight else None
        return rms(x.double(), w, self.shape.eps if eps is None else eps)

    def output(self, i: int, o: Tensor, bias: bool = True) -> Tensor:
        """o [B, T, H, D] → [B, T, d]."""
        return self.map(f"model.layers.{i}.self_attn.o_proj", o.flatten(-2), bias)

    def mlp(self, i: int, y: Tensor, bias: bool = True) -> Tensor:
        """Of normalised y [B, T, d]."""
        at = f"model.layers.{i}.mlp."
        gate, up = (self.map(f"{at}{name}_proj", y, bias) for name in ("gate", "up"))
        return self.map(f"{at}down_proj", gate * torch.sigmoid(gate) * up, bias)

    def head(self, x: Tensor, weight: bool = True, eps: float | None = None) -> Tensor:
        """The last residual stream [B, T, d] → logits."""
        y = rms(x.double(), self.w("model.norm.weight") if weight else None, self.shape.eps if eps is None else eps)
        return y @ self.w("model.embed_tokens.weight" if self.shape.tied else "lm_head.weight").T

    def kept(self, x: Tensor) -> Tensor:
        """As the cache holds it."""
        return x if self.cache is None else x.to(self.cache).double()

    def layer(self, i: int, x: Tensor) -> dict[str, Tensor]:
        """x [B, T, d] from position 0 → every point of layer i."""
        y, at, f = self.normed(i, "input", x), torch.arange(x.shape[1]), self.shape.frequencies
        found = {
            "attn_in": x,
            "q_after_rope": turn(self.heads(i, "q", y), at, f),
            "keys": self.kept(turn(self.heads(i, "k", y), at, f)),
            "values": self.kept(self.heads(i, "v", y)),
        }
        seen = mask(x.shape[1], self.shape.windows[i])
        found["attn_out"] = self.output(
            i, attend(found["q_after_rope"], found["keys"], found["values"], seen, self.shape.scale)
        )
        found["ffn_out"] = self.mlp(i, self.normed(i, "post_attention", x + found["attn_out"]))
        return found | {"streams": x + found["attn_out"] + found["ffn_out"]}

    def logits(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T] from an empty context → float64 [B, T, vocab]."""
        x = self.w("model.embed_tokens.weight")[ids]
        for i in range(self.raw["num_hidden_layers"]):
            x = self.layer(i, x)["streams"]
        return self.head(x)


def oracle_of(subject) -> GQAOracle:
    """On the subject's files, with the cache dtype of its numerics."""
    return GQAOracle.open(subject.files.path, None if subject.numerics == "fp32" else torch.bfloat16)


def other_variant(oracle: GQAOracle, **changes) -> Tensor:
    """Frequencies of another rotary variant: keys of `rotary` changed."""
    raw = {k: v for k, v in oracle.raw.items() if k not in ("rope_scaling", "rope_parameters", "rope_theta")}
    return frequencies(raw | {"rope_scaling": rotary(oracle.raw) | changes}, oracle.shape.head_dim)[0]


def with_shape(oracle: GQAOracle, **changes) -> GQAOracle:
    return replace(oracle, shape=replace(oracle.shape, **changes))
