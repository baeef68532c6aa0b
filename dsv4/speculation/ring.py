"""Records of the last few rounds, in pinned memory for the host, so that the bytes that cross do not grow with the
response."""

from dataclasses import dataclass

import torch

from dsv4.errors import InputError
from dsv4.kernels.commit_rows import HEAD, SIZE, record


@dataclass
class Record:
    """What one round did. tokens: the new tokens of each row; sizes: drafts of the rows in the round that is `ahead`
    rounds later."""

    tokens: list[list[int]]
    sizes: list[int]
    done: list[bool]


class Ring:
    """Records of the last `rounds` rounds of `batch` rows that get up to `tokens` tokens each: round n is at n mod
    `rounds`.

    A round writes one record. The record may be read when the round's event says that its copy has ended; then all of
    it is of one round. Later copies write the same numbers again, until round n + `rounds` overwrites them. So the host
    must read record n before it launches that round.

    ahead: how many rounds may run at once. The host knows a round's decision only when that many have begun, so it
    applies to the round `ahead` rounds later, on the device too. Both then have the same sizes, and a record that comes
    early changes none. Raises InputError if the ring holds fewer rounds.
    """

    def __init__(self, rounds: int, batch: int, tokens: int, device: torch.device, ahead: int = 1):
        if not 1 <= ahead <= rounds:
            raise InputError(f"{ahead} rounds were to be under way, with a ring of {rounds}: expected 1 to that many")
        self.ahead = ahead
        self.records = torch.zeros(rounds, batch, HEAD + tokens, dtype=torch.int64, device=device)
        self.host = torch.zeros(rounds, batch, HEAD + tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.clear()

    def clear(self) -> None:
        """Clear all records. No round may be running."""
        self.records.fill_(-1)
        self.host.fill_(-1)

    def decide(self, number: int, sizes: torch.Tensor) -> None:
        """Set sizes int64 [B] of round `number`, one of the first `ahead`, which no round decides."""
        self.records[(number - self.ahead) % self.rounds, :, SIZE] = sizes

    @property
    def rounds(self) -> int:
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """Bytes that every round copies to the host."""
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
        """On the device, write the record of round `number` int64 [1], and increment the number; sizes int64 [B] become
        those of the next round. Arguments as for `dsv4.kernels.commit_rows.record`."""
        record(chosen, count, wanted, offered, left, done, sizes, number, self.records, self.ahead)

    def send(self, wait: bool = False) -> None:
        """Copy the device's records to the host, after all launched work. wait: until the copy has ended."""
        self.host.copy_(self.records, non_blocking=not wait)

    def read(self, number: int) -> Record:
        """The record of round `number`, whose copy has ended. Raises RuntimeError if another round's record is in its
        place."""
        rows = self.host[number % len(self.host)].tolist()
        if any(row[0] != number for row in rows):
            raise RuntimeError(
                f"round {number} was to be read, and rounds {sorted({row[0] for row in rows})} are in its place "
                f"in a ring of {len(self.host)}"
            )
        return Record(
            [row[HEAD : HEAD + row[1]] for row in rows], [row[SIZE] for row in rows], [bool(row[3]) for row in rows]
        )
