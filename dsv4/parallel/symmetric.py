"""Memory of all GPUs of one host that every one of them can write, for exchanges by one kernel."""

import os

import torch
import torch.distributed as dist

from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.parallel.store import Store


def one_shot(rank: int, size: int, device: torch.device, store: Store) -> tuple[OneShot | None, str]:
    """The exchange by one kernel, if all ranks can have it, and how exchanges of a few tokens go, in words.

    All ranks get it or none. Its memory is torch's symmetric memory; multicast is not used.
    """
    found, why = None, ""
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        why = "ranks are on several hosts"
    else:
        try:
            import torch.distributed._symmetric_memory as symmetric

            group = dist.group.WORLD.group_name
            memory = symmetric.empty(OneShot.nbytes(size) // 8, dtype=torch.int64, device=device)
            memory.zero_()
            handle = symmetric.rendezvous(memory, group)
            found = OneShot(rank, list(handle.buffer_ptrs), device)
            found.memory = memory, handle  # freed with it
            torch.cuda.synchronize(device)
        except (RuntimeError, ImportError, AttributeError, TypeError) as failure:
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
    said = [reason.decode() for reason in store.exchange("exchange by one kernel", why.encode())]
    if not any(said):
        return found, "one kernel, which writes to the other GPUs"
    other = next(r for r, reason in enumerate(said) if reason)
    return None, f"NCCL (no exchange by one kernel on rank {other}: {said[other]})"
