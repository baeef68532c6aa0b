"""Rotary position embedding on the last dimensions, interleaved pairs."""

import math

import torch


def inverse_frequencies(rope_dim: int, theta: float, yarn=None) -> torch.Tensor:
    """Frequencies f_i = θ^(−2i/d) of the d/2 pairs, YaRN-interpolated if `yarn` is given.

    yarn: object with factor, beta_fast, beta_slow, original_max_position_embeddings.
    c(n) = d·ln(L/(2πn)) / (2 ln θ); low = max(⌊c(beta_fast)⌋, 0), high = min(⌈c(beta_slow)⌉, d−1);
    f_i ← f_i/factor·ramp + f_i·(1−ramp), ramp = clip((i−low)/(high−low), 0, 1). No mscale in V4.
    Returns fp32 [d/2] in host memory.
    """
    f = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim)
    if yarn is None:
        return f

    def corrected_dim(rotations: float) -> float:
        return (
            rope_dim
            * math.log(yarn.original_max_position_embeddings / (2 * math.pi * rotations))
            / (2 * math.log(theta))
        )

    low = max(math.floor(corrected_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(corrected_dim(yarn.beta_slow)), rope_dim - 1)
    # Beyond the last pair low may exceed high; the ramp then falls, as in the official code and in transformers.
    span = high - low if high != low else 0.001  # a ramp of width 0 would divide by zero
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return f / yarn.factor * ramp + f * (1 - ramp)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """e^{i·pos·f}: positions [...] integer, frequencies [d/2] fp32 → complex64 [..., d/2]."""
    angle = positions.unsqueeze(-1).float() * frequencies
    return torch.complex(angle.cos(), angle.sin())


def rotate(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Rotate the last d dims of x by `cis`, pair (2i, 2i+1) as one complex number. In place.

    x [..., D] contiguous; cis complex64 [..., d/2], broadcastable. The inverse rotation is
    the conjugate of `cis`. Arithmetic in fp32, stored back in x.dtype. Returns x.
    """
    half = cis.shape[-1]
    if x.dtype is torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))[..., -half:].mul_(cis)
    else:
        tail = x[..., -2 * half :]
        pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
        tail.copy_(torch.view_as_real(pairs * cis).flatten(-2))
    return x
