"""Stand-ins for what the kernel files of SGLang and FlashInfer import and do not need on a CUDA device.

Only SGLang's kernel files are fetched (`scripts/peers.sh`), not the server around them. Every other `sglang.*` module
becomes an empty one whose names are false, call to false and compare as zero: `is_hip()`, `envs.SGLANG_X.get()` and the
like take their CUDA branch.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path

import torch


class Absent:
    """False, zero, and whatever is asked of it again absent."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __call__(self, *args, **kwargs):
        return Absent()

    def __bool__(self):
        return False

    def __int__(self):
        return 0

    __index__ = __int__

    def __gt__(self, other):
        return 0 > other

    def __lt__(self, other):
        return 0 < other


def aligned_new_empty(shape, dtype, device, alignment_bytes):
    """A tensor [rows, columns] whose row stride is a multiple of alignment_bytes."""
    rows, columns = shape
    step = alignment_bytes // dtype.itemsize
    return torch.empty(rows, -(-columns // step) * step, dtype=dtype, device=device)[:, :columns]


KNOWN = {
    "sglang.kernels.jit.utils": {"aligned_new_empty": aligned_new_empty},
    "sglang.kernels.ops.attention.deep_select": {"get_input_stride_alignment_bytes": lambda: 128},
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line: finds any sglang module that nothing else found."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sglang.") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _absent(spec.name, name)
        return module

    def exec_module(self, module):
        vars(module).update(KNOWN.get(module.__name__, {}))


def _absent(module: str, name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent()


def install(package: str, folders: list[Path]) -> None:
    """Make the files of a package importable without running its `__init__`; missing modules of sglang become absent
    ones."""
    if package == "sglang" and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
    places = [str(folder / package) for folder in folders if (folder / package).is_dir()]
    if places and package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = places
