"""SwiGLU experts on a GPU.

With few tokens, in all (TOKENS at most) or per expert (MEAN), reading the weights takes the time. They are streamed
once for all tokens of an expert (`triton_decode`): sort, gate and up projection with SwiGLU, down projection, sum; one
token needs no sort. More tokens, and weights that cannot be streamed, go step by step through tiles (`triton_prefill`).

In official numerics Hopper multiplies the codes themselves (`hopper_launch`), for any number of tokens: a token alone
has the bits that it has among others, so that text with drafts is that of plain decoding. With up to
`hopper_launch.BESIDE` tokens that holds for the shared expert too, in FP8, whose tiles are in the same launches.
"""

from typing import Any

import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.experts import hopper_launch, reference
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.experts.triton_prefill import tile_experts, tile_shared
from dsv4.kernels.experts.triton_stream import Routed, Shared, stream_experts
from dsv4.kernels.launch import require_device
from dsv4.kernels.linear.triton_streams import TOKENS
from dsv4.kernels.linear.triton_weights import Held, check, hold
from dsv4.kernels.quantize.weights import PackedWeight

# Pairs an expert, on average, up to which weights are streamed. With more, tiles take less: of Flash's experts on an
# H200 96, 128 and 256 tokens took 1535, 1654 and 1743 µs as streams, and 384 tokens in tiles, which read as much, 1320.
MEAN = 1.5
BESIDE = 4 * TOKENS  # tokens up to which the shared expert is streamed beside experts, whose weights take more time


def experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    routing: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    limit: float,
    simulate: bool,
) -> torch.Tensor:
    return _mixture("experts", x, (indices, routing, w13, w2), None, limit, simulate, False, torch.float32)


def shared_expert(
    x: torch.Tensor, w1: PackedWeight, w3: PackedWeight, w2: PackedWeight, limit: float, simulate: bool
) -> torch.Tensor:
    return _mixture("shared_expert", x, None, (w1, w3, w2), limit, False, simulate, torch.float32)


def moe(
    x: torch.Tensor,
    indices: torch.Tensor,
    routing: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    shared: tuple[PackedWeight, PackedWeight, PackedWeight],
    limit: float,
    simulate: bool,
    simulate_shared: bool,
    dtype: torch.dtype | None = None,
    combine: bool = True,
) -> torch.Tensor | ExpertRows:
    """Routed experts plus the shared one (w1, w3, w2), summed in fp32 and cast once: x [N, d] → [N, d] in dtype (None:
    of x). Without `combine` the rest of the sum may be left to who reads the result: it is fp32, or `ExpertRows`."""
    wanted = (dtype or x.dtype) if combine else None
    return _mixture("moe", x, (indices, routing, w13, w2), shared, limit, simulate, simulate_shared, wanted)


experts.__doc__, shared_expert.__doc__ = reference.experts.__doc__, reference.shared_expert.__doc__


def _mixture(
    name: str,
    x: torch.Tensor,
    routed: tuple | None,
    shared: tuple | None,
    limit: float,
    simulate: bool,
    simulate_shared: bool,
    dtype: torch.dtype | None,
) -> Any:
    """Σ over the routed experts (indices, routing, w13, w2) and the shared one (w1, w3, w2), of those that are not
    None; with dtype None the `ExpertRows` of it."""
    N, d = x.shape
    x = check(name, x, d)
    require_device(name, x)
    pairs = _routed(name, x, routed, simulate)
    beside = _shared(name, x, shared, simulate_shared)
    if not N:
        return torch.empty(0, d, dtype=dtype or torch.float32, device=x.device)
    coded = pairs is not None and simulate and hopper_launch.unfit(x, pairs) is None
    few = pairs is not None and not coded and (N <= TOKENS or pairs.indices.numel() <= MEAN * pairs.w13.stack)
    streams = few and pairs.streams
    joined = coded and beside is not None and simulate_shared and hopper_launch.joins(x, beside)
    fused = beside is not None and not joined and beside.streams and N <= (BESIDE if streams else TOKENS)
    y = ys = None
    if streams or fused:
        given = pairs if streams else None, beside if fused else None
        y, ys = stream_experts(x, *given, limit, simulate, simulate_shared)
    if coded:
        y, of_shared = hopper_launch.multiply_codes(x, pairs, limit, beside if joined else None)
        ys = of_shared if joined else ys
    elif pairs is not None and not streams:
        y = tile_experts(name, x, pairs, limit, simulate)
    if shared is not None and not fused and not joined:
        ys = tile_shared(name, x, shared, limit, simulate_shared)
    if pairs is None:
        return ys
    rows = ExpertRows(y, pairs.indices, ys)
    return rows if dtype is None else rows.combine(dtype)


def _routed(name: str, x: torch.Tensor, routed: tuple | None, simulate: bool) -> Routed | None:
    if routed is None:
        return None
    indices, routing = (t.contiguous() for t in routed[:2])
    w13, w2 = (hold(name, w) for w in routed[2:])
    require_device(name, indices, routing, w13.weight, w13.scale, w13.glob, w2.weight, w2.scale, w2.glob)
    _refuse(name, x, w13, w2, 2 * w2.K, simulate)
    return Routed(indices, routing, w13, w2)


def _shared(name: str, x: torch.Tensor, shared: tuple | None, simulate: bool) -> Shared | None:
    if shared is None:
        return None
    w1, w3, w2 = (hold(name, w) for w in shared)
    require_device(name, *(t for h in (w1, w3, w2) for t in (h.weight, h.scale, h.glob)))
    _refuse(name, x, w1, w2, w2.K, simulate)
    _refuse(name, x, w3, w2, w2.K, simulate)
    return Shared(w1, w3, w2)


def _refuse(name: str, x: torch.Tensor, first: Held, second: Held, rows: int, simulate: bool) -> None:
    """Raises UnsupportedInput for simulation with dense weights, and for shapes that do not fit together."""
    if simulate and (first.scale is None or second.scale is None):
        raise UnsupportedInput("activations are quantised for FP8 and FP4 weights only; this weight is dense")
    if first.O != rows or first.K != x.shape[1] or second.O != x.shape[1]:
        raise UnsupportedInput(
            f"{name}: x of {x.shape[1]} columns, first weight {tuple(first.weight.shape)} in {first.format} "
            f"and second {tuple(second.weight.shape)} in {second.format} do not belong together"
        )
