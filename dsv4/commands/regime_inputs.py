"""What the commands of `dsv4 regime` read off their options, and how they call their files."""

import json
import sys
import time
from dataclasses import replace
from enum import Enum
from math import isfinite
from pathlib import Path

from dsv4.errors import InputError
from dsv4.outputs import dumped as dumped

SUFFIXES = (".json", ".md", ".svg")
ROW = 800  # characters of a line of JSON at most


class Model(str, Enum):
    gqa = "gqa"
    csa = "csa"


def source(model: Model, heads: str, policies: str, budget: str, device):
    if model is Model.csa:
        from dsv4.cost_model.csa import CSA

        return CSA(device, "triton" if device.type == "cuda" else "reference")
    from dsv4.cost_model.gqa import GQA, POLICIES, Geometry

    try:
        H, KV, D = (int(n) for n in heads.split(","))
    except ValueError:
        raise InputError(
            f"--heads {heads!r}; expected three numbers: query heads, KV heads, columns (28,4,128)"
        ) from None
    if min(H, KV, D) < 1 or H % KV:
        raise InputError(f"--heads {heads!r}; expected KV heads that divide the query heads")
    chosen = [p.strip() for p in policies.split(",") if p.strip()]
    unknown = [p for p in chosen if p not in POLICIES]
    if unknown or not chosen:
        raise InputError(f"--policies {policies!r}: {', '.join(unknown) or 'nothing'} is none of {', '.join(POLICIES)}")
    kept = count(budget)
    if kept % 128 or kept < 512:
        raise InputError(f"--budget {budget}; expected a multiple of 128 tokens, at least 512")
    return GQA(Geometry(H, KV, D, 4 if device.type == "cpu" else 2), {p: POLICIES[p](kept) for p in chosen}, device)


def about(model: Model, heads: str, device) -> dict:
    """What a report is about, and its origin: device, versions, commit, date and command."""
    import torch

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "host processor"
    return {"model": f"{model.value} {heads}", "device": where, **origin()}


def origin() -> dict:
    """Where a report comes from: versions, commit, date and command."""
    import torch

    from dsv4.probes.report import provenance

    found = provenance.versions()
    return {
        "torch": torch.__version__,
        "triton": found["triton"],
        "python": found["python"],
        **provenance.commit(),
        "date": provenance.date(time.time()),
        "command": provenance.command_line(sys.argv),
    }


def short(device: str) -> str:
    """The device's short name in file names: 'cpu', 'H100'."""
    import torch

    return _short_name("cpu" if not device.startswith("cuda") else torch.cuda.get_device_name(torch.device(device)))


def _short_name(name: str) -> str:
    import re

    found = re.search(r"\b([ABHLV]\d{2,3}S?|RTX \w+|T4)\b", name)
    return found[0] if found else name


def stem(model: Model, name: str) -> str:
    """The stem of file names. Reports of CSA have the family in it, so that a report of one kind of model does not
    replace that of the other."""
    import re

    return "regime_" + ("" if model is Model.gqa else f"{model.value}_") + re.sub(r"\W+", "_", name.lower())


def steps_stem(found) -> str:
    """The stem of the fit of whole steps: 'regime_steps_qwen2_5_7b_h100'."""
    import re

    return "regime_steps_" + re.sub(r"\W+", "_", f"{found.geometry}_{_short_name(found.device)}".lower())


def check_replaceable(folder: Path, stem: str, report: dict) -> None:
    """Raises InputError if one of the files exists and they are not a map of the same source and hardware."""
    there = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").exists()]
    if not there:
        return
    try:
        held = json.loads((folder / f"{stem}.json").read_text())
        same = not held["rows"] and drawn_of(held) == drawn_of(report)
    except (OSError, ValueError, KeyError, TypeError):  # no report, or none of this program
        same = False
    if not same:
        raise InputError(
            f"{there[0]} is there and is no map of this source and hardware; expected a free name: give another --out "
            "or --name, or --force to replace it"
        )


def drawn_of(report: dict) -> list:
    """What a map depends on: formulas of bytes, where they were measured, and the hardware's name."""
    return [report["source"], report["about"]["model"], report["about"]["device"], report["hardware"]["name"]]


def kind(found: dict, file: Path) -> Model:
    """The kind of model of a report. Raises KeyError, TypeError if it has none, InputError for another."""
    kind = found["source"]["kind"]
    if kind not in [m.value for m in Model]:
        raise InputError(f"{file} is of a model of kind {kind!r}; expected one of {', '.join(m.value for m in Model)}")
    return Model(kind)


def sizes(model: Model, layers: int | None, weights: str | None) -> tuple[int, int, list[str]]:
    """Layers and bytes of weights, as given or assumed, and a note about assumed ones."""
    from dsv4.cost_model.defaults import assumed

    found = assumed(model.value)
    note = [found.note] * bool(found.note and layers is None and weights is None)
    return layers or found.layers, found.weights if weights is None else count(weights), note


def hardware(model: Model, measured, layers: int | None, weights: str | None):
    """(hardware without name and capacity, notes): sizes as they were given, or of the measured steps, or assumed."""
    from dsv4.cost_model.regime import Hardware

    n, size, note = sizes(model, layers, weights)
    if measured is None:
        return Hardware("", 0, n, size), note
    if measured.heads is None:  # layers of one kind, among others that the formulas of the map do not have
        return Hardware("", 0, n, size, others=max(0, measured.layers - n)), note
    whole = Hardware("", 0, layers or measured.layers, measured.weights if weights is None else size)
    return (whole if weights is not None else replace(whole, resident=measured.held)), note


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",") if part.strip()]


def count(text: str) -> int:
    from dsv4.units import parse_count

    return parse_count(text)


def bandwidth(text: str) -> float:
    units = {"G": 1e9, "T": 1e12}
    try:
        value = float(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise InputError(f"--bandwidth {text!r}; expected bytes a second: 4.8T, 3350G, 3.35e12")
    return value


def capacity(text: str | None, device) -> int:
    from dsv4.runtime.memory import free_bytes

    return count(text) if text is not None else free_bytes(device)


def wide(measured: list[int], longest: int = 1 << 22) -> list[int]:
    """The map's axis: powers of two from the smallest measured value on."""
    first = 1 << (min(measured).bit_length() - 1)
    return [first << i for i in range(32) if first << i <= max(longest, max(measured))]


def can_draw(folder: Path) -> None:
    """Checks before anything runs that matplotlib is installed and that the directory can be made."""
    from dsv4.speculation.documents import check_can_draw

    check_can_draw(folder, "the map is an SVG, and matplotlib is not installed; pip install 'dsv4[plots]'")


def share(text: float) -> float:
    """--hit-rate: from 0 to 1."""
    if not 0 <= text <= 1:
        raise InputError(f"--hit-rate {text}; expected a share from 0 (nothing is staged) to 1")
    return text


def measured_steps(file: Path | None):
    """The steps of a document of scripts/bench_decode.py; None for no file."""
    from dsv4.cost_model.steps import steps_of
    from dsv4.speculation.documents import read_document

    return None if file is None else read_document(file, steps_of)


def measured_tier(file: Path | None):
    """(the price of the host tier, the document of scripts/bench_host_tier.py that it was fitted to)."""
    from dsv4.cost_model.tier import tier_of
    from dsv4.speculation.documents import read_document

    return (None, None) if file is None else read_document(file, lambda d: (tier_of(d), d))
