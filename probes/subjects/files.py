"""A checkpoint directory alone: what its tensors and its config say, without running anything."""

import hashlib
import json
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.loaders.load import Inventory
from dsv4.model import families
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig
from dsv4.probes.subject import Subject


class FilesSubject(Subject):
    """`files` is the dsv4.loaders.load.Inventory: names, shapes and formats of everything, from the headers.

    `numerics` names the formats of the matrices. `provenance` identifies config and headers by hash; tensor data is not
    hashed, since that would read all of it.
    """

    can = frozenset({"files"})

    def __init__(self, path: str | Path):
        self.files = Inventory.open(path)
        self.family = self.files.family
        self.config = families.of(self.files).read_config(self.files.config)
        self.name = f"files of {Path(path).name}"
        self.numerics = " + ".join(sorted({form.value for form in self.files.formats.values()}))
        self.provenance = {
            "path": str(path),
            "layout": self.files.layout.name,
            "shards": [f.name for f in self.files.files.shards],
            "config sha256": _digest(self.files.config),
            "headers sha256": _digest(_headers(self.files)),
        }

    def weight(self, name: str) -> torch.Tensor:
        """A tensor as stored, by official name: a matrix dequantised to fp32, anything else widened (tables stay
        int64).

        Raises InputError for a name that the checkpoint does not hold.
        """
        if name not in self.files.sources:
            raise InputError(f"the checkpoint holds no tensor {name!r}")
        base = name.removesuffix(".weight")
        if base != name and base in self.files.formats:
            return self.files.read_matrix(base, block_of(self.config))
        return plain(self.files.read(name))


def block_of(config: ModelConfig | GQAConfig) -> tuple[int, int]:
    """Block of FP8 scales; GQA checkpoints are dense, and it does not matter there."""
    return tuple(getattr(config, "weight_block_size", (128, 128)))


def plain(value: torch.Tensor) -> torch.Tensor:
    """A copy of its own on the CPU: fp32 of a float tensor, int64 of an integer one."""
    with torch.inference_mode(False), torch.no_grad():
        return value.detach().to("cpu", torch.float32 if value.is_floating_point() else torch.int64, copy=True)


def _headers(files: Inventory) -> dict:
    return {
        name: (source.dtype, list(source.shape), source.start, source.nbytes) for name, source in files.sources.items()
    }


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
