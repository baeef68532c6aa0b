"""One dumped tensor as an engine wrote it, and the errors of importing such tensors."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from dsv4.errors import InputError

QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class EngineDumpError(InputError):
    """An engine's dump that cannot be imported: files that are broken, contradict their names, or hold no such run."""


class RenameError(InputError):
    """A table of names that cannot be read, or that names what the dump does not have."""


class MissingPieces(EngineDumpError):
    """A step, a layer's part of a step, or a rank's part of a tensor is not among the files."""


class RanksDiffer(EngineDumpError):
    """Ranks hold other values, dtypes or shapes than the way of joining them allows."""


class WrongShape(EngineDumpError):
    """A joined tensor that is not of the shape of its capture point."""


@dataclass(frozen=True)
class Loaded:
    """A piece's value. axes: parallel axis → (rank on it, ranks of it), axes of one rank left out; dims: what the
    dumper says of the dimensions (`dims.py`), '' where it says nothing."""

    value: object
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    dims: str = ""


@dataclass(frozen=True)
class Piece:
    """One dumped tensor. name: the engine's; layer: as a tag of its own says, None if none does; step: the engine's
    number of the forward pass; rank: of the process; skip: why nobody wants it; load: reads it (it is not kept)."""

    file: Path
    name: str
    layer: int | None
    step: int
    rank: int
    load: Callable[[], Loaded]
    skip: str = ""

    @property
    def place(self) -> str:
        """For messages: file and name."""
        return self.file.name if self.name in self.file.name else f"{self.name} in {self.file.name}"


@lru_cache(maxsize=16)  # a file may hold many tensors; mapped, none of them is read before it is used
def read_pt(file: Path):
    """What torch.save wrote to `file`, tensors and plain values alone. Raises EngineDumpError for anything else."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise EngineDumpError(
            f"{file.name} holds more than tensors and plain values, and loading it would run code of the file; dump "
            "tensors only, or remove the file"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:80]
        raise EngineDumpError(
            f"{file.name} is no file of torch.save that can be read ({said}); it may be cut off: dump it again"
        ) from None


def tensor_of(piece: Piece, found: Loaded) -> torch.Tensor:
    """The value, which must be a tensor that needs no scales. Raises EngineDumpError."""
    if not isinstance(found.value, torch.Tensor):
        raise EngineDumpError(
            f"{piece.place} holds a {type(found.value).__name__}; expected a tensor: give its name `false` in the "
            "renaming table"
        )
    if found.value.dtype in QUANTISED:
        raise EngineDumpError(
            f"{piece.place} holds {dtype_name(found.value)} without its scales; dump the value that it stands for"
        )
    return found.value


def dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same bits: NaN equals itself, 0 does not equal −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
