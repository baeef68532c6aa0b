"""SwiGLU experts on a GPU.

Few tokens an expert (MEAN at most): the weights' bytes are the time, and they are streamed once for all tokens of an expert
(`triton_few`): sort, first product with SwiGLU, second product, sum; one token needs no sort. More tokens, and weights that
do not stream, go step by step through tiles (`triton_many`).
"""

import torch
import triton

from kernels.errors import UnsupportedInput
from kernels.experts import reference
from kernels.experts.triton_few import add_pairs, hide, project
from kernels.experts.triton_many import expert_product, gate_pairs
from kernels.experts.triton_order import FEW, blocks_of, sort_pairs
from kernels.launch import dot_in_fp32, next_power, processors, require_device
from kernels.linear.reference import ACTIVATION_BLOCK
from kernels.linear.triton import products, stages, tile_columns
from kernels.linear.triton_streams import TOKENS, warps
from kernels.linear.triton_weights import Held, check, hold
from kernels.quantize.triton import simulate_fp8_blocks
from kernels.quantize.weights import PackedWeight

MEAN = 8      # pairs an expert, on average, up to which weights are streamed
RESIDENT = 6  # programs a multiprocessor that share the tiles of many pairs
SUM_TILE = 1024


def experts(x: torch.Tensor, indices: torch.Tensor, routing: torch.Tensor, w13: PackedWeight, w2: PackedWeight, limit: float,
            simulate: bool) -> torch.Tensor:
    return _mixture("experts", x, (indices, routing, w13, w2), None, limit, simulate, False, torch.float32)


def shared_expert(x: torch.Tensor, w1: PackedWeight, w3: PackedWeight, w2: PackedWeight, limit: float, simulate: bool) -> torch.Tensor:
    return _mixture("shared_expert", x, None, (w1, w3, w2), limit, False, simulate, torch.float32)


def moe(x: torch.Tensor, indices: torch.Tensor, routing: torch.Tensor, w13: PackedWeight, w2: PackedWeight,
        shared: tuple[PackedWeight, PackedWeight, PackedWeight], limit: float, simulate: bool, simulate_shared: bool) -> torch.Tensor:
    """Routed experts plus the shared one (w1, w3, w2), summed in fp32 and cast once: x [N, d] → [N, d] in x.dtype."""
    return _mixture("moe", x, (indices, routing, w13, w2), shared, limit, simulate, simulate_shared, x.dtype)


experts.__doc__, shared_expert.__doc__ = reference.experts.__doc__, reference.shared_expert.__doc__


def _mixture(name, x, routed, shared, limit, simulate, simulate_shared, dtype) -> torch.Tensor:
    N, d = x.shape
    if routed is not None:
        indices, routing = (t.contiguous() for t in routed[:2])
        w13, w2 = (hold(name, w) for w in routed[2:])
        k, E, I = indices.shape[1], w13.weight.shape[0], w13.O // 2
        require_device(name, x, indices, routing, w13.weight, w13.scale, w13.glob, w2.weight, w2.scale, w2.glob)
        _same(name, x, w13, w2, simulate, w13.O, 2 * I)
    if shared is not None:
        w1, w3, w2s = (hold(name, w) for w in shared)
        require_device(name, x, *(t for h in (w1, w3, w2s) for t in (h.weight, h.scale, h.glob)))
        _same(name, x, w1, w2s, simulate_shared, w1.O, w3.O)
    x = check(name, x, d)
    out = torch.empty(N, d, dtype=dtype, device=x.device)
    if not N:
        return out
    fuse = shared is not None and N <= TOKENS and w1.streams and w3.streams and w2s.streams and _alike(w1, w3)
    stream = routed is None or (_gates(w13) and w2.streams and indices.numel() <= MEAN * E)
    y = ys = None
    if (routed is None or stream) and (shared is None or fuse):
        y, ys = _few(x, None if routed is None else (indices, routing, w13, w2), None if shared is None else (w1, w3, w2s), limit,
                     simulate, simulate_shared, out if routed is None else None)
    else:
        if routed is not None:
            y = _few(x, (indices, routing, w13, w2), None, limit, simulate, False, None)[0] if stream \
                else _many(name, x, indices, routing, w13, w2, limit, simulate)
        if shared is not None:
            ys = _shared(name, x, shared, limit, simulate_shared, out if routed is None else None)
    if routed is not None:
        block = min(SUM_TILE, next_power(d))
        add_pairs[(N, triton.cdiv(d, block))](y, ys, out, d, k, block, num_warps=4)
    return out


