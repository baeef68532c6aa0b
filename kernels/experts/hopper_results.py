"""Device code of `hopper`: what becomes of the sums of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.kernels.experts.hopper_codes import BASE, SPREAD
from dsv4.kernels.experts.hopper_sums import BLOCK, ROWS
from dsv4.kernels.experts.triton_decode import swiglu
from dsv4.kernels.quantize.triton_codes import e4m3_exponent, magnitude, narrow, power_of_two, rounded, widen

# [tokens, rows of a half] of results, as they are stored
BYTE_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
BF16_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
# [rows of a half, tokens of a group]: of two tokens a thread has the 16 rows whose codes it stores
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [32, 0], [64, 0], [0, 32]],
        lane_bases=[[4, 0], [8, 0], [16, 0], [0, 1], [0, 2]],
        warp_bases=[[0, 4], [0, 8], [0, 16]],
        block_bases=[],
        shape=[128, 64],
    )
)


@gluon.jit
def restored(y, top, D: gl.constexpr):
    """y times the power of two by which a row's codes are too small."""
    exponent = gl.convert_layout(top, gl.SliceLayout(1, D), assert_trivial=True) - (127 + SPREAD - BASE)
    return y * power_of_two(exponent)[:, None]


@gluon.jit
def turned(y, DTYPE: gl.constexpr):
    """y rounded to DTYPE, with 2 tokens a thread, not 16: what is known of each token takes registers, and beside them
    are the sums of the other group."""
    return widen(gl.convert_layout(narrow(y, DTYPE), TURNED))


@gluon.jit
def gate(
    g, up, first, count, x_row, ORDER, ROUTING, out, row, limit, WIDTH: gl.constexpr, T: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """routing weight · swiglu, rounded to E4M3 with a scale for the tile's 128 columns: codes and scales, as x of the
    next product. Codes are by places; without routing weights, which is the shared expert, they are in order."""
    OUT, SCALE, stride = out
    n = gl.arange(0, T, gl.SliceLayout(0, g.type.layout))
    # y is in x.dtype; h = clamped_swiglu(gate, up, limit).mul_(weights).to(x.dtype)
    h = swiglu(rounded(g, DTYPE), rounded(up, DTYPE), limit)
    if ROUTING is not None:
        h *= gl.load(ROUTING + pairs(ORDER, first, n, count), mask=n < count, other=0.0)[None, :]
    h = rounded(h, DTYPE)
    exponent = e4m3_exponent(gl.max(magnitude(h), 0))
    gl.store(SCALE + row // BLOCK * stride + x_row + n, power_of_two(exponent), mask=n < count)
    codes = (h * power_of_two(-exponent)[None, :]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    codes = gl.permute(codes, (1, 0))
    if ROUTING is not None:
        codes = gl.permute(gl.reshape(codes, [T, 4, 8, 4]), (0, 2, 1, 3))
    codes = gl.convert_layout(gl.reshape(codes, [T, ROWS]), BYTE_ROWS)
    t, c = gl.arange(0, T, gl.SliceLayout(1, BYTE_ROWS)), gl.arange(0, ROWS, gl.SliceLayout(0, BYTE_ROWS))
    at = OUT + (x_row + t).to(gl.int64)[:, None] * WIDTH
    gl.store(at + (row + c)[None, :], codes, mask=(t < count)[:, None])


@gluon.jit
def pairs(ORDER, first, n, count):
    """Numbers of the pairs at places first + n; without an order a pair's number is its place. Nothing makes these
    warps wait for earlier kernels but the tokens that they multiplied, so an L1 cache may be older."""
    if ORDER is None:
        pair = gl.where(n < count, first + n, 0)
    else:
        pair = gl.load(ORDER + first + n, mask=n < count, other=0, cache_modifier=".cg")
    return pair


@gluon.jit
def put(y, first, count, ORDER, OUT, row, O: gl.constexpr, T: gl.constexpr):
    """Rows of the pairs of OUT [P, O]: columns row … row + 128."""
    y = gl.convert_layout(gl.permute(narrow(y, OUT.dtype.element_ty), (1, 0)), BF16_ROWS)
    t, c = gl.arange(0, T, gl.SliceLayout(1, BF16_ROWS)), gl.arange(0, ROWS, gl.SliceLayout(0, BF16_ROWS))
    pair = pairs(ORDER, first, t, count).to(gl.int64)
    gl.store(OUT + (pair * O)[:, None] + (row + c)[None, :], y, mask=(t < count)[:, None])
