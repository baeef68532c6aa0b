"""INDEX_FP8: index keys in FP8 with one scale a key."""

import torch

from dsv4.kernels.cache_rows.formats import PAGE, Layout, RowFormat, blocks, key_form
from dsv4.kernels.quantize.formats import E4M3_MAX, power_of_two, round_e4m3
from dsv4.kernels.quantize.weights import FP8_AMAX_FLOOR


class IndexFP8(RowFormat):
    """132 B a key at 128 dims: 128 E4M3, then one fp32 scale, a power of two."""

    name, value, option, simulated = "INDEX_FP8", "fp8 index keys", "fp8", False
    bits, block = 8, 0
    form = key_form(bits, block)
    about = "{payload} E4M3 codes a row; one fp32 scale each"

    def layout(self, width: int, rope: int = 0) -> Layout:
        return Layout(width, 4, PAGE * (width + 4))

    def encode(self, x: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, exponent = blocks(x, x.shape[1], FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
        return codes.view(torch.uint8), power_of_two(exponent).contiguous().view(torch.uint8)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, width: int, rope: int) -> torch.Tensor:
        return payload.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)


INDEX_FP8 = IndexFP8()
