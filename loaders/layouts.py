"""The layouts a checkpoint may have on disk, each as exact rules to the official names.

A rule is a whole-name pattern: nothing is renamed leaf by leaf and nothing matches a suffix. The failure
this guards against is real: official files nest the compressor inside the indexer
(`attn.indexer.compressor.wkv`), transformers' modules nest the indexer inside the compressor
(`self_attn.compressor.indexer.kv_proj`), and a key with the wrong prefix loads nowhere, silently.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import DTYPES, FileTensor, some

N = r"(\d+)"
_ATTENTION = {  # official leaf → transformers leaf
    "attn_sink": "sinks",
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "kv_norm.weight": "kv_norm.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
}
_POOL = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "ape": "position_bias",
    "norm.weight": "kv_norm.weight",
}
_HC = ("fn", "base", "scale")
_SUFFIX = r"\.(weight|scale|weight_scale|weight_scale_2|input_scale)"


@dataclass(frozen=True)
class Source:
    """A canonical tensor: a contiguous range of one file tensor. `start` and sizes in bytes."""

    tensor: FileTensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A named layout: (pattern of a whole file key, template of the official name)."""

    name: str
    rules: tuple[tuple[re.Pattern, str], ...]
    stacked: tuple[re.Pattern, re.Pattern] | None = None  # gate_up_proj and down_proj of transformers

    def official(self, key: str) -> str | None:
        for pattern, template in self.rules:
            match = pattern.fullmatch(key)
            if match:
                return match.expand(template)
        return None


