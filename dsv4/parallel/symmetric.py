"""Memory of all GPUs of one host that every one of them can write, and exchanges by kernels of ours over it."""

import os

import torch
import torch.distributed as dist

from dsv4.kernels.collectives.triton_one_shot import SUMMED, OneShot
from dsv4.kernels.collectives.triton_shares import Shares
from dsv4.parallel.store import Store

NAMED = "kernels that write to the other GPUs"


class OneHost:
    """Exchanges of one rank with the others of its host: few numbers by one shot, more by shares. Its memory is
    torch's symmetric memory; multicast is not used. Raises RuntimeError where GPUs cannot write each other's memory."""

    def __init__(self, rank: int, size: int, device: torch.device):
        self._held: list = []  # freed with this
        self.few = OneShot(rank, self._shared(OneShot.nbytes(size), device), device)
        self.many = Shares(rank, self._shared(Shares.nbytes(size), device), device)
        torch.cuda.synchronize(device)

    def _shared(self, nbytes: int, device: torch.device) -> list[int]:
        """Addresses of every rank's buffer of so many bytes, zeroed."""
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(nbytes // 8, dtype=torch.int64, device=device).zero_()
        handle = symmetric.rendezvous(memory, dist.group.WORLD.group_name)
        self._held.append((memory, handle))
        return list(handle.buffer_ptrs)

    def gather(self, raw: torch.Tensor) -> list[torch.Tensor]:
        """Bytes uint8 [n] of every rank, in their order. NCCL would move many of them faster, but it takes 0.7 GiB of a
        GPU when it starts."""
        if self.few.takes(raw):  # as in every decode step
            return list(self.few.gather(raw))
        n = len(raw)
        words = torch.nn.functional.pad(raw, (0, -n % 4))
        return list(torch.cat([self.few.gather(piece) for piece in words.split(OneShot.BYTES)], 1)[:, :n])

    def sums(self, x: torch.Tensor) -> bool:
        """Whether these kernels sum x."""
        return x.dtype in SUMMED

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `dsv4.model.ranks.in_order`, of x in fp32, bf16 or fp16."""
        return self.few.sum(x, dtype) if self.few.sums(x) else self.many.sum(x.float(), dtype)


def one_host(rank: int, size: int, device: torch.device, store: Store) -> tuple[OneHost | None, str]:
    """Exchanges by kernels if all ranks can have them, and how exchanges go, in words. All ranks get them or none."""
    found, why = None, ""
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        why = "they are on several hosts"
    else:
        try:
            found = OneHost(rank, size, device)
        except (RuntimeError, ImportError, AttributeError, TypeError) as failure:
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
    said = [reason.decode() for reason in store.exchange("memory that all GPUs can write", why.encode())]
    if found is not None and not any(said):
        # all ranks must find alike whether a kernel's programs run together, on unlike GPUs too
        told = store.exchange("their multiprocessors", str(found.few.processors).encode())
        found.few.processors = min(map(int, told))
        return found, NAMED
    other = next(r for r, reason in enumerate(said) if reason)
    return None, f"NCCL, because ranks cannot write each other's memory (rank {other}: {said[other]})"
