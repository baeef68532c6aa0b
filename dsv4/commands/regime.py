"""`dsv4 regime`: the cost model of decode attention (measure, fit, predict), and the map of where sparse reading
pays."""

import json
import sys
import time
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.options import choice
from dsv4.errors import InputError

SUFFIXES = (".json", ".md", ".svg")
regime_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


class Model(str, Enum):
    gqa = "gqa"
    csa = "csa"


def _folder(value: Path) -> Path:
    """Callback of --out: the folder is tried before anything else."""
    from dsv4.outputs import writable

    return writable(value)


Out = Annotated[
    Path,
    typer.Option(help="Directory for regime_DEVICE.md, .json, .svg and .predictions.json.", callback=_folder),
]
Capacity = Annotated[
    str | None,
    typer.Option(help="Bytes for weights and caches (80G …); default: what the device has.", show_default=False),
]
Layers = Annotated[
    int | None,
    typer.Option(
        min=1, show_default=False, help="Layers whose caches share the capacity; default: 28, of CSA those of V4-Flash."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="Bytes of weights that a step reads; default: 14G, of CSA what a step of one row reads of V4-Flash.",
    ),
]


@regime_app.command()
def measure(
    out: Out = Path(),
    model: Annotated[
        str,
        choice(
            ("gqa", "csa"),
            "gqa: dense attention and what keeps blocks of it. csa: V4-Flash's indexer and selection beside dense "
            "latents.",
        ),
    ] = "gqa",
    contexts: Annotated[str, typer.Option(help="Measured contexts.")] = "8K,16K,32K,64K,128K,256K,512K,1M",
    batches: Annotated[str, typer.Option(help="Measured batches.")] = "1,2,4,8",
    policies: Annotated[
        str, typer.Option(help="Of sink+window, page-16 bound, block-128 bound, block-128 mean.")
    ] = "sink+window,block-128 bound,page-16 bound",
    budget: Annotated[str, typer.Option(help="Tokens that a policy keeps.")] = "4K",
    heads: Annotated[str, typer.Option(help="Query heads, KV heads, columns of a head.")] = "28,4,128",
    device: Annotated[str, typer.Option(help="cuda, cuda:N; cpu measures the reference there, and says so.")] = "cuda",
    rounds: Annotated[int, typer.Option(min=3, help="Times that each row runs; the median counts.")] = 30,
    capacity: Capacity = None,
    layers: Layers = None,
    weights: Weights = None,
):
    """Measure, fit, write predictions down, measure what was held out, and report. Exit code 1 when a goal or a
    crossover FAILED."""
    from dsv4.cost_model import session
    from dsv4.cost_model.measure import Timer
    from dsv4.cost_model.regime import Hardware
    from dsv4.model.load import resolve_device

    model = Model(model)
    target, stem = resolve_device(device), _stem(model, _short(device))
    _can_draw(out)
    source, sizes, rows = _source(model, heads, policies, budget, target), _counts(contexts), _counts(batches)
    about = _about(model, heads if model is Model.gqa else "V4-Flash", target)
    layers, size, note = _model(model, layers, weights)
    hardware = Hardware(about["device"], _capacity(capacity, target), layers, size)
    say = lambda line: typer.echo(line, err=True)
    plan = session.Plan.of(rows, sizes)
    report = session.run(
        source, Timer(target, rounds), plan, hardware, _wide(sizes), _wide(rows, 64), out, stem, about, say
    )
    report["notes"] += note
    _write(report, out, stem)
    from dsv4.cost_model.report import verdict

    failed = [g["goal"] for g in report["quality"]["goals"] if g["verdict"] == "FAILED"]
    failed += [
        f"crossover of {c['policy']} at batch {c['batch']}" for c in report["crossovers"] if verdict(c) == "FAILED"
    ]
    for name in failed:
        typer.echo(f"FAILED: {name}")
    if failed:
        raise typer.Exit(1)


@regime_app.command(name="map")
def draw_map(
    report: Annotated[Path, typer.Argument(help="A regime_*.json that was measured.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(help="Directory for regime_NAME.md, .json and .svg; of CSA regime_csa_NAME.*.", callback=_folder),
    ] = Path(),
    name: Annotated[str, typer.Option(help="What the hardware is called.")] = "other hardware",
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes/s (4.8T is 4.8e12); default: the fitted one.", show_default=False)
    ] = None,
    capacity: Annotated[str, typer.Option(help="Bytes for weights and caches (141G …).")] = "80G",
    layers: Layers = None,
    weights: Weights = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that are no map of the same source and hardware.")
    ] = False,
):
    """Draw the map of a measured cost model for other hardware: c₀ and c₁ stay as they were measured, and the report
    says so."""
    from dsv4.cost_model import regime, session
    from dsv4.speculation.documents import expect_header, read_document

    _can_draw(out)
    found = read_document(
        report, lambda d: expect_header(d, "a report of dsv4 regime measure", session.FORMAT, session.VERSION)
    )
    try:
        layers, size, note = _model(_kind(found, report), layers, weights)
        hardware = regime.Hardware(
            name, _count(capacity), layers, size, None if bandwidth is None else _bandwidth(bandwidth)
        )
        remapped = session.remap(found, hardware)
        remapped["notes"] += note
    except (KeyError, TypeError) as error:
        raise InputError(f"{report} lacks {error}; expected a report that dsv4 regime measure wrote") from None
    stem = _stem(_kind(found, report), name)
    if not force:
        _check_replaceable(out, stem, remapped)
    _write(remapped, out, stem)


