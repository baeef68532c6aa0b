"""What ranks exchange by when each is a process: torch.distributed, as `torchrun` or `dsv4.parallel.launch` set it up.

A rank that waits for another says within PATIENCE whom it waits for. On CPUs exchanges of tensors end then; on GPUs,
where a host learns nothing of them, a thread of each rank watches the others (`watch`). While a checkpoint is read
every rank tells from time to time that it goes on.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dsv4.errors import RankLost
from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.model.ranks import ALONE, Ranks, here, in_order, settle
from dsv4.parallel.ranks_asked import asked, own_device
from dsv4.parallel.store import PATIENCE, Store
from dsv4.parallel.symmetric import OneHost, one_host
from dsv4.parallel.watch import LEFT, Watch

# seconds after which NCCL ends a process that waits for another, if nothing else has: kernels may compile meanwhile
UNWATCHED = 600.0


def join(device: str = "cpu", by_expert: bool = False, patience: float = PATIENCE) -> Ranks:
    """Join the other ranks that the environment names, once. by_expert: as in `Ranks`; patience: seconds that a rank
    may be silent. Raises RankLost where they do not come."""
    found = asked()
    if found is None or here() is not ALONE:
        return here()
    rank, size = found
    backend, limit = ("nccl", UNWATCHED) if device.startswith("cuda") else ("gloo", patience)
    if backend == "nccl":
        torch.cuda.set_device(own_device(device))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=limit))
        store = Store(rank, size, dist.distributed_c10d._get_default_store(), patience)
    except (RuntimeError, ValueError) as failure:
        raise RankLost(
            f"rank {rank} of {size} did not find the others at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} ({' '.join(str(failure).split())[:120]}); see that all were started"
        ) from None
    group = Processes(store)
    if backend == "nccl":
        Watch(group, patience).start()
        group.kernels, group.by = one_host(rank, size, torch.device("cuda", torch.cuda.current_device()), store)
    settle(Ranks(rank, size, group, by_expert))
    return here()


def leave(code: int) -> None:
    """End this process, which joined others, with that exit code: 0, 1 for a verdict, or that of a failure."""
    if code in (0, 1) and isinstance(here().group, Processes):
        here().group.left()
    # torch.distributed's threads may still free tensors, which aborts a process whose interpreter ends meanwhile
    os._exit(code)


class Processes:
    """The group of all ranks. kernels: exchanges by kernels of ours (None: by torch.distributed); by: how exchanges go,
    in words."""

    def __init__(self, store: Store, kernels: OneHost | None = None, by: str = "gloo"):
        self.store, self.kernels, self.by = store, kernels, by
        self.rank, self.size, self.beat, self.exchange = store.rank, store.size, store.beat, store.exchange
        self.issued = 0  # exchanges that this host has asked for: `Watch` sees by it that a rank goes on
        self.flags: dict[str, torch.Tensor] = {}  # what ranks may differ in → 1 if they ever did, on the device

    @property
    def few(self) -> OneShot | None:
        return None if self.kernels is None else self.kernels.few

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        self.issued += 1
        # Of contiguous x a dimension of one may have any stride, with which its bytes could not be viewed.
        raw = x.as_strided((x.numel(),), (1,)).view(torch.uint8) if x.is_contiguous() else x.ravel().view(torch.uint8)
        if self.kernels is not None:
            found = self.kernels.gather(raw)
        else:
            found = [torch.empty_like(raw) for _ in range(self.size)]
            try:
                dist.all_gather(found, raw)
            except RuntimeError as failure:
                raise RankLost(self.store.missing(failure)) from None
        return [part.view(x.dtype).view(x.shape) for part in found]

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.kernels is not None and self.kernels.sums(x):
            self.issued += 1
            return self.kernels.sum(x, dtype)
        return self._by_shares(x, dtype) if x.is_cuda else in_order(self.all_gather(x), dtype)

    def note(self, x: torch.Tensor, what: str) -> None:
        if what not in self.flags:
            self.flags[what] = torch.zeros(1, dtype=torch.int32, device=x.device)
        if self.few is not None and self.few.takes(x):
            self.issued += 1
            self.few.same(x, self.flags[what])
        else:
            differs = torch.stack([part.ne(x).any() for part in self.all_gather(x)]).any()
            self.flags[what].logical_or_(differs)

    def differed(self) -> str | None:
        return next((what for what, flag in self.flags.items() if flag.item()), None)

    def left(self) -> None:
        """Say that this rank ends because it is done: its silence means nothing. Rank 0, which keeps what ranks say to
        each other, ends after the others, or PATIENCE later."""
        try:
            self.store.store.set(f"dsv4/at/{self.rank}", LEFT)
            self.store.depart()
        except RuntimeError:  # rank 0 waited for this one in vain
            pass

    def _by_shares(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Each rank sums its share of the numbers, in the order of ranks, and gives the others the result: of x
        B bytes travel twice (1 − 1/R) of them, however many ranks there are, and the second time in dtype."""
        self.issued += 1
        n, share = x.numel(), -(-x.numel() // self.size)
        given = torch.nn.functional.pad(x.reshape(-1), (0, share * self.size - n))
        got, out = torch.empty_like(given), x.new_empty(share * self.size, dtype=dtype)
        try:
            dist.all_to_all_single(got, given)
            dist.all_gather_into_tensor(out, in_order(got.view(self.size, share).unbind(), dtype))
        except RuntimeError as failure:
            raise RankLost(self.store.missing(failure)) from None
        return out[:n].view(x.shape)
