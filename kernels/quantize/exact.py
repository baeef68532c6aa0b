"""Number formats in fp64, by tables of every code: what the contracts' exact results are made of.

Nothing here calls the encoders and decoders of `dsv4.kernels.quantize`.
"""

import torch

from dsv4.kernels.quantize.kept import once
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat


def e4m3_values() -> torch.Tensor:
    """fp64 [256]: the value of each E4M3 byte; 0x7F and 0xFF are NaN."""
    byte = torch.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).double()
    size = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7).double())
    size[(byte & 127) == 127] = float("nan")
    return torch.where(byte >= 128, -size, size)


def e2m1_values() -> torch.Tensor:
    """fp64 [16]: the value of each E2M1 code."""
    code = torch.arange(16)
    exponent, mantissa = (code >> 1) & 3, (code & 1).double()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1).double())
    return torch.where(code >= 8, -size, size)


E4M3, E2M1 = e4m3_values(), e2m1_values()
E4M3_GRID, E2M1_GRID = E4M3[:127], E2M1[:8]  # magnitudes by code; the last are 448 and 6
E2M1_PAIRS = torch.stack((E2M1[torch.arange(256) & 15], E2M1[torch.arange(256) >> 4]), -1)  # low nibble first
E8M0 = 2.0 ** (torch.arange(256).double() - 127)
FP8_FLOOR, FP4_FLOOR = 1e-4, 6 * 2.0**-126  # least amax of a block


def codes(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """int64: number of the magnitude of `grid` that is nearest to |x|; half way the even number, beyond the end the
    end. x fp64."""
    size, middles = x.abs(), (grid[1:] + grid[:-1]) / 2
    low = torch.searchsorted(middles, size.contiguous())  # a half belongs to the lower code here
    tie = (low < len(middles)) & (middles[low.clamp(max=len(middles) - 1)] == size) & (low % 2 == 1)
    return low.clamp(max=len(grid) - 1) + tie.long()


def exponents(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """int64: the least e with largest · 2^e ≥ amax, for positive fp64 amax."""
    steps = torch.arange(-150, 151)
    return steps[torch.searchsorted(largest * 2.0 ** steps.double(), amax.contiguous()).clamp(max=len(steps) - 1)]


def block_codes(x, block: int, grid: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x fp64 [..., K] in blocks of columns, the last may be short: codes without sign int64 [..., K], and the
    exponent of each block int64 [..., blocks]."""
    found = []
    for part in x.split(block, -1):
        e = exponents(part.abs().amax(-1, keepdim=True).clamp(min=floor), float(grid[-1]))
        found.append((codes(part / 2.0 ** e.double(), grid), e))
    return tuple(torch.cat(parts, -1) for parts in zip(*found))


def simulated(x: torch.Tensor, block: int, grid: torch.Tensor, floor: float) -> torch.Tensor:
    """x [..., K] rounded to ±grid with one power of two a block of columns, and back: fp64. NaN spreads over its
    block."""
    x = x.double()
    code, exponent = block_codes(x, block, grid, floor)
    scale = (2.0 ** exponent.double()).repeat_interleave(block, -1)[..., : x.shape[-1]]
    bad = torch.cat([p.isnan().any(-1, keepdim=True).expand_as(p) for p in x.split(block, -1)], -1)
    return torch.copysign(grid[code] * scale, x).masked_fill(bad, float("nan"))


def simulated_fp8(x: torch.Tensor, block: int = 128, keep: int = 0) -> torch.Tensor:
    """As `simulate_fp8_blocks`, in fp64."""
    K = x.shape[-1] - keep
    return torch.cat((simulated(x[..., :K], block, E4M3_GRID, FP8_FLOOR), x[..., K:].double()), -1)


def simulated_fp4(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """As `simulate_fp4_blocks`, in fp64."""
    return simulated(x, block, E2M1_GRID, FP4_FLOOR)


def values(w: PackedWeight) -> torch.Tensor:
    """fp64 [..., O, K]: a weight by its codes and scales. Kept while weights are; the result must not be written to."""
    return once(w, (values,), lambda: _values(w))


def _values(w: PackedWeight) -> torch.Tensor:
    if w.format is WeightFormat.DENSE:
        return w.weight.double()
    O, scale = w.out_features, scales(w.scale)
    if w.format is WeightFormat.FP8:
        code, of_row = _looked_up(E4M3, w.weight), scale[..., torch.arange(O) // w.block[0], :]
        for columns, size in zip(code.split(w.block[1], -1), of_row.unbind(-1), strict=True):
            columns *= size.unsqueeze(-1)
        return code
    code = _looked_up(E2M1_PAIRS, w.weight).flatten(-2)
    if w.format is WeightFormat.NVFP4:
        part = torch.arange(O) // (O // w.global_scale.shape[-1])
        scale = scale * w.global_scale.double()[..., part].unsqueeze(-1)
    width = code.shape[-1] // scale.shape[-1]
    return code.unflatten(-1, (-1, width)).mul_(scale.unsqueeze(-1)).flatten(-2)


def scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales in fp64: E8M0 and E4M3 by their bytes, fp32 as they are."""
    if scale.dtype is torch.float32:
        return scale.double()
    return _looked_up(E8M0 if scale.dtype is torch.float8_e8m0fnu else E4M3, scale)


def _looked_up(table: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """Entries of a table [256, ...] for the bytes of a tensor."""
    index = byte.view(torch.uint8).flatten().int()
    return table.to(index.device).index_select(0, index).view(*byte.shape, *table.shape[1:])
