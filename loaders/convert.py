"""Converting a checkpoint between layouts, tensor by tensor.

Nothing is requantised silently: bytes that already have the wanted format are copied; FP8 and MXFP4 become bf16
exactly; MXFP4 and NVFP4 become each other exactly or not at all (unless the caller allows it and is told the count).
Only dense sources are quantised, in the official way.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dsv4.kernels.quantize import (
    PackedWeight,
    WeightFormat,
    mxfp4_to_nvfp4,
    nvfp4_to_mxfp4,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    to_float,
)
from dsv4.loaders.config_files import nvfp4_quantization, official_quantization, to_transformers
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.expected import matrix, official_tensors
from dsv4.loaders.files import DTYPES, Progress
from dsv4.loaders.ledger import keeps_value
from dsv4.loaders.load import Inventory, matrix_names
from dsv4.loaders.write import MAX_SHARD_BYTES, write_checkpoint

TARGETS = ("official", "nvfp4", "transformers", "bf16")
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FORMS = {
    "official": ("FP8", "MXFP4"),
    "nvfp4": ("FP8", "NVFP4"),
    "bf16": ("BF16", "BF16"),
    "transformers": ("BF16", "BF16"),
}


@dataclass
class Summary:
    """What a conversion did: matrices by action, and blocks or values that could not be kept exactly."""

    actions: Counter = field(default_factory=Counter)
    inexact_blocks: int = 0
    rounded_tensors: list[str] = field(default_factory=list)


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    config,
    allow_inexact: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Summary:
    """Write checkpoint `src` to `dst` in another layout.

    to: 'official' (FP8 + MXFP4), 'nvfp4' (official with NVFP4 backbone experts), 'transformers' (its in-memory names,
    dense bf16), 'bf16' (official names, dense). config: ModelConfig of the source. allow_inexact: let MXFP4 → NVFP4
    round, and count the blocks. Raises CheckpointError, InexactConversion or WriteError; nothing half-written stays.
    Names, shapes and dtypes are checked from the headers, before anything is written.
    """
    if to not in TARGETS:
        raise CheckpointError(f"target layout {to!r} is unknown; expected one of {', '.join(TARGETS)}")
    inventory = Inventory.open(src)
    converter = _Converter(inventory, config, to, allow_inexact)
    copies = [inventory.path / name for name in COMPANIONS if (inventory.path / name).is_file()]
    value_of = converter.transformers_value if to == "transformers" else converter.value
    write_checkpoint(
        dst, converter.planned, value_of, _documents(inventory.config, config, to), copies, max_shard_bytes, progress
    )
    return converter.summary


def _documents(official: dict, config, to: str) -> dict[str, dict]:
    official = official | {"compress_ratios": [*config.compress_ratios, *config.mtp_compress_ratios]}
    plain = {k: v for k, v in official.items() if k not in ("quantization_config", "expert_dtype")}
    if to == "transformers":
        return {"config.json": to_transformers(official)}
    if to == "bf16":
        return {"config.json": plain | {"torch_dtype": "bfloat16"}}
    base = plain | {
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": official_quantization(official),
    }
    if to == "official":
        return {"config.json": base}
    quantization, exporter = nvfp4_quantization(official)
    return {"config.json": base | {"quantization_config": quantization}, "hf_quant_config.json": exporter}


class _Converter:
    """Values of the target's tensors, in official names, from the source's."""

    def __init__(self, inventory: Inventory, config, to: str, allow_inexact: bool):
        self.inventory, self.config, self.to, self.allow_inexact = inventory, config, to, allow_inexact
        self.summary = Summary()
        self.dense, self.experts = FORMS[to]
        mtp = bool(config.num_mtp_layers and inventory.mtp_blocks)
        self.target = official_tensors(config, mtp, self.dense, self.experts)
        absent = [n for n in self.target if self._base(n) not in inventory.formats and n not in inventory.sources]
        if absent:
            raise CheckpointError(f"the source lacks {len(absent)} tensors that its config asks for, first {absent[0]}")
        self._check_headers(mtp)
        self.planned = self.target if to != "transformers" else _transformers_plan(self.target, config)
        # the matrix converted last: its tensors are asked for one after another
        self._held: tuple[str, dict] = ("", {})

    @staticmethod
    def _base(name: str) -> str:
        return re.sub(r"\.(weight|scale|weight_scale|weight_scale_2|input_scale)$", "", name)

    def _check_headers(self, mtp: bool) -> None:
        """Names and shapes of every stored tensor, scales too (one of another block size would dequantise to other
        values), and dtypes of what is no matrix, held against the config."""
        sources, formats, expected = self.inventory.sources, self.inventory.formats, {}
        for name, (_, shape) in official_tensors(self.config, mtp, "F32", "F32").items():
            form = formats.get(self._base(name), WeightFormat.DENSE)
            if form is WeightFormat.DENSE:
                expected[name] = ("F32", shape)
            else:
                matrix(expected, self._base(name), shape, form.name, self.config.weight_block_size, "F8_E8M0")
        strays = [n for n in sources if n not in expected]
        if strays:
            raise CheckpointError(
                f"the source holds {len(strays)} tensors that its config does not ask for, first {strays[0]}; "
                "they would be lost"
            )
        for name in sources:
            self._check_shape(name, expected[name][1])
            if self._base(name) not in formats:
                self._check_dtype(name)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self.inventory.sources[name].shape)
        if found != shape and not {found, shape} <= {(), (1,)}:  # a scalar may be stored as one element
            raise CheckpointError(f"tensor {name} has shape {list(found)}; the config asks for {list(shape)}")

    def _check_dtype(self, name: str) -> None:
        found, wanted = self.inventory.sources[name].dtype, self.target[name][0]
        if not keeps_value(DTYPES[found], DTYPES[wanted]):
            raise CheckpointError(
                f"tensor {name} is {found} in the file and would have to become {wanted}; that would lose bits"
            )

    def value(self, name: str) -> torch.Tensor:
        base = self._base(name)
        if base not in self.inventory.formats:
            return self._kept(name)
        if self._held[0] != base:
            self._held = (base, self._matrix(base))
        return self._held[1][name]

    def _kept(self, name: str) -> torch.Tensor:
        """Vectors and tables that stay fp32 or integer: as stored, or widened."""
        dtype, shape = self.target[name]
        return self.inventory.read(name).to(DTYPES[dtype]).view(shape)

    def _cast(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = value.to(dtype)
        if out.is_floating_point() and not torch.equal(out.to(torch.float32), value.to(torch.float32)):
            if self.inventory.formats[self._base(name)] is not WeightFormat.DENSE:
                raise CheckpointError(f"{name} has no exact bf16 form; keep it quantised")
            self.summary.rounded_tensors.append(name)
        return out

    def _matrix(self, base: str) -> dict[str, torch.Tensor]:
        """All target tensors of one weight, by name."""
        wanted = self._wanted(base)
        stored = self.inventory.formats[base]
        if wanted is WeightFormat.DENSE:
            value = self.inventory.read_matrix(base, self.config.weight_block_size)
            self.summary.actions[
                "kept dense" if stored is WeightFormat.DENSE else f"{stored.value} → dense, exact"
            ] += 1
            name = f"{base}.weight"
            return {name: self._cast(name, value, DTYPES[self.target[name][0]])}
        if stored is wanted and self._same_scales(base):
            self.summary.actions[f"{stored.value} bytes copied"] += 1
            names = set(matrix_names(base, stored).values()) | {n for n in self.target if n == f"{base}.input_scale"}
            return {n: self._stored_or_bound(n) for n in names}
        if stored is WeightFormat.DENSE:
            return self._quantised(base, wanted)
        return self._between(base, stored, wanted)

    def _same_scales(self, base: str) -> bool:
        return (
            self.inventory.formats[base] is not WeightFormat.FP8
            or self.inventory.sources[f"{base}.scale"].dtype == "F8_E8M0"
        )

    def _stored_or_bound(self, name: str) -> torch.Tensor:
        if name not in self.inventory.sources:
            return self._input_scale(name)
        wanted, shape = DTYPES[self.target[name][0]], self.target[name][1]
        value = self.inventory.read(name).view(shape)
        return value if value.dtype is wanted else value.view(wanted)  # packed FP4: I8 and U8 are the same bytes

    def _wanted(self, base: str) -> WeightFormat:
        if f"{base}.weight_scale_2" in self.target:
            return WeightFormat.NVFP4
        if f"{base}.scale" in self.target:
            return WeightFormat.FP8 if self.target[f"{base}.weight"][0] == "F8_E4M3" else WeightFormat.MXFP4
        return WeightFormat.DENSE

    def _quantised(self, base: str, wanted: WeightFormat) -> dict[str, torch.Tensor]:
        value = self.inventory.read_matrix(base, self.config.weight_block_size)
        block, glob = self.config.weight_block_size, None
        if not value.isfinite().all():
            raise CheckpointError(
                f"tensor {base}.weight holds infinite values, which {wanted.value} cannot; the file is damaged"
            )
        match wanted:
            case WeightFormat.FP8:
                weight, scale = quantize_fp8(value, block)
            case WeightFormat.MXFP4:
                weight, scale = quantize_mxfp4(value)
            case WeightFormat.NVFP4:
                amax = max(self.inventory.read_matrix(p, block).abs().amax() for p in self._partners(base))
                weight, scale, glob = quantize_nvfp4(value, amax.clamp(min=1e-30) / (6 * 448))
        back = to_float(PackedWeight(wanted, weight, scale, None if glob is None else glob.view(1), block))
        self.summary.actions[f"dense → {wanted.value}, {'exact' if torch.equal(back, value) else 'rounded'}"] += 1
        if glob is not None:
            return self._nvfp4(base, weight, scale, glob)
        return {
            f"{base}.weight": weight.view(torch.int8) if wanted is WeightFormat.MXFP4 else weight,
            f"{base}.scale": scale,
        }

    def _between(self, base: str, stored: WeightFormat, wanted: WeightFormat) -> dict[str, torch.Tensor]:
        packed = self.inventory.read_packed(base, self.config.weight_block_size)
        self.summary.actions[f"{stored.value} → {wanted.value}"] += 1
        match stored, wanted:
            case WeightFormat.MXFP4, WeightFormat.NVFP4:
                k_max = max(
                    int(self.inventory.read(f"{p}.scale").view(torch.uint8).max()) - 127 for p in self._partners(base)
                )
                weight, scale, glob, inexact = mxfp4_to_nvfp4(packed.weight, packed.scale, k_max)
                if inexact and not self.allow_inexact:
                    raise CheckpointError(
                        f"{inexact} blocks of {base} have no exact NVFP4 form (their scales lie more than 17 powers "
                        "of two below the largest); pass --allow-inexact to round them"
                    )
                self.summary.inexact_blocks += inexact
                return self._nvfp4(base, weight, scale, glob)
            case WeightFormat.NVFP4, WeightFormat.MXFP4:
                weight, scale = nvfp4_to_mxfp4(packed.weight, packed.scale, packed.global_scale)
                return {f"{base}.weight": weight.view(torch.int8), f"{base}.scale": scale}
        stored_as = f"{stored.value} with F32 scales" if stored is wanted else stored.value
        raise CheckpointError(
            f"{base} is {stored_as}; there is no exact way to {wanted.value}. Convert to bf16 first, then quantise"
        )

    def _partners(self, base: str) -> list[str]:
        """w1 and w3 of one expert share NVFP4's global scale."""
        stem, w = base.rsplit(".", 1)
        return [base] if w == "w2" else [f"{stem}.w1", f"{stem}.w3"]

    def _nvfp4(self, base, weight, scale, glob) -> dict[str, torch.Tensor]:
        return {
            f"{base}.weight": weight,
            f"{base}.weight_scale": scale,
            f"{base}.weight_scale_2": glob.reshape(()),
            f"{base}.input_scale": self._input_scale(f"{base}.input_scale"),
        }

    def _input_scale(self, name: str) -> torch.Tensor:
        """Static activation scale amax/(6·448) without calibration data: a bound that can never saturate.

        w1, w3 take a normalised vector: |x_j| ≤ √d·|norm weight_j|. w2 takes routing weight · silu(g)·u with g ≤ limit,
        |u| ≤ limit and routing weight ≤ routed_scaling_factor.
        """
        c = self.config
        if name.split(".")[-2] == "w2":
            amax = torch.tensor(c.swiglu_limit**2 * c.routed_scaling_factor)
        else:
            layer = ".".join(name.split(".")[:2])  # layers.3, mtp.0
            amax = self.inventory.read(f"{layer}.ffn_norm.weight").float().abs().amax() * c.hidden_size**0.5
        return (amax / (6 * 448)).float().reshape(())

    def transformers_value(self, key: str) -> torch.Tensor:
        """A tensor in transformers' in-memory naming: experts stacked, gate rows before up rows."""
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", key)
        if not match:
            return self.value(_from_transformers(key))
        E, rows, columns = self.planned[key][1]
        out = torch.empty(E, rows, columns, dtype=torch.bfloat16)
        for e in range(E):
            base = f"layers.{match[1]}.ffn.experts.{e}"
            if match[2] == "down_proj":
                out[e] = self.value(f"{base}.w2.weight")
            else:
                out[e, : rows // 2], out[e, rows // 2 :] = (
                    self.value(f"{base}.w1.weight"),
                    self.value(f"{base}.w3.weight"),
                )
        return out


