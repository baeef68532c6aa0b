"""The end of a round on a GPU: one program for all rows, since a launch takes longer than the work of a hundred.

It equals the reference bit for bit. A program reads everything that it updates before it writes. A barrier lies
between, because a thread writes values that other threads read.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.commit_rows import reference
from dsv4.kernels.commit_rows.reference import HEAD, SIZE
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import next_power, require_device


@triton.jit(do_not_specialize=["B", "T", "room", "width", "entries"])
def commit_rows(
    CHOSEN,
    ACCEPTED,
    PROPOSED,
    STOPS,
    TOKEN,
    LEFT,
    WRITTEN,
    DONE,
    OUT,
    LOG,
    ROUND,
    COUNT,
    B,
    T,
    S,
    room,
    width,
    entries,
    BP: tl.constexpr,
    TP: tl.constexpr,
):
    """BP, TP: rows and tokens padded to powers of two. width: columns of OUT. entries: of LOG."""
    b, place = tl.arange(0, BP), tl.arange(0, TP).to(tl.int64)
    row, there = b < B, (b < B)[:, None] & (place < T)[None, :]
    at = b.to(tl.int64)
    chosen = tl.load(CHOSEN + at[:, None] * T + place[None, :], mask=there, other=0)
    accepted, proposed = tl.load(ACCEPTED + b, mask=row, other=0), tl.load(PROPOSED + b, mask=row, other=0)
    token, left = tl.load(TOKEN + b, mask=row, other=0), tl.load(LEFT + b, mask=row, other=0)
    written, done = tl.load(WRITTEN + b, mask=row, other=0), tl.load(DONE + b, mask=row, other=1) != 0
    entry = tl.minimum(tl.load(ROUND), entries - 1)
    stopping = chosen == tl.load(STOPS)
    for s in range(1, S):
        stopping |= chosen == tl.load(STOPS + s)
    first_stop = tl.min(tl.where(stopping, place[None, :], T), 1)  # padding lies after T, whatever it holds
    count = tl.where(done, 0, tl.minimum(tl.minimum(accepted + 1, left), first_stop + 1))
    last = tl.sum(tl.where(place[None, :] == (count - 1)[:, None], chosen, 0), 1)
    column = tl.where(place[None, :] < count[:, None], written[:, None], room) + place[None, :]
    tl.debug_barrier()  # after this all threads have read the values that are overwritten below
    tl.store(OUT + at[:, None] * width + column, chosen, mask=there)
    tl.store(TOKEN + b, tl.where(count > 0, last, token), mask=row)
    LOG += entry * 3 * B
    tl.store(LOG + b, proposed, mask=row)
    tl.store(LOG + B + b, tl.minimum(accepted, count), mask=row)
    tl.store(LOG + 2 * B + b, count, mask=row)
    tl.store(WRITTEN + b, written + count, mask=row)
    tl.store(LEFT + b, left - count, mask=row)
    tl.store(DONE + b, (done | (left == count) | (count > first_stop)).to(tl.uint8), mask=row)
    tl.store(COUNT + b, count, mask=row)


@triton.jit(do_not_specialize=["B", "T", "width", "rounds", "ahead"])
def record_rows(
    CHOSEN,
    COUNT,
    WANTED,
    OFFERED,
    LEFT,
    DONE,
    SIZES,
    ROUND,
    RECORDS,
    B,
    T,
    width,
    rounds,
    ahead,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BP: tl.constexpr,
    WP: tl.constexpr,
):
    """BP, WP: rows, and the `width` numbers of a record, padded to powers of two. FIRST: where its tokens begin; SIZE:
    where its size is."""
    b, i = tl.arange(0, BP), tl.arange(0, WP)
    row, token, at = b < B, i - FIRST, b.to(tl.int64)
    some = row[:, None] & ((token >= 0) & (token < T))[None, :]
    numbers = tl.load(CHOSEN + at[:, None] * T + token[None, :], mask=some, other=0)
    number, count = tl.load(ROUND), tl.load(COUNT + b, mask=row, other=0)
    wanted, offered = tl.load(WANTED + b, mask=row, other=0), tl.load(OFFERED + b, mask=row, other=0)
    left, done = tl.load(LEFT + b, mask=row, other=0), tl.load(DONE + b, mask=row, other=0) != 0
    most = tl.minimum(offered, tl.maximum(left - 1, 0))
    later = tl.minimum(wanted, most)
    # with ahead = 1 this is the record's own place, which is not written yet
    before = (number + 1 - ahead + rounds) % rounds
    decided = tl.load(RECORDS + (before * B + at) * width + SIZE, mask=row, other=0)
    sizes = tl.where(ahead == 1, later, tl.minimum(decided, most))
    numbers = tl.where(i[None, :] == 0, number, numbers)
    numbers = tl.where(i[None, :] == 1, count[:, None], numbers)
    numbers = tl.where(i[None, :] == SIZE, later[:, None], numbers)
    numbers = tl.where(i[None, :] == 3, done[:, None].to(tl.int64), numbers)
    tl.debug_barrier()  # after this all threads have read the round, the records, and the earlier sizes
    tl.store(SIZES + b, sizes, mask=row)
    RECORDS += (number % rounds) * B * width
    tl.store(RECORDS + at[:, None] * width + i[None, :], numbers, mask=row[:, None] & (i < width)[None, :])
    tl.store(ROUND, number + 1)


def commit(
    chosen: torch.Tensor,
    accepted: torch.Tensor,
    proposed: torch.Tensor,
    stops: torch.Tensor,
    room: int,
    token: torch.Tensor,
    left: torch.Tensor,
    written: torch.Tensor,
    done: torch.Tensor,
    out: torch.Tensor,
    log: torch.Tensor,
    round: torch.Tensor,
) -> torch.Tensor:
    """Computes what the reference does, in one launch. Tensors that are updated must be contiguous."""
    require_device("commit_rows.commit", chosen, accepted, proposed, stops, token, left, written, done, out, log, round)
    reference.check_commit(
        chosen,
        room,
        accepted=accepted,
        proposed=proposed,
        stops=stops,
        token=token,
        left=left,
        written=written,
        done=done,
        out=out,
        log=log,
        round=round,
    )
    _require_contiguous("commit_rows.commit", token=token, left=left, written=written, done=done, out=out, log=log)
    (B, T), count = chosen.shape, torch.empty(len(chosen), dtype=torch.int64, device=chosen.device)
    read = (x.contiguous() for x in (chosen, accepted, proposed, stops))
    BP, TP = max(2, next_power(B)), max(2, next_power(T))
    commit_rows[(1,)](
        *read,
        token,
        left,
        written,
        done.view(torch.uint8),
        out,
        log,
        round,
        count,
        B,
        T,
        len(stops),
        room,
        out.shape[1],
        len(log),
        BP,
        TP,
        num_warps=_warps(BP * TP),
    )
    return count


def record(
    chosen: torch.Tensor,
    count: torch.Tensor,
    wanted: torch.Tensor,
    offered: torch.Tensor,
    left: torch.Tensor,
    done: torch.Tensor,
    sizes: torch.Tensor,
    round: torch.Tensor,
    records: torch.Tensor,
    ahead: int = 1,
) -> None:
    """Computes what the reference does, in one launch. Tensors that are updated must be contiguous."""
    require_device("commit_rows.record", chosen, count, wanted, offered, left, done, sizes, round, records)
    reference.check_record(
        chosen,
        ahead,
        count=count,
        wanted=wanted,
        offered=offered,
        left=left,
        done=done,
        sizes=sizes,
        round=round,
        records=records,
    )
    _require_contiguous("commit_rows.record", sizes=sizes, records=records)
    (B, T), (rounds, _, width) = chosen.shape, records.shape
    *read, done = (x.contiguous() for x in (chosen, count, wanted, offered, left, done))
    BP, WP = max(2, next_power(B)), next_power(width)
    record_rows[(1,)](
        *read,
        done.view(torch.uint8),
        sizes,
        round,
        records,
        B,
        T,
        width,
        rounds,
        ahead,
        HEAD,
        SIZE,
        BP,
        WP,
        num_warps=_warps(BP * WP),
    )


commit.__doc__ = f"{reference.commit.__doc__}\n    {commit.__doc__}"
record.__doc__ = f"{reference.record.__doc__}\n    {record.__doc__}"


def _require_contiguous(operation: str, **updated: torch.Tensor) -> None:
    for name, x in updated.items():
        if not x.is_contiguous():
            raise UnsupportedInput(
                f"{operation}: {name} is updated in place and has strides {x.stride()}; expected a contiguous tensor"
            )


def _warps(size: int) -> int:
    """Warps of a tile of that many numbers: up to 16 numbers a thread; for up to 512 numbers one warp, which waits for
    no other."""
    return max(1, min(8, size // 512))
