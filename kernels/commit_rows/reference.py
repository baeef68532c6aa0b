"""The end of a round in plain torch, which defines it. It is all integers, and nothing waits for the device."""

import torch

from dsv4.kernels.errors import UnsupportedInput

# numbers before a record's tokens: its round, how many tokens count, the size of a later round, whether the row is done
HEAD = 4
SIZE = 2  # where among them the size is


def check_tensors(operation: str, shapes: dict[str, tuple[int, ...]], **given: torch.Tensor) -> None:
    """Raise UnsupportedInput unless each tensor has its shape and is int64 (`done`: bool), and those with −1 in the
    shape, whose size is free there, hold something."""
    for name, shape in shapes.items():
        found, dtype = given[name], torch.bool if name == "done" else torch.int64
        fits = found.dim() == len(shape) and all(n == wanted or wanted < 0 < n for n, wanted in zip(found.shape, shape))
        if found.dtype is not dtype or not fits:
            raise UnsupportedInput(
                f"{operation}: {name} is {found.dtype} {list(found.shape)}; expected {dtype} "
                f"[{', '.join('any' if n < 0 else str(n) for n in shape)}]"
            )


def check_commit(chosen: torch.Tensor, room: int, **others: torch.Tensor) -> None:
    """Raise UnsupportedInput for arguments that `commit` does not take."""
    check_tensors("commit_rows.commit", {"chosen": (-1, -1)}, chosen=chosen)
    B, T = chosen.shape
    rows = dict.fromkeys(("accepted", "proposed", "token", "left", "written", "done"), (B,))
    check_tensors(
        "commit_rows.commit", rows | {"stops": (-1,), "out": (B, -1), "log": (-1, 3, B), "round": (1,)}, **others
    )
    if room < 0 or others["out"].shape[1] < room + T:
        raise UnsupportedInput(
            f"commit_rows.commit: out has {others['out'].shape[1]} columns; expected at least {T} behind room "
            f"{room} ≥ 0"
        )


def check_record(chosen: torch.Tensor, ahead: int, **others: torch.Tensor) -> None:
    """Raise UnsupportedInput for arguments that `record` does not take."""
    check_tensors("commit_rows.record", {"chosen": (-1, -1)}, chosen=chosen)
    B, T = chosen.shape
    rows = dict.fromkeys(("count", "wanted", "offered", "left", "sizes", "done"), (B,))
    check_tensors("commit_rows.record", rows | {"round": (1,), "records": (-1, B, -1)}, **others)
    if others["records"].shape[2] < HEAD + T:
        raise UnsupportedInput(
            f"commit_rows.record: records hold {others['records'].shape[2]} numbers a row; expected at least {HEAD} "
            f"and {T} tokens"
        )
    if not 1 <= ahead <= len(others["records"]):
        raise UnsupportedInput(
            f"commit_rows.record: sizes are to be those of {ahead} rounds before; expected 1 to the "
            f"{len(others['records'])} that records hold"
        )


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
    """Choose the output tokens among the chosen ones, and update the state of each row.

    chosen int64 [B, T]; accepted int64 [B], below T: accepted drafts, after which one more token follows; proposed
    int64 [B]: proposed drafts; stops int64 [S]: tokens that end a row, which keeps the first of them ([-1]: none).
    Updated in place, except in rows that are done: token int64 [B], the last output token; left int64 [B] ≥ 0, tokens
    that a row may still produce; written int64 [B], tokens that it has produced (written + left ≤ room); done bool [B];
    out int64 [B, room + T or more], where output tokens follow those written and the others go to columns from `room`
    on, which mean nothing; log int64 [N, 3, B], whose entry number round int64 [1] (≥ 0, only read; beyond the end the
    last) becomes proposed, accepted and count.

    Returns count int64 [B]: the first count[b] tokens of chosen[b] are output. Raises UnsupportedInput.
    """
    check_commit(
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
    T = chosen.shape[1]
    place = torch.arange(T, device=chosen.device)
    first_stop = torch.where((chosen.unsqueeze(-1) == stops).any(-1), place, T).amin(1)
    count = torch.minimum(torch.minimum(accepted + 1, left), first_stop + 1).masked_fill(done, 0)
    last = chosen.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    token.copy_(torch.where(count > 0, last, token))
    out.scatter_(1, torch.where(place < count.unsqueeze(1), written.unsqueeze(1) + place, room + place), chosen)
    entry = torch.stack((proposed, torch.minimum(accepted, count), count))
    log.index_copy_(0, round.clamp(max=len(log) - 1), entry.unsqueeze(0))
    written.add_(count)
    left.sub_(count)
    done.logical_or_((left == 0) | (count > first_stop))
    return count


def next_sizes(wanted: torch.Tensor, offered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Drafts of the next round, int64 [B]: the minimum of the policy's size, the drafter's offer, and the tokens that a
    row may write in addition to the one of every round. All int64 [B]."""
    return torch.minimum(torch.minimum(wanted, offered), (left - 1).clamp(min=0))


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
    """Write the round's record for the host, with sizes of the round that is `ahead` later, and set the sizes of the
    next round.

    chosen int64 [B, T], of which the first count int64 [B] are output; wanted, offered int64 [B]: drafts that the
    policy wants and that the drafter has; left int64 [B] and done bool [B] as `commit` left them. In place: records
    int64 [R, B, HEAD + T or more], whose entry at round mod R becomes round, count, `next_sizes`, done, the chosen
    tokens and zeros; sizes int64 [B]: those in the record of `ahead` − 1 rounds before (1: this one), at most what is
    offered and left now; then round int64 [1] (≥ 0) is incremented. Raises UnsupportedInput, also where `ahead` is not
    1 … R.
    """
    check_record(
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
    later = next_sizes(wanted, offered, left)
    head = torch.stack((round.expand_as(count), count, later, done.long()), 1)
    rest = chosen.new_zeros(len(chosen), records.shape[2] - HEAD - chosen.shape[1])
    records.index_copy_(0, round % len(records), torch.cat((head, chosen, rest), 1).unsqueeze(0))
    decided = records.index_select(0, (round + 1 - ahead) % len(records))[0, :, SIZE]
    sizes.copy_(next_sizes(decided, offered, left))
    round.add_(1)