_TRANSFORMERS = [  # official → transformers, whole names
    (r"embed\.weight", "model.embed_tokens.weight"),
    (r"head\.weight", "lm_head.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"hc_head_(fn|base|scale)", r"model.hc_head.hc_\1"),
    (r"layers\.(\d+)\.attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"layers\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"layers\.(\d+)\.hc_(attn|ffn)_(fn|base|scale)", r"model.layers.\1.\2_hc.\3"),
    (r"layers\.(\d+)\.attn\.attn_sink", r"model.layers.\1.self_attn.sinks"),
    (r"layers\.(\d+)\.attn\.wq_(a|b)\.weight", r"model.layers.\1.self_attn.q_\2_proj.weight"),
    (r"layers\.(\d+)\.attn\.wkv\.weight", r"model.layers.\1.self_attn.kv_proj.weight"),
    (r"layers\.(\d+)\.attn\.wo_(a|b)\.weight", r"model.layers.\1.self_attn.o_\2_proj.weight"),
    (r"layers\.(\d+)\.attn\.q_norm\.weight", r"model.layers.\1.self_attn.q_a_norm.weight"),
    (r"layers\.(\d+)\.attn\.kv_norm\.weight", r"model.layers.\1.self_attn.kv_norm.weight"),
    (r"layers\.(\d+)\.attn\.indexer\.wq_b\.weight", r"model.layers.\1.self_attn.compressor.indexer.q_b_proj.weight"),
    (
        r"layers\.(\d+)\.attn\.indexer\.weights_proj\.weight",
        r"model.layers.\1.self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    (r"layers\.(\d+)\.ffn\.gate\.(weight|tid2eid)", r"model.layers.\1.mlp.gate.\2"),
    (r"layers\.(\d+)\.ffn\.gate\.bias", r"model.layers.\1.mlp.gate.e_score_correction_bias"),
    (r"layers\.(\d+)\.ffn\.shared_experts\.w1\.weight", r"model.layers.\1.mlp.shared_experts.gate_proj.weight"),
    (r"layers\.(\d+)\.ffn\.shared_experts\.w2\.weight", r"model.layers.\1.mlp.shared_experts.down_proj.weight"),
    (r"layers\.(\d+)\.ffn\.shared_experts\.w3\.weight", r"model.layers.\1.mlp.shared_experts.up_proj.weight"),
    *[
        (rf"layers\.(\d+)\.attn\.{ours}compressor\.{leaf}", rf"model.layers.\1.self_attn.compressor.{theirs}{name}")
        for ours, theirs in (("", ""), (r"indexer\.", "indexer."))
        for leaf, name in (
            (r"wkv\.weight", "kv_proj.weight"),
            (r"wgate\.weight", "gate_proj.weight"),
            ("ape", "position_bias"),
            (r"norm\.weight", "kv_norm.weight"),
        )
    ],
    (r"(mtp\..*)", r"\1"),  # transformers has no MTP and ignores these; they keep their official names
]


def _to_transformers(name: str) -> str:
    for pattern, template in _TRANSFORMERS:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(template)
    raise CheckpointError(f"{name} has no name in transformers' layout")


def _from_transformers(key: str) -> str:
    from dsv4.loaders.layouts import TRANSFORMERS

    return TRANSFORMERS.official(key)  # type: ignore[return-value]  # a key that _to_transformers made has a name


def _transformers_plan(target: dict, config) -> dict:
    E, I, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    plan = {}
    for name, entry in target.items():
        match = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\..*", name)
        if match:
            plan[f"model.layers.{match[1]}.mlp.experts.gate_up_proj"] = ("BF16", (E, 2 * I, d))
            plan[f"model.layers.{match[1]}.mlp.experts.down_proj"] = ("BF16", (E, d, I))
        else:
            plan[_to_transformers(name)] = entry
    return plan
