"""Products with a weight as stored, on a GPU.

Up to TOKENS tokens, reading the weight takes the time: it is streamed once (`triton_skinny`). For a few more tokens a
small weight is streamed for groups of TOKENS, because tiles in sequence are slower. More tokens, large weights and
weights whose rows are not a multiple of 16 bytes use tiles (`triton_tiles`). Weights are dequantised exactly; products
of bf16 accumulate in fp32, those of fp32 are IEEE fp32. The bf16 products read E4M3's NaN code as 480. Activations that
are rounded to FP8 may meet FP8 weights as codes (`triton_fp8`). Very many tokens in bf16 meet the dequantised weight in
cuBLAS (`triton_dense`).
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import capability, dot_in_fp32, processors, require_device
from dsv4.kernels.linear import reference, triton_fp8
from dsv4.kernels.linear import triton_batch as batch
from dsv4.kernels.linear import triton_dense as dense
from dsv4.kernels.linear.reference import ACTIVATION_BLOCK
from dsv4.kernels.linear.triton_skinny import skinny, tokens
from dsv4.kernels.linear.triton_streams import SLOTS, TOKENS, apart, early, row_groups, stream, warps
from dsv4.kernels.linear.triton_tiles import arrange, order, swizzle, tile_product, tile_words
from dsv4.kernels.linear.triton_weights import Held, check, hold
from dsv4.kernels.linear.triton_words import launch_dependents
from dsv4.kernels.quantize.coded import FEWEST, STREAMED, CodedRows, RoundedRows, Rows, plain, scales_of
from dsv4.kernels.quantize.triton import simulate_fp8_blocks
from dsv4.kernels.quantize.triton_codes import narrow
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat
from dsv4.kernels.rms_norm.triton import rms_norm, rms_norm_fp8

MIN_BLOCK = 16  # columns of an FP8 block that a tile can keep apart
AGAIN = STREAMED  # tokens up to which a weight of at most AGAIN_BYTES is read for each TOKENS of them
AGAIN_BYTES = 24 << 20
FEW, DEEP = 64, 5  # tokens of a tile up to which DEEP tiles are loaded ahead: so many bytes in flight hide the latency


def linear(x: torch.Tensor, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    return products("linear", x, None, 0.0, (w,), (simulate,), (x.dtype,))[0]


def grouped_linear(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    N, G, K = x.shape
    return plain(grouped("grouped_linear", x.reshape(N, G * K), None, 0, w, G)).view(N, G, w.out_features // G)


linear.__doc__, grouped_linear.__doc__ = reference.linear.__doc__, reference.grouped_linear.__doc__


def products(
    name: str,
    x: Rows,
    norm: torch.Tensor | None,
    eps: float,
    weights: tuple[PackedWeight, ...],
    simulate: tuple[bool, ...],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[torch.Tensor, ...]:
    """x [N, K], normalised unless `norm` is None, times each weight: tensors [N, O_i] of dtypes[i], x.dtype or fp32.
    Without a norm, what comes with x is multiplied where x would be rounded to it."""
    made = (x.codes, x.scales) if isinstance(x, CodedRows) and norm is None else None
    rounded = x.rounded if isinstance(x, RoundedRows) and norm is None else None
    x = plain(x)
    held = [hold(name, w) for w in weights]
    require_device(name, x, norm, *(t for h in held for t in (h.weight, h.scale, h.glob)))
    for w, h, sim, dtype in zip(weights, held, simulate, dtypes, strict=True):
        x = check(name, x, h.K)
        if sim and w.format is WeightFormat.DENSE:
            raise UnsupportedInput("activations are quantised for FP8 and FP4 weights only; this weight is dense")
        if dtype not in (x.dtype, torch.float32):
            raise UnsupportedInput(f"{name}: a result in {dtype} from x in {x.dtype}; expected that or float32")
    N = x.shape[0]
    outs = tuple(torch.empty(N, h.O, dtype=dtype, device=x.device) for h, dtype in zip(held, dtypes))
    if not N:
        return outs
    alone = norm is not None or len(held) == 1
    coded = [i for i, h in enumerate(held) if simulate[i] and multiplies_codes(x, h, alone)]
    if coded:
        codes = made or triton_fp8.quantised(x, norm, eps)
        triton_fp8.products(*codes, [held[i] for i in coded], [outs[i] for i in coded])
    small = N <= AGAIN and all(h.weight.nbytes <= AGAIN_BYTES for h in held if h.streams)
    streamed = [i for i, h in enumerate(held) if h.streams and (N <= TOKENS or small) and i not in coded]
    for at in range(0, len(streamed), SLOTS):
        some = streamed[at : at + SLOTS]
        given = [held[i] for i in some], [bool(simulate[i]) for i in some], [outs[i] for i in some]
        stream(x, norm, eps, *given)
    rest = [i for i in range(len(held)) if i not in streamed and i not in coded]
    if rest:
        given = [held[i] for i in rest], [bool(simulate[i]) for i in rest], [outs[i] for i in rest]
        _multiply(name, x, norm, eps, *given, rounded)
    return outs


def _multiply(
    name: str,
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    held: list[Held],
    simulate: list[bool],
    outs: list[torch.Tensor],
    rounded: torch.Tensor | None,
) -> None:
    """`products` by tiles: together where that saves a launch, others one by one. rounded: x, if that is known."""
    every = range(len(held))
    apart = norm is None and len(held) == 1 and not any(simulate) and not order(held[0])
    tiled = [i for i in every if not apart and batch.takes(held[i], len(x))]
    if norm is not None and all(simulate) and len(tiled) == len(held):
        x, norm, simulate = rms_norm_fp8(x, norm, eps, ACTIVATION_BLOCK), None, [False for _ in every]
    elif norm is not None and (any(simulate) or len(tiled) < len(held)):
        x, norm = rms_norm(x, norm, eps), None
    if any(simulate) and rounded is None:
        rounded = simulate_fp8_blocks(x, ACTIVATION_BLOCK)
    for at in range(0, len(tiled), SLOTS):
        some = tiled[at : at + SLOTS]
        given = ([each[i] for i in some] for each in (held, outs, simulate))
        batch.tiles(x, norm, eps, *given, rounded)
    ready = {}
    for i in every:
        if i in tiled:
            continue
        given = rounded if simulate[i] else x
        if dense.takes(given, held[i], outs[i]):
            dense.product(given, held[i], outs[i])
        else:
            key = simulate[i], order(held[i])
            if key not in ready:
                ready[key] = arrange(given, order(held[i]))
            gemm(name, ready[key], held[i], outs[i], 1)


def multiplies_codes(x: torch.Tensor, h: Held, alone: bool) -> bool:
    """Whether the rounded x [N, K] meets this weight as codes on FP8 tensor cores, whose sums are not IEEE fp32. alone:
    it is the only weight that x meets, or x is normalised first: a kernel of its own does that anyway, and leaves
    codes. Other weights of fewer than FEWEST tokens are streamed in one launch, which rounds x. (Steps of 16 layers in
    official numerics on an H200, with 1, 8 and 16 rows: 2.65, 5.62 and 8.82 ms where fewer than 17 tokens were always
    streamed, and 2.52, 5.46 and 8.62.)

    Passes of one row with at most 8 drafts are below FEWEST, and products of up to 64 tokens have the same bits for
    each, so a draft has those of its own step.
    """
    N = x.shape[0]
    enough = N >= (1 if alone else FEWEST) and triton_fp8.takes(h, x.device)
    enough = enough or N >= dense.TOKENS and triton_fp8.takes_fp4(h, x.device)
    return enough and not h.exact_sums and not dot_in_fp32(x)


def grouped(
    name: str,
    x: torch.Tensor,
    cis: torch.Tensor | None,
    head: int,
    w: PackedWeight,
    groups: int,
    coded: bool = False,
) -> torch.Tensor | CodedRows:
    """x [N, G·K] through the block-diagonal w [G·R, K] → [N, G·R]; if `coded` with codes, where they cost no launch.

    cis fp32 [N, d], few tokens or `turns_within` only: the last d columns of each head of `head` columns are rotated in
    the kernel.
    """
    h = hold(name, w)
    require_device(name, x, h.weight, h.scale, h.glob)
    x = check(name, x, groups * h.K)
    if h.O % groups:
        raise UnsupportedInput(f"{name}: {h.O} rows of the weight do not divide into {groups} groups")
    N = x.shape[0]
    out = torch.empty(N, h.O, dtype=x.dtype, device=x.device)
    if not N or not h.O:
        return out
    if not (N <= TOKENS and h.streams):
        turned = 0 if cis is None else cis.shape[1]
        if batch.turns_within(h, x, groups, head, turned):
            made = None
            if coded and batch.codes_within(h, x, groups):
                made = CodedRows(out, torch.empty(N, h.O, dtype=torch.uint8, device=x.device), scales_of(out))
            batch.tiles(x, None, 0.0, [h], [out], [False], groups=groups, turns=cis, head=head, coded=made)
            return out if made is None else made
        if turned:
            raise UnsupportedInput(f"{name}: {N} tokens are not rotated on the way")
        if dense.takes(x, h, out):
            dense.product(x, h, out, groups)
            return out
        gemm(name, arrange(x.reshape(N * groups, h.K), order(h)).view(N, -1) if order(h) else x, h, out, groups)
        return out
    fp32 = dot_in_fp32(x) or h.format == "fp32"
    R, rh = h.O // groups, row_groups(h, fp32, h.O, False, x.device)
    tiles = triton.cdiv(R, 8 * rh) * groups
    ks = warps(h.K, fp32, tiles, rh, x.device)
    turned, cis_stride = (0, 0) if cis is None else (cis.shape[1], cis.stride(0))
    ahead = early(x.device)
    _grouped[(tiles,)](
        x,
        N,
        x.stride(0),
        h.words,
        h.scale,
        h.glob,
        out,
        cis,
        cis_stride,
        R,
        groups,
        h.K,
        ks,
        rh,
        1 if N <= 8 else 2,
        h.format,
        fp32,
        *h.block,
        h.parts,
        max(1, head),
        turned,
        apart(h, fp32, N),
        ahead,
        num_warps=ks,
        num_stages=1,
        launch_pdl=ahead > 0,
    )
    return out


@triton.jit(do_not_specialize=["N"])
def _grouped(
    X,
    N,
    x_stride,
    W,
    S,
    G,
    Y,
    CIS,
    cis_stride,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    APART: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch_dependents(EARLY)
    PROGRAMS: tl.constexpr = (R + 8 * RH - 1) // (8 * RH)
    group = tl.program_id(0) // PROGRAMS
    first, rows = group * R + (tl.program_id(0) % PROGRAMS) * (8 * RH), (group + 1) * R
    token, mine = tokens(KS, NH, APART)
    T: tl.constexpr = 2 if APART else 8 * NH
    o, t = first + tl.arange(0, 8 * RH), tl.arange(0, T)
    token = token.to(tl.int64)
    out = skinny(
        X + group * K,
        token * x_stride,
        mine & (token < N),
        W,
        S,
        first,
        rows,
        K,
        KS,
        RH,
        NH,
        FORMAT,
        FP32,
        BO,
        BK,
        CIS=CIS,
        cis_at=token * cis_stride,
        HEAD=HEAD,
        TURNED=TURNED,
        APART=APART,
        row_at=t.to(tl.int64) * x_stride,
        count=N,
        EARLY=EARLY,
    )
    if G is not None:
        out *= tl.load(G + tl.minimum(o, rows - 1) // (R * GROUPS // PARTS))[:, None]
    tl.store(
        Y + t.to(tl.int64)[None, :] * (R * GROUPS) + o[:, None],
        narrow(out, Y.dtype.element_ty),
        mask=(o[:, None] < rows) & (t[None, :] < N),
    )


# Many tokens ---------------------------------------------------------------------------------------------------------


def tile_columns(name: str, h: Held, fp32: bool) -> int:
    """Columns of a tile, within one block of FP8's scales. Raises UnsupportedInput if the block has no power of two of
    at least 16."""
    if order(h):
        return 32 * order(h)
    columns = 32 if fp32 else 64
    if h.format == "fp8":
        columns = min(columns, h.block[1] & -h.block[1])
        if columns < MIN_BLOCK:
            raise UnsupportedInput(
                f"{name}: FP8 blocks of {h.block[1]} columns; the triton backend takes multiples of {MIN_BLOCK}"
            )
    return columns


def stages(device: torch.device, tokens: int = 128) -> int:
    """Tiles loaded ahead: shared memory of capabilities 8.6, 8.9 and 12.0 is 99 KB a block."""
    return (DEEP if tokens <= FEW else 3) if capability(device) in ((8, 0), (9, 0), (10, 0)) else 2


def gemm_shape(N: int, R: int, groups: int, fp32: bool, device: torch.device) -> tuple[int, int, int]:
    """(rows, tokens, warps) of a tile."""
    bt = 16 if N <= 16 else 32 if N <= 32 or fp32 else 64 if N <= 64 else 128
    if bt <= FEW and not fp32:
        return 64, bt, 4
    columns = triton.cdiv(N, bt) * groups
    bo = next(
        (rows for rows in (() if fp32 else (128, 64)) if triton.cdiv(R, rows) * columns >= processors(device)), 32
    )
    return bo, bt, 8 if bo * bt > 8192 else 4


def gemm(name: str, x: torch.Tensor, h: Held, out: torch.Tensor, groups: int) -> None:
    """out [N, G·R] = x [N, G·K] · Wᵀ, group by group; x is already rounded, if required, and arranged."""
    N, R = x.shape[0], h.O // groups
    fp32 = dot_in_fp32(x) or h.format == "fp32"
    bk = tile_columns(name, h, fp32)
    bo, bt, warps = gemm_shape(N, R, groups, fp32, x.device)
    _gemm[(triton.cdiv(R, bo) * triton.cdiv(N, bt), groups)](
        x,
        N,
        x.stride(0),
        tile_words(h),
        h.scale,
        h.glob,
        out,
        R,
        h.K,
        bo,
        bt,
        bk,
        h.format,
        fp32,
        *h.block,
        h.parts,
        groups,
        num_warps=warps,
        num_stages=1 if fp32 else stages(x.device, bt),
    )


@triton.jit(do_not_specialize=["N"])
def _gemm(
    X,
    N,
    x_stride,
    W,
    S,
    G,
    Y,
    R: tl.constexpr,
    K: tl.constexpr,
    BO: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row_block, token_block = swizzle(tl.program_id(0), tl.cdiv(N, BT), tl.cdiv(R, BO), 8)
    group = tl.program_id(1)
    o, t = row_block * BO + tl.arange(0, BO), (token_block * BT + tl.arange(0, BT)).to(tl.int64)
    row = (group * R + tl.minimum(o, R - 1)).to(tl.int64)
    columns = (K + 127) // 128 * 128 if W.dtype.element_ty == tl.int32 else K  # of x, a group
    out = tile_product(X + group * columns, t * x_stride, t < N, W, S, row, K, BO, BT, BK, FORMAT, FP32, ROWS, COLUMNS)
    if G is not None:
        out *= tl.load(G + row // (R * GROUPS // PARTS))[:, None]
    tl.store(
        Y + t[None, :] * (R * GROUPS) + group * R + o[:, None],
        narrow(out, Y.dtype.element_ty),
        mask=(o[:, None] < R) & (t[None, :] < N),
    )
