"""Launches of `triton_decode`: the number and shape of programs, for the routed experts, the shared one, or both."""

from typing import NamedTuple

import torch
import triton

from dsv4.kernels.experts.triton_decode import down, gate_up
from dsv4.kernels.experts.triton_order import blocks_of, sort_pairs
from dsv4.kernels.launch import dot_in_fp32, processors
from dsv4.kernels.linear.triton_streams import TOKENS, apart, early, warps
from dsv4.kernels.linear.triton_weights import Held

DYNAMIC = 512  # pairs up to which every possible tile has a program, so that the hardware balances them
REGISTERS = 128  # registers a thread, which leave room for 8 programs of two warps on a multiprocessor
RESIDENT = 6  # programs a multiprocessor that share the tiles of more pairs, because many of those tiles may not exist


class Routed(NamedTuple):
    """indices int64 [N, k], routing fp32 [N, k], w13 [E, 2I, d], w2 [E, d, I]."""

    indices: torch.Tensor
    routing: torch.Tensor
    w13: Held
    w2: Held

    @property
    def streams(self) -> bool:
        """Whether rows can be streamed, and the halves of w13 (gate, up) begin on blocks of its scales."""
        w = self.w13
        return w.streams and self.w2.streams and (w.format != "fp8" or w.O // 2 % w.block[0] == 0) and w.parts in (1, 2)


class Shared(NamedTuple):
    """w1, w3 [I, d], w2 [d, I]."""

    w1: Held
    w3: Held
    w2: Held

    @property
    def streams(self) -> bool:
        """Whether rows can be streamed, and w1 and w3 are of one kind."""
        a, b = self.w1, self.w3
        kind = lambda h: (h.format, h.block, h.parts, h.scale is None or h.scale.dtype)
        return a.streams and b.streams and self.w2.streams and kind(a) == kind(b) and a.parts == 1


class Part(NamedTuple):
    """One weight of a launch, with its compile-time constants. height: rows of a result from a group of 8 weight rows
    (8, or 4 of the gate and 4 up). apart: see `triton_skinny`."""

    weight: Held
    simulate: bool
    nh: int
    fp32: bool
    height: int
    apart: bool

    @property
    def groups(self) -> int:
        """Groups of 8 rows of a tile: as many as registers hold, because there are many tiles. Quantising x in the
        kernel costs as much for few rows as for many, so it pays to use twice the registers."""
        form = self.weight.format
        if self.fp32 or form in ("bf16", "fp32"):
            return 2
        if form == "mxfp4" and self.simulate and self.nh == 1 and not self.apart:
            return 8
        return 2 if form == "fp8" and not (self.simulate and self.nh == 1) else 4

    @property
    def constants(self) -> tuple:
        return self.groups, self.weight.format, self.fp32, *self.weight.block, self.simulate, self.apart

    def tiles(self, rows: int, tokens: int = 1) -> int:
        """Tiles of so many results of a weight, each for 8 · nh of the tokens."""
        return triton.cdiv(rows, self.height * self.groups) * triton.cdiv(tokens, 8 * self.nh)


ABSENT = (2, "bf16", False, 1, 128, False, False)  # constants of a part that a launch lacks


def stream_experts(
    x: torch.Tensor,
    routed: Routed | None,
    shared: Shared | None,
    limit: float,
    simulate: bool,
    simulate_shared: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows of the pairs [P, d] in x.dtype and of the shared expert fp32 [N, d]. With up to TOKENS tokens each token has
    the bits that it has alone (a shared expert in MXFP4: from three tokens on). The shared expert's weights are read
    again for each TOKENS tokens, by programs that run side by side, so mostly from the L2 cache.

    Two launches, three if there are pairs to sort.
    """
    (N, d), new = x.shape, lambda *shape: torch.empty(*shape, dtype=x.dtype, device=x.device)
    few = 1 if N <= 8 else 2
    order = table = rounded = h = y = hs = ys = indices = routing = first = second = shared_first = shared_second = None
    blocks = k = I = shared_I = nh = 1
    if routed is not None:
        indices, routing, w13, w2 = routed
        (_, k), E, I = indices.shape, w13.stack, w2.K
        fp32 = dot_in_fp32(x) or "fp32" in (w13.format, w2.format)
        nh = 1 if N * k <= 2 * E else few
        split = (nh == 1 or N <= TOKENS) and apart(w13, fp32, 1) and apart(w2, fp32, 1)
        nh = 1 if split else nh
        blocks = k if N == 1 else blocks_of(N * k, E, 8 * nh)
        if N > 1:
            order, table, rounded = sort_pairs(indices, E, 8 * nh, x if simulate else None)
        first, second = (
            Part(w13, simulate and rounded is None, nh, fp32, 4, split),
            Part(w2, simulate, nh, fp32, 8, split),
        )
        h, y = new(N * k, I), new(N * k, d)
    if shared is not None:
        shared_I, fp32 = shared.w2.K, dot_in_fp32(x) or "fp32" in (shared.w1.format, shared.w2.format)
        shared_first = Part(shared.w1, simulate_shared and rounded is None, few, fp32, 4, apart(shared.w1, fp32, N))
        shared_second = Part(shared.w2, simulate_shared, few, fp32, 8, apart(shared.w2, fp32, N))
        hs, ys = new(N, shared_I), torch.empty(N, d, dtype=torch.float32, device=x.device)
    xr, xs = x if rounded is None else rounded, rounded if simulate_shared and rounded is not None else x
    w1, w3, w2s = (None,) * 3 if shared is None else shared
    ahead, larger = early(x.device), 0 if first is None or not first.apart or N <= 2 else 1 if N <= TOKENS else 2
    capped = first is not None and first.apart and not (simulate or simulate_shared)
    options = {"maxnreg": REGISTERS if few == 1 else 168} if capped else {}
    alike = k if N <= TOKENS else blocks
    programs, ks = _grid(first, blocks, alike, I, shared_first, shared_I, N, k, x.device)
    gate_up[(programs,)](
        xr,
        xr.stride(0),
        xs,
        xs.stride(0),
        N,
        indices,
        order,
        table,
        routing,
        *_tensors(first),
        h,
        _words(w1),
        _words(w3),
        *_both(w1, w3, "scale"),
        *_both(w1, w3, "glob"),
        hs,
        float(limit),
        blocks,
        k,
        I,
        d,
        nh,
        ks,
        *_constants(first),
        *_sizes(first),
        shared_I,
        *_constants(shared_first),
        few,
        ahead,
        larger,
        num_warps=ks,
        num_stages=1,
        launch_pdl=ahead > 0,
        **options,
    )
    programs, ks = _grid(second, blocks, alike, d, shared_second, d, N, k, x.device)
    down[(programs,)](
        h,
        N,
        indices,
        order,
        table,
        *_tensors(second),
        y,
        hs,
        *_tensors(shared_second),
        ys,
        blocks,
        d,
        I,
        nh,
        ks,
        *_constants(second),
        *_sizes(second),
        shared_I,
        *_constants(shared_second),
        1 if w2s is None else w2s.parts,
        few,
        ahead,
        larger,
        num_warps=ks,
        num_stages=1,
        launch_pdl=ahead > 0,
        **options,
    )
    return y, ys


def _grid(
    part: Part | None,
    blocks: int,
    alike: int,
    rows: int,
    shared: Part | None,
    shared_rows: int,
    tokens: int,
    each: int,
    device: torch.device,
) -> tuple[int, int]:
    """Programs and warps of a launch that computes `rows` results of each block, and `shared_rows` of the shared
    expert, for tokens of `each` experts.

    alike: the number of blocks that decides the number of warps, and with it the order of sums; with few tokens it is
    that of one token.
    """
    tiles_of = lambda n, tokens: (
        (0 if part is None else n * part.tiles(rows)) + (0 if shared is None else shared.tiles(shared_rows, tokens))
    )
    tiles, parts = tiles_of(blocks, tokens), [p for p in (part, shared) if p is not None]
    ks = warps(
        min(p.weight.K for p in parts),
        any(p.fp32 for p in parts),
        tiles_of(alike, 1),
        max(p.groups for p in parts),
        device,
    )
    resident = 8 if part is not None and part.apart else RESIDENT
    return tiles if tokens * each <= DYNAMIC else min(tiles, resident * processors(device)), ks


def _constants(part: Part | None) -> tuple:
    return ABSENT if part is None else part.constants


def _tensors(part: Part | None) -> tuple:
    return (None, None, None) if part is None else (part.weight.words, part.weight.scale, part.weight.glob)


def _sizes(part: Part | None) -> tuple[int, int, int]:
    """Words, scales and global scales of one matrix of a stack."""
    if part is None:
        return 1, 1, 1
    w = part.weight
    return (
        w.words.shape[-2] * w.words.shape[-1],
        1 if w.scale is None else w.scale.shape[-2] * w.scale.shape[-1],
        w.parts,
    )


def _words(w: Held | None) -> torch.Tensor | None:
    return None if w is None else w.words


def _both(a: Held | None, b: Held | None, name: str) -> tuple:
    return (None, None) if a is None else (getattr(a, name), getattr(b, name))
