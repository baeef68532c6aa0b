"""The origin of a report: enough to say what was audited, and to repeat it.

Nothing here names the machine: of every path only the last part is kept, so that a report can be published unchanged.
"""

import hashlib
import os
import platform
import re
import shlex
import struct
import subprocess
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from dsv4 import __version__
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import MAX_HEADER, open_checkpoint
from dsv4.loaders.layouts import detect_layout
from dsv4.loaders.load import Inventory
from dsv4.runtime import user_kernels

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("dsv4", "torch", "triton", "transformers")
_ABSOLUTE = re.compile(r"(?<![\w./~-])~?(?:/[\w.+@~-]+)+/?")  # not the slash of tokens/s or of https://


def provenance(subject, command: list[str], seeds: dict, started: float) -> dict:
    """What identifies an audit, as JSON values.

    subject: dsv4.probes.subject.Subject. Its checkpoint is found by its `files` (dsv4.loaders.load.Inventory), `path`
    or `provenance`; its `model`, if it is a dsv4.model.deepseek_v4.Model, gives the backend and the dispatch ledger;
    its `file` is a recorded dump.
    command: argv that repeats it. started: time.time() at the start. Call it after the run: the ledger counts so far.
    """
    model = getattr(subject, "model", None)
    path = checkpoint_path(subject)
    return {
        "subject": without_paths(subject.name),
        "can": sorted(subject.can),
        "checkpoint": None if path is None else checkpoint(path, _inventory(subject)),
        "recorded": recorded(getattr(subject, "file", None)),
        **commit(),
        "device": device(getattr(subject, "device", None) or getattr(model, "device", None)),
        "versions": versions(),
        "numerics": subject.numerics,
        "backend": _backend(subject, model),
        "dispatch": _dispatch(subject, model),
        **({"ranks": ranks} if (ranks := getattr(getattr(model, "ranks", None), "words", "")) else {}),
        **({"kernels": user_kernels.documents(model)} if model is not None and _replaces(model) else {}),
        "seeds": dict(seeds),
        "command": command_line(command),
        "date": date(started),
        "seconds": round(max(0.0, time.time() - started), 3),
        "about": without_paths(dict(subject.provenance)),
    }


def command_line(command: list[str]) -> str:
    """argv as it would be typed, of paths the last parts."""
    return shlex.join(without_paths(part) for part in called(command))


def date(started: float) -> str:
    """time.time() → '2026-01-31T12:00:00Z'."""
    return datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def called(command: list[str]) -> list[str]:
    """argv as it would be typed: `python -m PACKAGE …` for a package's __main__.py."""
    first = Path(command[0]) if command else Path()
    return ["python", "-m", first.parent.name, *command[1:]] if first.name == "__main__.py" else list(command)


def checkpoint_path(subject) -> Path | None:
    """The checkpoint directory of a subject; None if it has none."""
    said = subject.provenance
    inventory = _inventory(subject)
    for found in (
        getattr(inventory, "path", None),
        getattr(subject, "path", None),
        said.get("path"),
        said.get("config"),
    ):
        if found is not None and Path(found).is_dir():
            return Path(found).resolve()
    return None


def checkpoint(path: Path, inventory=None) -> dict:
    """Name, layout and hashes. A broken checkpoint has provenance too: what cannot be read is said, not raised."""
    config = path / "config.json"
    return {
        "name": path.name,
        "layout": _layout(path, inventory),
        "config_sha256": _sha256_of(config),
        "headers_sha256": headers_sha256(path),
        "files": len(list(path.glob("*.safetensors"))),
    }


def recorded(file: Path | None) -> dict | None:
    """Name and hash of a dump, of all of it: its data is what is audited."""
    return None if file is None else {"name": Path(file).name, "sha256": _sha256_of(Path(file))}


def headers_sha256(path: Path) -> str | None:
    """sha256 over name and header of each safetensors file, in the order of names; None if there is no such file.

    The data is not read: it may be hundreds of gigabytes. Names, dtypes, shapes and offsets are what the header holds.
    """
    files = sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(_header(file))
    return digest.hexdigest() if files else None


def _header(file: Path) -> bytes:
    """Length and header as they are in the file; as much as there is if it is truncated."""
    try:
        with open(file, "rb") as f:
            prefix = f.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            return prefix + f.read(min(length, MAX_HEADER))
    except OSError:
        return b"unreadable"


def _sha256_of(file: Path) -> str | None:
    try:
        with open(file, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return None


def _inventory(subject):
    """The subject's own, or that of its model; None if neither read a checkpoint."""
    found = (getattr(subject, "files", None), getattr(getattr(subject, "model", None), "inventory", None))
    return next((inventory for inventory in found if isinstance(inventory, Inventory)), None)


def _layout(path: Path, inventory) -> str:
    if inventory is not None:
        return inventory.layout.name
    try:
        return detect_layout(open_checkpoint(path).tensors).name
    except (CheckpointError, OSError) as error:
        return f"unknown: {without_paths(' '.join(str(error).split()))}"


def _backend(subject, model) -> str | None:
    return getattr(subject, "backend", None) or getattr(model, "backend", None)


def _replaces(model) -> bool:
    """Whether kernels of the user's stand for operations of the model."""
    return bool(getattr(model, "replacements", None))


def _dispatch(subject, model) -> list[dict]:
    """Rows of what really ran; empty for implementations that keep no such ledger."""
    ledger = getattr(subject, "dispatch", None) or getattr(model, "dispatch", None)
    return [row for row in ledger.rows() if row["calls"]] if ledger is not None else []


def device(found) -> str:
    """The device with its kind, since 'cuda:0' alone repeats nothing."""
    name = str(found or "cpu")
    if name.startswith("cuda") and torch.cuda.is_available():
        return f"{name} ({torch.cuda.get_device_name(torch.device(name))})"
    return f"{name} ({platform.machine()}, {torch.get_num_threads()} threads)" if name.startswith("cpu") else name


def commit() -> dict:
    """Commit of this project, and whether tracked files differ from it. DSV4_COMMIT speaks for a copy without git."""
    given = os.environ.get("DSV4_COMMIT")
    if given:
        return {"commit": given, "dirty": None}
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:  # installed somewhere inside another project's repository
        return {"commit": None, "dirty": None}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def versions() -> dict[str, str | None]:
    """Of python and of the libraries that figures depend on; None for one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    if name == "dsv4":
        return __version__  # a checkout that is not installed has one too
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def without_paths(value):
    """`value` with every absolute path in it, at any depth, cut down to its last part."""
    if isinstance(value, dict):
        return {str(k): without_paths(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_paths(v) for v in value]
    if isinstance(value, Path):
        return value.resolve().name
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~/")):  # the whole value is a path, which may hold spaces
        return Path(value).name or value
    return _ABSOLUTE.sub(lambda found: Path(found[0]).name, value)
