"""safetensors files: headers checked byte by byte, data read without mapping the file.

The safetensors library reads tensors whole and maps files; here a slice of a stacked tensor must be
readable alone, peak memory must be the model plus one tensor, and a broken file must say what is broken.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.loaders.cuts import Cut
from dsv4.loaders.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 << 20
PAGE = 4096  # bytes that are read from a disk together


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. `offset` is absolute in the file, sizes in bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Files:
    """All tensors of a checkpoint directory, by file key."""

    root: Path
    tensors: dict[str, FileTensor]
    shards: tuple[Path, ...]

    def read(self, tensor: FileTensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """Bytes [start, start + nbytes) of a tensor as a fresh uint8 buffer."""
        nbytes = tensor.nbytes - start if nbytes is None else nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        with open(tensor.file, "rb") as f:
            f.seek(tensor.offset + start)
            if nbytes and f.readinto(memoryview(buffer.numpy())) != nbytes:
                raise CheckpointError(f"{tensor.file.name}: the file ends inside tensor {tensor.key}; it is truncated")
        return buffer

    def read_part(self, tensor: FileTensor, start: int, nbytes: int, shape: tuple[int, ...], cut: Cut) -> torch.Tensor:
        """Bytes of the part `cut` of the array `shape`, which is [start, start + nbytes) of a tensor, as a fresh uint8
        buffer. Columns are read row by row, or with what is between them where that lies on the same pages."""
        rows = math.prod(shape[: cut.axis])
        line = nbytes // max(1, rows)  # bytes of the cut axis and of those after it
        element = line // max(1, shape[cut.axis])
        first, last = cut.start * element, cut.stop * element
        if rows == 1:
            return self.read(tensor, start + first, last - first)
        if last - first < PAGE:
            return self.read(tensor, start, nbytes).view(rows, line)[:, first:last].reshape(-1)
        buffer = torch.empty(rows * (last - first), dtype=torch.uint8)
        parts = memoryview(buffer.numpy())
        with open(tensor.file, "rb") as f:
            for row in range(rows if last > first else 0):
                part = parts[row * (last - first) : (row + 1) * (last - first)]
                if os.preadv(f.fileno(), [part], tensor.offset + start + row * line + first) != len(part):
                    raise CheckpointError(
                        f"{tensor.file.name}: the file ends inside tensor {tensor.key}; it is truncated"
                    )
        return buffer


def open_checkpoint(path: str | Path) -> Files:
    """Read the headers of a checkpoint directory (an index with shards, or one *.safetensors file).

    Raises CheckpointError for a missing directory or shard, a truncated or malformed file, a tensor in
    two shards, and an index that disagrees with its shards.
    """
    root = Path(path)
    try:
        is_directory = root.is_dir()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(root)[:80]} cannot be opened: {error}") from None
    if not is_directory:
        raise CheckpointError(f"{root} is not a directory; expected a checkpoint directory with config.json")
    if os.path.lexists(root / INDEX):  # a broken link is an index that cannot be read, not none
        return _open_sharded(root)
    found = sorted(root.glob("*.safetensors"))
    if (root / SINGLE).exists():
        found = [root / SINGLE]
    if len(found) != 1:
        raise CheckpointError(
            f"{root} has {len(found)} safetensors files, but neither {INDEX} nor {SINGLE}; expected one of them"
        )
    return Files(root, read_header(found[0]), tuple(found))


def _open_sharded(root: Path) -> Files:
    wanted = read_json(root / INDEX).get("weight_map")
    if not isinstance(wanted, dict) or not all(isinstance(shard, str) for shard in wanted.values()):
        raise CheckpointError(f"{INDEX} has no weight_map from tensor names to file names; it is damaged")
    names = sorted(set(wanted.values()))
    outside = [n for n in names if n in ("", ".", "..") or "/" in n or "\\" in n or "\0" in n]
    if outside:
        raise CheckpointError(
            f"{INDEX} names {outside[0]!r:.80}; expected names of files beside it, without a path, so that nothing "
            "outside the checkpoint is read"
        )
    missing = [n for n in names if not (root / n).is_file()]
    if missing:
        raise CheckpointError(f"{len(missing)} of {len(names)} shards are missing: {some(missing)}; fetch them again")
    tensors: dict[str, FileTensor] = {}
    for name in names:
        for key, tensor in read_header(root / name).items():
            if key in tensors:
                raise CheckpointError(f"tensor {key} is in two shards: {tensors[key].file.name} and {name}")
            tensors[key] = tensor
    absent = [k for k, shard in wanted.items() if k not in tensors or tensors[k].file.name != shard]
    if absent:
        raise CheckpointError(f"{len(absent)} tensors are not in the shard that {INDEX} names: {some(absent)}")
    unlisted = sorted(set(tensors) - set(wanted))
    if unlisted:
        raise CheckpointError(f"{len(unlisted)} tensors of the shards are not in {INDEX}: {some(unlisted)}")
    return Files(root, tensors, tuple(root / n for n in names))


def read_header(file: Path) -> dict[str, FileTensor]:
    """Tensors of one safetensors file. Raises CheckpointError for anything the format forbids."""
    try:
        size = file.stat().st_size
        opened = open(file, "rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    with opened as f:
        prefix = f.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
            raise CheckpointError(
                f"{file.name} ({size} bytes) is not a whole safetensors file; it is truncated or damaged"
            )
        header = parse_json(f.read(length), file.name)
    tensors, spans = {}, []
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        tensor = _file_tensor(file, key, entry, 8 + length)
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{file.name} ends before tensor {key} does ({size} bytes, expected at least "
                f"{tensor.offset + tensor.nbytes}); it is truncated"
            )
        tensors[key] = tensor
        spans.append((tensor.offset, tensor.offset + tensor.nbytes, key))
    _check_coverage(file, sorted(spans), 8 + length, size)
    return tensors


def _check_coverage(file: Path, spans: list[tuple[int, int, str]], data: int, size: int) -> None:
    """The format has no holes: every byte after the header belongs to one tensor, or something was lost or added."""
    end, before = data, "the header"
    for start, stop, key in spans:
        if start < end:
            raise CheckpointError(f"{file.name}: tensors {before} and {key} overlap; the header is damaged")
        if start > end:
            raise CheckpointError(
                f"{file.name}: {start - end} bytes between {before} and {key} belong to no tensor; the file is damaged"
            )
        end, before = stop, key
    if end != size:
        raise CheckpointError(
            f"{file.name}: {size - end} bytes after {before} belong to no tensor; the file is damaged"
        )


def _file_tensor(file: Path, key: str, entry, data: int) -> FileTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file.name}: the header entry of {key} is malformed") from None
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, start, stop)):
        raise CheckpointError(
            f"{file.name}: the header entry of {key} is malformed; expected a dtype name, sizes and offsets"
        )
    if dtype not in DTYPES:
        raise CheckpointError(f"{file.name}: tensor {key} has dtype {dtype}; expected one of {', '.join(DTYPES)}")
    nbytes = DTYPES[dtype].itemsize
    for extent in shape:
        nbytes *= extent
    if stop - start != nbytes:
        raise CheckpointError(
            f"{file.name}: tensor {key} {dtype} {list(shape)} spans {stop - start} bytes; expected {nbytes}"
        )
    return FileTensor(key, dtype, shape, file, data + start, nbytes)


def read_json(file: Path) -> dict:
    """A JSON object from a file. Raises CheckpointError when absent, malformed, or with a key twice."""
    try:
        return parse_json(file.read_bytes(), file.name)
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}") from None
    except OSError as error:  # a loop of links, a directory, a file that may not be read
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def parse_json(text: bytes, where: str) -> dict:
    def unique(pairs):
        value = dict(pairs)
        if len(value) < len(pairs):
            twice = sorted(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
            raise CheckpointError(f"{where} has {some(twice)} twice")
        return value

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested or numbered beyond reason
        raise CheckpointError(f"{where} is not valid JSON ({str(error)[:60]}); it is damaged") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}; expected an object")
    return value


def some(names: list[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
