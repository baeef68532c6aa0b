"""RMS normalisation."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """y = w · x · rsqrt(mean(x²) + eps) over the last axis, in fp32 with one cast at the end.

    x [..., D] any float dtype; weight [D] or None (the weightless norm of the query heads).
    Returns [..., D] in x.dtype.
    """
    x32 = x.float()
    y = x32 * x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight is not None:
        y = y * weight
    return y.to(x.dtype)
