"""GPUs that need not be there: while `simulated()` lasts, tensors on 'cuda:N' lie in host memory and claim to be there.

Arithmetic is the host's, so a model over several such GPUs equals the whole one on the host bit for bit. As on real
ones, an operation on tensors of different devices is an error, and only copies go from one to another. What a copy
returns shares no memory with what was copied. Kernels outside of torch (C++, Triton) are not simulated: the backend
`reference` has none.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dsv4.kernels.tables import own_tables

HOST = torch.device("cpu")
MOVES = {"to", "cpu"}
# what takes tensors from anywhere: fills the first one, or only asks
FILLS = {"copy_", "__setitem__", "_has_compatible_shallow_copy_type"}
INDEXES = {"__getitem__", "index_put_"}  # by numbers in host memory too
DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]  # what torch calls for `t.device`


class OnGPU(torch.Tensor):
    """A tensor in host memory that claims to be on `place`."""

    place: torch.device

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False):
        """A parameter that is `data`: accelerate makes parameters anew by their class, wherever they then are."""
        if not isinstance(data, OnGPU):
            return torch.nn.Parameter(data, requires_grad)
        made = data.detach().requires_grad_(requires_grad)
        made._is_param = True  # type: ignore[attr-defined]  # what torch.nn.Parameter knows parameters of a subclass by
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Simulation(TorchFunctionMode):
    """Operations without an `OnGPU` among their arguments: they may make one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def simulated() -> Iterator[None]:
    """While it lasts, 'cuda:N' is simulated, also where such a GPU exists. Operations raise RuntimeError for tensors on
    different devices."""
    with _Simulation(), own_tables():
        yield


def _run(func, args: tuple, kwargs: dict) -> Any:
    """func(*args, **kwargs) in host memory; its results are where a GPU would leave them."""
    given, name = tree_leaves((args, kwargs)), getattr(func, "__name__", "")
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    with torch._C.DisableTorchFunction():
        if func == DEVICE:
            return _place(tensors[0])
        if func is torch.device or name == "_parse_to":  # they give devices, not tensors
            return func(*args, **kwargs)
        where = _where(name, tensors, [d for d in map(_device, given) if d is not None])
        args, kwargs = tree_map(lambda x: HOST if (_device(x) or HOST).type == "cuda" else x, (args, kwargs))
        out = func(*args, **kwargs)
        if name in MOVES and _place(tensors[0]) != where:
            out = out.clone()
        return tree_map(lambda t: _put(t, where) if isinstance(t, torch.Tensor) else t, out)


def _where(name: str, tensors: list[torch.Tensor], wanted: list[torch.device]) -> torch.device:
    """The device of what an operation returns, given its tensors and the devices that it was asked for."""
    places = [_place(t) for t in tensors]
    if name == "cpu":
        return HOST
    if name in MOVES:
        return (wanted + places[::-1])[0]  # as a second tensor, if there is one
    if name in FILLS:
        return places[0]
    loose = lambda i, t: not t.dim() or i and name in INDEXES  # of numbers in host memory, which go anywhere
    strict = [p for i, (p, t) in enumerate(zip(places, tensors)) if p != HOST or not loose(i, t)]
    if len(set(strict)) > 1:
        raise RuntimeError(
            f"{name} of tensors on {' and '.join(sorted({str(p) for p in strict}))}; expected all on one device"
        )
    return (wanted + strict + [HOST])[0]


def _place(t: torch.Tensor) -> torch.device:
    return t.place if isinstance(t, OnGPU) else t.device


def _put(t: torch.Tensor, where: torch.device) -> torch.Tensor:
    """t as a tensor on `where`."""
    if _place(t) == where or where.type != "cuda":
        return t if not isinstance(t, OnGPU) or t.place == where else t.as_subclass(torch.Tensor)
    found = t.as_subclass(OnGPU)
    found.place = where
    return found


def _device(given: Any) -> torch.device | None:
    """The device that an argument names."""
    if isinstance(given, str) and re.fullmatch(r"(cpu|meta|cuda)(:\d+)?", given):
        given = torch.device(given)
    if not isinstance(given, torch.device):
        return None
    return torch.device("cuda", 0) if given == torch.device("cuda") else given
