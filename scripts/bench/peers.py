"""Published kernels that a row can be timed against.

An adapter is a function make(row, i) registered for operations under the name that tables print. It builds input set i
at the row's shape (`row.facts`) and returns run, or (run, check) as a row does. It imports what it needs when it is
called and raises NotInstalled where that is missing. `scripts/peers.sh` fetches what does not come with torch into a
folder, which the environment variable PEERS names (several folders: joined by ':').
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from scripts.bench.row import Row

ADAPTERS: dict[str, dict[str, Callable]] = {}  # operation → name → make(row, i)
MODULES = ("peers_torch", "peers_attention", "peers_indexer", "peers_mhc", "peers_experts", "peers_sdpa")


class NotInstalled(Exception):
    """The peer is not on this machine, or not for this device."""


def peer(name: str, *ops: str, when: Callable[[dict], bool] = lambda facts: True):
    """Decorator: register make(row, i) as `name` for `ops`, for the rows whose facts satisfy `when`."""

    def register(make):
        make.when = when
        for op in ops:
            ADAPTERS.setdefault(op, {})[name] = make
        return make

    return register


@cache
def _load() -> None:
    for module in MODULES:
        importlib.import_module(f"scripts.bench.{module}")


def for_row(row: Row) -> dict[str, Callable]:
    """name → make(i) of every adapter that takes this row, installed or not."""
    _load()
    return {name: partial(make, row) for name, make in ADAPTERS.get(row.op, {}).items() if make.when(row.facts)}


def folders() -> list[Path]:
    return [Path(p) for p in os.environ.get("PEERS", "").split(":") if p]


def require(module: str):
    """Import a module of a peer, from PEERS or the environment. Raises NotInstalled."""
    for folder in map(str, folders()):
        if folder not in sys.path:
            sys.path.append(folder)
    package = module.split(".")[0]
    if package in ("sglang", "flashinfer"):  # without the packages' own beginnings, which import all of them
        from scripts.bench import absent

        absent.install(package, folders())
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as missing:
        raise NotInstalled(f"{module} ({' '.join(str(missing).split())[:80]})") from missing


@cache
def library(name: str, namespace: str):
    """Load NAME.*.so from a folder of PEERS; return torch.ops.NAMESPACE. Raises NotInstalled."""
    for folder in folders():
        for path in sorted(folder.rglob(f"{name}.*so")):
            try:
                torch.ops.load_library(str(path))
            except OSError as failure:
                raise NotInstalled(f"{name} ({' '.join(str(failure).split())[:80]})") from failure
            return getattr(torch.ops, namespace)
    raise NotInstalled(name)


def processors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def at_least(major: int, minor: int = 0) -> None:
    """Raise NotInstalled on a GPU of a lower capability."""
    have = torch.cuda.get_device_capability()
    if have < (major, minor):
        raise NotInstalled(f"needs capability {major}.{minor}, this device has {have[0]}.{have[1]}")


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        raise NotInstalled("only for capability 9.0")
