"""Compositions of products with adjacent operations of a decode step."""

import torch

from dsv4.kernels.linear.triton import grouped, products
from dsv4.kernels.linear.triton_streams import TOKENS
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize.weights import PackedWeight
from dsv4.kernels.rope.triton import rotate


def linears(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    weights: tuple[PackedWeight, ...],
    simulate: tuple[bool, ...],
    dtypes: tuple[torch.dtype | None, ...],
) -> tuple[torch.Tensor, ...]:
    """One launch for up to TOKENS tokens and SLOTS weights. For more, the norm and the rounding are launches of their
    own, then there is one launch for each weight."""
    return products("linears", x, norm, eps, weights, simulate, tuple(dtype or x.dtype for dtype in dtypes))


def project_heads(o: torch.Tensor, cis: torch.Tensor, w: PackedWeight, groups: int) -> torch.Tensor:
    """One launch for up to TOKENS tokens, two for more."""
    N, H, D = o.shape
    if N <= TOKENS and hold("project_heads", w).streams:
        turns = torch.view_as_real(cis.resolve_conj().expand(N, -1)).flatten(1)
        return grouped("project_heads", o.reshape(N, H * D), turns, D, w, groups)
    return grouped("project_heads", rotate(o, cis.unsqueeze(1)).reshape(N, H * D), None, D, w, groups)
