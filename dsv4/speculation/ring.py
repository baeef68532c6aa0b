"""What rounds leave for the host: the records of the last few, in pinned memory, so that what crosses does not grow
with the response."""

from dataclasses import dataclass

import torch

from dsv4.errors import InputError
from dsv4.kernels.commit_rows import HEAD, SIZE, record


@dataclass
class Record:
    """What one round did. tokens: of each row those that count; sizes: drafts that rows are to have in the round that
    is `ahead` behind it."""

    tokens: list[list[int]]
    sizes: list[int]
    done: list[bool]


class Ring:
    """Records of the last `rounds` rounds of `batch` rows that get up to `tokens` tokens each: round n is at n mod
    `rounds`.

    Everything that a round says is one record, and a record may be read when the copy behind it has ended, as the
    round's event tells:
    then none of it is older than the rest. Later copies write the same numbers again, until round n + `rounds` takes
    the place. So whoever launches rounds must have read n before.

    ahead: how many rounds may be under way. What a round decides is known to the host when so many have begun, so it is
    of the round that is `ahead` behind it, on the device too: both then have the same sizes, and whether a record came
    early changes none. Raises InputError where the ring holds fewer.
    """

    def __init__(self, rounds: int, batch: int, tokens: int, device: torch.device, ahead: int = 1):
        if not 1 <= ahead <= rounds:
            raise InputError(f"{ahead} rounds were to be under way, with a ring of {rounds}: expected 1 to that many")
        self.ahead = ahead
        self.records = torch.zeros(rounds, batch, HEAD + tokens, dtype=torch.int64, device=device)
        self.host = torch.zeros(rounds, batch, HEAD + tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.clear()

    def clear(self) -> None:
        """No round's record is anywhere; none may be under way."""
        self.records.fill_(-1)
        self.host.fill_(-1)

    def decide(self, number: int, sizes: torch.Tensor) -> None:
        """Sizes int64 [B] of round `number`, one of the first `ahead`, which no round decides."""
        self.records[(number - self.ahead) % self.rounds, :, SIZE] = sizes

    @property
    def rounds(self) -> int:
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """Copied to the host by every round."""
        return self.host.nbytes

    def put(
        self,
        chosen: torch.Tensor,
        count: torch.Tensor,
        wanted: torch.Tensor,
        offered: torch.Tensor,
        left: torch.Tensor,
        done: torch.Tensor,
        sizes: torch.Tensor,
        number: torch.Tensor,
    ) -> None:
        """On the device, what round `number` int64 [1] did, which counts on; sizes int64 [B] become those of the next.
        As `dsv4.kernels.commit_rows.record`."""
        record(chosen, count, wanted, offered, left, done, sizes, number, self.records, self.ahead)

    def send(self, wait: bool = False) -> None:
        """Copy what the device holds, behind what is already under way. wait: until it is there."""
        self.host.copy_(self.records, non_blocking=not wait)

    def read(self, number: int) -> Record:
        """What round `number` said, whose copy has ended. Raises RuntimeError where another round's record is in its
        place."""
        rows = self.host[number % self.rounds].tolist()
        if any(row[0] != number for row in rows):
            raise RuntimeError(
                f"round {number} was to be read, and rounds {sorted({row[0] for row in rows})} are in its place "
                f"in a ring of {self.rounds}"
            )
        return Record(
            [row[HEAD : HEAD + row[1]] for row in rows], [row[SIZE] for row in rows], [bool(row[3]) for row in rows]
        )
