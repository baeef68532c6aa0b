"""Device code of attention for Hopper: 64 heads × 64 keys at a time on wgmma, rows copied ahead of their use.

It computes what `triton_tiles.attend` does. It is written in Gluon, where layouts, copies and waits are explicit, so
that the copies of the next tiles run while a tile is multiplied. Each of the two warpgroups has the logits of half the
keys of a tile, and half the columns of the output.

Programs that share a query may also share the columns of its output, and merge what they have found: `hopper_merge`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.attention.hopper_merge import APART, meet, merge_piece, sink_of_piece
from dsv4.kernels.quantize.triton_codes import decode_e8m0

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(64)  # columns of one scale of a packed row
BLOCKS = gl.constexpr(7)  # such blocks of a packed row; the rest is in bf16
PAYLOAD = gl.constexpr(576)  # bytes of a packed row, without its scales


@gluon.jit(do_not_specialize=["T", "W", "K", "splits", "wi_n", "ei_n", "v_b"])
def attend(
    Q,
    OUT,
    LSE,
    SINK,
    WINDOW,
    ENTRIES,
    WINDOW_INDEX,
    ENTRY_INDEX,
    VISIBLE,
    scale,
    T,
    H,
    W,
    K,
    splits,
    q_b,
    q_t,
    q_h,
    e_b,
    wi_n,
    wi_k,
    ei_n,
    ei_k,
    v_b,
    v_t,
    MERGED,
    COUNTERS,
    W_ROW: gl.constexpr,
    E_ROW: gl.constexpr,
    PACKED: gl.constexpr,
    LISTED: gl.constexpr,
    SPLIT: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PIECES: gl.constexpr,
    MOST: gl.constexpr,
):
    """Computes what `triton_tiles.attend` does, for rows of 512, with both pools in bf16 or both PACKED (KV_FP8 with 64
    columns in bf16).

    PARTS: programs (axis 2) that share a tile; each has all logits, and a part of the columns. OUT is the same, and LSE
    [N, PARTS, H, splits]. PIECES > 0: the first of the programs of a part merge as many pieces of MERGED [N, H, D];
    splits ≤ MOST, and all programs of the grid run at the same time. COUNTERS: of each part (axis 0 × PARTS).
    """
    gdc_wait()  # no later kernel starts before this one has ended: see `triton_tiles.attend`
    D: gl.constexpr = 512
    C: gl.constexpr = D // PARTS
    GROUPS: gl.constexpr = gl.num_warps() // 4
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BN // GROUPS, 16])  # logits
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, C // GROUPS, 16])  # output
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(128 if BN >= 64 else 2 * BN, 16, 2)
    n, split, part = gl.program_id(0) // gl.cdiv(H, 64), gl.program_id(1), gl.program_id(2)
    h0 = gl.program_id(0) % gl.cdiv(H, 64) * 64
    b, t, n = (n // T).to(gl.int64), n % T, n.to(gl.int64)
    # Copies of the queries and of the first tiles start before anything else.
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [64, D], SHARED)
    head, d = h0 + gl.arange(0, 64, gl.SliceLayout(1, COPY)), gl.arange(0, D, gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(
        q_shared, Q + b * q_b + t * q_t + head[:, None] * q_h + d[None, :], mask=(head < H)[:, None]
    )
    seen = K
    if not LISTED:  # unseen = entry[tile] >= visible
        seen = gl.maximum(0, gl.minimum(gl.load(VISIBLE + b * v_b + t * v_t), K)).to(gl.int32)
    near = gl.cdiv(W, BN)
    tiles = near + gl.cdiv(seen, BN)
    each = gl.cdiv(tiles, splits)
    first, last = split * each, gl.minimum(split * each + each, tiles)
    h = h0 + gl.arange(0, 64, gl.SliceLayout(1, S))
    if SPLIT and PIECES == 0:
        if first >= last:
            gl.store(
                LSE + (n * H + h) * splits + split,
                gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S)),
                mask=h < H,
            )
            async_copy.commit_group()
            async_copy.wait_group(0)  # no program ends while queries are copied to its memory
            return
    lists = WINDOW_INDEX + n * wi_n, wi_k, ENTRY_INDEX + n * ei_n, ei_k, near, W, seen
    run = ENTRIES + b * e_b
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [1 if PACKED else STAGES, BN, D], SHARED)
    if PACKED:
        ring = packed_ring(BN, STAGES)
    ROWS: gl.constexpr = keys_layout(BN, gl.num_warps()) if PACKED else gl.SliceLayout(1, COPY)
    ahead = rows_of(first, lists, LISTED, BN, ROWS)
    for tile in range(first, first + STAGES):
        row, ahead = ahead, rows_of(tile + 1, lists, LISTED, BN, ROWS)
        if tile < last:
            if PACKED:
                copy_packed(ring, tile - first, row, tile < near, WINDOW, run, W_ROW, E_ROW)
            else:
                copy_rows(k_shared.index(tile - first), row, tile < near, WINDOW, run, W_ROW, E_ROW, D)
        async_copy.commit_group()
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    if not SPLIT:  # logits[:, :, -1] = sink
        sink = gl.load(SINK + h, mask=h < H, other=0.0).to(gl.float32) * LOG2E
        m = sink
    if PIECES > 0:
        sink = sink_of_piece(SINK, h0, H, split, C, PIECES)
    acc = gl.zeros([64, C], gl.float32, O)
    # Sums by place in the tile: only maxima and weights pass between the warpgroups.
    l, weights = gl.zeros([64, BN], gl.float32, S), gl.allocate_shared_memory(gl.bfloat16, [64, BN], WEIGHTS)
    for tile in range(first, last):
        stage, more = (tile - first) % STAGES, tile + STAGES < last
        async_copy.wait_group(STAGES - 1)
        if PACKED:
            k = k_shared.index(0)
            unpack(ring, stage, k, BN, ROWS)
        else:
            k = k_shared.index(stage)
        fence_async_shared()
        s = warpgroup_mma(q_shared, k.permute([1, 0]), gl.zeros([64, BN], gl.float32, S), use_acc=False, is_async=True)
        # Work that needs no logits runs meanwhile.
        present = rows_of(tile, lists, LISTED, BN, gl.SliceLayout(0, S)) >= 0
        if PACKED:
            if more:
                copy_packed(ring, stage, ahead, tile + STAGES < near, WINDOW, run, W_ROW, E_ROW)
            async_copy.commit_group()
            ahead = rows_of(tile + STAGES + 1, lists, LISTED, BN, ROWS)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where(present[None, :], s * scale, float("-inf"))
        top = gl.maximum(m, gl.max(s, 1))
        safe = gl.where(top == float("-inf"), 0.0, top)  # −inf − −inf is NaN
        keep, p = gl.exp2(m - safe), gl.exp2(s - safe[:, None])
        m, l, acc = top, l * keep[:, None] + p, acc * gl.convert_layout(keep, gl.SliceLayout(1, O))[:, None]
        weights.store(p.to(gl.bfloat16))
        fence_async_shared()
        if PARTS == 1:
            acc = warpgroup_mma(weights, k, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            for p in gl.static_range(PARTS):
                if part == p:
                    acc = warpgroup_mma(weights, k.slice(p * C, C, dim=1), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc])
        if not PACKED:
            if more:
                copy_rows(k, ahead, tile + STAGES < near, WINDOW, run, W_ROW, E_ROW, D)
            async_copy.commit_group()
            ahead = rows_of(tile + STAGES + 1, lists, LISTED, BN, ROWS)
    if first >= last:  # the queries are not waited for: what follows may exchange numbers through their memory
        async_copy.wait_group(0)
        tl.debug_barrier()
    total = gl.sum(l, 1)
    lses = LSE + (n * PARTS + part) * H * splits
    if SPLIT:
        gl.store(lses + h * splits + split, m + gl.log2(total), mask=h < H)
    else:
        total += gl.exp2(sink - gl.where(m == float("-inf"), 0.0, m))
    out = acc * (1.0 / gl.convert_layout(total, gl.SliceLayout(1, O)))[:, None]
    rows = OUT + (n * splits + split) * (H * D)
    if SPLIT:  # in fp32: parts may cancel
        head, d = h0 + gl.arange(0, 64, gl.SliceLayout(1, O)), part * C + gl.arange(0, C, gl.SliceLayout(0, O))
        gl.store(rows + (head * D)[:, None] + d[None, :], out, mask=(head < H)[:, None])
    else:
        q_shared.store(out.to(gl.bfloat16))  # so that whole rows are written
        gl.store(rows + (head * D)[:, None] + d[None, :], q_shared.load(COPY), mask=(head < H)[:, None])
    if PIECES > 0:
        meet(COUNTERS + (gl.program_id(0) * PARTS + part) * APART, split == 0, splits)
        if split < PIECES:
            partial, merged = OUT + n * splits * (H * D) + part * C, MERGED + n * (H * D) + part * C
            merge_piece(partial, lses, sink, merged, h0, H, splits, split, D, C, PIECES, MOST)


@gluon.jit
def rows_of(tile, lists, LISTED: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of a tile in their pool, int32 [BN], −1 beyond the ends of the lists. Only the low halves of the int64
    indices are read."""
    window_list, wi_k, entry_list, ei_k, near, W, seen = lists
    j = gl.arange(0, BN, LAYOUT)
    low = gl.pointer_type(gl.int32)
    if LISTED:
        nearby = tile < near
        j += gl.where(nearby, tile, tile - near) * BN
        listed = gl.where(nearby, window_list, entry_list).to(low, bitcast=True)
        row = gl.load(listed + 2 * j * gl.where(nearby, wi_k, ei_k), mask=j < gl.where(nearby, W, seen), other=-1)
    else:
        e = (tile - near) * BN + j
        row = gl.where(e < seen, e, -1)
        if tile < near:
            j += tile * BN
            row = gl.load(window_list.to(low, bitcast=True) + 2 * j * wi_k, mask=j < W, other=-1)
    return row


