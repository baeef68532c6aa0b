"""Planted faults of the quantisation simulation and of packed rows that are written."""

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat
from dsv4.kernels.cache_rows.reference import encode_rows
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.wrappers import common, gates, in_place, replaced

FP8_FLOOR, FP4_FLOOR = 1e-4, 6 * 2.0**-126
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(y):
    return y.to(torch.float8_e4m3fn).float()


def e2m1(y, up=None):
    """Nearest of the values of E2M1. up: which halves go to the larger value, by the number of the smaller one."""
    grid = torch.tensor(GRID, device=y.device)
    middle = (grid[1:] + grid[:-1]) / 2
    size = y.abs().clamp(max=6).contiguous()
    code = torch.bucketize(size, middle)
    half = (code < 7) & (middle[code.clamp(max=6)] == size)
    to_larger = (code % 2 == 1) if up is None else up
    return grid[code + (half & to_larger).long()].copysign(y)


def ceiling(amax, top):
    return torch.exp2((amax.double() / top).log2().ceil()).float()


def blocks(x, block, floor, top, scale=ceiling, rounded=e4m3):
    """x [..., K] by blocks: rounded(x / scale(amax, top)) · scale, in x's dtype."""
    K = x.shape[-1]
    y = torch.nn.functional.pad(x.float(), (0, -K % block)).unflatten(-1, (-1, block))
    s = scale(y.abs().amax(-1, keepdim=True).clamp(min=floor), top)
    return (rounded(y / s) * s).flatten(-2)[..., :K].to(x.dtype)


def _fp8(size=None, floor=FP8_FLOOR, top=448.0, scale=ceiling, rounded=e4m3, first=False, whole=False):
    """honest → `simulate_fp8_blocks` with parts changed. first: the first `keep` columns stay instead of the last;
    whole: none stays."""

    def faulty(x, block, keep=0):
        run = lambda part: blocks(part, size(part, block) if size else block, floor, top, scale, rounded)
        if whole or not keep:
            return run(x)
        if first:
            return torch.cat((x[..., :keep], run(x[..., keep:])), -1)
        return torch.cat((run(x[..., :-keep]), x[..., -keep:]), -1)

    return lambda honest: faulty


def _fp4(size=None, floor=FP4_FLOOR, top=6.0, scale=ceiling, rounded=e2m1):
    def faulty(x, block=32):
        return blocks(x, size(x, block) if size else block, floor, top, scale, rounded)

    return lambda honest: faulty


def floor_of(amax, top):
    return torch.exp2((amax.double() / top).log2().floor()).float()


def nearest_of(amax, top):
    return torch.exp2((amax.double() / top).log2().round()).float()


def no_power(amax, top):
    return amax / top


def saturated(y):
    return e4m3(y.clamp(-448, 448))


