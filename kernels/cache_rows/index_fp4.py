"""INDEX_FP4: index keys in FP4 with a scale for 32 dims."""

import torch

from dsv4.kernels.cache_rows.formats import KEY_BLOCK, Layout, RowFormat, blocks, key_form, key_layout
from dsv4.kernels.quantize.formats import E2M1_MAX, decode_e8m0, encode_e2m1, encode_e8m0, pack_e2m1, unpack_e2m1
from dsv4.kernels.quantize.weights import FP4_AMAX_FLOOR


class IndexFP4(RowFormat):
    """68 B a key at 128 dims: 64 B of E2M1 pairs (low nibble even), then 4 E8M0 scales (one for 32 dims). Keeps what
    went through `simulate_fp4_blocks(x, 32)`."""

    name, value, option, simulated = "INDEX_FP4", "fp4 index keys", "fp4", True
    bits, block = 4, KEY_BLOCK
    form = key_form(bits, block)
    about = "{payload} bytes of E2M1 pairs a row, low nibble first; E8M0 scales of 32 columns"

    def layout(self, width: int, rope: int = 0) -> Layout:
        return key_layout("FP4", width, self.bits)

    def encode(self, x: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, exponent = blocks(x, KEY_BLOCK, FP4_AMAX_FLOOR, E2M1_MAX, encode_e2m1)
        return pack_e2m1(codes), encode_e8m0(exponent).view(torch.uint8)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, width: int, rope: int) -> torch.Tensor:
        return unpack_e2m1(payload) * decode_e8m0(scales.contiguous()).repeat_interleave(KEY_BLOCK, 1)


INDEX_FP4 = IndexFP4()
