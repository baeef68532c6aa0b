"""`dsv4 fidelity`: the command line of the measurement."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.errors import InputError
from probes.console import counts, errors, option, progress

Number = int | None
Word = str | None


def fidelity(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory: DeepSeek-V4 or a GQA model.", show_default=False)],
    topk: Annotated[Word, option("DeepSeek-V4: entries that CSA selects, e.g. 16,32,64; default: around index_topk. The checkpoint's "
                                 "own and all entries are measured too.")] = None,
    policy: Annotated[Word, option("GQA: sink-window, page-bound, block-bound, block-mean, separated by commas; default: all.")] = None,
    budget: Annotated[Word, option("GQA: tokens that a policy keeps, e.g. 1K,4K; default: an 8th and a 4th of the "
                                   "longest context.")] = None,
    block: Annotated[Number, option("GQA: tokens of a block, instead of each policy's own.")] = None,
    effort: Annotated[str, typer.Option(help="quick, standard or thorough: how much text, how many needles.")] = "standard",
    context: Annotated[Word, option("Contexts in tokens, e.g. 2K,16K.")] = None,
    rows: Annotated[Number, option("Rows of text, and prompts, of each context.")] = None,
    tail: Annotated[Number, option("Last tokens of each row that are predicted, by the exact run and by the variant.")] = None,
    new_tokens: Annotated[Number, option("Greedy tokens after each prompt, 0 for none.")] = None,
    needles: Annotated[Number, option("Needles a variant, haystack and context, 0 for none.")] = None,
    queries: Annotated[Number, option("Last queries of each context whose selection is looked at.")] = None,
    text: Annotated[Path | None, option("UTF-8 text to read and to hide needles in; default: Python's help topics.")] = None,
    numerics: Annotated[str, typer.Option(help="native, fp32, qat or qat:fp32.")] = "native",
    backend: Annotated[str, typer.Option(help="auto, reference, cpu or triton.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of needles, and of random ids.")] = 0,
    out: Annotated[Path | None, option("Directory for fidelity_NAME_FAMILY.md, .json and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
):
    """What reading sparsely changes: each policy, or k of CSA, held against the model reading everything. Exit code 0: measured."""
    from probes.fidelity import document
    from probes.fidelity.settings import settle, variants_of
    from probes.recall import plots
    from probes.recall.text import read_text
    ks, budgets, contexts = (counts(*pair) for pair in (("--topk", topk), ("--budget", budget), ("--context", context)))
    errors.print(f"loading {checkpoint.name}")
    subject = document.ModelSubject(checkpoint, numerics, backend, device)
    settings = settle(subject.model, effort, contexts, seed, rows=rows, tail=tail, new=new_tokens, needles=needles, queries=queries)
    variants = variants_of(subject.model, settings, ks, names(policy), budgets, block)
    tokens = settings.rows * settings.contexts[-1]
    material = read_text(text, checkpoint, subject.config.vocab_size, tokens, seed)
    with progress(document.work(variants, settings)) as (say, advance):
        found = document.measured(subject, variants, settings, material, sys.argv, say, advance)
    if not plots.available():
        found["notes"].append(plots.MISSING)
    _show(found, as_json)
    if out is not None:
        for file in _write(found, out, f"fidelity_{word(checkpoint.resolve().name)}_{found['family']}"):
            errors.print(f"wrote {file}")


def names(text: str | None) -> list[str] | None:
    """'dense, block-bound' → names. Raises InputError for an empty one."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise InputError(f"--policy is {text!r}; expected names separated by commas, such as sink+window,block-bound")
    return list(dict.fromkeys(names))


def word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "checkpoint"


def _show(found: dict, as_json: bool) -> None:
    from probes.fidelity import document, tables
    if as_json:
        sys.stdout.write(document.render(found))
        return
    wide = None if sys.stdout.isatty() else 160  # of what goes to a file, nothing is cut off at 80
    tables.show(found, Console(highlight=False, markup=False, soft_wrap=True, width=wide))


def _write(found: dict, out: Path, stem: str) -> list[Path]:
    """All files or none; a plot for each title."""
    from probes.fidelity import document, markdown, plots
    from probes.recall.plots import available
    from probes.report import write_files
    drawn = plots.draw(found) if available() else {}
    files = {title: f"{stem}-{title.lower().replace(' ', '-')}.svg" for title in drawn}
    texts = {files[title]: svg for title, svg in drawn.items()}
    return write_files(out, texts | {f"{stem}.md": markdown.render(found, files), f"{stem}.json": document.render(found)})
