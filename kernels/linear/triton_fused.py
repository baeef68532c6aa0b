"""Compositions of products with adjacent operations of a decode step."""

import torch

from dsv4.kernels.linear import triton_batch as batch
from dsv4.kernels.linear.triton import grouped, products
from dsv4.kernels.linear.triton_streams import TOKENS
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize.coded import CodedRows, Rows, plain
from dsv4.kernels.quantize.weights import PackedWeight
from dsv4.kernels.rope.triton import rotate


def linears(
    x: Rows,
    norm: torch.Tensor | None,
    eps: float,
    weights: tuple[PackedWeight, ...],
    simulate: tuple[bool, ...],
    dtypes: tuple[torch.dtype | None, ...],
) -> tuple[torch.Tensor, ...]:
    """One launch for up to TOKENS tokens and SLOTS weights; for up to `triton_batch.MOST` tokens another one for the
    rounding. For more, the norm, too, is a launch of its own, and there is one or two for each weight."""
    return products("linears", x, norm, eps, weights, simulate, tuple(dtype or plain(x).dtype for dtype in dtypes))


def project_heads(
    o: torch.Tensor, cis: torch.Tensor, w: PackedWeight, groups: int, coded: bool = False
) -> torch.Tensor | CodedRows:
    """One launch for up to TOKENS tokens, and for up to `triton_batch.MOST` where its tiles divide heads; for others
    two, or three. Of `coded` tokens those are left with codes for which there is one launch of tiles."""
    (N, H, D), half = o.shape, cis.shape[-1]
    h = hold("project_heads", w)
    if h.streams and N <= TOKENS or batch.turns_within(h, o, groups, D, 2 * half):
        turns = torch.view_as_real(cis.resolve_conj().expand(N, -1)).flatten(1)
        return grouped("project_heads", o.reshape(N, H * D), turns, D, w, groups, coded)
    return grouped("project_heads", rotate(o, cis.unsqueeze(1)).reshape(N, H * D), None, D, w, groups)
