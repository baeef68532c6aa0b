"""`dsv4 fidelity`: the command line of the measurement."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import (
    Backend,
    Device,
    Json,
    Numerics,
    Policies,
    Seed,
    Text,
    Word,
    counts,
    errors,
    option,
    progress,
    publish,
    report_in,
    show,
    tell,
)
from dsv4.commands.options import Kernels, choice
from dsv4.errors import InputError

Number = int | None


def fidelity(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint directory: DeepSeek-V4 or a GQA model.", show_default=False)
    ],
    topk: Annotated[
        Word,
        option(
            "DeepSeek-V4: entries that CSA selects, e.g. 16,32,64; default: around index_topk. The checkpoint's "
            "own and all entries are measured too."
        ),
    ] = None,
    policy: Policies = None,
    budget: Annotated[
        Word, option("GQA: tokens that a policy keeps, e.g. 1K,4K; default: an 8th and a 4th of the longest context.")
    ] = None,
    block: Annotated[Number, option("GQA: tokens of a block, instead of each policy's own.")] = None,
    effort: Annotated[str, choice(("quick", "standard", "thorough"), "How much text, how many needles.")] = "standard",
    context: Annotated[Word, option("Contexts in tokens, e.g. 2K,16K.")] = None,
    rows: Annotated[Number, option("Rows of text, and prompts, of each context.")] = None,
    tail: Annotated[
        Number, option("Last tokens of each row that are predicted, by the exact run and by the variant.")
    ] = None,
    new_tokens: Annotated[Number, option("Greedy tokens after each prompt, 0 for none.")] = None,
    needles: Annotated[Number, option("Needles a variant, haystack and context, 0 for none.")] = None,
    queries: Annotated[Number, option("Last queries of each context whose selection is looked at.")] = None,
    text: Text = None,
    numerics: Numerics = "native",
    backend: Backend = "auto",
    kernel: Kernels = None,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Annotated[Path | None, report_in("fidelity_NAME_FAMILY")] = None,
    as_json: Json = False,
):
    """What reading sparsely changes: each policy, or k of CSA, held against the model reading everything. Exit code 0:
    measured."""
    from dsv4.probes.measure.fidelity import document, markdown, plots, tables
    from dsv4.probes.measure.fidelity.settings import settle, variants_of
    from dsv4.probes.measure.recall.plots import MISSING, available
    from dsv4.probes.measure.recall.text import read_text
    from dsv4.probes.report.document import slug
    from dsv4.probes.report.json_report import dumped
    from dsv4.runtime import user_kernels
    from dsv4.runtime.threads import limited_threads

    ks, budgets, contexts = (counts(*pair) for pair in (("--topk", topk), ("--budget", budget), ("--context", context)))
    errors.print(f"loading {checkpoint.name}")
    subject = document.ModelSubject(checkpoint, numerics, backend, device, user_kernels.kernels_named(kernel))
    tell(user_kernels.before(subject.model))
    settings = settle(
        subject.model, effort, contexts, seed, rows=rows, tail=tail, new=new_tokens, needles=needles, queries=queries
    )
    variants = variants_of(subject.model, settings, ks, names(policy), budgets, block)
    tokens = settings.rows * settings.contexts[-1]
    material = read_text(text, checkpoint, subject.config.vocab_size, tokens, seed)
    hidden = subject.config.hidden_size
    with progress(document.work(variants, settings)) as (say, advance), limited_threads(hidden):
        found = document.measured(subject, variants, settings, material, sys.argv, say, advance)
    if not available():
        found["notes"].append(MISSING)
    show(found, as_json, tables.show, 160)
    publish(
        out,
        f"fidelity_{slug(checkpoint.resolve().name)}_{found['family']}",
        lambda: plots.draw(found),
        lambda files: markdown.render(found, files),
        lambda: dumped(found),
    )
    tell(user_kernels.after(subject.model))
    user_kernels.check_reached(subject.model)


def names(text: str | None) -> list[str] | None:
    """'dense, block-bound' → names. Raises InputError for an empty one."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise InputError(f"--policy is {text!r}; expected names separated by commas, such as sink+window,block-bound")
    return list(dict.fromkeys(names))
