"""`dsv4 sparse-prefill`: the command line of the measurement."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from probes.console import counts, errors, option

Word = str | None


def sparse_prefill(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory of a GQA model.", show_default=False)],
    context: Annotated[Word, option("Contexts in tokens, e.g. 4K,16K; default: 4K,8K,16K as far as the checkpoint goes.")] = None,
    cuts: Annotated[Word, option("CHUNK,LOCAL,HEAVY, separated by spaces, e.g. '512,64,192 1024,128,384'; "
                                 "default: a grid of twelve.")] = None,
    text: Annotated[Path | None, option("UTF-8 text; default: Python's help topics, and this project's own sources.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of each text.")] = 1,
    tail: Annotated[int, typer.Option(help="Last tokens of each context that are decoded, reading the whole cache.")] = 256,
    needles: Annotated[int, typer.Option(help="Needles of a context, 0 for none.")] = 20,
    asked_context: Annotated[Word, option("Contexts that needles and facts are asked in; default: the first and the last.")] = None,
    in_prompt: Annotated[int, typer.Option(help="Needles that are asked in the prompt too, which is read sparsely.")] = 6,
    every: Annotated[int, typer.Option(help="One query in so many has its dense attention looked at.")] = 16,
    numerics: Annotated[str, typer.Option(help="native or fp32.")] = "fp32",
    backend: Annotated[str, typer.Option(help="auto, reference, cpu or triton.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of needles, and of random ids.")] = 0,
    out: Annotated[Path | None, option("Directory for sparse_prefill_NAME.md, .json and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
):
    """What reading prompts in chunks and a memory (--prefill-chunks) costs: perplexity, attention mass, needles. Exit code 0: measured."""
    from probes.fidelity.document import ModelSubject
    from probes.recall import plots
    from probes.sparse_prefill import document
    from probes.sparse_prefill.settings import settle, texts
    contexts, asked = (counts(*pair) for pair in (("--context", context), ("--asked-context", asked_context)))
    errors.print(f"loading {checkpoint.name}")
    subject = ModelSubject(checkpoint, numerics, backend, device)
    settings = settle(subject.model, contexts, cuts, rows, tail, needles, asked, in_prompt, every, seed)
    material = texts(text, checkpoint, subject.config.vocab_size, settings.rows * settings.contexts[-1], seed)
    found, maps = document.measured(subject, settings, material, sys.argv, errors.print)
    if not plots.available():
        found["notes"].append(plots.MISSING)
    _show(found, as_json)
    if out is not None:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", checkpoint.resolve().name).strip("-.") or "checkpoint"
        for file in write(found, maps, out, f"sparse_prefill_{stem}"):
            errors.print(f"wrote {file}")


def _show(found: dict, as_json: bool) -> None:
    from probes.sparse_prefill import document, markdown
    sys.stdout.write(document.render(found) if as_json else markdown.terminal(found))


def write(found: dict, maps: dict, out: Path, stem: str) -> list[Path]:
    """All files or none; a plot for each title."""
    from probes.recall.plots import available
    from probes.report import write_files
    from probes.sparse_prefill import document, markdown, plots
    drawn = plots.draw(found, maps) if available() else {}
    files = {title: f"{stem}-{re.sub(r'[^a-z0-9]+', '-', title.lower())}.svg" for title in drawn}
    texts = {files[title]: svg for title, svg in drawn.items()}
    return write_files(out, texts | {f"{stem}.md": markdown.render(found, files), f"{stem}.json": document.render(found)})
