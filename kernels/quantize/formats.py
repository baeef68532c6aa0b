"""Scalar codes: E8M0, E4M3 and E2M1, decoded and encoded bit by bit."""

import torch

from dsv4.kernels.tables import table

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (float8_e8m0fnu or uint8) → fp32 2^(byte − 127); byte 255 is NaN.

    Built from the bits: a numeric cast of the byte, or of the value to an integer, is the
    classic mistake. Byte 0 is 2^−127, an fp32 subnormal.
    """
    byte = (scale if scale.dtype is torch.uint8 else scale.view(torch.uint8)).to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


def encode_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Integer exponents −127 … 127 → E8M0 bytes as float8_e8m0fnu."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """⌈log2 x⌉ of positive fp32 x, exact at powers of two and on subnormals. int32."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa · 2^exponent, mantissa in [0.5, 1)
    return exponent - (mantissa == 0.5).to(torch.int32)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 2^exponent for integer exponents −127 … 127."""
    return decode_e8m0((exponent + 127).to(torch.uint8))


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 → E4M3, clamped to ±448, round to nearest even."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 → E2M1 codes uint8 0 … 15, saturating at ±6, ties to the even code. NaN is not representable."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, (low, high) in enumerate(zip(E2M1_VALUES, E2M1_VALUES[1:])):
        middle = (low + high) / 2  # a tie goes to the even code: up if `lower` is odd
        code += (magnitude >= middle) if lower % 2 else (magnitude > middle)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (integer 0 … 15) → fp32."""
    return _values(code.device).index_select(0, code.flatten().int()).view(code.shape)


def pack_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] → bytes [..., K/2]; the low nibble is the even index."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., K/2] → fp32 values [..., K]; the low nibble is the even index."""
    pairs = _pairs(packed.device)
    return pairs.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], 2 * packed.shape[-1])


@table
def _values(device: torch.device) -> torch.Tensor:
    """The value of each E2M1 code: fp32 [16]."""
    return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=device)


@table
def _pairs(device: torch.device) -> torch.Tensor:
    """Both values of each byte of E2M1 codes: fp32 [256, 2]."""
    byte = torch.arange(256, device=device)
    return torch.stack((decode_e2m1(byte & 15), decode_e2m1(byte >> 4)), -1)
