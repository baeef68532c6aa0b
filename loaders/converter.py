"""Tensors of a conversion's target, one after another, and the account of what became of each matrix."""

import re
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch

from dsv4.kernels.quantize import InexactConversion, PackedWeight, WeightFormat, mxfp4_to_nvfp4, nvfp4_to_mxfp4
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.exact import nvfp4_global, quantised
from dsv4.loaders.expected import check_extent, matrix, official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import keeps_value
from dsv4.loaders.load import Inventory, matrix_names
from dsv4.loaders.transformers_names import from_transformers, transformers_plan
from dsv4.loaders.write import Notes

FORMS = {
    "official": ("FP8", "MXFP4"),
    "nvfp4": ("FP8", "NVFP4"),
    "bf16": ("BF16", "BF16"),
    "transformers": ("BF16", "BF16"),
}


@dataclass
class Summary(Notes):
    """What a conversion did, by name, so that a resumed run accounts for what an earlier one wrote.

    matrices: name without suffix → what was done. rounded: tensor → [values changed, values].
    """

    matrices: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, list[int]] = field(default_factory=dict)

    @property
    def actions(self) -> Counter:
        """Matrices by what was done."""
        return Counter(self.matrices.values())

    @property
    def rounded_tensors(self) -> list[str]:
        return list(self.rounded)

    @property
    def rounded_values(self) -> int:
        return sum(changed for changed, _ in self.rounded.values())

    def to_json(self) -> dict:
        return asdict(self)

    def restore(self, kept: dict) -> None:
        self.matrices, self.rounded = dict(kept["matrices"]), dict(kept["rounded"])

    def document(self) -> dict:
        """Counts, for people and for --json."""
        return {
            "actions": dict(self.actions),
            "rounded_tensors": self.rounded_tensors,
            "rounded_values": self.rounded_values,
        }


