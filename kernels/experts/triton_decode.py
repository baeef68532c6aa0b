"""Experts of a few tokens: each expert's weights are streamed once for all of its tokens, and the shared expert's in
the same launch."""

import triton
import triton.language as tl

from dsv4.kernels.linear.triton_skinny import skinny, tokens
from dsv4.kernels.linear.triton_words import launch_dependents, wait_for_dependencies
from dsv4.kernels.quantize.triton_codes import narrow, rounded


@triton.jit
def _block(TABLE, INDICES, b, blocks):
    """(expert, first place in the order, pairs) of block b; without a table, of pair b alone. `down` reads them while
    `gate_up` runs, so not from an L1 cache, which may hold those of an earlier launch."""
    if TABLE is None:
        e, first, count = tl.load(INDICES + b, cache_modifier=".cg").to(tl.int32), b, 1
    else:
        e, first = tl.load(TABLE + 1 + b, cache_modifier=".cg"), tl.load(TABLE + 1 + blocks + b, cache_modifier=".cg")
        count = tl.load(TABLE + 1 + 2 * blocks + b, cache_modifier=".cg")
    return e, first, count


@triton.jit
def _ids(ORDER, first, n, count):
    """Numbers of the pairs (or of the tokens, without an order) first + n; 0 if n ≥ count."""
    if ORDER is None:
        ids = tl.where(n < count, first + n, 0)
    else:
        ids = tl.load(ORDER + first + n, mask=n < count, other=0, cache_modifier=".cg")
    return ids.to(tl.int64)


