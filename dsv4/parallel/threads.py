"""Ranks as threads of one process, which exchange tensors without torch.distributed: for checks of what ranks compute,
not for speed."""

import threading
from collections.abc import Callable

import torch

from dsv4.model.ranks import Ranks, in_order


class Threads:
    """Where `size` threads meet."""

    def __init__(self, size: int):
        self.barrier, self.given = threading.Barrier(size), [None] * size

    def of(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    """What one rank exchanges by. sent: the bytes that this rank gave in each exchange of tensors."""

    by, few = "memory of this process", None

    def __init__(self, group: Threads, rank: int):
        self.group, self.rank, self.issued, self.sent = group, rank, 0, list[int]()

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.issued += 1
        self.sent.append(x.nbytes)
        self.group.given[self.rank] = x
        self.group.barrier.wait(60)
        found = list(self.group.given)
        self.group.barrier.wait(60)
        shapes = {(t.shape, t.dtype) for t in found}
        assert len(shapes) == 1, f"ranks give {shapes}"
        return found

    def exchange(self, what: str, said: bytes) -> list[bytes]:
        self.group.given[self.rank] = said
        self.group.barrier.wait(60)
        found = list(self.group.given)
        self.group.barrier.wait(60)
        return found

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return in_order(self.all_gather(x), dtype)

    def note(self, x: torch.Tensor, what: str) -> None:
        raise NotImplementedError("threads run on a host, where ranks are compared at once")

    def differed(self) -> str | None:
        return None

    def beat(self) -> None:
        pass


def together(size: int, run: Callable[[Ranks], object]) -> list:
    """run(ranks) of every rank, at the same time; raises what the first of them raises."""
    group, found, failed = Threads(size), [None] * size, []

    def one(rank: int) -> None:
        try:
            found[rank] = run(Ranks(rank, size, group.of(rank)))
        except BaseException as failure:
            failed.append(failure)
            group.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((f for f in failed if not isinstance(f, threading.BrokenBarrierError)), failed[0])
    return found
