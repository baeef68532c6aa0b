"""The end of a round of speculative decoding: which tokens come out and what that leaves of each row, in two launches on a GPU, where
tensor operations would be over forty."""

import torch

from kernels.commit_rows import reference
from kernels.commit_rows import triton as triton_kernels
from kernels.commit_rows.reference import HEAD

__all__ = ["HEAD", "commit", "record"]


def commit(chosen: torch.Tensor, accepted: torch.Tensor, proposed: torch.Tensor, stops: torch.Tensor, room: int, token: torch.Tensor,
           left: torch.Tensor, written: torch.Tensor, done: torch.Tensor, out: torch.Tensor, log: torch.Tensor,
           round: torch.Tensor) -> torch.Tensor:
    where = triton_kernels if chosen.is_cuda else reference
    return where.commit(chosen, accepted, proposed, stops, room, token, left, written, done, out, log, round)


def record(chosen: torch.Tensor, count: torch.Tensor, wanted: torch.Tensor, offered: torch.Tensor, left: torch.Tensor, done: torch.Tensor,
           sizes: torch.Tensor, round: torch.Tensor, records: torch.Tensor) -> None:
    where = triton_kernels if chosen.is_cuda else reference
    where.record(chosen, count, wanted, offered, left, done, sizes, round, records)


commit.__doc__, record.__doc__ = reference.commit.__doc__, reference.record.__doc__
