"""Contract of `write_rows`."""

import torch

from dsv4.kernels.cache_rows import KEY_FORMATS
from dsv4.kernels.cache_rows.formats import PAGE, PackedRows, RowFormat, pack_layout
from dsv4.kernels.cache_rows.reference import write_rows
from dsv4.kernels.contract import BITS, Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.quantize.exact import E2M1_GRID, E4M3_GRID, FP4_FLOOR, FP8_FLOOR, block_codes

PAGES = 3


def encoded(x: torch.Tensor, form: RowFormat, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, scales) as bytes int64 [M, ·] of values [M, D], from the definition of the layout."""
    x = x.double()
    sign = torch.signbit(x).long()
    if form is not RowFormat.KV_FP8 and form.bits == 4:
        code, exponent = block_codes(x, form.block, E2M1_GRID, FP4_FLOOR)
        pair = (code + 8 * sign).unflatten(1, (-1, 2))
        return pair[..., 0] + 16 * pair[..., 1], exponent + 127
    if form is not RowFormat.KV_FP8 and form.block:
        code, exponent = block_codes(x, form.block, E4M3_GRID, FP8_FLOOR)
        return code + 128 * sign, exponent + 127
    if form is RowFormat.INDEX_FP8:
        code, exponent = block_codes(x, x.shape[1], E4M3_GRID, FP8_FLOOR)
        word = (exponent + 127) << 23
        return code + 128 * sign, torch.cat([word >> shift & 255 for shift in (0, 8, 16, 24)], 1)
    left = x.shape[1] - rope
    code, exponent = block_codes(x[:, :left], 64, E4M3_GRID, FP8_FLOOR)
    word = nearest_bf16(x[:, left:])
    kept = torch.stack((word & 255, word >> 8), -1).flatten(1)
    scales = torch.zeros(len(x), -(-exponent.shape[1] // 8) * 8, dtype=torch.int64)
    scales[:, : exponent.shape[1]] = exponent + 127
    return torch.cat((code + 128 * sign[:, :left], kept), 1), scales


def nearest_bf16(x: torch.Tensor) -> torch.Tensor:
    """int64: the 16 bits of the bf16 number nearest to x, which fp32 holds; half way the even one."""
    word = x.float().view(torch.int32).long() & 0xFFFFFFFF
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def exact(rows: PackedRows, slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The whole pool uint8 [pages, page bytes] after the rows were written, byte by byte."""
    payload, scales = encoded(values, rows.format, rows.rope)
    data, (P, S) = rows.data.clone(), (payload.shape[1], scales.shape[1])
    for m, slot in enumerate(slots.tolist()):
        page, row = divmod(slot, PAGE)
        data[page, row * P : (row + 1) * P] = payload[m].to(torch.uint8)
        data[page, PAGE * P + row * S : PAGE * P + (row + 1) * S] = scales[m].to(torch.uint8)
    return data


def at_page_ends(draw) -> torch.Tensor:
    """The first and the last row of every page, in no order."""
    return draw.shuffled(torch.cat((torch.arange(PAGES) * PAGE, torch.arange(PAGES) * PAGE + PAGE - 1)))


