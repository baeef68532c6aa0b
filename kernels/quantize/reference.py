"""The official quantisation simulation of activations and caches."""

import torch

from dsv4.kernels.quantize.formats import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_log2,
    decode_e2m1,
    encode_e2m1,
    power_of_two,
    round_e4m3,
)
from dsv4.kernels.quantize.weights import FP4_AMAX_FLOOR, FP8_AMAX_FLOOR


def simulate_fp8_blocks(x: torch.Tensor, block: int, keep: int = 0) -> torch.Tensor:
    """Round x [..., K] to E4M3 in blocks of `block` along K (the last may be short), and back; the last `keep` columns
    stay.

    amax of the block, at least 1e-4; scale 2^⌈log2(amax/448)⌉; clamp ±448, round to nearest even.
    fp32 inside, result in x.dtype. Blocks of 128 for activations, of 64 for main KV, whose rotated columns are kept.
    """
    if keep:
        return torch.cat((simulate_fp8_blocks(x[..., :-keep], block), x[..., -keep:]), -1)
    scale_of = lambda amax: power_of_two(ceil_log2(amax.clamp_(min=FP8_AMAX_FLOOR) / E4M3_MAX))
    return _by_blocks(x, block, scale_of, lambda y: round_e4m3(y).float())


def simulate_fp4_blocks(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Round x [..., K] to E2M1 in blocks along K (the last may be short), and back.

    amax at least 6·2^−126; scale 2^⌈log2(amax/6)⌉; round to nearest even. Result in x.dtype.
    """
    scale_of = lambda amax: power_of_two(ceil_log2(amax.clamp_(min=FP4_AMAX_FLOOR) / E2M1_MAX))
    return _by_blocks(x, block, scale_of, lambda y: decode_e2m1(encode_e2m1(y)))


def _by_blocks(x: torch.Tensor, block: int, scale_of, round_to) -> torch.Tensor:
    K = x.shape[-1]
    y = torch.nn.functional.pad(x.float(), (0, -K % block)).unflatten(-1, (-1, block))
    scale = scale_of(y.abs().amax(-1, keepdim=True))
    return (round_to(y / scale) * scale).flatten(-2)[..., :K].to(x.dtype).contiguous()
