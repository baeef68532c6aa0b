"""Results of an earlier run, read from its JSON: to judge them by goals that came later, and draw them again. Nothing
is measured."""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from dsv4.errors import InputError
from scripts.bench.journal import restore
from scripts.bench.measure import Result
from scripts.bench.row import Row
from scripts.bench.timing import Machine

KNOWN = {f.name for f in fields(Result)}


def read(path: Path, rows: Iterable[Row]) -> tuple[list[Result], Machine, dict]:
    """(results, machine, about) of a report's JSON. Goals in µs are those of the run; goals beside peers those that
    `rows`, by name, have today. Raises InputError for a file that is no such report."""
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no report of kernels: {type(error).__name__}: {error}") from None
    return parse(contents, rows, str(path))


def parse(contents: dict, rows: Iterable[Row], name: str) -> tuple[list[Result], Machine, dict]:
    """`read` of what a file called `name` holds."""
    try:
        results = [_result(row) for row in contents["rows"]]
        machine, about = Machine(**contents["machine"]), contents["about"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{name} is no report of kernels: {type(error).__name__}: {error}") from None
    goals = {row.name: row.beside for row in rows}
    for result in results:
        result.beside = list(goals.get(result.name, result.beside))
    return results, machine, about


def _result(row: dict) -> Result:
    """Of a row of the JSON, where NaN is null."""
    for part in (row, *row["peers"].values()):
        part |= {key: math.nan for key in ("error", "tolerance") if part[key] is None}
    for timing in (row["timing"], *(p.get(kind) for p in row["peers"].values() for kind in ("timing", "beside"))):
        if timing is not None and timing["hot_us"] is None:
            timing["hot_us"] = math.nan
    return restore({key: value for key, value in row.items() if key in KNOWN})