def truncated(y):
    near = e4m3(y)
    step = torch.exp2(near.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return torch.where(near.abs() > y.abs(), near - y.sign() * step, near)


def away(y):
    """Halves go away from zero."""
    step = torch.exp2(y.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return ((y.abs() / step + 0.5).floor() * step).clamp(max=448).copysign(y)


def flushed(y):
    near = e4m3(y)
    return torch.where(near.abs() < 2.0**-6, 0.0, near)


def small_top(y):
    """Saturates at 240, as E4M3 with another bias does."""
    return e4m3(y).clamp(-240, 240)


def whole_row(x, block):
    return x.shape[-1]


def _last_short(honest):
    """The last short block stays as it is."""

    def faulty(x, block=32, *keep):
        found, n = honest(x, block, *keep).clone(), (x.shape[-1] - sum(keep)) // block * block
        return torch.cat((found[..., :n], x[..., n:]), -1)

    return faulty


def _unsigned_zero(honest):
    return lambda *arguments: honest(*arguments) + 0.0


SCALES = {
    "scales are rounded down": (96, floor_of, saturated, lambda y: e2m1(y)),
    "scales are rounded to the nearest power": (96, nearest_of, saturated, lambda y: e2m1(y)),
    "scales are no powers of two": (52, no_power, saturated, lambda y: e2m1(y)),
}
FP8 = {name: (entry, _fp8(scale=scale, rounded=low)) for name, (entry, scale, low, _) in SCALES.items()} | {
    "a cast without a clamp": (54, _fp8(scale=floor_of)),
    "saturation at 240": (54, _fp8(rounded=small_top)),
    "rounded towards zero": (55, _fp8(rounded=truncated)),
    "halves go away from zero": (55, _fp8(rounded=away)),
    "subnormal codes count as zero": (84, _fp8(rounded=flushed)),
    "no least amax": (57, _fp8(floor=0.0)),
    "E5M2 codes": (14, _fp8(rounded=lambda y: y.to(torch.float8_e5m2).float())),
    "one scale a row": (53, _fp8(size=whole_row)),
    "blocks of half the size": (53, _fp8(size=lambda x, block: block // 2)),
    "no column is kept": (49, _fp8(whole=True)),
    "the first columns are kept": (49, _fp8(first=True)),
    "the last short block is not rounded": (26, _last_short),
    "−0 becomes 0": (56, _unsigned_zero),
}
FP4 = {name: (entry, _fp4(scale=scale, rounded=low)) for name, (entry, scale, _, low) in SCALES.items()} | {
    "halves go away from zero": (55, _fp4(rounded=lambda y: e2m1(y, torch.tensor(True)))),
    "halves go towards zero": (55, _fp4(rounded=lambda y: e2m1(y, torch.tensor(False)))),
    "0.5 counts as zero": (56, _fp4(rounded=lambda y: torch.where(e2m1(y).abs() == 0.5, 0.0, e2m1(y)))),
    "amax of 1e-4 at least": (57, _fp4(floor=FP8_FLOOR)),
    "no least amax": (57, _fp4(floor=0.0)),
    "one scale a row": (53, _fp4(size=whole_row)),
    "blocks of half the size": (53, _fp4(size=lambda x, block: block // 2)),
    "the last short block is not rounded": (26, _last_short),
    "−0 becomes 0": (56, _unsigned_zero),
}


def _stored(payload_at, scales_at, change=lambda payload, scales, rows: (payload, scales)):
    """honest → `write_rows` that puts row r of page p at payload_at(rows, p, r) and its scales at scales_at(rows, p,
    r), bytes of the flat pool."""

    def faulty(rows: PackedRows, slots, values):
        payload, scales = change(*encode_rows(values, rows.format, rows.rope), rows)
        flat = rows.data.view(-1)
        page, row = slots // PAGE, slots % PAGE
        for at, part in ((payload_at, payload), (scales_at, scales)):
            where = at(rows, page, row).unsqueeze(1) + torch.arange(part.shape[1], device=flat.device)
            where = where.flatten().clamp(max=len(flat) - 1)
            flat[where] = part.flatten()

    return lambda honest: faulty


def page_bytes(rows):
    return rows.layout.page


def payload_of(rows, page, row):
    return page * page_bytes(rows) + row * rows.layout.payload


def scales_of(rows, page, row):
    return page * page_bytes(rows) + PAGE * rows.layout.payload + row * rows.layout.scales


def _padded(payload, scales, rows):
    """The padding byte of a row's scales is 127."""
    if rows.format is RowFormat.KV_FP8:
        scales = scales.clone()
        scales[:, -(-(rows.width - rows.rope) // 64) :] = 127
    return payload, scales


def _swapped_nibbles(payload, scales, rows):
    return ((payload >> 4) | (payload << 4), scales) if rows.format is RowFormat.INDEX_FP4 else (payload, scales)


def _big_endian(payload, scales, rows):
    return payload, scales.flip(1) if rows.format is RowFormat.INDEX_FP8 else scales


def _exponent_up(payload, scales, rows):
    """Scales twice as large, codes as they are: another rounding of the exponent."""
    return payload, torch.where(scales > 0, scales + 1, scales) if rows.format is RowFormat.KV_FP8 else scales


def _then(change):
    """honest → the honest kernel, then change(rows, slots)."""

    def make(honest):
        def faulty(rows, slots, values):
            honest(rows, slots, values)
            change(rows, slots)

        return faulty

    return make


def _padding_zeroed(rows, slots):
    rows.data[slots // PAGE, PAGE * rows.layout.row :] = 0


def _row_after_cleared(rows, slots):
    after = torch.tensor([s for s in (slots + 1).tolist() if s not in set(slots.tolist()) and s % PAGE])
    if len(after):
        rows.payload[after // PAGE, after % PAGE] = 0


def _bf16_cut(honest):
    """Values are cut to bf16 instead of rounded, so that columns kept in bf16 differ for fp32 values."""
    return lambda rows, slots, values: honest(
        rows, slots, (values.float().view(torch.int32) & -65536).view(torch.float32).to(values.dtype)
    )


def _without_ends(honest):
    """The last row of a page is skipped."""

    def faulty(rows, slots, values):
        inside = slots % PAGE != PAGE - 1
        honest(rows, slots[inside], values[inside])

    return faulty


def _by_place(rows, page, row):
    return page * page_bytes(rows) + row * rows.layout.row


WRITES = {
    "a page has no padding": (
        58,
        _stored(
            lambda rows, page, row: page * PAGE * rows.layout.row + row * rows.layout.payload,
            lambda rows, page, row: (
                page * PAGE * rows.layout.row + PAGE * rows.layout.payload + row * rows.layout.scales
            ),
        ),
    ),
    "scales behind the payload of each row": (
        94,
        _stored(_by_place, lambda rows, page, row: _by_place(rows, page, row) + rows.layout.payload),
    ),
    "padding of scales is 127": (94, _stored(payload_of, scales_of, _padded)),
    "the high nibble first": (56, _stored(payload_of, scales_of, _swapped_nibbles)),
    "fp32 scales with the high byte first": (59, _stored(payload_of, scales_of, _big_endian)),
    "scales twice as large": (96, _stored(payload_of, scales_of, _exponent_up)),
    "padding of pages is cleared": (94, _then(_padding_zeroed)),
    "the row after is cleared": (94, _then(_row_after_cleared)),
    "the last row of a page is skipped": (26, _without_ends),
    "values of the row before": (73, replaced(2, lambda values: values.roll(1, 0))),
    "values are rounded to FP8 before": (
        14,
        replaced(2, lambda v: v.clamp(-448, 448).to(torch.float8_e4m3fn).to(v.dtype)),
    ),
    "the last column is skipped": (26, replaced(2, lambda v: torch.cat((v[:, :-1], 0 * v[:, -1:]), 1))),
    "the slot after": (94, replaced(1, lambda slots: (slots + 1) % (3 * PAGE))),
}


def _scales_of_neighbours(honest):
    """One scale for all rows of a call."""

    def faulty(x, block, *keep):
        return honest(x.flatten(), x.numel(), 0).view(x.shape) if not sum(keep) else honest(x, block, *keep)

    return faulty


PLANTS = (
    *gates("simulate_fp8_blocks", FP8),
    *common("simulate_fp8_blocks"),
    Plant("one scale for all rows", "simulate_fp8_blocks", "gate", 73, _scales_of_neighbours),
    *gates("simulate_fp4_blocks", FP4),
    *(p for p in common("simulate_fp4_blocks") if p.entry != 67),  # its results are infinite in some cases
    *gates("write_rows", WRITES),
    *in_place("write_rows", (0,), lower=2),
)
