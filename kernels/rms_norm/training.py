"""RMS norm through torch's fused one."""

import torch
import torch.nn.functional as F

from kernels.rms_norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


rms_norm.__doc__ = reference.rms_norm.__doc__
