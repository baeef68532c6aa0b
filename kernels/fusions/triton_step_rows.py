"""Writes a row from registers into a cache, in any of its formats."""

import triton
import triton.language as tl

from dsv4.kernels.cache_rows.formats import PLAIN_FORM
from dsv4.kernels.cache_rows.triton import store_row
from dsv4.kernels.quantize.triton_codes import narrow

_PLAIN = tl.constexpr(PLAIN_FORM)


@triton.jit
def put(POOL, slot, y, D: tl.constexpr, ROPE: tl.constexpr, STRIDE: tl.constexpr, FORM: tl.constexpr, B: tl.constexpr):
    """Values fp32 [1, B] of a row of D ≤ B numbers to row `slot` int64 of a pool; the bytes are those of `encode_rows`.

    STRIDE: elements from row to row, or bytes from page to page; FORM: PLAIN_FORM, or of a `RowFormat`; KV_FP8 keeps
    the last ROPE numbers in bf16. A negative slot is skipped.
    """
    y = tl.reshape(y, [B])
    if slot >= 0:
        if FORM == _PLAIN:
            i = tl.arange(0, B)
            tl.store(POOL + slot * STRIDE + i, narrow(y, POOL.dtype.element_ty), mask=i < D)
        else:
            store_row(POOL + (slot >> 6) * STRIDE, slot & 63, y, D, ROPE, FORM, B)
