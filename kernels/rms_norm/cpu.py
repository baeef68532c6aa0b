"""RMS norm of a single row on a host processor: the mean square as one scalar instead of four small tensors."""

import torch

from dsv4.kernels.rms_norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    D = x.shape[-1]
    if x.numel() != D:
        return reference.rms_norm(x, weight, eps)
    x32 = x.float()
    flat = x32.view(D)
    r = (torch.dot(flat, flat).item() / D + eps) ** -0.5
    y = x32 * r if weight is None else (x32 * weight).mul_(r)
    return y.to(x.dtype)


rms_norm.__doc__ = reference.rms_norm.__doc__
