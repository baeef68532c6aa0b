"""How much is measured, as every measurement is asked it: contexts, rows of text, needles, a seed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from dsv4.errors import InputError

QUESTION = 64  # tokens that a needle, its question and its answer take at most


@dataclass(frozen=True, kw_only=True)
class Settings:
    """contexts: tokens, ascending; rows of text of each; needles: trials, 0 for none; seed: of needles, and of random
    ids. SHOWN: the document's keys, in order; FIELDS: key → field, where they differ."""

    contexts: tuple[int, ...]
    rows: int
    needles: int
    seed: int = 0
    SHOWN: ClassVar[tuple[str, ...]] = ()
    FIELDS: ClassVar[Mapping[str, str]] = {}

    def about(self, **more) -> dict:
        """As the document has them. more: by key, what is shown beside these settings, or instead of one."""
        return {key: more[key] if key in more else getattr(self, self.FIELDS.get(key, key)) for key in self.SHOWN}


def ascending(contexts: list[int] | None, otherwise: Iterable[int], most: int) -> tuple[int, ...]:
    """The contexts that were asked for, each once; else those of `otherwise` up to `most` tokens, or `most` itself."""
    return tuple(sorted(set(contexts or [n for n in otherwise if n <= most] or [most])))


def check_range(contexts: tuple[int, ...], most: int, why: str) -> None:
    """Raises InputError for a context below 2 or beyond `most` tokens. why: where that limit comes from."""
    if contexts[0] < 2 or contexts[-1] > most:
        wrong = contexts[0] if contexts[0] < 2 else contexts[-1]
        raise InputError(f"--context {wrong}: expected 2 … {most} tokens ({why})")


def check_least(given: Mapping[str, int], **least: int) -> None:
    """Raises InputError that names all options of `least`, if one is given less. Both: option, or field → number."""
    if any(given[name] < number for name, number in least.items()):
        said = ", ".join(f"--{name.replace('_', '-')} {given[name]}" for name in least)
        raise InputError(f"{said}: expected at least {', '.join(map(str, least.values()))}")


def refuse_idle(given: Mapping[str, object], of: str) -> None:
    """Raises InputError for options without effect: nothing is ignored silently. given: option → value, None where it
    was not given; of: what they would change nothing of, and what to do."""
    idle = [name for name, value in given.items() if value is not None]
    if idle:
        raise InputError(f"{', '.join(idle)} would change nothing of {of}")
