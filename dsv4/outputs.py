"""Checks whether the output of a command can be written, before the work and not after it."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from dsv4.errors import InputError


def writable(out: Path | None, file: bool = False, option: str = "--out") -> Path | None:
    """Returns `out` after a trial that it can be written; the trial leaves nothing. Commands call this before the work.

    out: a folder that exists or can be made, or with `file` a file in such a folder; None: no report. option: how the
    command line names it. Raises InputError.
    """
    if out is None:
        return None
    folder = out.parent if file else out
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        if file and out.is_dir():
            raise IsADirectoryError(0, "it is a folder, not a file")
        folder.mkdir(parents=True, exist_ok=True)
        handle, trial = tempfile.mkstemp(prefix=".trial-", dir=folder)
        os.close(handle)
        os.unlink(trial)
    except OSError as error:
        raise InputError(
            f"{option} {out} cannot be written: {error.strerror or error}; expected a folder that is there or can be "
            "made"
        ) from None
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    return out
