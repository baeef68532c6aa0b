"""`dsv4 termination`: the command line of the measurement."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.errors import InputError
from probes.console import counts, errors, option
from probes.fidelity.cli import names, word

Word = str | None


def termination(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory: DeepSeek-V4 or a GQA model.", show_default=False)],
    policy: Annotated[Word, option("GQA: sink-window, page-bound, block-bound, block-mean, separated by commas; default: the first three. "
                                   "Dense, newest first, is measured too.")] = None,
    budget: Annotated[Word, option("GQA: tokens that a policy keeps, e.g. 1K,4K; default: 2K.")] = None,
    context: Annotated[Word, option("Contexts in tokens, e.g. 2K,16K; default: 2K.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of text.")] = 1,
    queries: Annotated[int, typer.Option(help="Last queries of each context that are walked.")] = 16,
    needles: Annotated[int, typer.Option(help="Needles a policy, rule, haystack and context, 0 for none.")] = 0,
    needle_context: Annotated[Word, option("Contexts that needles are hidden in; default: those of --context.")] = None,
    tau: Annotated[float, typer.Option(help="Of the rule: most that the probe may move.")] = 1e-5,
    phi: Annotated[float, typer.Option(help="Of the rule: most that it may turn, 1 − cos.")] = 1e-3,
    patience: Annotated[int, typer.Option(help="Of the rule: stable tiles in a row.")] = 5,
    tile: Annotated[int | None, option("Tokens of a tile, a multiple of 64 (default 128); of DeepSeek-V4: rows of a tile (default 16).")] = None,
    looser: Annotated[Word, option("Further τ that needles are asked under, e.g. 1e-3,1e-2.")] = None,
    text: Annotated[Path | None, option("UTF-8 text to read and to hide needles in; default: Python's help topics.")] = None,
    numerics: Annotated[str, typer.Option(help="native, fp32, qat or qat:fp32.")] = "native",
    backend: Annotated[str, typer.Option(help="auto, reference or cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of needles, and of random ids.")] = 0,
    out: Annotated[Path | None, option("Directory for termination_NAME.md, .json and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
):
    """When attention may stop reading: tiles skipped, at what error, probe against oracle. On the host, in plain torch. Exit code 0: measured."""
    from probes.fidelity.document import ModelSubject
    from probes.recall import plots as drawing
    from probes.recall.text import read_text
    from probes.terminating import document
    from probes.terminating.settings import orders_of, rule_of, settle
    contexts, budgets, further = counts("--context", context), counts("--budget", budget), _numbers(looser)
    errors.print(f"loading {checkpoint.name}")
    subject = ModelSubject(checkpoint, numerics, backend, "cpu")
    model = subject.model
    rule = rule_of(model, tau, phi, patience, tile)
    policies = orders_of(model, names(policy), budgets)
    settings = settle(model, contexts, rows, queries, needles, rule, further, counts("--needle-context", needle_context), seed)
    material = read_text(text, checkpoint, subject.config.vocab_size, settings.rows * max(settings.contexts + settings.asked), seed)
    if needles and material.tokenizer is None:
        raise InputError("--needles: the checkpoint has no tokenizer, and needles are sentences; pass --needles 0")
    found = document.measured(subject, policies, settings, material, sys.argv, errors.print)
    if not drawing.available():
        errors.print(drawing.MISSING)
    _show(found, as_json)
    if out is not None:
        for file in _write(found, out, f"termination_{word(checkpoint.resolve().name)}"):
            errors.print(f"wrote {file}")


def _numbers(text: str | None) -> list[float]:
    """'1e-3,1e-2' → [0.001, 0.01]. Raises InputError."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--looser is {text!r}; expected numbers separated by commas, such as 1e-3,1e-2") from None


def _show(found: dict, as_json: bool) -> None:
    from probes.fidelity.tables import show_table as show
    from probes.terminating import document, markdown
    if as_json:
        sys.stdout.write(document.render(found))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(found["title"])
    for title, of in (("by order and context", markdown.together), ("the bound", markdown.bound), ("ablations", markdown.ablations)):
        show(console, title, *of(found))
    if found["geometries"]:
        show(console, "published keep-sets", *markdown.geometries(found))
    if found["needles"]:
        show(console, "needles", *markdown.needles(found))


def _write(found: dict, out: Path, stem: str) -> list[Path]:
    """All files or none; a plot for each title."""
    from probes.recall.plots import available
    from probes.report import write_files
    from probes.terminating import document, markdown, plots
    drawn = plots.draw(found) if available() else {}
    files = {title: f"{stem}-{title.lower().replace(' ', '-')}.svg" for title in drawn}
    texts = {files[title]: svg for title, svg in drawn.items()}
    return write_files(out, texts | {f"{stem}.md": markdown.render(found, files), f"{stem}.json": document.render(found)})
