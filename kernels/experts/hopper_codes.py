"""Device code that turns E2M1 codes into E4M3 codes in registers, as the left operand of wgmma.

A row's scales are powers of two, and so are those of E4M3's exponents: a group's scale, relative to the largest one of
its row, becomes part of the codes. This is exact over `SPREAD` exponents.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SPREAD = gl.constexpr(13)  # the most by which exponents of a row's scales may differ
BASE = gl.constexpr(7)  # largest codes are 2^6 times those of E2M1, the smallest 2^−7

# Layouts of two warpgroups. Thread 4r + q of a warp has group q, of 32 columns, of rows r and r + 8.
CODES = gl.constexpr(  # [rows, groups, words]: 16 bytes of a row are a thread's
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [64, 0, 0]],
        block_bases=[],
        shape=[128, 4, 4],
    )
)
FLAT = gl.constexpr(  # [rows, words], as CODES
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 16],
    )
)
FOUR = gl.constexpr(  # [rows, stages]: words of four scales, all of a row in each of its threads
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 4],
    )
)
SCALES = gl.constexpr(gl.SliceLayout(2, CODES))  # [rows, groups]
LINES = gl.constexpr(gl.SliceLayout(1, SCALES))  # [rows]

# A word of E2M1 codes ($2) → two words of E4M3 codes ($0, $1), in their order. Codes without signs select bytes of $3
# and $4, which hold the eight magnitudes. Signs of the codes with odd numbers are the highest bits of bytes; shifted by
# a code, those of the others are.
E2M1_E4M3 = gl.constexpr("""{ .reg .b32 v, w, m, s, t; and.b32 v, $2, 0x77777777; shr.b32 w, v, 16; shl.b32 s, $2, 4;
    prmt.b32 m, $3, $4, v; prmt.b32 t, s, $2, 0x5140; lop3.b32 $0, m, t, 0x80808080, 0xf8;
    prmt.b32 m, $3, $4, w; prmt.b32 t, s, $2, 0x7362; lop3.b32 $1, m, t, 0x80808080, 0xf8; }""")

# The two tables of a group ($0, $1), which every warp holds: lane `up` has those of `up` in $5 and $6. A byte of four
# scales ($2) is taken by the selector $3; $4 makes it an exponent above the lowest. Only groups of zeros alone have
# exponents that no lane stands for: they take the tables of another lane, in which zeros are zeros too.
TABLES = gl.constexpr("""{ .reg .b32 up; prmt.b32 up, $2, 0, $3; add.u32 up, up, $4;
    shfl.sync.idx.b32 $0, $5, up, 31, -1; shfl.sync.idx.b32 $1, $6, up, 31, -1; }""")


@gluon.jit
def lanes_tables():
    """`magnitudes` of each thread's number in its warp: two tensors int32 [128, 4]."""
    row, group = gl.arange(0, 128, gl.SliceLayout(1, SCALES)), gl.arange(0, 4, gl.SliceLayout(0, SCALES))
    return magnitudes(4 * (row & 7)[:, None] + group[None, :])


@gluon.jit
def magnitudes(up):
    """Two words: bytes of the E4M3 codes of {0, 0.5, 1, 1.5} and {2, 3, 4, 6} · 2^(up − 7), for up 0 … 13.

    Codes of normal numbers differ by 8 a power of two. Only 0.5 and 1 may be subnormal here, and 0 always is.
    """
    few = 0x0C080400 >> gl.maximum(1 - up, 0)
    return gl.where(up < 2, few, up * 0x08080800 + 0x03FFF800), up * 0x08080808 + 0x14100C08


@gluon.jit
def scales_of(scales, block: gl.constexpr):
    """Scales of a stage, number `block` of four: words int32 [128], of int32 [128, 4] in shared memory."""
    halves = gl.split(gl.reshape(scales.load(FOUR), [128, 2, 2]))
    return gl.convert_layout(gl.split(halves[block % 2])[block // 2], LINES, assert_trivial=True)


@gluon.jit
def scales_of_any(scales, block):
    """As `scales_of`, of a stage whose number is not known at compile time."""
    even, odd = gl.split(gl.reshape(scales.load(FOUR), [128, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    four = gl.where(block < 2, gl.where(block == 0, first, second), gl.where(block == 2, third, fourth))
    return gl.convert_layout(four, LINES, assert_trivial=True)


@gluon.jit
def e4m3_words(codes, four, top, tables):
    """128 rows of one stage as E4M3, in words of four codes: two tensors int32 [128, 4, 4], of the even and the odd
    words.

    codes int32 [128, 16] in shared memory. four int32 [128]: words of four scales. top int32 [128]: byte of the largest
    scale of each row. tables: see `lanes_tables`.
    """
    words = gl.convert_layout(gl.reshape(codes.load(FLAT), [128, 4, 4]), CODES, assert_trivial=True)
    four, base = gl.broadcast(four[:, None], (SPREAD - top)[:, None])
    byte = 0x4440 + gl.arange(0, 4, gl.SliceLayout(0, SCALES))
    # Neither is pure: both would be moved to where their results are used, behind the wait for the products before.
    small, large = gl.inline_asm_elementwise(
        TABLES, "=&r,=&r,r,r,r,r,r", [four, byte[None, :], base, tables[0], tables[1]],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    words, small = gl.broadcast(words, small[:, :, None])
    words, large = gl.broadcast(words, large[:, :, None])
    return gl.inline_asm_elementwise(
        E2M1_E4M3, "=&r,=&r,r,r,r", [words, small, large], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def operand(low, high, A: gl.constexpr):
    """Words of `e4m3_words` → the left operand E4M3 [128, 128], with columns in the order of `hopper_order`."""
    words = gl.permute(gl.join(low, high), (0, 2, 3, 1))  # rows, instructions, halves of one, groups
    first, second = words.to(gl.uint8), (words >> 8).to(gl.uint8)
    third, fourth = (words >> 16).to(gl.uint8), (words >> 24).to(gl.uint8)
    codes = gl.reshape(gl.join(gl.join(first, third), gl.join(second, fourth)), [128, 128])
    return gl.convert_layout(codes, A, assert_trivial=True).to(gl.float8e4nv, bitcast=True)
