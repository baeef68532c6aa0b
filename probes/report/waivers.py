"""Waivers: findings that are accepted for a reason and until a date, from a JSON file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from dsv4.errors import InputError


@dataclass(frozen=True)
class Waiver:
    """Accepts findings of (probe, name), at places that match the glob `where`, through the day `expires`. Of a kernel
    audit `probe` is a clause."""

    probe: str
    name: str
    reason: str
    expires: date
    where: str = "*"

    def covers(self, probe: str, name: str, where: str) -> bool:
        """Whether it applies to this check. A literal place matches itself, brackets and all."""
        return (self.probe, self.name) == (probe, name) and (where == self.where or fnmatchcase(where, self.where))


def load_waivers(file: Path | None) -> list[dict]:
    """Entries of a file, none without one. Raises InputError."""
    if file is None:
        return []
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"waivers {file.name} cannot be read ({str(error)[:60]}); expected a JSON list") from None
    if not isinstance(value, list):
        raise InputError(f"waivers {file.name} holds a {type(value).__name__}; expected a list")
    return value


def sorted_out(entries: list[dict], today: date) -> tuple[list[Waiver], list[Waiver]]:
    """(waivers that hold, those that have expired). Raises InputError."""
    found = [parse_waiver(waiver, i) for i, waiver in enumerate(entries, 1)]
    return [w for w in found if w.expires >= today], [w for w in found if w.expires < today]


def holding(file: Path | None, said: Callable[[str], None]) -> tuple[Waiver, ...]:
    """Waivers of a file that hold today. said: told those that have expired. Raises InputError."""
    found, expired = sorted_out(load_waivers(file), date.today())
    for waiver in expired:
        said(f"a waiver of {waiver.probe} expired on {waiver.expires}: {waiver.name}; {waiver.where}")
    return tuple(found)


def parse_waiver(waiver: dict, number: int) -> Waiver:
    """A waiver from JSON. A misspelt one must not waive nothing, or everything, so it raises InputError."""
    where = f"waiver {number}"
    if not isinstance(waiver, dict):
        raise InputError(
            f"{where} is a {type(waiver).__name__}; expected an object with probe, name, reason and expires"
        )
    needed, unknown = ("probe", "name", "reason", "expires"), sorted(set(waiver) - set(Waiver.__dataclass_fields__))
    if unknown:
        raise InputError(f"{where} has {', '.join(unknown)}; expected probe, name, where, reason and expires")
    for key in (*needed, *(["where"] if "where" in waiver else [])):
        if not isinstance(waiver.get(key), str) or not waiver[key].strip() and key != "where":
            raise InputError(
                f"{where} has no {key}; expected probe, name, reason and expires as text, and perhaps where"
            )
    try:
        expires = datetime.strptime(waiver["expires"], "%Y-%m-%d").date()
    except ValueError:
        raise InputError(f"{where} expires on {waiver['expires'][:40]!r}; expected a date as YYYY-MM-DD") from None
    return Waiver(**{**waiver, "expires": expires})
