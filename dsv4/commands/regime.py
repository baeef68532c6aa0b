"""`dsv4 regime`: the cost model of decode attention (measure, fit, predict), and the map of where sparse reading
pays."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands import regime_inputs as inputs
from dsv4.commands.options import choice
from dsv4.commands.regime_inputs import SUFFIXES, Model
from dsv4.errors import InputError

regime_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


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


Steps = Annotated[
    Path | None,
    typer.Option(
        show_default=False,
        help="A bench_decode_*.json of scripts/bench_decode.py, to which whole steps are fitted; default: those of the "
        "report, if it has any. It gives --layers and --weights too.",
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

    begun, model = time.time(), Model(model)
    target, stem = resolve_device(device), inputs.stem(model, inputs.short(device))
    inputs.can_draw(out)
    source = inputs.source(model, heads, policies, budget, target)
    sizes, rows = inputs.counts(contexts), inputs.counts(batches)
    about = inputs.about(model, heads if model is Model.gqa else "V4-Flash", target)
    layers, size, note = inputs.sizes(model, layers, weights)
    hardware = Hardware(about["device"], inputs.capacity(capacity, target), layers, size)
    say = lambda line: typer.echo(line, err=True)
    plan = session.Plan.of(rows, sizes)
    report = session.run(
        source, Timer(target, rounds), plan, hardware, inputs.wide(sizes), inputs.wide(rows, 64), out, stem, about, say
    )
    report["notes"] += note
    report["about"]["seconds"] = round(time.time() - begun, 1)
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
    steps: Steps = None,
    tier: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="A host_tier_*.json of scripts/bench_host_tier.py: the map gets rows of caches in host memory.",
        ),
    ] = None,
    hit_rate: Annotated[
        float, typer.Option(help="Of rows in host memory: share of a step's choice that is staged already.")
    ] = 0.0,
    host_memory: Annotated[str, typer.Option(help="Bytes of host memory for caches.")] = "256G",
    check: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="A bench_decode_*.json: measured whole steps, from which the map's ratios may be 5 % off.",
        ),
    ] = None,
    redraw: Annotated[
        bool,
        typer.Option("--redraw", help="Draw the report's own map again, for the hardware it was measured on."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that are no map of the same source and hardware.")
    ] = False,
):
    """Draw the map of a measured cost model for other hardware: c₀ and c₁ stay as they were measured, and the report
    says so. Exit code 1 where a --check FAILED."""
    from dsv4.cost_model import session
    from dsv4.cost_model.whole import Whole
    from dsv4.speculation.documents import expect_header, read_document

    inputs.can_draw(out)
    found = read_document(
        report, lambda d: expect_header(d, "a report of dsv4 regime measure", session.FORMAT, session.VERSION)
    )
    if check is not None and bandwidth is not None:
        raise InputError(
            "--check was given with --bandwidth: steps were measured at the fitted β, not at another; leave out one"
        )
    measured, (price, host) = inputs.measured_steps(steps), inputs.measured_tier(tier)
    try:
        kind = inputs.kind(found, report)
        whole = Whole.of(found, measured, price)
        hardware, note = inputs.hardware(kind, measured, layers, weights)
        more = {"host": inputs.count(host_memory), "hit": inputs.share(hit_rate)}
        if redraw:
            name, note = found["about"]["device"], []
            same = {key: found["hardware"][key] for key in ("name", "capacity", "bandwidth")}
            drawn = session.redraw(found, replace(hardware, **same, **more), whole)
        else:
            rate = None if bandwidth is None else inputs.bandwidth(bandwidth)
            there = replace(hardware, name=name, capacity=inputs.count(capacity), bandwidth=rate, **more)
            drawn = session.remap(found, there, whole)
        drawn["notes"] = drawn["notes"] + note
    except (KeyError, TypeError) as error:
        raise InputError(f"{report} lacks {error}; expected a report that dsv4 regime measure wrote") from None
    drawn["drawn"] = inputs.origin()
    stem = report.stem if redraw else inputs.stem(kind, name)
    if not (force or redraw):
        inputs.check_replaceable(out, stem, drawn)
    _write(drawn, out, stem)
    if check is not None:
        _checked(drawn, inputs.measured_steps(check), host)


def _checked(report: dict, measured, host: dict | None) -> None:
    """Print every comparison. Exit code 1 where one FAILED."""
    from dsv4.cost_model.whole import check, expect_close, said
    from dsv4.errors import MapMismatch

    rows = check(report, measured, host)
    for part in rows.values():
        for row in part:
            typer.echo(said(row))
    try:
        expect_close(rows)
    except MapMismatch as wrong:
        typer.echo(f"FAILED: {wrong}")
        raise typer.Exit(1) from None


@regime_app.command(name="steps")
def fit_steps(
    measured: Annotated[Path, typer.Argument(help="A bench_decode_*.json that was measured.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="Directory for regime_steps_GEOMETRY_DEVICE.md and .json.", callback=_folder)
    ] = Path(),
):
    """Fit bytes / β + c₀ (+ c₁) to measured whole decode steps, with the errors of steps that were left out, and all
    residuals. Exit code 1 when the goal for steps that were left out FAILED."""
    from dsv4.cost_model import steps_report
    from dsv4.speculation.documents import write_whole

    found = inputs.measured_steps(measured)
    report = steps_report.document(found, {"device": found.device, **inputs.origin()})
    text = steps_report.markdown(report)
    stem = inputs.steps_stem(found)
    out.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".json", inputs.dumped(report) + "\n"), (".md", text)):
        write_whole(out / f"{stem}{suffix}", content)
    typer.echo(text)
    failed = [goal["goal"] for goal in report["goals"] if goal["verdict"] == "FAILED"]
    for name in failed:
        typer.echo(f"FAILED: {name}")
    if failed:
        raise typer.Exit(1)


def _write(report: dict, folder: Path, stem: str) -> None:
    from dsv4.cost_model.plot import svg
    from dsv4.cost_model.report import markdown
    from dsv4.speculation.documents import write_whole

    texts = inputs.dumped(report) + "\n", markdown(report, f"{stem}.svg"), svg(report)
    for suffix, text in zip(SUFFIXES, texts):
        write_whole(folder / f"{stem}{suffix}", text)
    typer.echo(texts[1])