def _source(model: Model, heads: str, policies: str, budget: str, device):
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
    kept = _count(budget)
    if kept % 128 or kept < 512:
        raise InputError(f"--budget {budget}; expected a multiple of 128 tokens, at least 512")
    return GQA(Geometry(H, KV, D, 4 if device.type == "cpu" else 2), {p: POLICIES[p](kept) for p in chosen}, device)


def _about(model: Model, heads: str, device) -> dict:
    """What a report is about, and its origin: device, versions, commit, date and command."""
    import torch

    from dsv4.probes.report import provenance

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "host processor"
    found = provenance.versions()
    return {
        "model": f"{model.value} {heads}",
        "device": where,
        "torch": torch.__version__,
        "triton": found["triton"],
        "python": found["python"],
        **provenance.commit(),
        "date": provenance.date(time.time()),
        "command": provenance.command_line(sys.argv),
    }


def _short(device: str) -> str:
    """The device's short name in file names: 'cpu', 'H100'."""
    import re

    import torch

    name = "cpu" if not device.startswith("cuda") else torch.cuda.get_device_name(torch.device(device))
    found = re.search(r"\b([ABHLV]\d{2,3}S?|RTX \w+|T4)\b", name)
    return found[0] if found else name


def _stem(model: Model, name: str) -> str:
    """The stem of file names. Reports of CSA have the family in it, so that a report of one kind of model does not
    replace that of the other."""
    import re

    return "regime_" + ("" if model is Model.gqa else f"{model.value}_") + re.sub(r"\W+", "_", name.lower())


def _check_replaceable(folder: Path, stem: str, report: dict) -> None:
    """Raises InputError if one of the files exists and they are not a map of the same source and hardware."""
    there = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").exists()]
    if not there:
        return
    try:
        held = json.loads((folder / f"{stem}.json").read_text())
        same = not held["rows"] and _drawn_of(held) == _drawn_of(report)
    except (OSError, ValueError, KeyError, TypeError):  # no report, or none of this program
        same = False
    if not same:
        raise InputError(
            f"{there[0]} is there and is no map of this source and hardware; expected a free name: give another --out "
            "or --name, or --force to replace it"
        )


def _drawn_of(report: dict) -> list:
    """What a map depends on: formulas of bytes, where they were measured, and the hardware's name."""
    return [report["source"], report["about"]["model"], report["about"]["device"], report["hardware"]["name"]]


def _kind(found: dict, file: Path) -> Model:
    """The kind of model of a report. Raises KeyError, TypeError if it has none, InputError for another."""
    kind = found["source"]["kind"]
    if kind not in [m.value for m in Model]:
        raise InputError(f"{file} is of a model of kind {kind!r}; expected one of {', '.join(m.value for m in Model)}")
    return Model(kind)


def _model(model: Model, layers: int | None, weights: str | None) -> tuple[int, int, list[str]]:
    """Layers and bytes of weights, as given or assumed, and a note about assumed ones."""
    from dsv4.cost_model.defaults import assumed

    found = assumed(model.value)
    note = [found.note] * bool(found.note and layers is None and weights is None)
    return layers or found.layers, found.weights if weights is None else _count(weights), note


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",") if part.strip()]


def _count(text: str) -> int:
    from dsv4.units import parse_count

    return parse_count(text)


def _bandwidth(text: str) -> float:
    units = {"G": 1e9, "T": 1e12}
    try:
        value = float(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise InputError(f"--bandwidth {text!r}; expected bytes a second: 4.8T, 3350G, 3.35e12")
    return value


def _capacity(text: str | None, device) -> int:
    from dsv4.runtime.memory import free_bytes

    return _count(text) if text is not None else free_bytes(device)


def _wide(measured: list[int], longest: int = 1 << 22) -> list[int]:
    """The map's axis: powers of two from the smallest measured value on."""
    first = 1 << (min(measured).bit_length() - 1)
    return [first << i for i in range(32) if first << i <= max(longest, max(measured))]


def _can_draw(folder: Path) -> None:
    """Checks before anything runs that matplotlib is installed and that the directory can be made."""
    from dsv4.speculation.documents import check_can_draw

    check_can_draw(folder, "the map is an SVG, and matplotlib is not installed; pip install 'dsv4[plots]'")


def _write(report: dict, folder: Path, stem: str) -> None:
    from dsv4.cost_model.plot import svg
    from dsv4.cost_model.report import markdown
    from dsv4.speculation.documents import write_whole

    texts = json.dumps(report, indent=1) + "\n", markdown(report, f"{stem}.svg"), svg(report)
    for suffix, text in zip(SUFFIXES, texts):
        write_whole(folder / f"{stem}{suffix}", text)
    typer.echo(texts[1])
