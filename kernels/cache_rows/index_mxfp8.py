"""INDEX_MXFP8: index keys in FP8 with a scale for 32 dims."""

import torch

from dsv4.kernels.cache_rows.formats import KEY_BLOCK, Layout, RowFormat, blocks, key_form, key_layout
from dsv4.kernels.quantize.formats import E4M3_MAX, decode_e8m0, encode_e8m0, round_e4m3
from dsv4.kernels.quantize.weights import FP8_AMAX_FLOOR


class IndexMXFP8(RowFormat):
    """132 B a key at 128 dims: 128 E4M3, then 4 E8M0 scales (one for 32 dims), as OCP Microscaling Formats (MX) 1.0
    defines MXFP8.

    A scale is the least power of two that keeps every value of its block up to 448, as in the other formats. The
    example of section 6.3 there rounds it down, and so clamps values between 448 and 512 times the scale.
    """

    name, value, option, simulated = "INDEX_MXFP8", "mxfp8 index keys", "mxfp8", False
    bits, block = 8, KEY_BLOCK
    form = key_form(bits, block)
    about = "{payload} E4M3 codes a row; E8M0 scales of 32 columns"

    def layout(self, width: int, rope: int = 0) -> Layout:
        return key_layout("MXFP8", width, self.bits)

    def encode(self, x: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, exponent = blocks(x, KEY_BLOCK, FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
        return codes.view(torch.uint8), encode_e8m0(exponent).view(torch.uint8)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, width: int, rope: int) -> torch.Tensor:
        codes = payload.contiguous().view(torch.float8_e4m3fn).float()
        return codes * decode_e8m0(scales.contiguous()).repeat_interleave(KEY_BLOCK, 1)


INDEX_MXFP8 = IndexMXFP8()
