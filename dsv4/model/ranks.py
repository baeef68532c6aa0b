"""Several processes that hold one model together, each a part of every layer, and what they must exchange.

Attention is cut by heads and groups of heads, experts by width (routed ones by expert if that is asked for), embedding
and head by vocabulary. Everything else is held by every rank, caches too. Each rank runs every token; sums over ranks
follow the maps that end a sublayer.

By width every rank reads an equal part of each expert that a token needs, whichever these are; by expert one token's
experts may all be on one rank, but matrices stay large where there are many ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from dsv4.errors import InputError, RanksDisagree
from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.loaders.cuts import Cut


class Group(Protocol):
    """What ranks exchange by. issued: exchanges that this host has asked for, or replays of steps that exchange; by:
    what carries them, in words; few: kernels by which GPUs exchange few numbers, None without."""

    issued: int
    by: str
    few: OneShot | None

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x of every rank, in their order; each rank gives the same shape and dtype. Raises RankLost."""

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`in_order` of x of every rank, in dtype. Raises RankLost."""

    def note(self, x: torch.Tensor, what: str) -> None:
        """Remember on the device whether ranks have different x, which `what` names. The host does not wait."""

    def differed(self) -> str | None:
        """In what they ever did; waits for the device."""

    def beat(self) -> None:
        """Say that this rank goes on, while others wait for what it will say."""

    def exchange(self, what: str, said: bytes) -> Sequence[bytes]:
        """What every rank says, in their order; ranks may be minutes apart. Raises RankLost."""


def in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of the parts, taken in fp32 (fp64 stays) from the first to the last, cast once to dtype."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


@dataclass(frozen=True)
class Ranks:
    """The process `rank` of `size`. group: None where nothing is exchanged, as in a plan. by_expert: routed experts are
    cut by expert."""

    rank: int = 0
    size: int = 1
    group: Group | None = None
    by_expert: bool = False

    @property
    def words(self) -> str:
        """As reports name them; '' for a single process."""
        if self.size == 1:
            return ""
        exchanging = f", exchanging by {self.group.by}" if self.group is not None else ""
        return f"{self.size} ranks, experts by {'expert' if self.by_expert else 'width'}{exchanging}"

    def even(self, n: int, what: str, per: int = 1) -> Cut:
        """This rank's part of n equal things, each of `per` elements. Raises InputError unless all get equally many."""
        if n % self.size:
            raise InputError(f"{what} is {n}, which {self.size} ranks cannot share equally; choose a divisor of it")
        mine = n // self.size * per
        return Cut(0, self.rank * mine, (self.rank + 1) * mine, n * per)

    def blocks(self, n: int, unit: int) -> Cut:
        """This rank's part of n elements in blocks of `unit`, as even as whole blocks allow; it may be empty."""
        count = -(-n // unit)
        bounds = (min(n, r * count // self.size * unit) for r in (self.rank, self.rank + 1))
        return Cut(0, *bounds, n)

    def slots(self, n: int) -> Cut:
        """This rank's part of n elements of which every rank has room for ⌈n / size⌉: the last may have fewer."""
        room = -(-n // self.size)
        return Cut(0, min(n, self.rank * room), min(n, (self.rank + 1) * room), n)

    def sum(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum of every rank's x, in dtype (None: of x). It is taken in fp32 (fp64 stays) in the order of ranks, so
        all get the same bits, and get them again."""
        if self.size == 1:
            return x.to(dtype or x.dtype)
        return self._exchanging().sum(x.contiguous(), dtype or x.dtype)

    def defers(self, x: torch.Tensor) -> bool:
        """Whether a sum over ranks of the shape and dtype of x can be left to the kernel that reads it."""
        return self.size > 1 and self.group is not None and self.group.few is not None and self.group.few.sums(x)

    def deferred(self, part: torch.Tensor | ExpertRows, dtype: torch.dtype) -> Unsummed:
        """The sum of every rank's part in dtype, left to the kernel that reads it; where `defers`."""
        assert self.group is not None and self.group.few is not None, "nothing can sum this later: see `defers`"
        self.group.issued += 1
        return Unsummed(part, dtype, self.group.few)

    def joined(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """x [N, part] of `slots(n)` of every rank → [N, n]."""
        return self._side_by_side(x, n, 1)

    def stacked(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """x [part, …] of `slots(n)` of every rank → [n, …]."""
        return self._side_by_side(x, n, 0)

    def _side_by_side(self, x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
        """Parts of `slots(n)` of every rank along a dimension → all n."""
        if self.size == 1:
            return x
        missing = -(-n // self.size) - x.shape[dim]
        if missing:
            x = torch.cat((x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])), dim)
        return torch.cat(list(self.gathered(x)), dim).narrow(dim, 0, n)

    def argmax(self, own: torch.Tensor, n: int) -> torch.Tensor:
        """own fp32 [..., part] of `slots(n)` of every rank → int64 [...]: torch.argmax of all n, so of equal values
        the first, and the first NaN before any value. A rank sends its best value and that one's place, in 8 bytes."""
        part = self.slots(n)
        if part.size:
            value, place = own.max(-1)
        else:  # the last ranks may have nothing: −inf comes after any other rank's
            value = own.new_full(own.shape[:-1], float("-inf"))
            place = torch.zeros_like(value, dtype=torch.int64)
        best = torch.stack((value.view(torch.int32), (place + part.start).to(torch.int32)), -1)
        values, places = torch.stack(list(self.gathered(best))).unbind(-1)
        first = values.view(torch.float32).argmax(0, keepdim=True)  # ranks are in the order of their parts
        return places.gather(0, first).squeeze(0).long()

    def gathered(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x of every rank, in their order; each rank gives the same shape and dtype."""
        return (x,) if self.size == 1 else self._exchanging().all_gather(x.contiguous())

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """The sums of x fp64 [...] from the first rank to each, fp64 [ranks, ...]: the last is that of all."""
        return torch.stack(list(accumulate(self.gathered(x))))

    def every(self, flags: torch.Tensor) -> torch.Tensor:
        """flags bool [...] → whether they are true on every rank."""
        return flags if self.size == 1 else torch.stack(list(self.gathered(flags))).all(0)

    def of_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H, D] of this rank's heads, as many as every rank has → [..., all heads, D]."""
        if self.size == 1:
            return x
        H, D = x.shape[-2:]
        return self.joined(x.reshape(-1, H * D), self.size * H * D).view(*x.shape[:-2], self.size * H, D)

    def same(self, x: torch.Tensor, what: str) -> None:
        """Raises RanksDisagree unless every rank has the same x. On a GPU, where the host does not wait for it, `check`
        raises that later."""
        if self.size == 1:
            return
        if x.device.type != "cpu":
            self._exchanging().note(x.contiguous(), what)
            return
        parts = self.gathered(x)
        for rank, other in enumerate(parts):
            if not torch.equal(other, x):
                at = int((other != x).flatten().nonzero()[0])
                raise RanksDisagree(
                    f"rank {self.rank} has {what} {x.flatten()[at].item()} where rank {rank} has "
                    f"{other.flatten()[at].item()}; all ranks were to compute the same: nothing they say can be used"
                )

    def went(self) -> None:
        """Count a replay of a captured step, which exchanges without this host."""
        if self.group is not None:
            self.group.issued += 1

    def check(self) -> None:
        """Raises RanksDisagree if what `same` was given on a GPU ever differed. Waits for the device."""
        what = None if self.group is None else self.group.differed()
        if what:
            raise RanksDisagree(
                f"rank {self.rank} of {self.size} had another {what} than others; all ranks were to compute the same: "
                "nothing they say can be used"
            )

    def _exchanging(self) -> Group:
        if self.group is None:
            raise InputError(f"this is rank {self.rank} of {self.size} of a plan, which exchanges nothing")
        return self.group


ALONE = Ranks()
_here = ALONE


def here() -> Ranks:
    """Which rank this process is: ALONE, unless it joined others (`dsv4.parallel.join`)."""
    return _here


def settle(ranks: Ranks) -> None:
    """This process is that rank from now on."""
    global _here
    _here = ranks
