"""Weight formats: FP8 blocks, MXFP4, NVFP4. Quantise, dequantise, convert."""

import enum
from typing import NamedTuple

import torch

from dsv4.kernels.errors import Dsv4Error, UnsupportedInput
from dsv4.kernels.quantize.formats import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_log2,
    decode_e8m0,
    encode_e2m1,
    encode_e8m0,
    pack_e2m1,
    power_of_two,
    round_e4m3,
    unpack_e2m1,
)

MXFP4_BLOCK = 32
NVFP4_BLOCK = 16
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6 * 2.0**-126


class InexactConversion(Dsv4Error):
    """A conversion between FP4 formats that would change values."""


class WeightFormat(enum.Enum):
    DENSE = "dense"
    FP8 = "fp8"  # E4M3, one scale (E8M0 or fp32) per block of rows × columns
    MXFP4 = "mxfp4"  # E2M1, one E8M0 scale per row and 32 columns
    NVFP4 = "nvfp4"  # E2M1, one E4M3 scale per row and 16 columns, one fp32 scale per matrix


class PackedWeight(NamedTuple):
    """A matrix [..., O, K] as stored; the products take this.

    DENSE: weight only. FP8: weight float8_e4m3fn [..., O, K], scale [..., ⌈O/bo⌉, ⌈K/bk⌉]. MXFP4: weight
    uint8 [..., O, K/2], scale float8_e8m0fnu [..., O, K/32]. NVFP4: weight uint8 [..., O, K/2], scale
    float8_e4m3fn [..., O, K/16], global_scale fp32 [..., P] for P matrices stacked along O.

    of: where the stack is a pool of slots, of how many matrices the slots hold some. Slots change between calls, so
    nothing that is computed from them may be kept. Kernels choose tiles by that number, so that the bits are those of
    the whole stack. None: the stack is all there is.

    exact_sums: whether sums of products must keep the bits of fp32. FP8 tensor cores keep 14 of the largest product.
    """

    format: WeightFormat
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    block: tuple[int, int] = (128, 128)
    of: int | None = None
    exact_sums: bool = False

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]


def scale_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Block scales as fp32: E8M0 by its bits, anything else by value."""
    return decode_e8m0(scale) if scale.dtype is torch.float8_e8m0fnu else scale.float()


def spread(scale: torch.Tensor, block: int, size: int, dim: int) -> torch.Tensor:
    """Repeat each scale over its block along `dim`; the last block may be short."""
    return scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def to_float(w: PackedWeight, rows: slice | None = None) -> torch.Tensor:
    """Dequantise: fp32 [..., rows, K]. `rows` slices O; for FP8 its start must be on a block boundary."""
    if w.format is WeightFormat.DENSE:
        return (w.weight if rows is None else w.weight[..., rows, :]).float()
    O = w.out_features
    start, stop, _ = (rows or slice(None)).indices(O)
    weight = w.weight[..., start:stop, :]
    if w.format is WeightFormat.FP8:
        bo, bk = w.block
        if start % bo:
            raise UnsupportedInput(f"rows {start}…{stop} of an FP8 matrix start inside a block of {bo} rows")
        scale = scale_to_float(w.scale[..., start // bo : -(-stop // bo), :])
        value = weight.to(torch.float32)
        return value * spread(spread(scale, bk, value.shape[-1], -1), bo, stop - start, -2)
    scale = scale_to_float(w.scale[..., start:stop, :])
    if w.format is WeightFormat.NVFP4:
        parts = w.global_scale.shape[-1]
        per_row = w.global_scale.repeat_interleave(O // parts, -1)[..., start:stop]
        scale = scale * per_row.unsqueeze(-1)
    value = unpack_e2m1(weight)
    return value.unflatten(-1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1)).flatten(-2)


def quantize_fp8(w: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """w [O, K] → (E4M3 [O, K], E8M0 [⌈O/bo⌉, ⌈K/bk⌉]) with scale 2^⌈log2(amax/448)⌉, amax at least 1e-4."""
    (O, K), (bo, bk) = w.shape, block
    w = w.float()
    padded = torch.nn.functional.pad(w, (0, -K % bk, 0, -O % bo))
    amax = padded.abs().unflatten(1, (-1, bk)).unflatten(0, (-1, bo)).amax((1, 3)).clamp_(min=FP8_AMAX_FLOOR)
    exponent = ceil_log2(amax / E4M3_MAX)
    scale = spread(spread(power_of_two(exponent), bk, K, 1), bo, O, 0)
    return round_e4m3(w / scale), encode_e8m0(exponent)


def quantize_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w [..., O, K], K a multiple of 32 → (bytes uint8 [..., O, K/2], E8M0 [..., O, K/32]), scale 2^⌈log2(amax/6)⌉."""
    blocks = _blocks(w.float(), MXFP4_BLOCK, "MXFP4")
    exponent = ceil_log2(blocks.abs().amax(-1).clamp_(min=FP4_AMAX_FLOOR) / E2M1_MAX)
    code = encode_e2m1(blocks / power_of_two(exponent).unsqueeze(-1)).flatten(-2)
    return pack_e2m1(code), encode_e8m0(exponent)


