"""Modules that own a weight: matrices as stored (dense, FP8 blocks, MXFP4 or NVFP4), and norms."""

from dataclasses import dataclass

import torch
from torch import nn

from dsv4.errors import UnsupportedInput
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.quantize.coded import CodedRows
from dsv4.loaders.cuts import Cut
from dsv4.loaders.load import stored_cuts
from dsv4.model.module import Mapped, Module
from dsv4.model.numerics import Numerics


@dataclass(frozen=True)
class Storage:
    """How a matrix is held in memory. `scale` is the dtype of FP8's block scales."""

    format: WeightFormat = WeightFormat.DENSE
    dtype: torch.dtype = torch.float32
    scale: torch.dtype | None = None
    block: tuple[int, int] = (128, 128)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An uninitialised parameter: the loader poisons and fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Matrix(Module):
    """A matrix [..., O, K] and its scales, held as `storage` says.

    FP8: weight E4M3 [O, K], scale [⌈O/bo⌉, ⌈K/bk⌉] (E8M0 or fp32). MXFP4: weight uint8
    [..., O, K/2], scale E8M0 [..., O, K/32]. NVFP4: weight uint8 [..., O, K/2], scale E4M3
    [..., O, K/16], global_scale fp32 [..., parts].

    `stacked` names the official matrices that are stacked along O in equal parts; empty if the matrix is one of the
    file. `cut`: which part of that one this is, None for all of it. Raises UnsupportedInput for a cut within a block.
    `exact_sums` may be set: see `PackedWeight`.
    """

    def __init__(self, shape: tuple[int, ...], storage: Storage, stacked: tuple[str, ...] = (), cut: Cut | None = None):
        super().__init__()
        self.storage, self.stacked, self.cut = storage, stacked, cut and cut.partial
        self.cuts = stored_cuts(storage.format, storage.block, self.cut, "a matrix")
        parts = max(1, len(stacked))
        *lead, O, K = shape
        match storage.format:
            case WeightFormat.DENSE:
                self.weight = parameter(*shape, dtype=storage.dtype)
            case WeightFormat.FP8:
                bo, bk = storage.block
                if parts > 1 and O // parts % bo:
                    raise UnsupportedInput(
                        f"{parts} FP8 matrices of {O // parts} rows cannot be stacked: their blocks "
                        f"of {bo} rows would straddle two; expected a multiple of {bo} rows"
                    )
                self.weight = parameter(*shape, dtype=torch.float8_e4m3fn)
                self.scale = parameter(*lead, -(-O // bo), -(-K // bk), dtype=storage.scale)
            case WeightFormat.MXFP4:
                self.weight = parameter(*lead, O, K // 2, dtype=torch.uint8)
                self.scale = parameter(*lead, O, K // 32, dtype=torch.float8_e8m0fnu)
            case WeightFormat.NVFP4:
                self.weight = parameter(*lead, O, K // 2, dtype=torch.uint8)
                self.scale = parameter(*lead, O, K // 16, dtype=torch.float8_e4m3fn)
                self.global_scale = parameter(*lead, parts)
        self.quantised, self.exact_sums = storage.format is not WeightFormat.DENSE, False

    def packed(self) -> PackedWeight:
        """The matrix in the form that the products take."""
        held, storage = self._parameters, self.storage
        scales = held.get("scale"), held.get("global_scale")
        return PackedWeight(storage.format, held["weight"], *scales, storage.block, exact_sums=self.exact_sums)


class Linear(Matrix):
    """y = W x. In simulated numerics the activation of a quantised matrix is quantised too."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        storage: Storage,
        numerics: Numerics,
        op,
        stacked: tuple[str, ...] = (),
        cut: Cut | None = None,
    ):
        super().__init__((out_features, in_features), storage, stacked, cut)
        self.op = op
        self.simulate = numerics.simulate and self.quantised

    @property
    def takes_codes(self) -> bool:
        """Whether products may multiply the E4M3 codes of this matrix's input, if a kernel left them."""
        return self.simulate and not self.exact_sums and not self.watched

    def forward(self, x: torch.Tensor | Mapped | CodedRows, exact: bool = False) -> torch.Tensor:
        """x [N, in] → [N, out] in x.dtype. If `exact`, x is not quantised, and the result is the fp32 sum."""
        if isinstance(x, Mapped):
            return x.of(self, exact)
        if exact or isinstance(x, CodedRows):
            dtype = torch.float32 if exact else None
            return self.op.linears(x, None, 0.0, (self.packed(),), (self.simulate,), (dtype,))[0]
        return self.op.linear(x, self.packed(), self.simulate)


class RMSNorm(Module):
    """y = w · x · rsqrt(mean(x²) + eps), fp32 inside, one cast at the end."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, op):
        super().__init__()
        self.weight = parameter(dim, dtype=dtype)
        self.eps, self.op = eps, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] → same shape and dtype."""
        return self.op.rms_norm(x, self._parameters["weight"], self.eps)
