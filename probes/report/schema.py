"""A small validator: the part of JSON Schema that probes/schema/ uses, without a dependency."""

import json
import re
from pathlib import Path

from dsv4.errors import Dsv4Error

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
KNOWN = {
    "$schema",
    "$id",
    "$defs",
    "title",
    "description",
    "type",
    "const",
    "enum",
    "required",
    "properties",
    "$ref",
    "additionalProperties",
    "items",
    "minimum",
    "pattern",
    "minLength",
    "minItems",
}


def valid(document: dict, file: Path, wrong: str) -> dict:
    """`document` itself. Raises Dsv4Error: `wrong`, and the first thing that contradicts the schema in `file`."""
    found = problems(document, json.loads(file.read_text(encoding="utf-8")))
    if found:
        raise Dsv4Error(f"{wrong}: {found[0]}")
    return document


def problems(value, schema: dict, where: str = "$", root: dict | None = None) -> list[str]:
    """What contradicts the schema, as 'place: what is wrong'; empty if nothing does.

    Raises ValueError for a keyword that is not checked here: a schema must not promise what nobody verifies.
    """
    root = schema if root is None else root
    unknown = set(schema) - KNOWN
    if unknown:
        raise ValueError(f"the schema uses {sorted(unknown)} at {where}, which this validator does not know")
    if "$ref" in schema:
        return problems(value, _resolve(schema["$ref"], root), where, root)
    found = _plain(value, schema, where)
    if found:
        return found
    if isinstance(value, dict):
        return _object(value, schema, where, root)
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in problems(v, schema.get("items", {}), f"{where}[{i}]", root)]
    return []


def _resolve(reference: str, root: dict) -> dict:
    found = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def _is(value, kind: str) -> bool:
    """JSON's true is not a number, although Python's is."""
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _plain(value, schema: dict, where: str) -> list[str]:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where}: {type(value).__name__}; expected {' or '.join(kinds)}"]
    found = []
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: {value!r}; expected {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r}; expected one of {schema['enum']}")
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        found.append(f"{where}: {value}; expected at least {schema['minimum']}")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{where}: {value!r} does not match {schema['pattern']}")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        found.append(f"{where}: {len(value)} characters; expected at least {schema['minLength']}")
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        found.append(f"{where}: {len(value)} items; expected at least {schema['minItems']}")
    return found


def _object(value: dict, schema: dict, where: str, root: dict) -> list[str]:
    found = [f"{where}: no {key}" for key in schema.get("required", []) if key not in value]
    named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for key, inner in value.items():
        if key in named:
            found += problems(inner, named[key], f"{where}.{key}", root)
        elif others is False:
            found.append(f"{where}: {key} is unknown")
        elif isinstance(others, dict):
            found += problems(inner, others, f"{where}.{key}", root)
    return found
