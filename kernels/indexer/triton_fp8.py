"""Index scores of prompts on FP8 tensor cores of Hopper: both operands become E4M3 codes under one scale a row.

Queries that `simulate_fp4_blocks` rounded, and keys in FP4, are E2M1 numbers under a scale of 32 dims each. E4M3 has
room for the differences between the scales of a row: where these are at most 2^14, all numbers become codes exactly.
Beyond that, a small number is off by at most 2^-10 in a row whose largest code is more than 224. That is 2^-17 of the
row's largest number; sums of FP8 products on Hopper keep 13 to 22 bits. FP8 keys with a scale a row are codes already.
Scales are positive and so commute with ReLU: those of queries join the head weights, those of keys multiply the sums.

`select_entries` uses this from CODES queries on, once it is timed (`scripts/tune_index.py`).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.kernels.cache_rows import KEY_FORMATS, PackedRows
from dsv4.kernels.descriptors import described
from dsv4.kernels.indexer import hopper
from dsv4.kernels.indexer.triton_keys import PLAIN
from dsv4.kernels.launch import capability, dependent_launch, dot_in_fp32, processors
from dsv4.kernels.linear.triton_words import launch_dependents, wait_for_dependencies
from dsv4.kernels.quantize.triton_codes import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    e4m3_bytes,
    magnitude,
    power_of_two,
    widen,
)

HEADS, DIMS, PAGE, QUERIES = hopper.HEADS.value, hopper.DIMS.value, hopper.PAGE.value, hopper.QUERIES.value
STAGES = 8  # pages of keys in shared memory
_PAGE, _HEADS = tl.constexpr(PAGE), tl.constexpr(HEADS)


class Coded(NamedTuple):
    """Keys as codes uint8 [B, padded, 128] and scales fp32 [B, padded]; padded: a multiple of 64, zeros beyond the n
    keys of a batch row."""

    codes: torch.Tensor
    scales: torch.Tensor
    n: int

    def rows(self, part: slice) -> "Coded":
        """Keys of some batch rows."""
        return Coded(self.codes[part], self.scales[part], self.n)


def takes(q: torch.Tensor, keys: torch.Tensor | PackedRows) -> bool:
    """Whether these kernels score queries bf16 [B, T, 64, 128] that were rounded to FP4 against such keys, on that
    device."""
    packed = isinstance(keys, PackedRows)
    known = keys.format in KEY_FORMATS if packed else keys.dtype is torch.bfloat16
    shape = q.shape[2:] == (HEADS, DIMS) and not dot_in_fp32(q)
    return known and shape and capability(q.device)[0] == 9


def coded_keys(keys: torch.Tensor | PackedRows) -> Coded:
    """Keys bf16 [B, n, 128] or packed ones as codes. A row with a number that is not finite gets a scale of NaN."""
    packed = isinstance(keys, PackedRows)
    data = keys.data if packed else keys
    B, n = data.shape[0], keys.count if packed else keys.shape[1]
    form = keys.format.form if packed else PLAIN.value
    pages, whole = triton.cdiv(n, PAGE), packed and keys.format.block == 0
    codes = torch.empty(B, PAGE * pages, DIMS, dtype=torch.uint8, device=data.device)
    scales = torch.empty(B, PAGE * pages, dtype=torch.float32, device=data.device)
    held = data.view(torch.float32) if whole else data
    dependent = dependent_launch(data.device)
    _code_keys[(B * pages,)](
        data, held, codes, scales, n, pages, *data.stride()[:2], *held.stride()[:2], DIMS, form, dependent, num_warps=4,
        launch_pdl=dependent,
    )  # fmt: skip
    return Coded(codes, scales, n)


def coded_queries(
    q: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor, n: int, known: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [B, padded, 64, 128] of q bf16 [B, T, 64, 128], T padded to a multiple of 4; fp32 [B, padded, 64]:
    half of weights · scale, NaN for a head with a number that is not finite; and int32 [B, padded]: entries < that are
    visible, of n, and 0 where these are at most `known`, and from T on."""
    B, T = q.shape[:2]
    q = q if q.stride()[2:] == (DIMS, 1) else q.contiguous()
    padded, device = QUERIES * triton.cdiv(T, QUERIES), q.device
    codes = torch.empty(B, padded, HEADS, DIMS, dtype=torch.uint8, device=device)
    factors = torch.empty(B, padded, HEADS, dtype=torch.float32, device=device)
    ends = torch.empty(B, padded, dtype=torch.int32, device=device)
    dependent = dependent_launch(device)
    _code_queries[(B * padded,)](
        q, weights, visible, codes, factors, ends, T, padded, n, known, *q.stride()[:2], *weights.stride(),
        *visible.stride(), DIMS, dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return codes, factors, ends


def launch_codes(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: Coded,
    visible: torch.Tensor,
    scores: torch.Tensor,
    width: int,
    known: int = 0,
) -> None:
    """Scores of q bf16 [B, T, 64, 128] into scores fp32 [B, T, width], contiguous. Those of entries that a query does
    not see are not written, nor any of a query that sees at most `known`. The other arguments are those of
    `index_scores`."""
    B, T = q.shape[:2]
    codes, factors, ends = coded_queries(q, weights, visible, keys.n, known)
    tiles, padded, many = codes.shape[0] * codes.shape[1] // QUERIES, keys.codes.shape[1], processors(q.device)
    parts = parts_of(tiles, triton.cdiv(keys.n, PAGE), many)
    matrix = lambda x: x.view(-1, DIMS).view(torch.float8_e4m3fn)
    queries, columns = described(matrix(codes), QUERIES * HEADS, DIMS), described(matrix(keys.codes), PAGE, DIMS)
    hopper.scores[(min(tiles * parts, many),)](
        queries, factors, ends, columns, keys.scales, scores, B, T, padded, parts, width, STAGES, num_warps=4,
        maxnreg=168, launch_pdl=dependent_launch(q.device),
    )  # fmt: skip


@cache
def parts_of(tiles: int, pages: int, programs: int) -> int:
    """Into how many parts the pages of each tile are divided, so that the rounds of programs take the least time,
    counted in pages; a part costs as much as one page more."""
    cost = lambda parts: triton.cdiv(tiles * parts, programs) * (triton.cdiv(pages, parts) + 1)
    return min(range(1, min(pages, programs) + 1), key=cost, default=1)


# ---- codes ----------------------------------------------------------------------------------------------------------


@triton.jit
def _coded_rows(x):
    """fp32 [R, D] → E4M3 codes uint8 [R, D] and exponents int32 [R] such that the largest magnitude of a row becomes at
    most 448 and, unless it is below 2^-117, more than 224; and whether a row is finite [R]."""
    amax = tl.max(magnitude(x), 1)
    finite = amax < 0x7F800000
    k = (amax >> 23) - 135 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 = 1.75·2^8
    k = tl.where(finite, tl.maximum(k, -125), 0)
    x *= power_of_two(-k)[:, None]
    return e4m3_bytes(x), k, finite


@triton.jit(do_not_specialize=["T", "padded", "n", "known"])
def _code_queries(
    Q, WEIGHTS, VISIBLE, CODES, FACTORS, ENDS, T, padded, n, known, q_b, q_t, w_b, w_t, w_h, v_b, v_t,
    D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query a program."""
    launch_dependents(EARLY)
    row, head, i = tl.program_id(0), tl.arange(0, _HEADS), tl.arange(0, D)
    b, t = (row // padded).to(tl.int64), (row % padded).to(tl.int64)
    live = t < T
    within = head[:, None] * D + i[None, :]
    wait_for_dependencies(EARLY)
    x = widen(tl.load(Q + b * q_b + t * q_t + within, mask=live, other=0.0))
    weight = tl.load(WEIGHTS + b * w_b + t * w_t + head * w_h, mask=live, other=0.0)
    end = tl.minimum(tl.maximum(tl.load(VISIBLE + b * v_b + t * v_t, mask=live, other=0), 0), n)
    codes, k, finite = _coded_rows(x)
    row = row.to(tl.int64)
    tl.store(CODES + row * (_HEADS * D) + within, codes)
    factor = tl.where(finite, weight * power_of_two(k - 1), float("nan"))
    tl.store(FACTORS + row * _HEADS + head, factor)
    tl.store(ENDS + row, tl.where(end > known, end, 0).to(tl.int32))


@triton.jit(do_not_specialize=["n", "pages"])
def _code_keys(
    DATA, HELD, CODES, SCALES, n, pages, data_b, data_row, held_b, held_row, D: tl.constexpr, FORMAT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One page of keys a program. data_row: from key to key (PLAIN) or page to page; HELD: the scales of whole rows as
    fp32."""
    launch_dependents(EARLY)
    b, page = (tl.program_id(0) // pages).to(tl.int64), (tl.program_id(0) % pages).to(tl.int64)
    slot, i = tl.arange(0, _PAGE), tl.arange(0, D)
    there = page * _PAGE + slot < n
    live, at = there[:, None], DATA + b * data_b + page * data_row
    wait_for_dependencies(EARLY)
    to = tl.program_id(0).to(tl.int64) * _PAGE + slot
    if FORMAT == 8:  # one scale a row
        codes = tl.load(at + slot[:, None] * D + i[None, :], mask=live, other=0)
        scale = tl.load(HELD + b * held_b + page * held_row + _PAGE * D // 4 + slot, mask=there, other=0.0)
    else:
        codes, k, finite = _coded_rows(_numbers(DATA + b * data_b, at, page, data_row, live, slot, i, D, FORMAT))
        scale = tl.where(finite, power_of_two(k), float("nan"))
    tl.store(CODES + to[:, None] * D + i[None, :], codes)
    tl.store(SCALES + to, scale)


@triton.jit
def _numbers(rows, at, page, step, live, slot, i, D: tl.constexpr, FORMAT: tl.constexpr):
    """Keys of a page as fp32 [64, D]: bf16 of which each is `step` from the next, or codes with scales of blocks in the
    page at `at`."""
    if FORMAT == PLAIN:
        x = widen(tl.load(rows + (page * _PAGE + slot)[:, None] * step + i[None, :], mask=live, other=0.0))
    else:
        BYTES: tl.constexpr = D * (FORMAT % 16) // 8
        BLOCK: tl.constexpr = FORMAT // 16
        scale = tl.load(at + _PAGE * BYTES + slot[:, None] * (D // BLOCK) + (i // BLOCK)[None, :], mask=live, other=127)
        if FORMAT % 16 == 4:
            byte = tl.load(at + slot[:, None] * BYTES + (i // 2)[None, :], mask=live, other=0).to(tl.int32)
            x = decode_e2m1((byte >> (i % 2 * 4)[None, :]) & 15)
        else:
            x = decode_e4m3(tl.load(at + slot[:, None] * BYTES + i[None, :], mask=live, other=0))
        x *= decode_e8m0(scale)
    return x
