"""Honest kernels with legitimate liberties: the self-test wants them green."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4.kernels.contract import Contract, rebuilt
from dsv4.kernels.contracts import contracts
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.kernel_audit.plant import Plant


@dataclass(frozen=True)
class Control:
    """An honest kernel: `kernel` as a SubjectSpec names it, with a liberty that `plant` adds, in an accuracy class."""

    operation: str
    kernel: str
    liberty: str = ""
    accuracy: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.kernel, self.accuracy, self.liberty)))


def not_contiguous(honest: Callable) -> Callable:
    """Results with a gap behind each row."""

    def spaced(t: torch.Tensor) -> torch.Tensor:
        if t.ndim < 2:
            return t
        wide = t.new_zeros(*t.shape[:-1], t.shape[-1] + 16)
        return wide[..., : t.shape[-1]].copy_(t)

    return lambda *arguments: rebuilt(honest(*arguments), spaced)


def refuses_strides(honest: Callable) -> Callable:
    """Arguments that are not dense are refused before anything runs."""

    def strict(*arguments):
        if any(isinstance(a, torch.Tensor) and not a.is_contiguous() for a in arguments):
            raise UnsupportedInput("arguments must be contiguous")
        return honest(*arguments)

    return strict


def any_order(honest: Callable) -> Callable:
    """Indices in another order."""
    return lambda *arguments: rebuilt(honest(*arguments), lambda t: t.flip(-1))


def own_copy(honest: Callable) -> Callable:
    """Works on copies of its arguments."""
    return lambda *arguments: honest(*(rebuilt(a, torch.clone) for a in arguments))


LIBERTIES = (
    Plant("results are not contiguous", "sparse_attention", "layout", 0, not_contiguous),
    Plant("strides are refused", "sparse_attention", "layout", 0, refuses_strides),
    Plant("arguments are copied", "sparse_attention", "inputs", 0, own_copy),
    Plant("strides are refused", "index_scores", "layout", 0, refuses_strides),
    Plant("results are not contiguous", "rms_norm", "layout", 0, not_contiguous),
    Plant("indices in another order", "topk_entries", "gate", 0, any_order),
)


def controls(device: str = "cpu") -> list[Control]:
    """Every accuracy class of every contract, our reference and our kernels for the device, and the liberties."""
    found, own = [], "triton" if device.startswith("cuda") else "cpu"
    for name, contract in contracts().items():
        found += [Control(name, "honest", accuracy=c) for c in _classes(contract)]
        op = (OPERATIONS | GQA_OPERATIONS).get(name)
        found += [Control(name, k) for k in ("reference", own) if k == "reference" or op and k in op.implementations]
    return found + [Control(p.operation, "reference", p.name) for p in LIBERTIES]


def _classes(contract: Contract) -> tuple[str, ...]:
    return tuple(contract.classes)
