"""Lines of JSON of a run that may be cut off: what it has finished, so that it goes on where it stopped.

The first line is ["of", …]: everything that results depend on. A journal of another run is refused.
"""

import json
from pathlib import Path

from dsv4.errors import InputError


def lines_of(path: Path) -> list[list]:
    """The lines of a journal; none if there is none yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, *line) -> None:
    with path.open("a") as out:
        out.write(json.dumps(line, default=lambda x: vars(x)) + "\n")


def claim(path: Path, what: dict) -> None:
    """Begin a journal with the line ["of", what], or raise InputError for one that was begun with another: what results depend on."""
    lines, what = lines_of(path), json.loads(json.dumps(what))
    first = next((line[1] for line in lines if line[0] == "of"), None)
    if first is None and not lines:
        append(path, "of", what)
    elif first != what:
        differing = [key for key in what if (first or {}).get(key) != what[key]]
        raise InputError(f"{path.name} is the journal of another run ({', '.join(differing)} differ); give another file, or remove it")