def _same(name: str, x: torch.Tensor, first: Held, second: Held, simulate: bool, rows: int, other: int) -> None:
    """Raises UnsupportedInput for shapes that do not belong together, and for dense weights that are to be simulated."""
    if simulate and (first.scale is None or second.scale is None):
        raise UnsupportedInput("activations are quantised for FP8 and FP4 weights only; this weight is dense")
    if rows != other or first.K != x.shape[1] or second.O != x.shape[1] or second.K * (2 if first.weight.dim() == 3 else 1) != rows:
        raise UnsupportedInput(f"{name}: x of {x.shape[1]} columns, first weight {tuple(first.weight.shape)} in {first.format}, second "
                               f"{tuple(second.weight.shape)} in {second.format} do not belong together")


def _gates(w: Held) -> bool:
    """Whether the halves of a stack (gate, up) begin on blocks of their scales, and rows stream."""
    return w.streams and w.O // 2 % (w.block[0] if w.format == "fp8" else 1) == 0 and w.parts in (1, 2)


def _alike(a: Held, b: Held) -> bool:
    return (a.format, a.block, a.parts, a.scale is None or a.scale.dtype) == (b.format, b.block, b.parts, b.scale is None or b.scale.dtype) \
        and a.parts == 1


# Few tokens an expert ------------------------------------------------------------------------------------------------


def _few(x, routed, shared, limit, simulate, simulate_shared, out) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows of the pairs [P, d] in x.dtype and of the shared expert [N, d], in x.dtype or into `out`. Up to three launches."""
    (N, d), device = x.shape, x.device
    new = lambda *shape: torch.empty(*shape, dtype=x.dtype, device=device)
    order = table = rounded = indices = routing = h = y = hs = ys = None
    nh = nh_s = 1 if N <= 8 else 2
    w13 = w2 = w1 = w3 = w2s = None
    blocks = k = E = I = I_s = 1
    fp32 = fp32_s = dot_in_fp32(x)
    if routed is not None:
        indices, routing, w13, w2 = routed
        k, E, I = indices.shape[1], w13.weight.shape[0], w2.K
        P, fp32 = N * k, fp32 or w13.format == "fp32" or w2.format == "fp32"
        nh = 1 if N <= 8 or P <= 2 * E else 2
        blocks = k if N == 1 else blocks_of(P, E, 8 * nh)
        if N > 1:
            order, table, rounded = sort_pairs(indices, E, 8 * nh, x if simulate else None)
        h, y = new(P, I), new(P, d)
    if shared is not None:
        w1, w3, w2s = shared
        I_s, fp32_s = w2s.K, fp32_s or w1.format == "fp32" or w2s.format == "fp32"
        hs, ys = new(N, I_s), new(N, d) if out is None else out

    def constants(w: Held | None, sim: bool, single: bool) -> tuple:
        """(RH, FORMAT, FP32, BO, BK, SIMULATE) of a launch's weight."""
        if w is None:
            return 2, "bf16", False, 1, 128, False
        return row_groups(w, sim, single, nh if w.weight.dim() == 3 else nh_s), w.format, single, *w.block, sim

    def shape(rows: int, columns: int, rows_shared: int, columns_shared: int, height: int, rh: int, rh_s: int) -> tuple[int, int]:
        """Programs and warps of a launch; `height`: rows of a group that a tile makes."""
        tiles = (0 if routed is None else blocks * triton.cdiv(rows, height * rh)) + \
            (0 if shared is None else triton.cdiv(rows_shared, height * rh_s))
        narrowest = min(columns if routed is not None else columns_shared, columns_shared if shared is not None else columns)
        ks = warps(narrowest, fp32 or fp32_s, tiles, rh, device)
        return tiles if N * k <= 128 else min(tiles, RESIDENT * processors(device)), ks

    xs = rounded if simulate_shared and rounded is not None else x
    xr = x if rounded is None else rounded
    rh, *rest = constants(w13, simulate and rounded is None, fp32)
    rh_s, *rest_s = constants(w1, simulate_shared and rounded is None, fp32_s)
    programs, ks = shape(I, d, I_s, d, 4, rh, rh_s)
    hide[(programs,)](
        xr, xr.stride(0), xs, xs.stride(0), N, indices, order, table, routing, *_tensors(w13), h, _words(w1), _words(w3), *_pair(w1, w3, "scale"),
        *_pair(w1, w3, "glob"), hs, float(limit), blocks, k, 2 * I, I, d, nh, ks, rh, *rest, *_sizes(w13), I_s, rh_s, *rest_s, nh_s,
        num_warps=ks, num_stages=1)
    rh, *rest = constants(w2, simulate, fp32)
    rh_s, *rest_s = constants(w2s, simulate_shared, fp32_s)
    programs, ks = shape(d, I, d, I_s, 8, rh, rh_s)
    project[(programs,)](
        h, N, indices, order, table, *_tensors(w2), y, hs, *_tensors(w2s), ys, blocks, d, I, nh, ks, rh, *rest, *_sizes(w2), I_s, rh_s,
        *rest_s, 1 if w2s is None else w2s.parts, nh_s, num_warps=ks, num_stages=1)
    return y, ys


