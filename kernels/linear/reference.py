"""Products with a weight as stored. Quantised weights are dequantised tile by tile."""

import torch
import torch.nn.functional as F

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.quantize.kept import dequantised
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat

ACTIVATION_BLOCK = 128
SCRATCH_BYTES = 4 << 20  # of one dequantised tile


def linear(x: torch.Tensor, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    """y = x Wᵀ: x [N, K] → [N, O] in x.dtype; products accumulate in fp32, one rounding.

    simulate: quantise x to FP8 in blocks of 128 first, as the official kernels do for FP8 and FP4 weights. Raises
    UnsupportedInput for a dense weight.
    """
    if w.format is WeightFormat.DENSE:
        if simulate:
            raise UnsupportedInput("activations are quantised for FP8 and FP4 weights only; this weight is dense")
        if w.weight.dtype is x.dtype:
            return F.linear(x, w.weight)
    if simulate:
        x = simulate_fp8_blocks(x, ACTIVATION_BLOCK)
    x32 = x.float()
    out = torch.empty(x.shape[0], w.out_features, dtype=x.dtype, device=x.device)
    for rows in row_tiles(w):
        out[:, rows] = F.linear(x32, dequantised(w, rows)).to(x.dtype)
    return out


def grouped_linear(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """Block-diagonal product: x [N, G, K], W [G·R, K] → [N, G, R]; group g meets rows g·R … (g+1)·R.

    fp32 accumulation, result in x.dtype. Activations are never quantised here (wo_a).
    """
    N, G, K = x.shape
    R = w.out_features // G
    if w.format is WeightFormat.DENSE and w.weight.dtype is x.dtype:
        return torch.bmm(x.transpose(0, 1), w.weight.view(G, R, K).transpose(1, 2)).transpose(0, 1)
    y = torch.empty(N, G, R, dtype=x.dtype, device=x.device)
    x32, flat = x.float(), y.view(N, G * R)
    for rows in row_tiles(w):
        tile = dequantised(w, rows)
        # a tile may span several groups, and a group several tiles
        for g in range(rows.start // R, -(-rows.stop // R)):
            start, stop = max(rows.start, g * R), min(rows.stop, (g + 1) * R)
            part = tile[start - rows.start : stop - rows.start]
            flat[:, start:stop] = F.linear(x32[:, g], part).to(x.dtype)
    return y


def row_tiles(w: PackedWeight):
    """Slices of O whose dequantised tile is at most SCRATCH_BYTES, on boundaries of FP8 blocks."""
    columns = w.weight.shape[-1] * (2 if w.weight.dtype is torch.uint8 else 1)
    step = max(1, SCRATCH_BYTES // (4 * columns))
    step = max(w.block[0], step // w.block[0] * w.block[0])
    for start in range(0, w.out_features, step):
        yield slice(start, min(start + step, w.out_features))
