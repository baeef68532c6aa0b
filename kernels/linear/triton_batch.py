"""Products of one input of some tens of tokens with several weights, in one launch of tiles.

Reading the weights and launching kernels take the time. So what would be launches of their own happens to each tile of
x before it is multiplied: the norm, the rotation of heads, and the order of columns that tiles of codes take. The norm
of a row is a factor of its results, known when all columns were read. Results that are the input of an FP8 product may
be left with their codes: then a tile has the 128 rows of a scale.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import capability, dependent_launch, dot_in_fp32, next_power, processors
from dsv4.kernels.linear.triton_streams import FORMATS, NAMES, SLOTS, own
from dsv4.kernels.linear.triton_tiles import order, tile_product, tile_words
from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.linear.triton_words import begin
from dsv4.kernels.quantize.coded import BLOCK, FEWEST, CodedRows
from dsv4.kernels.quantize.triton_codes import e4m3_blocks, narrow, widen

MOST = 64  # tokens
ROWS = 64  # of a tile
WGMMA = 9, 10  # capabilities whose products of 64 rows keep their sums apart; others need more warps for them
DEEP, SHALLOW = 5, 3  # tiles of columns that are loaded ahead


def tile_rows(fp32: bool) -> int:
    return 32 if fp32 else ROWS


def tile_depth(h: Held, fp32: bool) -> int:
    """Columns of a tile."""
    if order(h):
        return 32 * order(h) if fp32 else 128
    return 32 if fp32 else 64


def takes(h: Held, tokens: int) -> bool:
    """Whether `tiles` multiplies so many tokens with a weight."""
    return h.streams and tokens <= MOST


def turns_within(h: Held, x: torch.Tensor, groups: int, head: int, turned: int) -> bool:
    """Whether `tiles` rotates the last `turned` columns of each head of x before it multiplies: tiles are in one group,
    and divide heads."""
    fp32 = dot_in_fp32(x) or h.format == "fp32"
    depth = tile_depth(h, fp32)
    rows = h.O // groups % tile_rows(fp32) == 0
    return takes(h, len(x)) and rows and head % depth == 0 and 0 < turned == next_power(turned) <= depth


def codes_within(h: Held, x: torch.Tensor, groups: int) -> bool:
    """Whether `tiles` leaves the codes of its result: tiles of a block of rows are in one group."""
    fp32 = dot_in_fp32(x) or h.format == "fp32"
    whole = h.O // groups % BLOCK == 0 and capability(x.device)[0] == 9
    return whole and not fp32 and takes(h, len(x)) and len(x) >= FEWEST


def tiles(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    held: list[Held],
    outs: list[torch.Tensor],
    simulate: list[bool],
    rounded: torch.Tensor | None = None,
    groups: int = 1,
    turns: torch.Tensor | None = None,
    head: int = 1,
    coded: CodedRows | None = None,
) -> None:
    """outs[i] [N, O_i] = x [N, groups · K] · W_iᵀ, group by group, N ≤ MOST; at most SLOTS weights that all `takes`.

    rounded [N, groups · K]: takes the place of x for weights with simulate[i]; then norm is None. turns fp32 [N, d]
    (cos, sin in turn) rotates the last d columns of each head of `head`, see `turns_within`. coded: its x is the one of
    `outs`, and gets codes, see `codes_within`.
    """
    N, K = x.shape[0], held[0].K
    kinds: dict[tuple, list[int]] = {}
    for i, (h, sim, out) in enumerate(zip(held, simulate, outs, strict=True)):
        fp32 = dot_in_fp32(x) or h.format == "fp32"
        scale = None if h.scale is None else h.scale.dtype
        key = -h.row_bytes, h.format, fp32, h.block, sim, str(scale), str(out.dtype), h.parts
        kinds.setdefault(key, []).append(i)
    fp32 = any(key[2] for key in kinds)
    rows, tokens, warps = tile_rows(fp32), 32 if fp32 or N <= 32 else 64, 4
    if coded is not None:  # as many programs, and as many rows a warp: half of the tokens are read by twice the warps
        rows, tokens, warps = BLOCK, tokens // 2, 8
    elif tokens == 64 and capability(x.device)[0] not in WGMMA:
        warps = 8
    sequence, classes, starts, first = [], [], [], 0
    for key in sorted(kinds):
        _, form, wide, (bo, bk), sim, _, _, parts = key
        start, at = len(sequence), first
        for i in kinds[key]:
            sequence.append(i)
            starts.append(first)
            first += triton.cdiv(held[i].O, rows)
        depth = tile_depth(held[sequence[-1]], wide)
        classes += [FORMATS.index(form), int(wide), bo, bk, int(sim), parts, depth, start, len(sequence), at, first]
    slots = [(tile_words(held[i]), held[i].scale, held[i].glob, outs[i]) for i in sequence]
    slots += [(None,) * 4] * (SLOTS - len(slots))
    early = dependent_launch(x.device)
    _tiles[(triton.cdiv(N, tokens), first)](
        x,
        x if rounded is None else rounded,
        norm,
        eps,
        turns,
        N,
        x.stride(0),
        x.stride(0) if rounded is None else rounded.stride(0),
        0 if turns is None else turns.stride(0),
        None if coded is None else coded.codes,
        None if coded is None else coded.scales,
        0 if coded is None else coded.scales.stride(0),
        *(t for column in zip(*slots) for t in column),
        tuple(classes),
        tuple(starts),
        tuple(held[i].O for i in sequence),
        K,
        rows,
        tokens,
        groups,
        head,
        0 if turns is None else turns.shape[1],
        early,
        num_warps=warps,
        num_stages=_stages(first, fp32, x.device),
        launch_pdl=early,
    )


def _stages(programs: int, fp32: bool, device: torch.device) -> int:
    """Tiles of columns that a program loads ahead: more where it has a multiprocessor for itself, so that enough bytes
    are on their way. Shared memory of capabilities 8.6, 8.9 and 12.0 is 99 KB a block."""
    if fp32:
        return 1
    if capability(device) not in ((8, 0), (9, 0), (10, 0)):
        return 2
    return DEEP if programs <= processors(device) else SHALLOW


@triton.jit
def _kind(
    pid,
    X,
    x_stride,
    NORM,
    eps,
    CIS,
    cis_stride,
    CODES,
    SCALES,
    scales_stride,
    N,
    W,
    S,
    G,
    Y,
    STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    NUMBER: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
):
    """A program of weights BEGIN … END, which are of one kind. W, S, G, Y, STARTS, ROWS: tuples by weight."""
    FORMAT: tl.constexpr = NAMES[NUMBER]
    PER: tl.constexpr = 0 if NUMBER < 2 else 2 if NUMBER == 2 else 4
    w, y, scale, glob = own(pid, W, STARTS, BEGIN, END), own(pid, Y, STARTS, BEGIN, END), S[BEGIN], G[BEGIN]
    if scale is not None:
        scale = own(pid, S, STARTS, BEGIN, END)
    if glob is not None:
        glob = own(pid, G, STARTS, BEGIN, END)
    rows, first = own(pid, ROWS, STARTS, BEGIN, END), (pid - own(pid, STARTS, STARTS, BEGIN, END)) * R
    o, t = first + tl.arange(0, R), (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    row = tl.minimum(o, rows - 1).to(tl.int64)
    if GROUPS > 1:  # whose rows are whole tiles
        X += first // (rows // GROUPS) * K
    out = tile_product(
        X,
        t * x_stride,
        t < N,
        w,
        scale,
        row,
        K,
        R,
        T,
        DEPTH,
        FORMAT,
        FP32 == 1,
        BO,
        BK,
        PER,
        NORM,
        eps,
        CIS,
        t * cis_stride,
        HEAD,
        TURNED,
    )
    if glob is not None:
        out *= tl.load(glob + row // (rows // PARTS))[:, None]
    out = narrow(out, y.dtype.element_ty)
    tl.store(y + t[None, :] * rows + o[:, None], out, mask=(o[:, None] < rows) & (t[None, :] < N))
    if CODES is not None:
        codes, scales = e4m3_blocks(tl.trans(widen(out)))
        tl.store(CODES + t[:, None] * rows + o[None, :], codes, mask=t[:, None] < N)
        tl.store(SCALES + first // R * scales_stride + t, scales, mask=t < N)


@triton.jit(do_not_specialize=["N", "scales_stride"])
def _tiles(
    X,
    XR,
    NORM,
    eps,
    CIS,
    N,
    x_stride,
    xr_stride,
    cis_stride,
    CODES,
    SCALES,
    scales_stride,
    W0,
    W1,
    W2,
    W3,
    W4,
    W5,
    S0,
    S1,
    S2,
    S3,
    S4,
    S5,
    G0,
    G1,
    G2,
    G3,
    G4,
    G5,
    Y0,
    Y1,
    Y2,
    Y3,
    Y4,
    Y5,
    KINDS: tl.constexpr,
    STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """KINDS: of each kind of weight the format, fp32, BO, BK, simulate, parts, columns of a tile, first and last
    weight, first and last program; STARTS, ROWS: first program and rows of each weight.
    Programs: T tokens, by R rows."""
    W, S, G, Y = (W0, W1, W2, W3, W4, W5), (S0, S1, S2, S3, S4, S5), (G0, G1, G2, G3, G4, G5), (Y0, Y1, Y2, Y3, Y4, Y5)
    pid = tl.program_id(1)
    begin(EARLY)
    for c in tl.static_range(0, len(KINDS), 11):
        if (pid >= KINDS[c + 9]) & (pid < KINDS[c + 10]):
            _kind(
                pid,
                XR if KINDS[c + 4] == 1 else X,
                xr_stride if KINDS[c + 4] == 1 else x_stride,
                NORM,
                eps,
                CIS,
                cis_stride,
                CODES,
                SCALES,
                scales_stride,
                N,
                W,
                S,
                G,
                Y,
                STARTS,
                ROWS,
                KINDS[c],
                KINDS[c + 1],
                KINDS[c + 2],
                KINDS[c + 3],
                KINDS[c + 5],
                KINDS[c + 6],
                KINDS[c + 7],
                KINDS[c + 8],
                K,
                R,
                T,
                GROUPS,
                HEAD,
                TURNED,
            )
