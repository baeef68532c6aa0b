"""Options that hold several values by name: 'tau=1e-5,patience=5'."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dsv4.errors import InputError, brief


class Kind(NamedTuple):
    """How a value is read (ValueError or KeyError if it cannot be), and what it is in words."""

    read: Callable[[str], object]
    words: str


NUMBER, WHOLE, WORD = Kind(float, "a number"), Kind(int, "a whole number"), Kind(str, "a word")


def one_of(*names: str) -> Kind:
    """One of these words."""
    return Kind(dict(zip(names, names)).__getitem__, " or ".join(names))


def several(kind: Kind) -> Kind:
    """A tuple of that kind, from '0.5/0.8'."""
    return Kind(
        lambda text: tuple(map(kind.read, text.split("/"))), kind.words.removeprefix("a ") + "s, several with / between"
    )


def named_values(option: str, text: str, known: Mapping[str, Kind], example: str) -> dict[str, object]:
    """'tau=1e-5,patience=5' → {'tau': 1e-5, 'patience': 5}, in the order given; an empty text gives nothing, and spaces
    are ignored.

    Raises InputError for a name that is not known, one that comes twice, and a value of another kind. option: its name
    on the command line.
    """
    found: dict[str, object] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name not in known or name in found:
            raise InputError(
                f"{option} has {brief(part)!r}; expected each of {', '.join(known)} at most once, such as {example}"
            )
        try:
            found[name] = known[name].read(value)
        except (ValueError, KeyError):
            raise InputError(f"{option} has {brief(part)!r}; expected {name}= and {known[name].words}") from None
    return found
