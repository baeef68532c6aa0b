"""Lines of JSON of a run that may be interrupted: its finished parts, so that it can be resumed.

The first line is ["of", …]: everything that results depend on. A journal of another run is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from dsv4.errors import InputError


def lines_of(path: Path) -> list[list]:
    """The lines of a journal; none if there is none yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, *line) -> None:
    with path.open("a") as out:
        out.write(json.dumps(line, default=lambda x: vars(x)) + "\n")


def claim(path: Path, what: Mapping) -> None:
    """Begin a journal with the line ["of", what]. Raises InputError for a journal that was begun with another `what`:
    results depend on it."""
    lines, what = lines_of(path), json.loads(json.dumps(dict(what)))
    first = next((line[1] for line in lines if line[0] == "of"), None)
    if first is None and not lines:
        append(path, "of", what)
    elif first != what:
        differing = [key for key in what if (first or {}).get(key) != what[key]]
        raise InputError(
            f"{path.name} is the journal of another run ({', '.join(differing)} differ); give another file, or "
            "remove it"
        )


class Kept:
    """A journal of one run, begun or taken up again: `held`, its lines after the first, and `append`. No path: nothing
    is held, nothing kept.

    what: everything that results depend on. Raises InputError for a journal of something else.
    """

    def __init__(self, path: Path | None, what: Mapping):
        self.path, self.held = path, []
        if path is not None:
            claim(path, what)
            self.held = lines_of(path)[1:]

    def append(self, *line) -> None:
        if self.path is not None:
            append(self.path, *line)
