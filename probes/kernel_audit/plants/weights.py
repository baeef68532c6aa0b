"""Planted faults of weights as stored: of scales, nibbles and short blocks."""

from collections.abc import Callable

import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.probes.kernel_audit.plants.wrappers import changed

Change = Callable[[PackedWeight], PackedWeight]


def weights(change: Change, only: tuple[int, ...] | None = None) -> Callable:
    """honest → the honest kernel with every weight, or those at places `only`, through `change`."""
    some = lambda i, a: isinstance(a, PackedWeight) and (only is None or i in only)
    return changed(lambda *arguments: tuple(change(a) if some(i, a) else a for i, a in enumerate(arguments)))


def of(*forms: WeightFormat) -> Callable[[Change], Change]:
    """Changes weights of these formats alone."""
    return lambda change: lambda w: change(w) if w.format in forms else w


def dense(w: PackedWeight, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
    """The values fp32 [..., O, K] through `change`, as a dense weight."""
    return PackedWeight(WeightFormat.DENSE, change(to_float(w)))


def scaled(w: PackedWeight, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
    """Scales through `change`; those of a byte by their bytes."""
    if w.scale.dtype.itemsize > 1:
        return w._replace(scale=change(w.scale))
    return w._replace(scale=change(w.scale.view(torch.uint8)).contiguous().view(w.scale.dtype))


QUANTISED = of(WeightFormat.FP8, WeightFormat.MXFP4, WeightFormat.NVFP4)
FP4 = of(WeightFormat.MXFP4, WeightFormat.NVFP4)


def _exchanged(scale: torch.Tensor) -> torch.Tensor:
    return scale.transpose(-1, -2).reshape(scale.shape)


def _zero_byte(w: PackedWeight) -> PackedWeight:
    """Scale byte 0 counts as zero, as an exponent that is shifted into place."""
    if w.scale is None or w.scale.dtype is not torch.float8_e8m0fnu:
        return w
    live = (w.scale.view(torch.uint8) != 0).float()
    rows, columns = w.block if w.format is WeightFormat.FP8 else (1, 32)
    live = live.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return dense(w, lambda v: v * live[..., : v.shape[-2], : v.shape[-1]])


def _powers(w: PackedWeight) -> PackedWeight:
    """fp32 scales without their mantissas."""
    if w.scale is None or w.scale.dtype is not torch.float32:
        return w
    return w._replace(scale=2.0 ** w.scale.log2().floor())


def _first_global(w: PackedWeight) -> PackedWeight:
    glob = w.global_scale
    return w if glob is None else w._replace(global_scale=glob[..., :1].expand_as(glob).contiguous())


def _no_global(w: PackedWeight) -> PackedWeight:
    return w if w.global_scale is None else w._replace(global_scale=torch.ones_like(w.global_scale))


def _halves_flushed(w: PackedWeight) -> PackedWeight:
    """E2M1 code 1, the only subnormal one, counts as zero."""
    low, high = (torch.where(n & 7 == 1, 0, n) for n in (w.weight & 15, w.weight >> 4))
    return w._replace(weight=low | (high << 4))


def _whole_columns(w: PackedWeight) -> PackedWeight:
    """Columns behind the last whole block of 128 are skipped."""
    return dense(
        w, lambda v: torch.where(torch.arange(v.shape[-1], device=v.device) < v.shape[-1] // 128 * 128, v, 0.0)
    )


def _whole_rows(w: PackedWeight) -> PackedWeight:
    """Rows behind the last whole block of 64 are skipped."""
    rows = w.out_features // 64 * 64
    return dense(w, lambda v: torch.where((torch.arange(v.shape[-2], device=v.device) < rows).unsqueeze(1), v, 0.0))


SCALES = {  # name → (entry of the catalogue, make)
    "the axes of scales are exchanged": (53, weights(QUANTISED(lambda w: scaled(w, _exchanged)))),
    "scales of the block of columns before": (53, weights(QUANTISED(lambda w: scaled(w, lambda s: s.roll(1, -1))))),
    "scales are ignored": (52, weights(QUANTISED(lambda w: scaled(w, lambda s: s[..., :1, :1].expand_as(s))))),
}
NIBBLES = {
    "the high nibble first": (56, weights(FP4(lambda w: w._replace(weight=(w.weight >> 4) | (w.weight << 4))))),
    "0.5 of E2M1 counts as zero": (56, weights(FP4(_halves_flushed))),
    "the global scale is ignored": (52, weights(_no_global)),
}
LINEAR = (
    SCALES
    | NIBBLES
    | {
        "scale byte 0 counts as zero": (51, weights(_zero_byte)),
        "fp32 scales lose their mantissas": (52, weights(_powers)),
        "one global scale for two matrices": (53, weights(_first_global)),
        "columns behind the last 128 are skipped": (26, weights(_whole_columns)),
        "rows behind the last 64 are skipped": (26, weights(_whole_rows)),
    }
)
