"""Finding published kernels: what is importable, and what `scripts/peers.sh` fetched into the folders of PEERS."""

import importlib
import os
import sys
from functools import cache
from pathlib import Path

import torch

from dsv4.probes.kernel_audit.errors import KernelAuditError


class NotInstalled(KernelAuditError):
    """A published kernel is not on this machine, or not for this device."""


def folders() -> list[Path]:
    """Folders of the environment variable PEERS (several: joined by ':')."""
    return [Path(p) for p in os.environ.get("PEERS", "").split(":") if p]


def require(module: str):
    """Import a module of a peer, from PEERS or the environment. Raises NotInstalled."""
    for folder in map(str, folders()):
        if folder not in sys.path:
            sys.path.append(folder)
    package = module.split(".")[0]
    if package in ("sglang", "flashinfer"):  # without the packages' own beginnings, which import all of them
        from dsv4.probes.kernel_audit.adapters import absent

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
    """Multiprocessors of the device."""
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def at_least(major: int, minor: int = 0) -> None:
    """Raise NotInstalled on a GPU of a lower capability."""
    if not torch.cuda.is_available():
        raise NotInstalled("it needs a CUDA device")
    have = torch.cuda.get_device_capability()
    if have < (major, minor):
        raise NotInstalled(f"needs capability {major}.{minor}, this device has {have[0]}.{have[1]}")


def hopper() -> None:
    """Raise NotInstalled on other GPUs than of capability 9.0."""
    at_least(9)
    if torch.cuda.get_device_capability() != (9, 0):
        raise NotInstalled("only for capability 9.0")
