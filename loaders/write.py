"""Writing checkpoints: sharded, streamed, all or nothing, resumable after a kill.

Everything goes to a hidden sibling of the destination, which is renamed at the end. Any failure that Python sees
removes it. Only a kill leaves it behind: the next run names it, and resumes or discards it as it is told.
"""

import errno
import json
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from dsv4.loaders.errors import WriteError
from dsv4.loaders.files import DTYPES, INDEX, SINGLE, Progress
from dsv4.loaders.partial import Partial, check_destination

MAX_SHARD_BYTES = 5 << 30
Planned = Mapping[str, tuple[str, tuple[int, ...]]]  # name → (dtype, shape)


class Notes:
    """What a writer must know again when it resumes: `to_json` is kept beside each finished shard."""

    def to_json(self) -> dict:
        return {}

    def restore(self, kept: dict) -> None:
        """Take over what `to_json` said when the last finished shard was recorded."""


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
    leftover: str | None = None,
    identity: str = "",
    notes: Notes | None = None,
) -> None:
    """Write a checkpoint directory, one tensor in memory at a time.

    planned: every tensor's dtype and shape, known before any value. value_of(name) → the tensor. documents: JSON files
    by name (config.json …). copies: files to copy along. leftover: what becomes of a killed run's files: 'resume' (keep
    the shards whose bytes are those that were recorded), 'discard', or None (refuse). identity: names what is written;
    only a run of the same identity and plan is resumed. notes: kept and restored with the shards.

    Everything goes to a sibling directory that is renamed at the end; any failure removes it. Raises WriteError when
    `root` exists, on leftovers without a choice, on a full disk, and on other OS errors.
    """
    root = Path(root)
    if max_shard_bytes < 1:
        raise WriteError(f"the largest shard is {max_shard_bytes} bytes; expected a positive size such as 5G")
    check_destination(root, leftover)
    total = sum(tensor_bytes(*p) for p in planned.values())
    shards = {_shard_name(i, len(s)): names for s in [_shards(planned, max_shard_bytes)] for i, names in enumerate(s)}
    plan = json.dumps([identity, {file: [[n, *planned[n]] for n in names] for file, names in shards.items()}])
    with Partial.open(root, leftover, plan, total) as partial:
        try:
            _write_shards(partial, shards, planned, value_of, total, progress, notes or Notes())
            _write_documents(partial.path, shards, documents, copies, total)
            partial.finish()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = shutil.disk_usage(root.parent).free
                raise WriteError(
                    f"the disk is full: {root} needs {total} bytes, {free} are free without what was just removed; "
                    "nothing half-written is left"
                ) from None
            raise WriteError(f"writing {root} failed ({error.strerror}); nothing half-written is left") from None


def _write_shards(partial: Partial, shards, planned: Planned, value_of, total: int, progress, notes: Notes) -> None:
    kept = partial.verified(list(shards))
    if kept:
        notes.restore(partial.notes)
    done = 0
    for file, names in shards.items():
        if file in kept:
            done += sum(tensor_bytes(*planned[n]) for n in names)
            if progress is not None:
                progress(done, total)
            continue
        with partial.shard(file) as f:
            f.write(_header({n: planned[n] for n in names}))
            for name in names:
                f.write(_bytes(name, value_of(name), *planned[name]))
                done += tensor_bytes(*planned[name])
                if progress is not None:
                    progress(done, total)
        if len(shards) > 1:
            partial.record(file, notes.to_json())


def _write_documents(folder: Path, shards, documents: Mapping[str, dict], copies: Iterable[Path], total: int) -> None:
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        documents = {
            **documents,
            INDEX: {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in copies:
        shutil.copyfile(file, folder / file.name)


def _shard_name(i: int, shards: int) -> str:
    return SINGLE if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"


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
