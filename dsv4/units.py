"""Sizes and counts as people write them: 128K, 12.30 GiB."""

import re

from dsv4.errors import InputError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_count(text: str) -> int:
    """'4096', '128K', '1M' → an integer (K = 1024). Raises InputError."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size; expected digits with an optional K, M, G or T")
    return int(match[1]) * UNITS[match[2].upper()]


def count_named(option: str, value: int | str) -> int:
    """`parse_count` of an option's value; a number is itself. Raises InputError that names the option."""
    try:
        return value if isinstance(value, int) else parse_count(value)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def format_bytes(n: float) -> str:
    """'12.3 GiB', with the unit that leaves three digits or so."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"
