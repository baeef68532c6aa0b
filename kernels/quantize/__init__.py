"""Number formats of weights, activations and caches."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.quantize import reference, training
from dsv4.kernels.quantize import triton as triton_kernels
from dsv4.kernels.quantize.formats import decode_e2m1, decode_e8m0, encode_e2m1, encode_e8m0, pack_e2m1, unpack_e2m1
from dsv4.kernels.quantize.weights import (
    InexactConversion,
    PackedWeight,
    WeightFormat,
    mxfp4_to_nvfp4,
    nvfp4_to_mxfp4,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    to_float,
)

simulate_fp8_blocks = Operation(
    "simulate_fp8_blocks",
    {
        "reference": reference.simulate_fp8_blocks,
        "training": training.simulate_fp8_blocks,
        "triton": triton_kernels.simulate_fp8_blocks,
    },
)
simulate_fp4_blocks = Operation(
    "simulate_fp4_blocks",
    {
        "reference": reference.simulate_fp4_blocks,
        "training": training.simulate_fp4_blocks,
        "triton": triton_kernels.simulate_fp4_blocks,
    },
)

__all__ = [
    "InexactConversion",
    "PackedWeight",
    "WeightFormat",
    "decode_e2m1",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e8m0",
    "mxfp4_to_nvfp4",
    "nvfp4_to_mxfp4",
    "pack_e2m1",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "simulate_fp4_blocks",
    "simulate_fp8_blocks",
    "to_float",
    "unpack_e2m1",
]