def official_leaves() -> list[str]:
    """Patterns of every official tensor name below `layers.N.` (and `mtp.N.`), with groups left out."""
    matrix = [f"attn.{m}" for m in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b", "indexer.weights_proj")]
    matrix += [f"attn.{c}compressor.{m}" for c in ("", "indexer.") for m in ("wkv", "wgate")]
    matrix += [f"ffn.shared_experts.w{i}" for i in (1, 2, 3)] + [rf"ffn.experts.\d+.w{i}" for i in (1, 2, 3)]
    plain = [
        "attn_norm.weight",
        "ffn_norm.weight",
        "attn.attn_sink",
        "attn.q_norm.weight",
        "attn.kv_norm.weight",
        "ffn.gate.weight",
        "ffn.gate.tid2eid",
        "ffn.gate.bias",
    ]
    plain += [f"attn.{c}compressor.{leaf}" for c in ("", "indexer.") for leaf in ("ape", "norm.weight")]
    plain += [f"hc_{which}_{p}" for which in ("attn", "ffn") for p in _HC]
    return [m.replace(".", r"\.") + _SUFFIX for m in matrix] + [p.replace(".", r"\.") for p in plain]


def compiled(rules) -> tuple[tuple[re.Pattern, str], ...]:
    """Rules of a `Layout`."""
    return tuple((re.compile(pattern), template) for pattern, template in rules)


def _mtp_rule(prefix: str = "") -> tuple[str, str]:
    """MTP blocks and DSpark stages keep their official names in every layout."""
    mtp = [
        rf"{m}{_SUFFIX}"
        for m in (
            "e_proj",
            "h_proj",
            "main_proj",
            r"markov_head\.markov_w1",
            r"markov_head\.markov_w2",
            r"confidence_head\.proj",
        )
    ]
    mtp += [r"enorm\.weight", r"hnorm\.weight", r"norm\.weight", r"main_norm\.weight"] + [f"hc_head_{p}" for p in _HC]
    # duplicates of the shared ones, in some releases
    mtp += [r"emb\.tok_emb\.weight", r"embed\.weight", r"head\.weight"]
    return rf"{prefix}(mtp\.\d+\.(?:{_any_of(official_leaves() + mtp)}))", r"\1"


def _any_of(leaves: list[str]) -> str:
    return "|".join(re.sub(r"\((?!\?)", "(?:", leaf) for leaf in leaves)


def _official(prefix: str) -> Layout:
    p = re.escape(prefix)
    return Layout(
        "official" if not prefix else f"official with prefix {prefix}",
        compiled(
            [
                (rf"{p}((?:embed|head|norm)\.weight|hc_head_(?:fn|base|scale))", r"\1"),
                (rf"{p}(layers\.\d+\.(?:{_any_of(official_leaves())}))", r"\1"),
                _mtp_rule(p),
            ]
        ),
    )


def _official_leaf_rules(base: str) -> list:
    """Rules of transformers' own module tree for one layer, `base` its prefix up to the layer number."""
    rules = [
        (rf"{base}\.input_layernorm\.weight", r"layers.\1.attn_norm.weight"),
        (rf"{base}\.post_attention_layernorm\.weight", r"layers.\1.ffn_norm.weight"),
    ]
    rules += [(rf"{base}\.{w}_hc\.({'|'.join(_HC)})", rf"layers.\1.hc_{w}_\2") for w in ("attn", "ffn")]
    rules += [(rf"{base}\.self_attn\.{re.escape(hf)}", rf"layers.\1.attn.{ours}") for ours, hf in _ATTENTION.items()]
    for ours, hf in _POOL.items():
        rules.append((rf"{base}\.self_attn\.compressor\.{re.escape(hf)}", rf"layers.\1.attn.compressor.{ours}"))
        rules.append(
            (rf"{base}\.self_attn\.compressor\.indexer\.{re.escape(hf)}", rf"layers.\1.attn.indexer.compressor.{ours}")
        )
    indexer = rf"{base}\.self_attn\.compressor\.indexer"
    rules += [
        (rf"{indexer}\.q_b_proj\.weight", r"layers.\1.attn.indexer.wq_b.weight"),
        (rf"{indexer}\.(?:scorer\.)?weights_proj\.weight", r"layers.\1.attn.indexer.weights_proj.weight"),
        (rf"{base}\.mlp\.gate\.(weight|tid2eid)", r"layers.\1.ffn.gate.\2"),
        (rf"{base}\.mlp\.gate\.e_score_correction_bias", r"layers.\1.ffn.gate.bias"),
    ]
    for ours, hf in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        rules.append((rf"{base}\.mlp\.shared_experts\.{hf}\.weight", rf"layers.\1.ffn.shared_experts.{ours}.weight"))
        rules.append((rf"{base}\.mlp\.experts\.{N}\.{hf}\.weight", rf"layers.\1.ffn.experts.\2.{ours}.weight"))
    return rules


_STACKED = (
    re.compile(rf"model\.layers\.{N}\.mlp\.experts\.gate_up_proj"),
    re.compile(rf"model\.layers\.{N}\.mlp\.experts\.down_proj"),
)
TRANSFORMERS = Layout(
    "transformers",
    compiled(
        [
            (r"model\.embed_tokens\.weight", "embed.weight"),
            (r"lm_head\.weight", "head.weight"),
            (r"model\.norm\.weight", "norm.weight"),
            (rf"model\.hc_head\.hc_({'|'.join(_HC)})", r"hc_head_\1"),
            *_official_leaf_rules(rf"model\.layers\.{N}"),
            _mtp_rule(),
        ]
    ),
    _STACKED,
)
_OFFICIAL = _official("")


def _either(ours: str, theirs: str) -> str:
    return f"(?:{re.escape(ours)}|{re.escape(theirs)})"


def _mixed_rules() -> list[tuple[str, str]]:
    """Rules of what transformers 5.17 to 5.24 save: leaves in either spelling below `model.layers.N`.

    `save_pretrained` renames module names back leaf by leaf, and only those that the loaded checkpoint made it rename
    before. So a model that was loaded from in-memory names is saved with both spellings in one file. Each rule still is
    a whole name, and two keys that mean one tensor are refused.
    """
    base, rules = rf"model\.layers\.{N}\.", []

    def rule(pattern: str, official: str) -> None:
        rules.append((base + pattern, rf"layers.\1.{official}"))

    rule(rf"{_either('attn_norm', 'input_layernorm')}\.weight", "attn_norm.weight")
    rule(rf"{_either('ffn_norm', 'post_attention_layernorm')}\.weight", "ffn_norm.weight")
    for which in ("attn", "ffn"):
        rule(rf"(?:hc_{which}_|{which}_hc\.)({'|'.join(_HC)})", rf"hc_{which}_\2")
    attention, moe = "(?:attn|self_attn)", "(?:ffn|mlp)"
    for ours, theirs in _ATTENTION.items():
        rule(rf"{attention}\.{_either(ours, theirs)}", f"attn.{ours}")
    rule(r"attn\.norm\.weight", "attn.kv_norm.weight")  # its pattern for a compressor's norm meets this one too
    indexer = rf"(?:attn\.indexer|{attention}\.compressor\.indexer)"
    for ours, theirs in _POOL.items():
        rule(rf"{attention}\.compressor\.{_either(ours, theirs)}", f"attn.compressor.{ours}")
        pool = rf"(?:attn\.indexer\.compressor|{attention}\.compressor\.indexer)"
        rule(rf"{pool}\.{_either(ours, theirs)}", f"attn.indexer.compressor.{ours}")
    rule(rf"{indexer}\.(?:wq_b|q_b_proj)\.weight", "attn.indexer.wq_b.weight")
    rule(rf"{indexer}\.(?:scorer\.)?weights_proj\.weight", "attn.indexer.weights_proj.weight")
    rule(rf"{moe}\.gate\.(weight|tid2eid)", r"ffn.gate.\2")
    rule(rf"{moe}\.gate\.(?:bias|e_score_correction_bias)", "ffn.gate.bias")
    for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        leaf = rf"{_either(ours, theirs)}\.weight"
        rule(rf"{moe}\.shared_experts\.{leaf}", f"ffn.shared_experts.{ours}.weight")
        rule(rf"{moe}\.experts\.{N}\.{leaf}", rf"ffn.experts.\2.{ours}.weight")
    return rules


HYBRID = Layout(
    "transformers save_pretrained",
    compiled(
        [
            (r"model\.embed_tokens\.weight", "embed.weight"),
            (r"(?:(?:model\.)?head|lm_head)\.weight", "head.weight"),
            (r"model\.norm\.weight", "norm.weight"),
            (rf"model\.hc_head\.hc_({'|'.join(_HC)})", r"hc_head_\1"),
            *_mixed_rules(),
            (rf"model\.(layers\.\d+\.(?:{_any_of(official_leaves())}))", r"\1"),  # quantised: with scales
            _mtp_rule(),
        ]
    ),
    (
        re.compile(rf"model\.layers\.{N}\.(?:ffn|mlp)\.experts\.gate_up_proj"),
        re.compile(rf"model\.layers\.{N}\.(?:ffn|mlp)\.experts\.down_proj"),
    ),
)
LAYOUTS = (_OFFICIAL, _official("model."), TRANSFORMERS, HYBRID)


def detect_layout(tensors: Mapping[str, FileTensor], layouts: tuple[Layout, ...] | None = None) -> Layout:
    """The layout whose rules know every tensor name. Raises CheckpointError naming the unknown ones."""
    candidates = []
    for layout in LAYOUTS if layouts is None else layouts:
        strange = [k for k in tensors if layout.official(k) is None and not _is_stacked(layout, k)]
        if not strange:
            return layout
        candidates.append((layout, strange))
    best, unknown = min(candidates, key=lambda candidate: len(candidate[1]))
    raise CheckpointError(
        f"{len(unknown)} of {len(tensors)} tensors have names that no layout knows (nearest: {best.name}): "
        f"{some(sorted(unknown))}"
    )


def canonical_sources(tensors: Mapping[str, FileTensor], layout: Layout) -> dict[str, Source]:
    """Official tensor name → where its bytes are. Raises CheckpointError when two tensors claim one name."""
    sources: dict[str, Source] = {}

    def claim(name: str, source: Source) -> None:
        if name in sources:
            raise CheckpointError(f"tensors {sources[name].tensor.key} and {source.tensor.key} are both {name}")
        sources[name] = source

    for key, tensor in tensors.items():
        name = layout.official(key)
        if name is not None:
            claim(name, Source(tensor, 0, tensor.shape))
            continue
        gate_up, down = (pattern.fullmatch(key) for pattern in layout.stacked or ())  # one of them does: detect_layout
        layer = (gate_up or down)[1]  # type: ignore[index]
        if len(tensor.shape) != 3 or (gate_up and tensor.shape[1] % 2):
            raise CheckpointError(
                f"tensor {key} has shape {list(tensor.shape)}; expected stacked experts [E, rows, columns]"
            )
        E, rows, columns = tensor.shape
        names = ("w1", "w3") if gate_up else ("w2",)  # gate rows first
        part = (rows // len(names), columns)
        nbytes = tensor.nbytes // (E * len(names)) if E else 0
        for e in range(E):
            for i, w in enumerate(names):
                claim(f"layers.{layer}.ffn.experts.{e}.{w}.weight", Source(tensor, (e * len(names) + i) * nbytes, part))
    return sources


def _is_stacked(layout: Layout, key: str) -> bool:
    return layout.stacked is not None and any(pattern.fullmatch(key) for pattern in layout.stacked)


def matrix_formats(sources: Mapping[str, Source]) -> dict[str, WeightFormat]:
    """Format of each weight by its official name without suffix, read off the dtypes of its tensors."""
    formats = {}
    for name, source in sources.items():
        if not name.endswith(".weight"):
            continue
        base = name.removesuffix(".weight")
        companions = {
            s: sources[f"{base}.{s}"].dtype
            for s in ("scale", "weight_scale", "weight_scale_2")
            if f"{base}.{s}" in sources
        }
        formats[base] = _format(base, source.dtype, companions)
    return formats


def _format(base: str, dtype: str, companions: dict[str, str]) -> WeightFormat:
    match dtype, companions:
        case "BF16" | "F32" | "F16", {**none} if not none:
            return WeightFormat.DENSE
        case "F8_E4M3", {"scale": "F8_E8M0" | "F32", **rest} if not rest:
            return WeightFormat.FP8
        case "I8" | "U8", {"scale": "F8_E8M0", **rest} if not rest:
            return WeightFormat.MXFP4
        case "U8" | "I8", {"weight_scale": "F8_E4M3", "weight_scale_2": "F32", **rest} if not rest:
            return WeightFormat.NVFP4
    found = ", ".join(f"{k} {v}" for k, v in companions.items()) or "no scales"
    raise CheckpointError(
        f"{base} has weight {dtype} with {found}; expected BF16/F32/F16 alone, F8_E4M3 with scale, packed I8/U8 "
        "with an F8_E8M0 scale, or U8 with weight_scale and weight_scale_2"
    )
