"""Products of one input of a few tokens with several weights in one launch: the programs are divided among the
weights."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import dependent_launch, dot_in_fp32, next_power, processors
from dsv4.kernels.linear.triton_skinny import skinny, tokens
from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.linear.triton_words import launch_dependents
from dsv4.kernels.quantize.triton_codes import narrow

FORMATS = ("fp32", "bf16", "fp8", "mxfp4", "nvfp4")  # formats by number, as a kernel's constant takes them in a tuple
NAMES = tl.constexpr(FORMATS)
TOKENS = 16  # more tokens need more products than fit in the time of reading the weight
SLOTS = 6  # weights of a launch
AHEAD = 2  # steps of a weight that are fetched before the wait for earlier kernels, at most two


def early(device: torch.device) -> int:
    """The EARLY of `skinny`: 1 + the steps of a weight that are issued before a kernel waits for earlier ones."""
    return 1 + AHEAD if dependent_launch(device) else 0


def apart(h: Held, fp32: bool, tokens: int) -> bool:
    """Whether `skinny` uses APART for a weight: MXFP4 and one or two tokens."""
    return h.format == "mxfp4" and tokens <= 2 and not fp32


def warps(K: int, fp32: bool, tiles: int, groups: int, device: torch.device) -> int:
    """Slices of a program, one a warp: the fewest that give every multiprocessor enough work to hide its loads;
    parallel programs also hide each other's beginning and end. There are at most so many that each takes two steps,
    with words loaded ahead."""
    enough, most = (5 if groups > 4 else 10) * processors(device), max(1, min(4 if fp32 else 8, next_power(K) // 256))
    ks = min(2, most)
    while ks < most and ks * tiles < enough:
        ks *= 2
    return ks


def row_groups(h: Held, fp32: bool, rows: int, worked: bool, device: torch.device) -> int:
    """Groups of 8 rows of a program: two, the rows of a product. If x is normalised, quantised or scaled (`apart`) in
    the kernel, four groups share that work, provided that two programs remain for every multiprocessor. rows: of all
    weights of the launch."""
    most = 4 if h.format not in ("bf16", "fp32") and not fp32 and (worked or h.format == "mxfp4") else 2
    return most if rows / (8 * most) >= 1.8 * processors(device) else 2


def stream(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    held: list[Held],
    simulate: list[bool],
    outs: list[torch.Tensor],
) -> None:
    """outs[i] [N, O_i] = x [N, K] · W_iᵀ, K the same for all, at most SLOTS weights that all `stream`.

    More than TOKENS tokens are divided into groups of so many. A weight is read again for each group, by programs that
    run side by side, so mostly from the L2 cache; a token has the bits that it has in a smaller batch.
    """
    N, K = x.shape
    # compile-time constants → their weights; sorted by bytes of a row, since long work starts first
    kinds: dict[tuple, list[int]] = {}
    for i, (h, sim, out) in enumerate(zip(held, simulate, outs, strict=True)):
        fp32 = dot_in_fp32(x) or h.format == "fp32"
        scale = None if h.scale is None else h.scale.dtype
        split = norm is None and apart(h, fp32, N)
        key = -h.row_bytes, h.format, fp32, h.block, sim, str(scale), str(out.dtype), h.parts, split
        kinds.setdefault(key, []).append(i)
    order, classes, starts, first = [], [], [], 0
    total = sum(h.O for h in held)
    fp32 = any(key[2] for key in kinds)
    for key in sorted(kinds):
        _, form, slot_fp32, (bo, bk), sim, _, _, parts, split = key
        groups = row_groups(held[kinds[key][0]], fp32, total, sim or norm is not None, x.device)
        begin, at = len(order), first
        for i in kinds[key]:
            order.append(i)
            starts.append(first)
            first += triton.cdiv(held[i].O, 8 * groups)
        classes += [
            FORMATS.index(form),
            int(slot_fp32),
            bo,
            bk,
            int(sim),
            parts,
            groups,
            begin,
            len(order),
            at,
            first,
            int(split),
        ]
    slots = [(held[i].words, held[i].scale, held[i].glob, outs[i]) for i in order] + [(None,) * 4] * (
        SLOTS - len(order)
    )
    ks, ahead = warps(K, fp32, first, 4, x.device), early(x.device)
    _streamed[(triton.cdiv(N, TOKENS), first)](
        x,
        norm,
        eps,
        N,
        x.stride(0),
        *(t for column in zip(*slots) for t in column),
        tuple(classes),
        tuple(starts),
        tuple(held[i].O for i in order),
        K,
        ks,
        1 if N <= 8 else 2,
        N <= 2,
        N > TOKENS,
        ahead,
        num_warps=ks,
        num_stages=1,
        launch_pdl=ahead > 0,
    )


@triton.jit
def own(pid, OF, STARTS: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr):
    """What belongs to a program of one of the weights BEGIN … END. OF, STARTS: tuples by weight, STARTS of their first
    programs."""
    found = OF[BEGIN]
    for i in tl.static_range(BEGIN + 1, END):
        found = tl.where(pid >= STARTS[i], OF[i], found)
    return found


@triton.jit
def _kind(
    pid,
    X,
    NORM,
    eps,
    N,
    x_stride,
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
    SIMULATE: tl.constexpr,
    PARTS: tl.constexpr,
    RH: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    APART: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    NH: tl.constexpr,
    FEW: tl.constexpr,
    GROUPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program of weights BEGIN … END, which are of one kind. W, S, G, Y, STARTS, ROWS: tuples by weight."""
    FORMAT: tl.constexpr = NAMES[NUMBER]
    launch_dependents(EARLY)
    w, y, scale, glob = own(pid, W, STARTS, BEGIN, END), own(pid, Y, STARTS, BEGIN, END), S[BEGIN], G[BEGIN]
    if scale is not None:
        scale = own(pid, S, STARTS, BEGIN, END)
    if glob is not None:
        glob = own(pid, G, STARTS, BEGIN, END)
    rows, first = own(pid, ROWS, STARTS, BEGIN, END), (pid - own(pid, STARTS, STARTS, BEGIN, END)) * (8 * RH)
    if GROUPED:
        before = tl.program_id(0).to(tl.int64) * (8 * NH)
        X, y, N = X + before * x_stride, y + before * rows, N - before.to(tl.int32)
    token, mine = tokens(KS, NH, APART == 1)
    T: tl.constexpr = 2 if APART == 1 else 8 * NH
    o, t = first + tl.arange(0, 8 * RH), tl.arange(0, T)
    out = skinny(
        X,
        token.to(tl.int64) * x_stride,
        mine & (token < N),
        w,
        scale,
        first,
        rows,
        K,
        KS,
        RH,
        NH,
        FORMAT,
        FP32 == 1,
        BO,
        BK,
        SIMULATE == 1,
        NORM=NORM,
        eps=eps,
        APART=APART == 1,
        row_at=tl.arange(0, 2 if FEW else 8 * NH).to(tl.int64) * x_stride,
        count=N,
        EARLY=EARLY,
    )
    if glob is not None:
        out *= tl.load(glob + tl.minimum(o, rows - 1) // (rows // PARTS))[:, None]
    tl.store(
        y + t.to(tl.int64)[None, :] * rows + o[:, None],
        narrow(out, y.dtype.element_ty),
        mask=(o[:, None] < rows) & (t[None, :] < N),
    )


@triton.jit(do_not_specialize=["N"])
def _streamed(
    X,
    NORM,
    eps,
    N,
    x_stride,
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
    KS: tl.constexpr,
    NH: tl.constexpr,
    FEW: tl.constexpr,
    GROUPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """KINDS: of each kind of weight the format, fp32, BO, BK, simulate, parts, groups of rows, first and last weight,
    first and last program, whether blocks are taken apart; STARTS, ROWS: first program and rows of each weight.
    Programs: groups of 8 · NH tokens (one unless GROUPED), by rows."""
    W, S, G, Y = (W0, W1, W2, W3, W4, W5), (S0, S1, S2, S3, S4, S5), (G0, G1, G2, G3, G4, G5), (Y0, Y1, Y2, Y3, Y4, Y5)
    pid = tl.program_id(1)
    for c in tl.static_range(0, len(KINDS), 12):
        if (pid >= KINDS[c + 9]) & (pid < KINDS[c + 10]):
            _kind(
                pid,
                X,
                NORM,
                eps,
                N,
                x_stride,
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
                KINDS[c + 4],
                KINDS[c + 5],
                KINDS[c + 6],
                KINDS[c + 7],
                KINDS[c + 8],
                KINDS[c + 11],
                K,
                KS,
                NH,
                FEW,
                GROUPED,
                EARLY,
            )
