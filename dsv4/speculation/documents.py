"""The JSON files of this package: reading and writing one, and the header that says what it is."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dsv4.errors import InputError, brief
from dsv4.outputs import writable

T = TypeVar("T")


def read_document(path: str | Path, parse: Callable[[object], T]) -> T:
    """`parse` of a JSON file. Raises InputError naming the file when it cannot be read, is not JSON, or `parse` refuses
    it."""
    path = Path(path)
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too; lists in lists without end
        raise InputError(f"{path} is not JSON: {brief(error, 80)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def check_can_draw(directory: Path, wanted: str, option: str = "--out") -> None:
    """Make the directory of a report with plots. Raises InputError if it cannot be written: before a run, not after it.
    wanted: why plots are needed, and what else can be done. option: how the command line names the directory."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(wanted)
    writable(directory, option=option)
    directory.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises InputError when it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another place or make room") from None


def expect_header(document: object, what: str, name: str, version: int) -> dict:
    """The document, if its 'format' and 'version' are these. Raises InputError."""
    if not isinstance(document, dict):
        raise InputError(
            f"found a {type(document).__name__}; expected {what}: an object with format {name!r}, version {version}"
        )
    if document.get("format") != name or document.get("version") != version:
        raise InputError(
            f"found {document.get('format')!r} version {document.get('version')!r}; expected {what}: format {name!r}, "
            f"version {version}"
        )
    return document
