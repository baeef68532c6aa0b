"""Planted faults of attention: of lists, the sink, softmax, values."""

import math
from functools import partial

import torch

from dsv4.kernels.attention import exact
from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.contract import doubles
from dsv4.probes.kernel_audit.plant import Plant

SPLIT = 16  # rows of a split


def _changed(**changes):
    """honest → the honest kernel with some arguments replaced: name → function of the arguments by name."""
    names = "q window window_index entries entry_index sink scale".split()

    def make(honest):
        def faulty(*arguments):
            given = dict(zip(names, arguments))
            given |= {name: change(given) for name, change in changes.items()}
            return honest(*given.values(), *arguments[len(names) :])

        return faulty

    return make


def _computed(compute):
    """honest → `compute(q, rows, present, sink, scale)` over the listed rows."""
    return lambda honest: partial(exact.sparse, compute)


def _softmax(q, rows, present, sink, scale, mask=float("-inf"), value=None):
    p = _weights(q, rows, present, sink, scale, mask=mask)[..., :-1]
    return torch.einsum("nhk,nkd->nhd", p, rows.float() if value is None else value(rows.float())).to(q.dtype)


def _filled(index):
    return lambda a: None if a[index] is None else a[index].clamp(min=0)


def _until_first_hole(index):
    return lambda a: None if a[index] is None else torch.where((a[index] < 0).cumsum(1) > 0, -1, a[index])


def _without_last(a):
    last = "entry_index" if a["entry_index"] is not None else "window_index"
    index = a[last]
    place = torch.arange(index.shape[1], device=index.device)
    at = torch.where(index >= 0, place, -1).amax(1, keepdim=True)
    return torch.where(place == at, -1, index)


def _weights(q, rows, present, sink, scale, *more, mask: float = -math.inf):
    """Softmax over rows, the sink and further logits [N, H, n]: [N, H, K + 1 + n] in fp32. mask: logit of absent
    rows."""
    logits = torch.einsum("nhd,nkd->nhk", q.float() * scale, rows.float()).masked_fill(~present.unsqueeze(1), mask)
    return torch.softmax(torch.cat((logits, sink.view(1, -1, 1).expand(len(q), -1, 1), *more), -1), -1)


def _sink_with_values(q, rows, present, sink, scale):
    p = _weights(q, rows, present, sink, scale)
    values = torch.cat((rows.float(), rows[:, :1].float()), 1)
    return torch.einsum("nhk,nkd->nhd", p, values).to(q.dtype)


def _empty_splits_count(q, rows, present, sink, scale):
    padded = torch.nn.functional.pad(present, (0, -present.shape[1] % SPLIT))
    empty = (~padded.unflatten(1, (-1, SPLIT)).any(-1)).sum(1).float()
    more = empty.log().view(-1, 1, 1).expand(-1, q.shape[1], 1)  # the logarithm of an empty sum is taken for 0
    p = _weights(q, rows, present, sink, scale, more)[..., : rows.shape[1]]
    return torch.einsum("nhk,nkd->nhd", p, rows.float()).to(q.dtype)


def _narrow_sums(q, rows, present, sink, scale):
    out = torch.zeros_like(q, dtype=torch.bfloat16)
    p = _weights(q, rows, present, sink, scale)[..., :-1]
    for s in range(0, rows.shape[1], 16):
        out = (out.float() + torch.einsum("nhk,nkd->nhd", p[..., s : s + 16], rows[:, s : s + 16].float())).bfloat16()
    return out.to(q.dtype)


def _deduplicated(a):
    index = a["entry_index"]
    if index is None:
        return None
    order = index.sort(1)
    again = torch.cat((torch.zeros_like(order.values[:, :1], dtype=torch.bool), order.values.diff(dim=1) == 0), 1)
    return index.masked_fill(torch.zeros_like(again).scatter(1, order.indices, again), -1)


def _half_values(rows):
    return torch.cat((rows[..., : rows.shape[-1] - 64], torch.zeros_like(rows[..., -64:])), -1)


def _dummy_row(honest):
    """Row 0 of the pool is what absent rows read, and is zeroed for that: no list names it."""

    def faulty(q, window, *rest):
        (window.data if isinstance(window, PackedRows) else window)[0].zero_()
        return honest(q, window, *rest)

    return lambda q, window, *rest: (
        honest(q, window, *rest) if isinstance(window, PackedRows) else faulty(q, window, *rest)
    )


def _gathers_absent(honest):
    """Absent rows are read as the row in front of the pool's first listed one, and multiplied by zero."""

    def faulty(q, window, window_index, entries, entry_index, sink, scale, *rest):
        result = honest(q, window, window_index, entries, entry_index, sink, scale, *rest)
        zero = 0 * doubles(window)[0].to(result.dtype)
        return torch.where((window_index < 0).any(1).view(-1, 1, 1), result + zero, result)

    return faulty


GATE = {  # name → (entry of the catalogue, make)
    "the sink is ignored": (41, _changed(sink=lambda a: torch.full_like(a["sink"], -1e38))),
    "the sink is counted twice": (42, _changed(sink=lambda a: a["sink"] + math.log(2))),
    "the sink is in log2 units": (43, _changed(sink=lambda a: a["sink"] * math.log(2))),
    "the scale is applied to the sink": (43, _changed(sink=lambda a: a["sink"] * a["scale"])),
    "−1 gathers row 0": (23, _changed(window_index=_filled("window_index"), entry_index=_filled("entry_index"))),
    "the list ends at its first −1": (24, _changed(entry_index=_until_first_hole("entry_index"))),
    "the last listed row is skipped": (
        26,
        _changed(entry_index=lambda a: a["entry_index"] if a["entry_index"] is None else _without_last(a)),
    ),
    "a mask of −1e4": (22, _computed(partial(_softmax, mask=-1e4))),
    "a row that is listed twice counts once": (28, _changed(entry_index=_deduplicated)),
    "values without the rotated part": (49, _computed(partial(_softmax, value=_half_values))),
    "sums in bf16": (50, _computed(_narrow_sums)),
    "the sink is weighted with the values of a row": (44, _computed(_sink_with_values)),
    "a split without rows counts as one of logit 0": (46, _computed(_empty_splits_count)),
}
PLANTS = tuple(Plant(name, "sparse_attention", "gate", entry, make) for name, (entry, make) in GATE.items()) + (
    Plant("absent rows are weighted with zero", "sparse_attention", "poison", 21, _gathers_absent),
    Plant("row 0 is zeroed for absent rows", "sparse_attention", "inputs", 65, _dummy_row),
)
