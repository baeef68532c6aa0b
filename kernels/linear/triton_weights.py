"""Weights in the form that kernels take: contiguous bytes, a format name and static shapes."""

from typing import NamedTuple

import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat

BITS = {"fp32": 32, "bf16": 16, "fp8": 8, "mxfp4": 4, "nvfp4": 4}
DTYPES = (torch.bfloat16, torch.float32)


class Held(NamedTuple):
    """A weight [..., O, K]. scale uint8 (E8M0 or E4M3 bytes), fp32 (FP8) or None; glob fp32 [..., parts] of NVFP4 or
    None. of, exact_sums: as in `PackedWeight`."""

    format: str
    weight: torch.Tensor
    scale: torch.Tensor | None
    glob: torch.Tensor | None
    O: int
    K: int
    block: tuple[int, int]
    of: int | None = None
    exact_sums: bool = False

    @property
    def stack(self) -> int:
        """Matrices of the stack, or of the one whose slots these are."""
        return self.weight.shape[0] if self.of is None else self.of

    @property
    def words(self) -> torch.Tensor:
        return self.weight.view(torch.int32)

    @property
    def row_bytes(self) -> int:
        return self.weight.element_size() * self.weight.shape[-1]

    @property
    def parts(self) -> int:
        return 1 if self.glob is None else self.glob.shape[-1]

    @property
    def streams(self) -> bool:
        """Whether rows are whole 16-byte pieces, and blocks of scales whole slices of 128 columns, as `skinny`
        requires."""
        return self.K * BITS[self.format] % 128 == 0 and self.weight.data_ptr() % 16 == 0 and self.block[1] % 128 == 0


def hold(name: str, w: PackedWeight) -> Held:
    """Raises UnsupportedInput for dtypes that the kernels do not take."""
    weight, scale, glob = w.weight.contiguous(), w.scale, w.global_scale
    O, K = weight.shape[-2:]
    block = (1, 128)
    match w.format:
        case WeightFormat.DENSE:
            if weight.dtype not in DTYPES:
                raise UnsupportedInput(
                    f"{name}: a dense weight in {weight.dtype}; the triton backend takes bfloat16 and float32"
                )
            form = "fp32" if weight.dtype is torch.float32 else "bf16"
        case WeightFormat.FP8:
            if weight.dtype is not torch.float8_e4m3fn:
                raise UnsupportedInput(
                    f"{name}: an FP8 weight in {weight.dtype}; the triton backend takes float8_e4m3fn"
                )
            form, block = "fp8", w.block
            if scale.dtype not in (torch.float8_e8m0fnu, torch.float32):
                scale = scale.float()
        case WeightFormat.MXFP4:
            form, K = "mxfp4", 2 * K
        case WeightFormat.NVFP4:
            form, K, glob = "nvfp4", 2 * K, glob.float().contiguous()
    if scale is not None:
        scale = scale.contiguous()
        scale = scale if scale.dtype is torch.float32 else scale.view(torch.uint8)
    return Held(form, weight, scale, glob, O, K, block, w.of, w.exact_sums)


def check(name: str, x: torch.Tensor, K: int) -> torch.Tensor:
    """x [..., K] with adjacent columns. Raises UnsupportedInput for another dtype or width."""
    if x.dtype not in DTYPES:
        raise UnsupportedInput(f"{name}: x in {x.dtype}; the triton backend takes bfloat16 and float32")
    if x.shape[-1] != K:
        raise UnsupportedInput(f"{name}: x has {x.shape[-1]} columns, the weight {K}")
    return x if x.stride(-1) == 1 else x.contiguous()
