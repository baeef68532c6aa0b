"""Ranks of one host that exchange tensors without memory, to find out what their GPUs will launch."""

from types import SimpleNamespace

import torch

from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.kernels.collectives.triton_shares import Shares
from dsv4.kernels.launch import GPU
from dsv4.model.ranks import Ranks
from dsv4.parallel.processes import Processes
from dsv4.parallel.symmetric import NAMED, OneHost

META = torch.device("meta")


class OnMeta(OneHost):
    """Exchanges of tensors of the device `meta`, by the kernels of GPUs of one host."""

    def __init__(self, rank: int, size: int, gpu: GPU):
        self.few = OneShot(rank, [0] * size, META, gpu.processors)
        self.many = Shares(rank, [0] * size, META)


def planned_ranks(rank: int, size: int, by_expert: bool, gpu: GPU) -> Ranks:
    """What `dsv4.parallel.processes.join` makes of rank `rank`, with tensors of the device `meta`."""
    store = SimpleNamespace(rank=rank, size=size, beat=lambda: None, exchange=lambda what, said: [said] * size)
    return Ranks(rank, size, Processes(store, OnMeta(rank, size, gpu), NAMED), by_expert)
