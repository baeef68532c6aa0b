"""The end of a round of speculative decoding: the output tokens and the new state of each row, in two launches on a
GPU, where tensor operations would be over forty."""

from functools import wraps

import torch

from dsv4.kernels.commit_rows import reference
from dsv4.kernels.commit_rows import triton as triton_kernels
from dsv4.kernels.commit_rows.reference import HEAD, SIZE, next_sizes

__all__ = ["HEAD", "SIZE", "commit", "next_sizes", "record"]


@wraps(reference.commit)
def commit(chosen: torch.Tensor, *rest) -> torch.Tensor:
    return _where(chosen).commit(chosen, *rest)


@wraps(reference.record)
def record(chosen: torch.Tensor, *rest) -> None:
    _where(chosen).record(chosen, *rest)


def _where(chosen: torch.Tensor):
    return triton_kernels if chosen.is_cuda else reference
