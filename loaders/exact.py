"""Quantising dense values without changing any, wherever the format can hold them.

The official scales are the smallest powers of two at which a block does not saturate. Among powers of two no other
choice holds more values, except below the floor that the official rule puts under a block's largest magnitude: there a
smaller scale is tried. NVFP4 has a finer choice: E4M3 block scales times one fp32 scale of the matrix. `nvfp4_global`
searches it.
"""

from collections.abc import Iterator

import torch

from dsv4.kernels.quantize import (
    PackedWeight,
    WeightFormat,
    encode_e2m1,
    encode_e8m0,
    pack_e2m1,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    to_float,
)
from dsv4.kernels.quantize.formats import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    ceil_log2,
    decode_e2m1,
    power_of_two,
    round_e4m3,
)
from dsv4.kernels.quantize.weights import MXFP4_BLOCK, NVFP4_BLOCK, spread

LARGEST = tuple(sorted(E2M1_VALUES[1:], reverse=True))  # codes that the largest magnitude of a block may have
SAMPLE = 64  # blocks that a global scale must fit before the whole matrix is tried


def quantised(
    value: torch.Tensor, wanted: WeightFormat, block: tuple[int, int], global_scale: torch.Tensor | None = None
) -> tuple[PackedWeight, int]:
    """value fp32 [O, K], finite → (the matrix in format `wanted`, values that it changes).

    global_scale: of NVFP4, as `nvfp4_global` found it; None for the official one, of rounded values.
    """
    match wanted:
        case WeightFormat.FP8:
            packed = PackedWeight(wanted, *quantize_fp8(value, block), block=block)
        case WeightFormat.MXFP4:
            packed = PackedWeight(wanted, *quantize_mxfp4(value))
        case _ if global_scale is None:
            weight, scale, glob = quantize_nvfp4(value)
            packed = PackedWeight(wanted, weight, scale, glob.view(1))
        case _:
            packed = _nvfp4(value, global_scale)
    lost = changed(packed, value)
    if lost and wanted is not WeightFormat.NVFP4:
        floorless = _fp8_below_floor(value, block) if wanted is WeightFormat.FP8 else _mxfp4_below_floor(value)
        packed, lost = min((packed, lost), (floorless, changed(floorless, value)), key=lambda found: found[1])
    return packed, lost


def changed(packed: PackedWeight, value: torch.Tensor) -> int:
    """Elements of fp32 `value` that the packed matrix has otherwise."""
    return int((to_float(packed) != value).sum())


def _fp8_below_floor(value: torch.Tensor, block: tuple[int, int]) -> PackedWeight:
    (O, K), (bo, bk) = value.shape, block
    padded = torch.nn.functional.pad(value, (0, -K % bk, 0, -O % bo))
    amax = padded.abs().unflatten(1, (-1, bk)).unflatten(0, (-1, bo)).amax((1, 3))
    exponent = torch.where(amax > 0, ceil_log2(amax / E4M3_MAX), 0).clamp(min=-127)
    scale = spread(spread(power_of_two(exponent), bk, K, 1), bo, O, 0)
    return PackedWeight(WeightFormat.FP8, round_e4m3(value / scale), encode_e8m0(exponent), block=block)


def _mxfp4_below_floor(value: torch.Tensor) -> PackedWeight:
    blocks = value.unflatten(-1, (-1, MXFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    exponent = torch.where(amax > 0, ceil_log2(amax / E2M1_MAX), -126).clamp(min=-127)
    code = encode_e2m1(blocks / power_of_two(exponent).unsqueeze(-1)).flatten(-2)
    return PackedWeight(WeightFormat.MXFP4, pack_e2m1(code), encode_e8m0(exponent))


def _nvfp4(value: torch.Tensor, glob: torch.Tensor) -> PackedWeight:
    """value [O, K] at a global scale: each block takes the first E4M3 scale that changes none of its values, else the
    official one."""
    blocks = value.unflatten(-1, (-1, NVFP4_BLOCK))
    scale, done = _blocks_at(blocks, glob, LARGEST[0])  # the official scale
    for largest in LARGEST[1:]:
        found, exact = _blocks_at(blocks, glob, largest)
        scale, done = torch.where(exact & ~done, found, scale), done | exact
    step = (scale * glob).unsqueeze(-1)
    code = encode_e2m1(torch.where(step > 0, blocks / step, 0)).flatten(-2)
    return PackedWeight(WeightFormat.NVFP4, pack_e2m1(code), scale.to(torch.float8_e4m3fn), glob.view(1))


def _blocks_at(blocks: torch.Tensor, glob: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 scale as fp32 at which the largest magnitude has code `largest`, whether it changes nothing), a block."""
    scale = round_e4m3(blocks.abs().amax(-1) / largest / glob).float()
    step = (scale * glob).unsqueeze(-1)
    back = decode_e2m1(encode_e2m1(torch.where(step > 0, blocks / step, 0))) * step
    return scale, (back == blocks).all(-1)


def nvfp4_global(value: torch.Tensor) -> torch.Tensor | None:
    """A global scale, fp32 [], at which NVFP4 holds every element of value [O, K]; None if there is none.

    The largest magnitude of a block has one of seven codes, which gives at most seven steps. A step is an E4M3 scale
    (one of 8 mantissas) times the global scale, so that one block leaves 56 global scales, up to powers of two. The
    power of two is the one that uses the whole range of E4M3 scales.
    """
    blocks = value.unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax()
    if amax == 0:
        return torch.tensor(2.0**-8)
    busy = blocks.flatten(0, -2)
    busy = busy[busy.abs().amax(-1) > 0]
    sample = busy[torch.linspace(0, len(busy) - 1, min(SAMPLE, len(busy))).long()]
    steps = _steps(sample)
    if not all(steps):
        return None
    # the standard one first: files that were dequantised from it come back to it
    candidates = [amax / (E2M1_MAX * E4M3_MAX), *_globals(min(steps, key=len), float(amax))]
    for glob in candidates:
        if _holds(sample, glob) and _holds(busy, glob):
            return glob
    return None


def _steps(sample: torch.Tensor) -> list[list[float]]:
    """Steps at which all values of a block are codes, up to fp32's rounding; one list a block."""
    values, found = sample.double(), []
    codes = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    for block in values:
        top = block.abs().amax()
        ratios = [block.abs() / (top / largest) for largest in LARGEST]
        fits = [((r.unsqueeze(-1) - codes).abs().amin(-1) <= 1e-6 * r).all() for r in ratios]
        found.append([float(top / largest) for largest, ok in zip(LARGEST, fits) if ok])
    return found


def _globals(steps: list[float], amax: float) -> Iterator[torch.Tensor]:
    for shift in (0, 1):  # a block whose largest code is 4 has a step beyond amax/6
        for step in steps:
            for mantissa in range(8, 16):
                base = torch.tensor(step * 8 / mantissa, dtype=torch.float64)
                least = torch.tensor(amax / (E2M1_MAX * E4M3_MAX), dtype=torch.float64)
                exponent = torch.ceil(torch.log2(least / base) - 1e-9)
                glob = (base * 2.0 ** (exponent + shift)).float()
                yield glob
                for towards in (0.0, torch.inf):  # the stored step was itself rounded to fp32
                    yield torch.nextafter(glob, torch.tensor(towards))


def _holds(blocks: torch.Tensor, glob: torch.Tensor) -> bool:
    exact = torch.zeros(blocks.shape[:-1], dtype=torch.bool)
    for largest in LARGEST:
        exact |= _blocks_at(blocks, glob, largest)[1]
        if exact.all():
            return True
    return False
