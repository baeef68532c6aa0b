"""Checks whether the output of a command can be written, before the work and not after it; reports as JSON."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from dsv4.errors import InputError

ROW = 800  # characters of a line of JSON at most


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


def dumped(value, depth: int = 0) -> str:
    """JSON with an object or list on one line where it takes at most ROW characters, and lists of numbers each on one:
    a row of a table is a line."""
    whole = json.dumps(value, ensure_ascii=False)
    if len(whole) <= ROW or not isinstance(value, dict | list | tuple) or not value:
        return whole
    inner, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        items = (f"{json.dumps(key, ensure_ascii=False)}: {dumped(item, depth + 1)}" for key, item in value.items())
        return f"{{{inner}" + f",{inner}".join(items) + f"{end}}}"
    if all(type(item) in (int, float) for item in value):
        return whole
    return f"[{inner}" + f",{inner}".join(dumped(item, depth + 1) for item in value) + f"{end}]"