@gluon.jit
def copy_rows(k, row, nearby, WINDOW, run, W_ROW: gl.constexpr, E_ROW: gl.constexpr, D: gl.constexpr):
    """Start copying the bf16 rows of a tile to k [BN, D]; zeros for rows that are absent (< 0)."""
    COPY: gl.constexpr = row.type.layout.parent
    d = gl.arange(0, D, gl.SliceLayout(0, COPY))
    pool, stride = gl.where(nearby, WINDOW, run), gl.where(nearby, W_ROW, E_ROW)
    place = gl.maximum(row, 0).to(gl.int64) * stride
    async_copy.async_copy_global_to_shared(k, pool + place[:, None] + d[None, :], mask=(row >= 0)[:, None])


# Packed rows ----------------------------------------------------------------------------------------------------------
# They are handled in two halves of four blocks of columns, since the compiler puts a barrier between writes to one
# buffer.


@gluon.constexpr_function
def keys_layout(BN, warps):
    """Of the keys of a tile, whose parent is that of [keys, blocks, columns]: 16 columns a thread."""
    rows = min(warps, BN // 8)
    piece = gl.BlockedLayout([1, 1, 16], [8, 1, 4], [rows, warps // rows, 1], [2, 1, 0])
    return gl.SliceLayout(1, gl.SliceLayout(2, piece))


@gluon.jit
def packed_ring(BN: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for packed rows in their stored form: codes of either half, bf16 columns, scales."""
    low = gl.allocate_shared_memory(gl.uint8, [STAGES, BN, 4, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1]))
    high = gl.allocate_shared_memory(gl.uint8, [STAGES, BN, 4, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1]))
    rotated = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    scales = gl.allocate_shared_memory(gl.int64, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return low, high, rotated, scales


@gluon.jit
def copy_packed(ring, stage, row, nearby, WINDOW, run, W_PAGE: gl.constexpr, E_PAGE: gl.constexpr):
    """Start copying the packed rows of a tile; zeros for rows that are absent (< 0)."""
    low, high, rotated, scales = ring
    PIECE: gl.constexpr = row.type.layout.parent.parent
    TAIL: gl.constexpr = gl.SliceLayout(1, PIECE)  # [keys, columns] of one block
    pool, bytes = gl.where(nearby, WINDOW, run), gl.where(nearby, W_PAGE, E_PAGE)
    r = gl.maximum(row, 0)
    page, slot, present = (r >> 6).to(gl.int64) * bytes, r & 63, row >= 0
    start, c = page + slot * PAYLOAD, gl.arange(0, BLOCK, gl.SliceLayout(0, TAIL))
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, PIECE)))[None, :, None]
    code = (pool + start)[:, None, None] + (block * BLOCK + c[None, None, :])
    live = present[:, None, None] & (block < 4)
    async_copy.async_copy_global_to_shared(low.index(stage), code, mask=live)
    async_copy.async_copy_global_to_shared(high.index(stage), code + 4 * BLOCK, mask=live & (block < 3))
    tail = (pool + start + BLOCKS * BLOCK).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    tail, there = gl.convert_layout(tail, gl.SliceLayout(1, TAIL)), gl.convert_layout(present, gl.SliceLayout(1, TAIL))
    async_copy.async_copy_global_to_shared(rotated.index(stage), tail[:, None] + c[None, :], mask=there[:, None])
    scale = (pool + page + 64 * PAYLOAD + slot * 8).to(gl.pointer_type(gl.int64), bitcast=True)
    async_copy.async_copy_global_to_shared(scales.index(stage), scale, mask=present)


@gluon.jit
def unpack(ring, stage, k, BN: gl.constexpr, KEYS: gl.constexpr):
    """k [BN, 512] = codes × scales, and the bf16 columns unchanged."""
    low, high, rotated, scales = ring
    PIECE: gl.constexpr = KEYS.parent.parent
    TAIL: gl.constexpr = gl.SliceLayout(1, PIECE)
    word = scales.index(stage).load(KEYS)
    code, tail = high.index(stage).load(PIECE), rotated.index(stage).load(TAIL)
    x = scaled(low.index(stage).load(PIECE), word)
    k.slice(0, 4 * BLOCK, dim=1).store(gl.reshape(x, [BN, 4 * BLOCK]))
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, PIECE)))[None, :, None]
    x = gl.where(block == 3, tail[:, None, :], scaled(code, word >> 32))
    k.slice(4 * BLOCK, 4 * BLOCK, dim=1).store(gl.reshape(x, [BN, 4 * BLOCK]))


@gluon.jit
def scaled(code, word):
    """codes * decode_e8m0(scales).repeat_interleave(KV_BLOCK, 1): E4M3 [keys, 4, 64], scales in bytes 0 … 3 of word →
    bf16."""
    PIECE: gl.constexpr = code.type.layout
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, PIECE)))
    factor = decode_e8m0((word.to(gl.int32)[:, None] >> (8 * block)[None, :]) & 255)
    return (code.to(gl.float8e4nv, bitcast=True).to(gl.float32) * factor[:, :, None]).to(gl.bfloat16)
