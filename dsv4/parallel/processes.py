"""What ranks exchange by when each is a process: torch.distributed, as `torchrun` or `dsv4.parallel.launch` set it up.

A rank that waits for another says within PATIENCE whom it waits for: exchanges of tensors end then, and while a
checkpoint is read every rank tells from time to time that it goes on.
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dsv4.errors import RankLost
from dsv4.model.ranks import ALONE, Ranks, here, settle
from dsv4.parallel.ranks_asked import asked, own_device

PATIENCE = 15.0  # seconds that a rank may be silent
POLL = 0.05  # seconds between looks at what others said
# seconds after which NCCL ends a process that waits for another: kernels may compile meanwhile, at first
UNWATCHED = 600.0


def join(device: str = "cpu", by_expert: bool = False) -> Ranks:
    """Join the other ranks that the environment names, once. by_expert: as in `Ranks`. Raises RankLost where they do
    not come."""
    found = asked()
    if found is None or here() is not ALONE:
        return here()
    rank, size = found
    backend, patience = ("nccl", UNWATCHED) if device.startswith("cuda") else ("gloo", PATIENCE)
    if backend == "nccl":
        torch.cuda.set_device(own_device(device))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=patience))
        store = dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError) as failure:
        raise RankLost(
            f"rank {rank} of {size} did not find the others at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} ({' '.join(str(failure).split())[:120]}); see that all were started"
        ) from None
    settle(Ranks(rank, size, Processes(rank, size, store), by_expert))
    return here()


class Processes:
    """The group of all ranks. store: torch.distributed's, for what is said between exchanges of tensors."""

    def __init__(self, rank: int, size: int, store):
        self.rank, self.size, self.store = rank, size, store
        self.exchanges, self.beats, self._told = 0, 0, 0.0
        self.flags: dict[str, torch.Tensor] = {}  # what ranks may differ in → whether they ever did, on the device

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        raw = x.reshape(-1).view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)
        found = [torch.empty_like(raw) for _ in range(self.size)]
        try:
            dist.all_gather(found, raw)
        except RuntimeError as failure:
            raise RankLost(self._missing(failure)) from None
        return [part.view(x.dtype).view(x.shape) for part in found]

    def exchange(self, what: str, said: bytes) -> Sequence[bytes]:
        self.exchanges += 1
        place = f"dsv4/{self.exchanges}"
        try:
            self.store.set(f"{place}/{self.rank}", said)
            for rank in range(self.size):
                self._await(f"{place}/{rank}", rank, what)
            return [self.store.get(f"{place}/{rank}") for rank in range(self.size)]
        except RuntimeError as failure:  # rank 0 keeps the store
            raise RankLost(f"rank 0 of {self.size} is gone ({' '.join(str(failure).split())[:80]})") from None

    def noted(self, differs: torch.Tensor, what: str) -> None:
        if what not in self.flags:
            self.flags[what] = torch.zeros_like(differs)
        self.flags[what].logical_or_(differs)

    def differed(self) -> str | None:
        return next((what for what, flag in self.flags.items() if bool(flag)), None)

    def beat(self) -> None:
        """Say that this rank goes on, at most once a second: others then wait longer for what it will say."""
        if time.monotonic() - self._told > 1:
            self.beats, self._told = self.beats + 1, time.monotonic()
            try:
                self.store.set(f"dsv4/beat/{self.rank}", str(self.beats))
            except RuntimeError as failure:
                raise RankLost(f"rank 0 of {self.size} is gone ({' '.join(str(failure).split())[:80]})") from None

    def _await(self, key: str, rank: int, what: str) -> None:
        """Wait until a rank has said `key`. Raises RankLost when it was silent for PATIENCE."""
        heard, last = time.monotonic(), None
        while not self.store.check([key]):
            beat = f"dsv4/beat/{rank}"
            now = self.store.get(beat) if self.store.check([beat]) else None
            if now != last:
                heard, last = time.monotonic(), now
            if time.monotonic() - heard > PATIENCE:
                raise RankLost(f"rank {rank} of {self.size} said nothing for {PATIENCE:.0f} s; expected {what}")
            self.beat()
            time.sleep(POLL)

    def _missing(self, failure: Exception) -> str:
        """Who did not come to an exchange: those that do not answer now. Those that wait too get here as well."""
        try:
            self.store.set(f"dsv4/lost/{self.rank}", "here")
            until = time.monotonic() + 2
            absent = [r for r in range(self.size) if r != self.rank]
            while absent and time.monotonic() < until:
                absent = [r for r in absent if not self.store.check([f"dsv4/lost/{r}"])]
                time.sleep(POLL)
        except RuntimeError:
            absent = [0]
        who = f"rank {', '.join(map(str, absent))} of {self.size} died or stalled" if absent else "an exchange failed"
        return f"{who}, and the others wait for nobody ({' '.join(str(failure).split())[:80]})"
