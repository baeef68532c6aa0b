"""KV_FP8: window rows and entries in FP8, their rotated columns in bf16."""

import torch
import torch.nn.functional as F

from dsv4.kernels.cache_rows.formats import KV_BLOCK, KV_FORM, PAGE, Layout, RowFormat, blocks
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.quantize.formats import E4M3_MAX, decode_e8m0, encode_e8m0, round_e4m3
from dsv4.kernels.quantize.weights import FP8_AMAX_FLOOR


class KVFP8(RowFormat):
    """FlashMLA's "MODEL1", vLLM's "fp8_ds_mla" of V4: 584 B a row at head_dim 512.

    448 E4M3, 64 bf16 (the rotated columns), then 7 E8M0 scales (one for 64 columns) and a byte of padding. A page is
    padded to a multiple of one row's payload (576 B). Keeps what went through `simulate_fp8_blocks(x, 64, rope)`.
    """

    name, value, option, simulated = "KV_FP8", "fp8 kv", "fp8", True
    form, bits, block = KV_FORM, 8, KV_BLOCK
    about = "{payload} bytes a row: E4M3 codes, then {rope} bf16 numbers; E8M0 scales of 64 columns"

    def layout(self, width: int, rope: int = 0) -> Layout:
        if rope % 2 or not 0 <= rope < width:
            raise UnsupportedInput(
                f"an FP8 cache row of {width} columns cannot keep {rope} of them in bf16; expected an even number "
                f"below {width}"
            )
        payload, scales = width - rope + 2 * rope, -(-(width - rope) // KV_BLOCK)
        scales = -(-scales // 8) * 8
        return Layout(payload, scales, -(-PAGE * (payload + scales) // payload) * payload)

    def encode(self, x: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
        D = x.shape[1] - rope
        codes, exponent = blocks(x[:, :D], KV_BLOCK, FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
        scales = encode_e8m0(exponent).view(torch.uint8)
        kept = x[:, D:].to(torch.bfloat16).view(torch.uint8)
        return torch.cat((codes[:, :D].view(torch.uint8), kept), 1), F.pad(scales, (0, -scales.shape[1] % 8))

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, width: int, rope: int) -> torch.Tensor:
        D = width - rope
        codes = payload[:, :D].contiguous().view(torch.float8_e4m3fn).float()
        scale = decode_e8m0(scales[:, : -(-D // KV_BLOCK)]).repeat_interleave(KV_BLOCK, 1)[:, :D]
        return torch.cat((codes * scale, payload[:, D:].contiguous().view(torch.bfloat16).float()), 1)


KV_FP8 = KVFP8()