def row_groups(w: Held, busy: bool, fp32: bool, nh: int) -> int:
    """Groups of 8 rows of a tile: there are many tiles, so as many as registers hold. busy: x is quantised on the way, which
    costs the same for few rows as for many."""
    if fp32 or w.format in ("bf16", "fp32"):
        return 2
    return 8 if busy and nh == 1 and w.format == "mxfp4" else 4 if nh == 1 or w.format != "fp8" else 2


def _words(w: Held | None) -> torch.Tensor | None:
    return None if w is None else w.words


def _tensors(w: Held | None) -> tuple:
    return (None, None, None) if w is None else (w.words, w.scale, w.glob)


def _pair(a: Held | None, b: Held | None, name: str) -> tuple:
    return (None, None) if a is None else (getattr(a, name), getattr(b, name))


def _sizes(w: Held | None) -> tuple[int, int, int]:
    """Words, scales and global scales of one matrix of a stack."""
    if w is None:
        return 1, 1, 1
    return w.words.shape[-2] * w.words.shape[-1], 1 if w.scale is None else w.scale.shape[-2] * w.scale.shape[-1], w.parts


# Many tokens ---------------------------------------------------------------------------------------------------------


def _many(name: str, x, indices, routing, w13: Held, w2: Held, limit: float, simulate: bool) -> torch.Tensor:
    """Rows of the pairs [P, d] in x.dtype: sort, product, SwiGLU, product, with the roundings of `simulate` between."""
    (N, d), k, E, I = x.shape, indices.shape[1], w13.weight.shape[0], w2.K
    P = N * k
    fp32 = dot_in_fp32(x) or w13.format == "fp32" or w2.format == "fp32"
    bt = next(t for t in (16, 32, 64, 128) if t >= min(2 * P // E, 32 if fp32 else 128))
    order, table, rounded = sort_pairs(indices, E, bt, x if simulate else None)
    x = rounded if simulate else x
    y = torch.empty(P, 2 * I, dtype=x.dtype, device=x.device)
    _tiles(name, x, w13, y, order, table, k, bt, fp32)
    h, block = torch.empty(P, I, dtype=x.dtype, device=x.device), min(SUM_TILE, next_power(I))
    gate_pairs[(P, triton.cdiv(I, block))](y, y[:, I:], 2 * I, routing, h, float(limit), I, block, num_warps=4)
    if simulate:
        h = simulate_fp8_blocks(h, ACTIVATION_BLOCK)
    y = torch.empty(P, d, dtype=x.dtype, device=x.device)
    _tiles(name, h, w2, y, order, table, 1, bt, fp32)
    return y


def _tiles(name: str, x: torch.Tensor, w: Held, y: torch.Tensor, order, table, each: int, bt: int, fp32: bool) -> None:
    P, E = y.shape[0], w.weight.shape[0]
    bo, blocks = 32 if fp32 else 128 if bt >= 64 else 64, blocks_of(P, E, bt)
    weight = w.weight.view(torch.uint8) if w.format == "fp8" else w.weight
    scales = 1 if w.scale is None else w.scale.shape[-2] * w.scale.shape[-1]
    expert_product[(triton.cdiv(w.O, bo), blocks)](
        x, x.stride(0), order, table, weight, w.scale, w.glob, y, blocks, each, w.O, w.K, bo, bt, tile_columns(name, w, fp32), w.format,
        fp32, *w.block, weight.shape[-2] * weight.shape[-1], scales, w.parts, num_warps=8 if bo * bt > 8192 else 4,
        num_stages=1 if fp32 else stages(x.device))


def _shared(name: str, x, shared, limit: float, simulate: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The shared expert [N, d] in x.dtype, or, rounded to it, into `out`: two products, SwiGLU, product."""
    w1, w3, w2 = shared
    gate, up = products(name, x, None, 0.0, (w1, w3), (simulate, simulate), (x.dtype, x.dtype))
    N, I = gate.shape
    h, block = torch.empty_like(gate), min(SUM_TILE, next_power(I))
    gate_pairs[(N, triton.cdiv(I, block))](gate, up, I, None, h, float(limit), I, block, num_warps=4)
    y = products(name, h, None, 0.0, (w2,), (simulate,), (x.dtype,))[0]
    return y if out is None else out.copy_(y)