def families(draw, width: int) -> dict[str, torch.Tensor]:
    """Values fp32 [M, width]: of all sizes, at the limits of formats, halves between codes, zeros, coded places."""
    x = draw.rand(12, width)
    limits = torch.tensor([448.0, 447.9, 464.0, 465.0, 480.0, 6.0, 6.01, 7.0, 3.0, 224.0, 1e9, 1e-5])
    edges = x / x.abs().amax(1, keepdim=True) * limits.unsqueeze(1)
    edges[:, 0] = limits
    zeros = draw.rand(4, width)
    zeros[0], zeros[1], zeros[2, : width // 2], zeros[3, 1:] = 0, -0.0, 0, 0
    blocks = draw.rand(9, width) * 2.0 ** (torch.arange(width) // 32 % 11 - 5)
    halves = draw.below(57, 6, width) / 4 * (1 - 2 * draw.below(2, 6, width))
    halves[:3] /= 4
    return {
        "random": x,
        "sizes": x * 2.0 ** torch.linspace(-30, 30, 12).round().unsqueeze(1),
        "largest at the limits": edges,
        "blocks of different sizes": blocks,
        "halves between codes": halves,
        "zeros": zeros,
        "coded": draw.coded(7, width).float(),
    }


def cases(w, draw):
    """Every row format in pools that hold something: rows at the ends of pages, one row, a whole page, all rows."""
    formats = (
        (RowFormat.KV_FP8, w.head_dim, w.qk_rope_head_dim),
        (RowFormat.KV_FP8, 512, 64),
        *((form, w.index_head_dim, 0) for form in KEY_FORMATS if form.fits(w.index_head_dim)),
    )
    for form, width, rope in dict.fromkeys(formats):
        for family, values in families(draw, width).items():
            slots = draw.shuffled(torch.arange(PAGES * PAGE))[: len(values)]
            yield _case(family, form, width, rope, slots, values, draw)
        if width == w.index_head_dim or rope:
            ends = at_page_ends(draw)
            for slots in (ends, ends[:1], PAGE + torch.arange(PAGE).flip(0)):
                yield _case("ends of pages", form, width, rope, slots, draw.rand(len(slots), width), draw)


def _case(family, form, width, rope, slots, values, draw) -> Case:
    """A pool whose bytes are random, so that any byte that changes shows."""
    page = pack_layout(form, width, rope).page
    data = draw.below(256, PAGES, page).to(torch.uint8)
    rows = PackedRows(form, data, width, rope, PAGES * PAGE)
    same = {"lower precision": "most values are codes, or too few to stand beside a boundary between two"}
    exempt = same if family in ("coded", "halves between codes", "zeros", "ends of pages") else {}
    exempt = same if form.bits == 4 and draw.dtype is torch.float32 else exempt
    label = f"{len(slots)} rows of {width}, {form.value}"
    return Case(label, family, (rows, slots, values.to(draw.dtype)), {}, exempt)


def work(rows: PackedRows, slots, values) -> Work:
    """Values in, bytes of the rows out."""
    M, row = len(slots), rows.layout.row
    moved = values.numel() * values.element_size() + M * row + 4 * M
    return Work(moved, 3 * values.numel(), f"M·D·{values.element_size()} + M·{row} + 4·M; 3·M·D")


def inputs(w, draw, form, width, rope, rows) -> tuple:
    """Every other row of a pool."""
    slots = torch.arange(rows, device=draw.device) * 2 + draw.seed % 2
    return draw.pool(form, 2 * rows + PAGE, width, rope), slots, draw.act(rows, width)


def sizes(w) -> dict:
    """A decode step and a prompt in each format; compiled with rotated columns of a small model too."""
    kv = dict(form=RowFormat.KV_FP8, width=w.head_dim, rope=w.qk_rope_head_dim)
    keys = [dict(form=form, width=w.index_head_dim, rope=0) for form in KEY_FORMATS]
    small = dict(form=RowFormat.KV_FP8, width=64, rope=32)
    return {
        "bench": [form | dict(rows=M) for form in (kv, *reversed(keys)) for M in (8, 4096)],
        "compiled": [
            form | dict(rows=8, dtype=dtype) for form in (kv, small, *keys) for dtype in (torch.bfloat16, torch.float32)
        ],
    }


WRITE_ROWS = Contract(
    "write_rows",
    "Encode rows of numbers and store them in pages of packed rows.",
    (
        Argument("rows", ("row_slots", "width"), "rows", "packed pool, flat; written in place"),
        Argument("slots", ("num_rows",), "int64", "row of the pool for each row of values; all different, at least 0"),
        Argument("values", ("num_rows", "width"), "activation", "rows to encode"),
    ),
    (
        Output(
            *("data", ("pages", "page_bytes"), "uint8", "every byte of the pool; only rows that are written change"),
            rule=BITS,
            argument=0,
        ),
    ),
    exact,
    {"bits": write_rows},
    cases,
    work,
    (
        "a page holds the payload of its 64 rows first, then their scales, then padding that is not touched",
        "scales are powers of two, rounded up; the padding byte of a row's scales is 0",
        "slots below 0 and slots that occur twice do not occur",
    ),
    production=Production(inputs, sizes),
)
CONTRACTS = (WRITE_ROWS,)
