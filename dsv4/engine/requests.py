"""Requests of a batch, one JSON line each."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator

from dsv4.engine.state import Request, Result
from dsv4.engine.state import percentiles as percentiles  # its old place, until 0.4
from dsv4.errors import Dsv4Error, InputError, brief
from dsv4.sampling import Sampling
from dsv4.speculation.result import Speculation

WORDS = {
    str: "a string",
    list: "a list",
    int: "an integer",
    dict: "an object",
    bool: "true or false",
    float: "a number",
    type(None): "null",
}
KEYS = {
    "id": str,
    "prompt": str,
    "token_ids": list,
    "max_tokens": int,
    "priority": (int, float),
    "seed": int,
    "temperature": (int, float),
    "top_p": (int, float),
}
DEFAULT = re.compile(r"line \d+")  # the name of a request without an id


def read_requests(
    lines: Iterable[str], encode: Callable[[str], list[int]], method: str = "off"
) -> Iterator[Request | Result]:
    """One Request a line of JSON; a line that is none gives the Result that says why, and harms no other. Empty lines
    are skipped.

    A request without an id is called after its line, from 1; so is one whose id another has, or is the name of another
    line, which keeps its answer to itself: ids of results are unique. method: what the run drafts with, for results
    that never ran. encode(text) → token ids.
    """
    seen = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"line {number}"
        try:
            fields = _fields(line, name)
            own = fields.get("id", name)
            if own in seen:
                raise InputError(f"{name} has the id {own!r}, which was used before; ids are unique")
            if own != name and DEFAULT.fullmatch(own):
                raise InputError(f"{name} has the id {own!r}, which names another line; choose one of another form")
            name = own
            seen.add(name)
            yield _request(name, fields, encode)
        except Dsv4Error as error:
            yield Result(name, stop_reason="error", error=error, speculation=Speculation(method))


def _fields(line: str, name: str) -> dict:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON ({error}); expected an object with prompt or token_ids") from None
    if not isinstance(fields, dict):
        raise InputError(f"{name} is {WORDS[type(fields)]}; expected an object with prompt or token_ids")
    for key, value in fields.items():
        if key not in KEYS:
            raise InputError(f"{name} has {key!r}; expected only {', '.join(KEYS)}")
        if (
            not isinstance(value, KEYS[key])
            or isinstance(value, bool)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise InputError(
                f"{name} has {key} {brief(json.dumps(value), 60)}; expected {WORDS.get(KEYS[key], 'a number')}"
            )
    return fields


def _request(name: str, fields: dict, encode) -> Request:
    if ("prompt" in fields) == ("token_ids" in fields):
        raise InputError(
            f"{name} has {'both' if 'prompt' in fields else 'neither'} prompt and token_ids; expected one of them"
        )
    ids = encode(fields["prompt"]) if "prompt" in fields else fields["token_ids"]
    if any(type(i) is not int for i in ids):
        raise InputError(f"{name} has token_ids that are no integers; expected a list of token ids")
    if fields.get("max_tokens", 1) < 1:
        raise InputError(f"{name} has max_tokens {brief(fields['max_tokens'])}; expected at least 1")
    try:
        sampling = Sampling(fields.get("temperature", 0.0), fields.get("top_p", 1.0), fields.get("seed", 0))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return Request(
        name,
        tuple(ids),
        fields.get("max_tokens", Request.max_tokens),
        fields.get("priority", Request.priority),
        sampling,
    )