@triton.jit
def after(shared):
    """The first tile of a program after the `shared` tiles, which programs take in turn."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    return program + tl.cdiv(tl.maximum(shared - program, 0), programs) * programs - shared


@triton.jit
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) · clamp(up, ±limit); NaN passes."""
    # F.silu(gate.float().clamp_(max=limit)).mul_(up.float().clamp_(-limit, limit))
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _gate_up_tile(
    X,
    x_stride,
    ORDER,
    first,
    count,
    EACH: tl.constexpr,
    W,
    W_UP,
    S,
    S_UP,
    G,
    G_UP,
    row,
    I: tl.constexpr,
    limit,
    ROUTING,
    H,
    K: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    SIMULATE: tl.constexpr,
    APART: tl.constexpr,
    EARLY: tl.constexpr = 0,
    THEN: tl.constexpr = False,
):
    """Columns row … row + 4·RH of the hidden activations of `count` pairs from place `first` on; EACH pairs share a row
    of X."""
    T: tl.constexpr = 2 if APART else 8 * NH
    n, mine = tokens(KS, NH, APART)
    t = tl.arange(0, T)
    ids = _ids(ORDER, first, t, count)
    at = _ids(ORDER, first, n, count) // EACH * x_stride
    y = skinny(
        X,
        at,
        mine & (n < count),
        W,
        S,
        row,
        I,
        K,
        KS,
        RH,
        NH,
        FORMAT,
        FP32,
        BO,
        BK,
        SIMULATE,
        W_UP,
        S_UP,
        APART=APART,
        row_at=ids // EACH * x_stride,
        count=count,
        EARLY=EARLY,
        THEN=THEN,
    )
    gate, up = tl.split(tl.permute(tl.reshape(y, [RH // 2, 2, 8, T]), (0, 2, 3, 1)))
    if G is not None:
        gate, up = gate * tl.load(G), up * tl.load(G_UP)
    gate, up = tl.reshape(gate, [4 * RH, T]), tl.reshape(up, [4 * RH, T])
    # y is in x.dtype; h = clamped_swiglu(gate, up, limit).mul_(weights).to(x.dtype)
    h = swiglu(rounded(gate, X.dtype.element_ty), rounded(up, X.dtype.element_ty), limit)
    if ROUTING is not None:
        h *= tl.load(ROUTING + ids, mask=t < count, other=0.0)[None, :]
    o = row + tl.arange(0, 4 * RH)
    tl.store(
        H + ids[None, :] * I + o[:, None], narrow(h, H.dtype.element_ty), mask=(o[:, None] < I) & (t[None, :] < count)
    )


@triton.jit(do_not_specialize=["N", "blocks"])
def gate_up(
    X,
    x_stride,
    XS,
    xs_stride,
    N,
    INDICES,
    ORDER,
    TABLE,
    ROUTING,
    W,
    S,
    G,
    H,
    W1,
    W3,
    S1,
    S3,
    G1,
    G3,
    HS,
    limit,
    blocks,
    EACH: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    NH: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    SIMULATE: tl.constexpr,
    APART: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    PARTS: tl.constexpr,
    I_S: tl.constexpr,
    RH_S: tl.constexpr,
    FORMAT_S: tl.constexpr,
    FP32_S: tl.constexpr,
    BO_S: tl.constexpr,
    BK_S: tl.constexpr,
    SIMULATE_S: tl.constexpr,
    APART_S: tl.constexpr,
    NH_S: tl.constexpr,
    EARLY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Gate and up projection and SwiGLU: hidden activations H [P, I] of the pairs, HS [N, I_S] of the shared expert,
    both in x.dtype.

    Programs take tiles in turn: the shared expert's, then each block's (`blocks` at most, see `triton_order`). A tile
    of the shared expert has 8 · NH_S tokens; tiles of the same rows come one after another. W, S: stacks of matrices of
    2I rows (gate, up), WORDS words and SCALES scales each, or None; without W1 there is no shared expert. X: rows of
    the pairs; XS: rows of the shared expert. APART is for blocks of up to two pairs. SPLIT is for larger blocks. 1:
    two pairs at a time, so that a pair has the bits that it has alone; weights are read again, mostly from caches. 2:
    not APART, with fewer rows, because such a program holds more in registers.

    The next kernel, `down`, may start when this one no longer waits: then it is known which experts there are, and the
    first words of their matrices are loaded before this kernel has ended.
    """
    THEN: tl.constexpr = W is not None and EARLY > 0
    if not THEN:
        launch_dependents(EARLY)
    groups = tl.cdiv(N, 8 * NH_S)
    shared = 0 if W1 is None else tl.cdiv(I_S, 4 * RH_S) * groups
    programs = tl.num_programs(0)
    if W1 is not None:
        for tile in range(tl.program_id(0), shared, programs):
            token = tile % groups * (8 * NH_S)
            _gate_up_tile(
                XS,
                xs_stride,
                None,
                token,
                tl.minimum(N - token, 8 * NH_S),
                1,
                W1,
                W3,
                S1,
                S3,
                G1,
                G3,
                tile // groups * 4 * RH_S,
                I_S,
                limit,
                None,
                HS,
                K,
                KS,
                RH_S,
                NH_S,
                FORMAT_S,
                FP32_S,
                BO_S,
                BK_S,
                SIMULATE_S,
                APART_S,
                EARLY,
                THEN,
            )
    if W is not None:
        wait_for_dependencies(EARLY)  # for those whose experts are
        launch_dependents(THEN)
        ROWS: tl.constexpr = (I + 4 * RH - 1) // (4 * RH)
        found = blocks if TABLE is None else tl.load(TABLE)
        for tile in range(after(shared), found * ROWS, programs):
            e, first, count = _block(TABLE, INDICES, tile // ROWS, blocks)
            if e >= 0:
                w = W + e.to(tl.int64) * WORDS
                s = None if S is None else S + e.to(tl.int64) * SCALES
                s_up = None if S is None else s + SCALES // 2
                g = None if G is None else G + e.to(tl.int64) * PARTS
                g_up = None if G is None else g + (PARTS - 1)
                row = tile % ROWS * 4 * RH
                if SPLIT == 1:
                    for pair in range(0, count, 2):
                        _gate_up_tile(
                            X,
                            x_stride,
                            ORDER,
                            first + pair,
                            tl.minimum(count - pair, 2),
                            EACH,
                            w,
                            w + WORDS // 2,
                            s,
                            s_up,
                            g,
                            g_up,
                            row,
                            I,
                            limit,
                            ROUTING,
                            H,
                            K,
                            KS,
                            RH,
                            NH,
                            FORMAT,
                            FP32,
                            BO,
                            BK,
                            SIMULATE,
                            APART,
                        )
                elif SPLIT == 2 and count > 2:
                    for half in range(RH // 2):
                        _gate_up_tile(
                            X,
                            x_stride,
                            ORDER,
                            first,
                            count,
                            EACH,
                            w,
                            w + WORDS // 2,
                            s,
                            s_up,
                            g,
                            g_up,
                            row + 8 * half,
                            I,
                            limit,
                            ROUTING,
                            H,
                            K,
                            KS,
                            2,
                            NH,
                            FORMAT,
                            FP32,
                            BO,
                            BK,
                            SIMULATE,
                            False,
                        )
                else:
                    _gate_up_tile(
                        X,
                        x_stride,
                        ORDER,
                        first,
                        count,
                        EACH,
                        w,
                        w + WORDS // 2,
                        s,
                        s_up,
                        g,
                        g_up,
                        row,
                        I,
                        limit,
                        ROUTING,
                        H,
                        K,
                        KS,
                        RH,
                        NH,
                        FORMAT,
                        FP32,
                        BO,
                        BK,
                        SIMULATE,
                        APART,
                    )


@triton.jit
def _down_tile(
    H,
    ORDER,
    first,
    count,
    W,
    S,
    G,
    PARTS: tl.constexpr,
    row,
    Y,
    D: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    SIMULATE: tl.constexpr,
    APART: tl.constexpr,
    EARLY: tl.constexpr = 0,
):
    n, mine = tokens(KS, NH, APART)
    o, t = row + tl.arange(0, 8 * RH), tl.arange(0, 2 if APART else 8 * NH)
    ids = _ids(ORDER, first, t, count)
    y = skinny(
        H,
        _ids(ORDER, first, n, count) * K,
        mine & (n < count),
        W,
        S,
        row,
        D,
        K,
        KS,
        RH,
        NH,
        FORMAT,
        FP32,
        BO,
        BK,
        SIMULATE,
        APART=APART,
        row_at=ids * K,
        count=count,
        EARLY=EARLY,
    )
    if G is not None:
        y *= tl.load(G + tl.minimum(o, D - 1) // (D // PARTS))[:, None]
    y = narrow(y, Y.dtype.element_ty)
    tl.store(Y + ids[None, :] * D + o[:, None], y, mask=(o[:, None] < D) & (t[None, :] < count))


@triton.jit(do_not_specialize=["N", "blocks"])
def down(
    H,
    N,
    INDICES,
    ORDER,
    TABLE,
    W,
    S,
    G,
    Y,
    HS,
    W2,
    S2,
    G2,
    YS,
    blocks,
    D: tl.constexpr,
    I: tl.constexpr,
    NH: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    SIMULATE: tl.constexpr,
    APART: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    PARTS: tl.constexpr,
    I_S: tl.constexpr,
    RH_S: tl.constexpr,
    FORMAT_S: tl.constexpr,
    FP32_S: tl.constexpr,
    BO_S: tl.constexpr,
    BK_S: tl.constexpr,
    SIMULATE_S: tl.constexpr,
    APART_S: tl.constexpr,
    PARTS_S: tl.constexpr,
    NH_S: tl.constexpr,
    EARLY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Down projection: Y [P, D] of the pairs and YS [N, D] of the shared expert. Arguments as for `gate_up`."""
    launch_dependents(EARLY)
    groups = tl.cdiv(N, 8 * NH_S)
    shared = 0 if W2 is None else tl.cdiv(D, 8 * RH_S) * groups
    programs = tl.num_programs(0)
    if W2 is not None:
        for tile in range(tl.program_id(0), shared, programs):
            token = tile % groups * (8 * NH_S)
            _down_tile(
                HS,
                None,
                token,
                tl.minimum(N - token, 8 * NH_S),
                W2,
                S2,
                G2,
                PARTS_S,
                tile // groups * 8 * RH_S,
                YS,
                D,
                I_S,
                KS,
                RH_S,
                NH_S,
                FORMAT_S,
                FP32_S,
                BO_S,
                BK_S,
                SIMULATE_S,
                APART_S,
                EARLY,
            )
    if W is not None:  # which experts there are was known before `gate_up` let this kernel start
        ROWS: tl.constexpr = (D + 8 * RH - 1) // (8 * RH)
        found = blocks if TABLE is None else tl.load(TABLE, cache_modifier=".cg")
        for tile in range(after(shared), found * ROWS, programs):
            e, first, count = _block(TABLE, INDICES, tile // ROWS, blocks)
            if e >= 0:
                s = None if S is None else S + e.to(tl.int64) * SCALES
                g = None if G is None else G + e.to(tl.int64) * PARTS
                w, row = W + e.to(tl.int64) * WORDS, tile % ROWS * 8 * RH
                if SPLIT == 1:
                    for pair in range(0, count, 2):
                        _down_tile(
                            H,
                            ORDER,
                            first + pair,
                            tl.minimum(count - pair, 2),
                            w,
                            s,
                            g,
                            PARTS,
                            row,
                            Y,
                            D,
                            I,
                            KS,
                            RH,
                            NH,
                            FORMAT,
                            FP32,
                            BO,
                            BK,
                            SIMULATE,
                            APART,
                            EARLY,
                        )
                elif SPLIT == 2 and count > 2:
                    for half in range(RH // 2):
                        _down_tile(
                            H,
                            ORDER,
                            first,
                            count,
                            w,
                            s,
                            g,
                            PARTS,
                            row + 16 * half,
                            Y,
                            D,
                            I,
                            KS,
                            2,
                            NH,
                            FORMAT,
                            FP32,
                            BO,
                            BK,
                            SIMULATE,
                            False,
                            EARLY,
                        )
                else:
                    _down_tile(
                        H,
                        ORDER,
                        first,
                        count,
                        w,
                        s,
                        g,
                        PARTS,
                        row,
                        Y,
                        D,
                        I,
                        KS,
                        RH,
                        NH,
                        FORMAT,
                        FP32,
                        BO,
                        BK,
                        SIMULATE,
                        APART,
                        EARLY,
                    )
        wait_for_dependencies(EARLY)  # also of a program without experts: whoever waits for this kernel waits for all