def quantize_nvfp4(w: torch.Tensor, global_scale: torch.Tensor | None = None):
    """w [O, K], K a multiple of 16 → (bytes [O, K/2], E4M3 [O, K/16], fp32 scalar).

    global_scale = amax/(6·448) unless given (w1 and w3 of an expert share one).
    """
    w = w.float()
    if global_scale is None:
        global_scale = w.abs().amax().clamp_(min=FP4_AMAX_FLOOR) / (E2M1_MAX * E4M3_MAX)
    blocks = _blocks(w, NVFP4_BLOCK, "NVFP4")
    scale = round_e4m3(blocks.abs().amax(-1) / E2M1_MAX / global_scale)
    step = scale.float().mul(global_scale).unsqueeze(-1)
    code = encode_e2m1(torch.where(step > 0, blocks / step, 0)).flatten(-2)
    return pack_e2m1(code), scale, global_scale


def mxfp4_to_nvfp4(packed: torch.Tensor, scale: torch.Tensor, k_max: int | None = None):
    """MXFP4 → NVFP4 with the same nibbles: (bytes, E4M3 [O, K/16], fp32 scalar, inexact blocks).

    With k_j the exponent of block j and k_max the largest (over w1 and w3 of an expert, which share it: pass it),
    global = 2^(k_max − 8) and scale_j = 2^(k_j − k_max + 8). E4M3 holds 2^8 … 2^−9, so blocks with k_max − k_j ≤ 17 are
    exact; the count of the others is returned, and the caller may refuse them. Blocks of zeros are exact with any
    scale.
    """
    k = scale.view(torch.uint8).int() - 127
    k_max = int(k.max()) if k_max is None else k_max
    wanted = power_of_two((k - k_max + 8).clamp(min=-127))
    stored = round_e4m3(wanted)
    zero = (packed.unflatten(-1, (-1, MXFP4_BLOCK // 2)) & 0x77).eq(0).all(-1)
    inexact = int(((stored.float() != wanted) & ~zero).sum())
    return (
        packed,
        stored.view(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e4m3fn),
        torch.tensor(2.0) ** (k_max - 8),
        inexact,
    )


def nvfp4_to_mxfp4(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor):
    """NVFP4 → MXFP4 with the same nibbles: (bytes, E8M0 [O, K/32]).

    Exact only if both 16-blocks of each 32-block have the same power-of-two scale. Raises InexactConversion with the
    count of blocks that do not.
    """
    step = (scale.float() * global_scale).unflatten(-1, (-1, 2))
    mantissa, exponent = torch.frexp(step)
    zero = (packed.unflatten(-1, (-1, NVFP4_BLOCK // 2)) & 0x77).eq(0).all(-1).unflatten(-1, (-1, 2))
    k = torch.where(zero, -(1 << 20), exponent - 1)
    exponent32 = k.amax(-1)  # a half of zeros takes the other half's scale
    bad = (
        (~zero & ((mantissa != 0.5) | (k != exponent32.unsqueeze(-1)))).any(-1)
        | (exponent32 > 127)
        | ((exponent32 < -127) & ~zero.all(-1))
    )
    if bad.any():
        raise InexactConversion(
            f"{int(bad.sum())} of {bad.numel()} blocks have no exact MXFP4 form (their scales are not "
            "one power of two per 32 values); convert to bf16 instead"
        )
    return packed, encode_e8m0(torch.where(zero.all(-1), (exponent - 1).amax(-1).clamp(-127, 127), exponent32))


def _blocks(w: torch.Tensor, size: int, name: str) -> torch.Tensor:
    if w.shape[-1] % size:
        raise UnsupportedInput(f"{name} needs columns in multiples of {size}; found {w.shape[-1]}")
    return w.unflatten(-1, (-1, size))


def expert(w: PackedWeight, e) -> PackedWeight:
    """Matrix e of a stack, or the stack of several for an index tensor."""
    pick = (
        (lambda t: None if t is None else t[e])
        if isinstance(e, int)
        else (lambda t: None if t is None else _rows(t, e))
    )
    return PackedWeight(w.format, pick(w.weight), pick(w.scale), pick(w.global_scale), w.block, w.of)


def _rows(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """index_select on dim 0 through bytes, because float8 dtypes lack it."""
    return (
        t.view(torch.uint8).index_select(0, index).view(t.dtype) if t.dtype.itemsize == 1 else t.index_select(0, index)
    )
