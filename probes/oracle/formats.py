"""Number formats (§2.2) from their definitions, decoders from bytes, and the quantisation simulation (§3), in
float64."""

import numpy as np
import torch


def e4m3_value(code: int) -> float:
    """Value of an E4M3 byte 0 … 255: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, all ones is
    NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1_value(code: int) -> float:
    """Value of an E2M1 code 0 … 15: sign, 2 bits of exponent (bias 1), 1 of mantissa; neither infinities nor NaN."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e8m0_value(code: int) -> float:
    """Value of an E8M0 byte: 2^(byte − 127), 255 is NaN."""
    return float("nan") if code == 255 else 2.0 ** (code - 127)


E4M3 = np.array([e4m3_value(c) for c in range(256)])
E2M1 = np.array([e2m1_value(c) for c in range(16)])
E8M0 = np.array([e8m0_value(c) for c in range(256)])


# ---- decoders ----------------------------------------------------------------------------------


def decode_fp8(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """E4M3 bytes [O, K] and scale values [⌈O/bo⌉, ⌈K/bk⌉] (already numbers) → float64 [O, K]."""
    (O, K), (bo, bk) = codes.shape, block
    row_block, column_block = np.arange(O) // bo, np.arange(K) // bk
    return E4M3[codes] * scale[row_block[:, None], column_block[None, :]]


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Bytes [O, K/2] of two E2M1 codes, E8M0 bytes [O, K/32] → float64 [O, K]."""
    return unpack_nibbles(packed) * np.repeat(E8M0[scale], 32, axis=1)


def decode_nvfp4(packed: np.ndarray, scale: np.ndarray, global_scale: float) -> np.ndarray:
    """Bytes [O, K/2] of two E2M1 codes, E4M3 bytes [O, K/16], one number → float64 [O, K]."""
    return unpack_nibbles(packed) * np.repeat(E4M3[scale], 16, axis=1) * global_scale


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes [O, K/2] → float64 [O, K]; the low nibble is the even index."""
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2], values[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    return values


# ---- quantisation simulation -------------------------------------------------------------------

E4M3_GRID = torch.from_numpy(E4M3[:127].copy())  # magnitudes by code; the last is 448
E2M1_GRID = torch.from_numpy(E2M1[:8].copy())  # 0 … 6
EXPONENTS = torch.arange(-140, 141)


def nearest(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Codes int64, without sign, of the numbers of ±grid nearest to float64 x: half way the even one, beyond an end the
    end."""
    size = x.abs().contiguous()
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)  # first of the grid that is not smaller
    below = (above - 1).clamp(min=0)
    up, down = (grid[above] - size).abs(), (size - grid[below]).abs()
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(take_above, above, below)


def round_to_grid(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The number of ±grid that is `nearest`. float64 in and out."""
    return torch.copysign(grid[nearest(x, grid)], x)


def scale_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The least power of two s with largest · s ≥ amax, i.e. 2^⌈log2(amax / largest)⌉."""
    powers = 2.0 ** EXPONENTS.double()
    return powers[torch.searchsorted(largest * powers, amax.contiguous())]


def simulate(x: torch.Tensor, block: int, grid: torch.Tensor, floor: float) -> torch.Tensor:
    """x [..., K] rounded to the grid with one power-of-two scale per `block` columns (the last may be short), and
    back."""
    out = torch.empty_like(x)
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block]
        scale = scale_of(part.abs().amax(-1, keepdim=True).clamp(min=floor), float(grid[-1]))
        out[..., start : start + block] = round_to_grid(part / scale, grid) * scale
    return out


def simulate_fp8(x: torch.Tensor, block: int = 128, keep: int = 0) -> torch.Tensor:
    """float64 x [..., K] through FP8 and back; the last `keep` columns stay. amax at least 1e-4."""
    K = x.shape[-1] - keep
    return torch.cat((simulate(x[..., :K], block, E4M3_GRID, 1e-4), x[..., K:]), -1)


def simulate_fp4(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """float64 x [..., K] through FP4 and back. amax at least 6·2^−126."""
    return simulate(x, block, E2M1_GRID, 6 * 2.0**-126)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """float64 x [..., D] · H · D^−0.5 with H[i, j] = (−1)^(number of ones in i AND j)."""
    D = x.shape[-1]
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)], dtype=x.dtype)
    return x @ matrix * D**-0.5
