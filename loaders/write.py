"""Writing checkpoints: sharded, streamed, all or nothing."""

import errno
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from dsv4.loaders.errors import WriteError
from dsv4.loaders.files import DTYPES, INDEX, SINGLE, Progress

MAX_SHARD_BYTES = 5 << 30
Planned = Mapping[str, tuple[str, tuple[int, ...]]]  # name → (dtype, shape)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    size = DTYPES[dtype].itemsize
    for extent in shape:
        size *= extent
    return size


def write_checkpoint(
    root: str | Path,
    planned: Planned,
    value_of: Callable[[str], torch.Tensor],
    documents: Mapping[str, dict],
    copies: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint directory, one tensor in memory at a time.

    planned: every tensor's dtype and shape, known before any value. value_of(name) → the tensor. documents: JSON files
    by name (config.json …). copies: files to copy along. Everything goes to a sibling directory that is renamed at the
    end; any failure removes it. Raises WriteError when `root` exists, on a full disk, and on other OS errors.
    """
    root = Path(root)
    if root.exists():
        raise WriteError(f"{root} exists already; choose another directory or remove it")
    if not root.parent.is_dir():
        raise WriteError(f"{root.parent} does not exist; create it first")
    total = sum(tensor_bytes(*p) for p in planned.values())
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{root.name}.partial-", dir=root.parent))
    except OSError as error:
        raise WriteError(f"cannot write in {root.parent}: {error.strerror}") from None
    try:
        _write_all(partial, planned, value_of, documents, copies, max_shard_bytes, total, progress)
        partial.chmod(0o755)
        partial.rename(root)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(root.parent).free
            raise WriteError(
                f"the disk is full: {root} needs {total} bytes, {free} are free without what was just removed; "
                "nothing half-written is left"
            ) from None
        raise WriteError(f"writing {root} failed ({error.strerror}); nothing half-written is left") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_all(partial, planned, value_of, documents, copies, max_shard_bytes, total, progress) -> None:
    shards = _shards(planned, max_shard_bytes)
    done, weight_map = 0, {}
    for i, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        with open(partial / file, "wb") as f:
            f.write(_header({n: planned[n] for n in names}))
            for name in names:
                f.write(_bytes(name, value_of(name), *planned[name]))
                weight_map[name] = file
                done += tensor_bytes(*planned[name])
                if progress is not None:
                    progress(done, total)
    if len(shards) > 1:
        documents = {
            **documents,
            INDEX: {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        }
    for name, content in documents.items():
        (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in copies:
        shutil.copyfile(file, partial / file.name)


def _shards(planned: Planned, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in planned.items():
        nbytes = tensor_bytes(*entry)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _header(entries: Planned) -> bytes:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in entries.items():
        nbytes = tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(name: str, value: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> memoryview:
    if tuple(value.shape) != tuple(shape) or value.dtype is not DTYPES[dtype]:
        raise ValueError(f"tensor {name} is {value.dtype} {tuple(value.shape)}; {dtype} {tuple(shape)} was planned")
    return memoryview(value.contiguous().view(-1).view(torch.uint8).numpy()) if value.numel() else memoryview(b"")
