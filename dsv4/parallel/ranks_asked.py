"""Which rank the environment says this process is. Without torch, because every command asks."""

import ctypes
import os
import signal
import sys

from dsv4.errors import InputError

LOST = 75  # exit code of a watched rank that others left: who watches it knows who left, and says so
WATCHED = "DSV4_WATCHED"  # in the environment of a rank: the process id of who watches it
PR_SET_PDEATHSIG = 1


def asked() -> tuple[int, int] | None:
    """(rank, number of ranks) as the environment has them (RANK, WORLD_SIZE), None for a single process. Raises
    InputError for what are no numbers."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise InputError(
            f"RANK {os.environ.get('RANK')!r} and WORLD_SIZE {os.environ.get('WORLD_SIZE')!r} are no numbers; start "
            "ranks by torchrun, or by --tensor-parallel-size"
        ) from None
    return (rank, size) if size > 1 else None


def speaks() -> bool:
    """Whether this process writes files and says what was found: rank 0, or a single process."""
    found = asked()
    return found is None or found[0] == 0


def own_device(device: str) -> str:
    """The device of this rank: 'cuda' is the GPU of its number on this machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and asked() else device


class ErrorsOnly:
    """A stderr to which only lines of errors come through: of all ranks one shows its progress."""

    def __init__(self, stream):
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        *whole, self._line = (self._line + text).replace("\r", "\n").split("\n")
        for line in whole:
            if line.startswith("error: "):
                self._stream.write(f"{line}\n")
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def end_with(parent: int) -> None:
    """From now on the kernel kills this process when `parent`, which started it, ends; at once if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(LOST)


def settle_streams() -> None:
    """Of a rank other than 0: results and progress are dropped. Of a watched one: it dies with who watches it."""
    found = asked()
    if found is None:
        return
    if WATCHED in os.environ:
        end_with(int(os.environ[WATCHED]))
    if found[0]:
        sys.stdout = open(os.devnull, "w")
        sys.stderr = ErrorsOnly(sys.stderr)
