"""`dsv4 recall`: the command line of the measurement."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import (
    Json,
    Seed,
    Text,
    Word,
    counts,
    option,
    progress,
    publish,
    refuse_idle,
    report_in,
    show,
    tell,
)
from dsv4.commands.options import BACKENDS, CACHES, INDEX_CACHES, NUMERICS, Kernels, choice
from dsv4.errors import InputError

STEM = "recall"
INSTEAD = "leave it out, or use --subject ours"
Number = int | None


def recall(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    context: Annotated[
        Word, option("Contexts in tokens, e.g. 4096,16K; default: those with 8·k and 16·k entries.")
    ] = None,
    k: Annotated[
        Word,
        option(
            "Entries to select, e.g. 64,512; default: index_topk. Others are what-ifs: the best of the "
            "model's own scores."
        ),
    ] = None,
    text: Text = None,
    subject: Annotated[str, option("ours (default); transformers: that implementation on the same weights.")] = "ours",
    dump: Annotated[
        Path | None, option("A recorded run (dsv4.probes.subjects.dump), instead of running anything.")
    ] = None,
    numerics: Annotated[Word, choice(NUMERICS, "Of ours; default: native.", show_default=False)] = None,
    backend: Annotated[Word, choice(BACKENDS, "Of ours; default: auto.", show_default=False)] = None,
    kernel: Kernels = None,
    device: Annotated[Word, option("cpu (default), cuda or cuda:N.")] = None,
    cache: Annotated[
        Word, choice(CACHES, "How window rows and entries are held (fp8: with qat); default: auto.", show_default=False)
    ] = None,
    index_cache: Annotated[
        Word,
        choice(INDEX_CACHES, "How index keys are held (fp8, fp4: with qat); default: auto.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of text.")] = 2,
    queries: Annotated[int, typer.Option(help="Last queries of each context that are measured, in each row.")] = 128,
    needles: Annotated[
        Number, option("Needles a haystack and length, 0 for none; default: 100 on a GPU, 20 on a CPU.")
    ] = None,
    seed: Seed = 0,
    vacuous: Annotated[
        bool, typer.Option("--vacuous", help="Measure below 8·k entries too; such rows are VACUOUS.")
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit code 1 if the classic gate fails, 2 if it is VACUOUS.")
    ] = False,
    out: Annotated[Path | None, report_in(STEM)] = None,
    as_json: Json = False,
):
    """How much of what matters the indexer selects, layer by layer. Exit code 0: measured; 1: --gate failed; 2: could
    not."""
    from dsv4.probes.measure.recall import document, markdown, plots, tables
    from dsv4.probes.measure.recall.settings import settle
    from dsv4.probes.measure.recall.text import read_text
    from dsv4.probes.report.json_report import dumped
    from dsv4.probes.subjects.files import FilesSubject
    from dsv4.runtime import user_kernels
    from dsv4.runtime.threads import limited_threads

    refuse_idle(
        dump is None and subject == "ours",
        {
            "--numerics": numerics,
            "--backend": backend,
            "--device": device,
            "--cache": cache,
            "--index-cache": index_cache,
            "--kernel": kernel,
        },
        INSTEAD,
    )
    refuse_idle(dump is None, {"--text": text}, INSTEAD)
    kernels = user_kernels.kernels_named(kernel)
    stored = FilesSubject(checkpoint)
    if stored.family == "gqa":
        raise InputError(
            "recall measures the indexer of CSA layers, and a GQA model has none; dsv4 fidelity compares policies "
            "that read its cache sparsely"
        )
    config = stored.config
    recorded = None if dump is None else _recorded(dump, checkpoint)
    rows, longest = (rows, None) if recorded is None else recorded.ids.shape
    contexts = counts("--context", context) or (longest and [longest])
    trials = needles if needles is not None else 20 if (device or "cpu").startswith("cpu") else 100
    settings = settle(config, contexts, counts("--k", k), queries, rows, trials, seed, vacuous, longest)
    tokens = rows * settings.contexts[-1]
    material = None if recorded else read_text(text, checkpoint, config.vocab_size, tokens, seed)
    with progress(tokens) as (say, advance):
        say("loading")
        opened = recorded or _opened(
            checkpoint,
            subject,
            numerics or "native",
            backend or "auto",
            device or "cpu",
            cache or "auto",
            index_cache or "auto",
            kernels=kernels,
        )
        tell(user_kernels.before(opened.model) if kernels else ())
        with limited_threads(config.hidden_size):
            found = document.measured(opened, settings, material, sys.argv, say, advance)
    if not plots.available():
        found["notes"].append(plots.MISSING)
    show(found, as_json, tables.show, 120)
    publish(out, STEM, lambda: plots.draw(found), lambda files: markdown.render(found, files), lambda: dumped(found))
    if kernels:
        tell(user_kernels.after(opened.model))
        user_kernels.check_reached(opened.model)
    raise typer.Exit({"FAIL": 1, "VACUOUS": 2}.get(found["gate"]["status"], 0) if gate else 0)


def _opened(checkpoint: Path, kind: str, *choices: str, kernels: Mapping):
    """choices: numerics, backend, device, cache, index cache of ours."""
    from dsv4.probes.audit import open_subject

    if kind not in ("ours", "transformers"):
        raise InputError(f"--subject is {kind!r}; expected ours or transformers (recorded runs: --dump FILE)")
    return open_subject(checkpoint, kind, *choices, kernels=kernels)


def _recorded(dump: Path, checkpoint: Path):
    """A dump, whose weights are the checkpoint's."""
    from dsv4.probes.subjects.dump import DumpSubject
    from dsv4.probes.subjects.files import FilesSubject

    subject = DumpSubject(dump, checkpoint)
    subject.files = FilesSubject(checkpoint).files
    return subject