class Converter:
    """Values of the target's tensors, in official names, from the source's."""

    def __init__(self, inventory: Inventory, config, to: str, allow_rounding: bool):
        self.inventory, self.config, self.to, self.allow_rounding = inventory, config, to, allow_rounding
        self.summary = Summary()
        check_extent(inventory.sources, config)
        self.dense, self.experts = FORMS[to]
        mtp = bool(config.num_mtp_layers and inventory.mtp_blocks)
        self.target = official_tensors(config, mtp, self.dense, self.experts)
        absent = [n for n in self.target if self._base(n) not in inventory.formats and n not in inventory.sources]
        if absent:
            raise CheckpointError(f"the source lacks {len(absent)} tensors that its config asks for, first {absent[0]}")
        self._check_headers(mtp)
        self.planned = self.target if to != "transformers" else transformers_plan(self.target, config)
        # the matrix converted last: its tensors are asked for one after another
        self._held: tuple[str, dict] = ("", {})
        self._globals: dict[tuple[str, ...], torch.Tensor] = {}  # by partners; of the last few

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
        if out.is_floating_point():
            self._account(
                name, int((out.to(torch.float32) != value.to(torch.float32)).sum()), value.numel(), str(dtype)
            )
        return out

    def _account(self, name: str, changed: int, values: int, form: str) -> None:
        """Count the values that a tensor loses. Raises CheckpointError where none may be lost."""
        if changed and not self.allow_rounding:
            raise CheckpointError(
                f"{changed} of {values} values of {name} have no exact {form.removeprefix('torch.')} form; pass "
                "--allow-rounding to round them, or choose a target that keeps them"
            )
        if changed:
            self.summary.rounded[name] = [changed, values]

    def _matrix(self, base: str) -> dict[str, torch.Tensor]:
        """All target tensors of one weight, by name."""
        wanted = self._wanted(base)
        stored = self.inventory.formats[base]
        if wanted is WeightFormat.DENSE:
            value = self.inventory.read_matrix(base, self.config.weight_block_size)
            name = f"{base}.weight"
            out = {name: self._cast(name, value, DTYPES[self.target[name][0]])}
            how = "rounded" if name in self.summary.rounded else "exact"
            stays = stored is WeightFormat.DENSE and how == "exact"
            self.summary.matrices[base] = "kept dense" if stays else f"{stored.value} → dense, {how}"
            return out
        if stored is wanted and self._same_scales(base):
            self.summary.matrices[base] = f"{stored.value} bytes copied"
            names = set(matrix_names(base, stored).values()) | {n for n in self.target if n == f"{base}.input_scale"}
            return {n: self._stored_or_bound(n) for n in names}
        return self._same_nibbles(base, stored, wanted) or self._quantised(base, stored, wanted)

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

    def _same_nibbles(self, base: str, stored: WeightFormat, wanted: WeightFormat) -> dict[str, torch.Tensor] | None:
        """MXFP4 and NVFP4 as each other, with the codes that are stored; None where that would change a value."""
        if {stored, wanted} != {WeightFormat.MXFP4, WeightFormat.NVFP4}:
            return None
        packed = self.inventory.read_packed(base, self.config.weight_block_size)
        if wanted is WeightFormat.MXFP4:
            try:
                weight, scale = nvfp4_to_mxfp4(packed.weight, packed.scale, packed.global_scale)
            except InexactConversion:
                return None
            converted = PackedWeight(wanted, weight, scale)
        else:
            partners = [self.inventory.read_packed(p, packed.block) for p in self._partners(base)]
            if any(p.format is not stored for p in partners):
                return None
            scales = [p.scale for p in partners if p.scale is not None]
            k_max = max(int(scale.view(torch.uint8).max()) for scale in scales) - 127
            if any(mxfp4_to_nvfp4(p.weight, p.scale, k_max)[3] for p in partners):
                return None  # partners share a global scale, so that both keep their codes or neither does
            weight, scale, glob, _ = mxfp4_to_nvfp4(packed.weight, packed.scale, k_max)
            converted = PackedWeight(wanted, weight, scale, glob.view(1))
        self.summary.matrices[base] = f"{stored.value} → {wanted.value}"
        return self._tensors(base, converted)

    def _quantised(self, base: str, stored: WeightFormat, wanted: WeightFormat) -> dict[str, torch.Tensor]:
        """The matrix by value in the wanted format: exactly where that is possible, else rounded if that is allowed."""
        block = self.config.weight_block_size
        value = self.inventory.read_matrix(base, block)
        if not value.isfinite().all():
            raise CheckpointError(
                f"tensor {base}.weight holds infinite values, which {wanted.value} cannot; the file is damaged"
            )
        glob = self._global(base, block) if wanted is WeightFormat.NVFP4 else None
        packed, changed = quantised(value, wanted, block, glob)
        self._account(f"{base}.weight", changed, value.numel(), wanted.value)
        self.summary.matrices[base] = f"{stored.value} → {wanted.value}, {'rounded' if changed else 'exact'}"
        return self._tensors(base, packed)

    def _global(self, base: str, block: tuple[int, int]) -> torch.Tensor:
        """NVFP4's global scale of a matrix and its partner: one that keeps every value of both, else the official."""
        partners = tuple(self._partners(base))
        if partners not in self._globals:
            values = torch.cat([self.inventory.read_matrix(p, block) for p in partners])
            glob = nvfp4_global(values)
            if len(self._globals) > 1:  # w1, w2, w3 follow one another, and w3 asks for that of w1 again
                self._globals.pop(next(iter(self._globals)))
            self._globals[partners] = values.abs().amax().clamp(min=1e-30) / (6 * 448) if glob is None else glob
        return self._globals[partners]

    def _partners(self, base: str) -> list[str]:
        """w1 and w3 of one expert share NVFP4's global scale."""
        stem, w = base.rsplit(".", 1)
        return [base] if w == "w2" else [f"{stem}.w1", f"{stem}.w3"]

    def _tensors(self, base: str, packed: PackedWeight) -> dict[str, torch.Tensor]:
        """A packed matrix as the tensors of a file, by official name."""
        if packed.global_scale is not None:
            return {
                f"{base}.weight": packed.weight,
                f"{base}.weight_scale": packed.scale,
                f"{base}.weight_scale_2": packed.global_scale.reshape(()),
                f"{base}.input_scale": self._input_scale(f"{base}.input_scale"),
            }
        weight = packed.weight.view(torch.int8) if packed.format is WeightFormat.MXFP4 else packed.weight
        return {f"{base}.weight": weight, f"{base}.scale": packed.scale}

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
            return self.value(from_transformers(key))
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
