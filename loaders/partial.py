"""The hidden directory in which a checkpoint grows, and what a kill leaves of it.

`.NAME.partial` beside the destination NAME holds the shards so far and `progress.json`, which names each finished shard
with the size and crc32 of its bytes. A lock on `lock` tells a directory that is being written from what a kill left.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from contextlib import contextmanager
from pathlib import Path

from dsv4.loaders.errors import WriteError

RECORD, LOCK = "progress.json", "lock"
RESUME, DISCARD = "resume", "discard"
CHUNK = 16 << 20


def check_destination(root: Path, leftover: str | None = None) -> None:
    """Raise WriteError unless a checkpoint can be written at `root`: before any work, so that none is lost.

    The place must not exist, its parent must be a directory that takes files, and what a killed run left there must be
    either absent or provided for by `leftover` ('resume' or 'discard').
    """
    try:
        if os.path.lexists(root):
            raise WriteError(f"{root} exists already; choose another directory or remove it")
        if not root.parent.is_dir():
            raise WriteError(f"{root.parent} does not exist; create it first")
        found = leftovers(root)
        tempfile.TemporaryFile(dir=root.parent).close()
    except OSError as error:
        raise WriteError(f"cannot write in {root.parent}: {error.strerror}") from None
    for path in found:
        if _locked(path):
            raise WriteError(f"another process is writing {root} ({path}); wait for it, or choose another directory")
    if found and leftover is None:
        size = sum(file.stat().st_size for path in found for file in path.rglob("*") if file.is_file())
        raise WriteError(
            f"{found[0]} holds {size} bytes ({size / 2**30:.1f} GiB) of a run that was killed; continue it with "
            "--resume, or remove it with --discard-partial"
        )
    if not found and leftover == RESUME:
        raise WriteError(f"--resume was given, and no killed run left anything of {root}; leave --resume out")


def leftovers(root: Path) -> list[Path]:
    """Directories that a killed run left for the destination `root`; those with a suffix are of earlier versions."""
    named = root.parent / f".{root.name}.partial"
    with contextlib.suppress(FileNotFoundError):
        named.lstat()  # raises for a name that is too long
    older = sorted(p for p in root.parent.iterdir() if re.fullmatch(re.escape(named.name) + r"-\w{8}", p.name))
    return [p for p in [named, *older] if p.is_dir()]


def _locked(path: Path) -> bool:
    try:
        with open(path / LOCK, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


class Partial:
    """The directory of one write. As a context manager it removes the directory, unless `finish` renamed it before."""

    def __init__(self, root: Path, plan: str):
        self.root, self.path = root, root.parent / f".{root.name}.partial"
        self.plan = hashlib.sha256(plan.encode()).hexdigest()
        self.shards: dict[str, dict] = {}  # file → its size and crc32, of finished shards
        self.notes: dict = {}
        self._crc = self._size = 0

    @classmethod
    @contextmanager
    def open(cls, root: Path, leftover: str | None, plan: str, total: int):
        """Make the directory, or take over the one that a killed run left. Raises WriteError where it is of another
        conversion, and where the disk has less room than `total` bytes."""
        partial = cls(root, plan)
        if leftover == DISCARD:
            for path in leftovers(root):
                shutil.rmtree(path)
        if leftover == RESUME:
            partial._take_over()
        partial._check_room(total)
        try:
            if leftover != RESUME:
                partial.path.mkdir()
            lock = open(partial.path / LOCK, "ab")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WriteError(f"cannot write in {root.parent}: {error.strerror}") from None
        try:
            with lock:
                yield partial
        finally:
            shutil.rmtree(partial.path, ignore_errors=True)

    def _take_over(self) -> None:
        try:
            kept = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
            plan, self.shards, self.notes = kept["plan"], kept["shards"], kept["notes"]
        except FileNotFoundError:
            return  # killed before its first shard was finished: everything is written anew
        except (ValueError, KeyError, TypeError):
            raise WriteError(
                f"{self.path / RECORD} is damaged, so that nothing beside it can be trusted; start anew with "
                "--discard-partial"
            ) from None
        if plan != self.plan:
            raise WriteError(
                f"{self.path} is of another conversion (another source, layout, option or shard size); repeat the "
                "command that was killed with --resume, or start anew with --discard-partial"
            )

    def _check_room(self, total: int) -> None:
        needed = total - sum(shard["size"] for shard in self.shards.values())
        free = shutil.disk_usage(self.root.parent).free
        if needed > free:
            raise WriteError(f"{self.root} needs {needed} more bytes, {free} are free in {self.root.parent}")

    def verified(self, files: list[str]) -> set[str]:
        """Shards that are recorded, and whose bytes are still those that were recorded; every other file goes."""
        kept = set()
        for file in files:
            if file in self.shards and _checksum(self.path / file) == tuple(self.shards[file].values()):
                kept.add(file)
        self.shards = {file: self.shards[file] for file in files if file in kept}
        for found in self.path.iterdir():
            if found.name not in kept | {LOCK, RECORD}:
                found.unlink()
        return kept

    @contextmanager
    def shard(self, file: str):
        """A file to write one shard to, counted and summed as it is written."""
        self._crc = self._size = 0
        with open(self.path / file, "wb") as raw:
            yield _Summed(self, raw)
            raw.flush()
            os.fsync(raw.fileno())

    def record(self, file: str, notes: dict) -> None:
        """A shard is complete: a later run may keep it, and takes over `notes`."""
        self.shards[file], self.notes = {"size": self._size, "crc32": self._crc}, notes
        new = self.path / f"{RECORD}.new"
        new.write_text(json.dumps({"plan": self.plan, "shards": self.shards, "notes": notes}), encoding="utf-8")
        new.replace(self.path / RECORD)

    def finish(self) -> None:
        """The directory becomes the destination."""
        (self.path / RECORD).unlink(missing_ok=True)
        (self.path / LOCK).unlink()
        self.path.chmod(0o755)
        self.path.rename(self.root)


class _Summed:
    """A file whose bytes are counted and summed on their way."""

    def __init__(self, partial: Partial, raw):
        self.partial, self.raw = partial, raw

    def write(self, data) -> None:
        self.raw.write(data)
        self.partial._size += memoryview(data).nbytes
        self.partial._crc = zlib.crc32(data, self.partial._crc)


def _checksum(file: Path) -> tuple[int, int] | None:
    """(size, crc32) of a file's bytes, None if it is not there."""
    crc = size = 0
    try:
        with open(file, "rb") as f:
            while data := f.read(CHUNK):
                size, crc = size + len(data), zlib.crc32(data, crc)
    except FileNotFoundError:
        return None
    return size, crc
