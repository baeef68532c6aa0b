"""From an engine's names to capture points: the default table of each engine, and a file that goes before it.

    [names]
    "model.layers.{layer}.self_attn.output" = { point = "attn_out", dims = "t d[attn_tp:partial]" }
    "decoder_hidden" = "streams"            # the layer is a tag of the dump, not part of the name
    "model.layers.{layer}.mlp.output" = false
    "my_token_ids" = "ids"

Beside the points there are `ids` and `positions` (of the tokens of a step).
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.engine_dumps import dims
from dsv4.probes.subjects.engine_dumps.pieces import EngineDumpError, RenameError

OF_STEPS = ("ids", "positions")
TARGETS = (*POINTS, *OF_STEPS)
SHAPE = 'expected [names] with "ENGINE.NAME.{layer}" = "POINT", { point = …, dims = … } or false'


@dataclass(frozen=True)
class Rule:
    """One line of a table. point: None leaves the name out; dims: None takes what the dump says; own: of the user's
    file, whose lines must fit, while what default lines do not fit is left out."""

    pattern: str
    point: str | None
    dims: str | None = None
    own: bool = False

    def layer_of(self, name: str) -> tuple[bool, int | None]:
        """(whether the name is meant, the layer that stands in it)."""
        found = re.fullmatch(re.escape(self.pattern).replace(r"\{layer\}", r"(\d+)"), name)
        return bool(found), int(found[1]) if found and found.groups() else None


class Table:
    """Rules in the order in which they are asked: the user's, then the engine's."""

    def __init__(self, defaults: Mapping[str, str], file: Path | None = None):
        self.own = _read(file) if file is not None else []
        self.rules = [*self.own, *(Rule(pattern, point) for pattern, point in defaults.items())]

    def match(self, name: str) -> tuple[Rule | None, int | None]:
        """(the first rule that means the name, the layer in the name)."""
        for rule in self.rules:
            meant, layer = rule.layer_of(name)
            if meant:
                return rule, layer
        return None, None

    def check(self, names: Iterable[str]) -> None:
        """Raises RenameError for a line of the user's file that means none of the dumped names."""
        names = set(names)
        for rule in self.own:
            if not any(rule.layer_of(name)[0] for name in names):
                alike = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name) for name in names})
                near = difflib.get_close_matches(rule.pattern, alike, 3, 0.0)
                raise RenameError(
                    f"the renaming table has {rule.pattern!r}, which no file is called; the nearest are "
                    f"{', '.join(map(repr, near)) or 'none'}: correct or remove the line"
                )


def _read(file: Path) -> list[Rule]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0][:80]
        raise RenameError(f"renaming table {file.name} cannot be read ({said}); {SHAPE}") from None
    names = content.get("names")
    if set(content) != {"names"} or not isinstance(names, dict):
        raise RenameError(f"renaming table {file.name} has {', '.join(content) or 'nothing'}; {SHAPE}")
    return [_rule(file, pattern, value) for pattern, value in names.items()]


def _rule(file: Path, pattern: str, value) -> Rule:
    given = value if isinstance(value, dict) else {"point": value}
    point, words = given.get("point"), given.get("dims")
    if not set(given) <= {"point", "dims"} or words is not None and not isinstance(words, str):
        raise RenameError(f"{file.name}: {pattern!r} is {value!r}; {SHAPE}")
    if point is False:
        return Rule(pattern, None, own=True)
    if point not in TARGETS:
        raise RenameError(
            f"{file.name}: {pattern!r} is to be {point!r}; expected one of {', '.join(TARGETS)}, or false"
        )
    if pattern.count("{layer}") > 1:
        raise RenameError(f"{file.name}: {pattern!r} has {{layer}} twice; expected it once, or as a tag of the dump")
    try:
        dims.parse(words or "")
    except EngineDumpError as error:
        raise RenameError(f"{file.name}: {pattern!r}: {error}") from None
    return Rule(pattern, point, words, own=True)
