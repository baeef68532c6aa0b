"""The command line. Every error is one line on stderr and exit code 2; data goes to stdout, progress to stderr."""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4 import tables
from dsv4.bill.cli import regime_app
from dsv4.errors import Dsv4Error, InputError
from dsv4.options import (
    AsJson,
    Backend,
    Cache,
    Checkpoint,
    Device,
    DraftCosts,
    Drafting,
    Drafts,
    Guess,
    IndexCache,
    KVMemory,
    Numerics,
    NumericsChoice,
    Reads,
    ReadTokens,
    Rule,
    Speculate,
    Staged,
    Target,
    Terminate,
    Where,
)
from dsv4.probes.cli import audit_app  # the command line alone knows the engine and the probes above it
from dsv4.probes.fidelity.cli import fidelity
from dsv4.probes.recall.cli import recall
from dsv4.probes.sparse_prefill.cli import sparse_prefill
from dsv4.probes.terminating.cli import termination

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run, measure and audit DeepSeek-V4-style checkpoints.",
)
app.add_typer(audit_app, name="audit", help="Probe a checkpoint and an implementation of it.")
app.add_typer(regime_app, name="regime", help="What decode attention costs, and where reading sparsely pays.")
app.command()(recall)
app.command()(fidelity)
app.command()(sparse_prefill)
app.command()(termination)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@app.command()
def generate(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory (config.json, safetensors).", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt; - is standard input.")] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="Prompt as comma-separated token ids, without a tokenizer.")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="So many random token ids as the prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="DeepSeek's chat format around the prompt.")] = False,
    think: Annotated[bool, typer.Option("--think", help="With --chat: let the reply begin with thinking.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    max_context: Annotated[
        str | None, typer.Option(help="Tokens the cache holds (128K, 1M …); default: just enough.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; else 1e-06 to 1000000.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    speculate: Drafting = Speculate.off,
    draft_tokens: Drafts = None,
    draft_costs: DraftCosts = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="With --speculate: verify a pass as one append. Faster on a host processor, and rounded "
            "otherwise: the "
            "text may leave plain decoding's. Steps captured on a GPU do so anyway, with its text.",
        ),
    ] = False,
    numerics: Numerics = NumericsChoice.native,
    backend: Backend = "auto",
    device: Device = "cpu",
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    terminate: Terminate = False,
    terminate_rule: Rule = None,
    prefill_chunks: Annotated[
        str | None,
        typer.Option(
            help="Of a GQA model: CHUNK,LOCAL,HEAVY. The prompt is read in chunks, each beside the last LOCAL and the "
            "heaviest HEAVY tokens before it; decoding reads all.",
            show_default=False,
        ),
    ] = None,
    kv_memory: Where = KVMemory.device,
    staged_blocks: Staged = None,
    guess_ahead: Guess = False,
    dummy_weights: Annotated[
        str | None,
        typer.Option(
            help="flash, pro, llama-8b or qwen2.5-7b: that geometry with random weights, without a checkpoint."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --dummy-weights: the first so many layers.")] = None,
    device_map: Annotated[str | None, typer.Option(help="auto: spread layers over GPUs, host memory and disk.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="With --device-map: e.g. 'cpu=4GiB,0=70GiB'.")] = None,
    as_json: AsJson = False,
):
    """Generate text from a checkpoint: single-shot inference."""
    from dsv4 import run
    from dsv4.generate import Sampling
    from dsv4.gqa.choice import attention_named
    from dsv4.host_tier.choice import memory_named

    request = run.Request(
        prompt=run.read_prompt(prompt, prompt_file, token_ids, prompt_tokens),
        is_ids=token_ids is not None,
        chat=chat,
        think=think,
        system=system,
        random_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_context=max_context,
        sampling=Sampling(temperature, top_p, seed),
        speculate=speculate.value,
        draft_tokens=draft_tokens,
        draft_costs=draft_costs,
        together=together,
    )
    if together and speculate is Speculate.off:
        raise InputError("--together says how drafts are verified, and nothing drafts; add --speculate mtp or lookup")
    if (draft_tokens is not None or draft_costs is not None) and speculate is Speculate.off:
        raise InputError(
            "--draft-tokens or --draft-costs was given and nothing is drafted; add --speculate mtp or "
            "--speculate lookup"
        )
    if (think or system is not None) and not chat:
        raise InputError("--think and --system belong to the chat format; add --chat")
    reads = attention_named(attention and attention.value, attention_tokens, terminate, prefill_chunks, terminate_rule)
    where = memory_named(kv_memory.value, staged_blocks, guess_ahead, reads is not None and not reads.policy.dense)
    with progress_bar("loading") as loading:
        choices = run.Choices(numerics.value, backend, device, cache, index_cache)
        session = run.Session(checkpoint, choices, device_map, max_memory, loading, dummy_weights, layers, reads, where)
    ids = session.encode(request)
    shown = (lambda text: None) if as_json else _show
    with progress_bar("prefill", unit="tokens") as prefilling:
        result, text = session.generate(ids, request, shown, prefilling)
    document = session.document(result, text)
    if as_json:
        _print_json(document)
    else:
        _show("\n")
        tables.generation(document, errors)


@app.command()
def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            help="One JSON object a line: prompt or token_ids; id, max_tokens, priority, seed, "
            "temperature, top_p. -: from standard input.",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint directory.", show_default=False)],
    rows: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 8,
    max_context: Annotated[
        str | None, typer.Option(help="Tokens of one request (128K, 1M …); default: just enough.")
    ] = None,
    pool_tokens: Annotated[
        str | None, typer.Option(help="Tokens that all requests hold at once; default: every row full.")
    ] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="Decode all rows as one batch: faster, and equal to running alone up to rounding."
        ),
    ] = False,
    speculate: Drafting = Speculate.off,
    draft_tokens: Drafts = None,
    draft_costs: DraftCosts = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Directory for batch_<name of the file>.json, .md and .svg: sizes, latencies, pages.",
            show_default=False,
        ),
    ] = None,
    numerics: Numerics = NumericsChoice.native,
    backend: Backend = "auto",
    device: Device = "cpu",
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    terminate: Terminate = False,
    terminate_rule: Rule = None,
    kv_memory: Where = KVMemory.device,
    prefill_chunks: Annotated[str | None, typer.Option(hidden=True)] = None,
):
    """Run many requests over one pool of pages: a JSON result a line as each ends, then the figures. Exit code 1 if any
    failed."""
    from dsv4 import run
    from dsv4.engine.command import Options, run_batch
    from dsv4.gqa.choice import attention_named

    if kv_memory is KVMemory.host:
        raise InputError(
            "--kv-memory host was given; requests of a batch share the pages of one pool, which is on the device: "
            "leave it out, or run single requests with dsv4 generate"
        )
    if prefill_chunks is not None:
        raise InputError(
            "--prefill-chunks was given; a batch reads prompts densely, since its requests share prefixes: leave it "
            "out, or run single requests with dsv4 generate"
        )
    options = Options(rows, max_context, pool_tokens, together, speculate.value, draft_tokens, draft_costs, report)
    reads = attention_named(attention and attention.value, attention_tokens, terminate, rule=terminate_rule)

    def load() -> run.Session:
        with progress_bar("loading") as loading:
            return run.Session(
                checkpoint,
                run.Choices(numerics.value, backend, device, cache, index_cache),
                progress=loading,
                attention=reads,
            )

    failed = run_batch(load, requests, options, lambda document: _show(json.dumps(document, ensure_ascii=False) + "\n"))
    if failed:
        raise typer.Exit(1)


@app.command()
def inspect(
    checkpoint: Checkpoint,
    as_json: AsJson = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also read every tensor: NaN, table ranges, crc32.")] = False,
):
    """Print the load ledger and the config ledger, without running the model."""
    from dsv4 import inspection

    with progress_bar("reading") as reading:
        document = inspection.inspect(checkpoint, verify, reading)
    if as_json:
        _print_json(document)
    else:
        tables.inspection(document, Console(highlight=False, markup=False, soft_wrap=True))
    if document["ledger"]["problems"]:
        raise typer.Exit(2)


@app.command()
def convert(
    src: Checkpoint,
    dst: Annotated[Path, typer.Argument(help="Directory to create.", show_default=False)],
    to: Annotated[Target, typer.Option(help="Layout to write.", show_default=False)],
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Round blocks that NVFP4 cannot hold exactly.")
    ] = False,
    max_shard: Annotated[str, typer.Option(help="Largest shard.")] = "5G",
    as_json: AsJson = False,
):
    """Write a checkpoint in another layout; nothing half-written stays after a failure."""
    from dsv4.config import ModelConfig
    from dsv4.loaders.config_files import read_config
    from dsv4.loaders.convert import convert as run_convert
    from dsv4.memory import parse_count

    config = ModelConfig.from_official(read_config(src)[0])
    with progress_bar("converting") as progress:
        summary = run_convert(src, dst, to.value, config, allow_inexact, progress, parse_count(max_shard))
    document = {"source": str(src), "destination": str(dst), "to": to.value, **asdict(summary)}
    if as_json:
        _print_json(document)
    else:
        tables.conversion(document, Console(highlight=False, markup=False, soft_wrap=True))


@app.command()
def plan(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint directory, or flash or pro.", show_default=False)],
    max_context: Annotated[
        str | None,
        typer.Option(
            help="Tokens a row: 128K, 1M …; default: the model's max_position_embeddings, at most 1M.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    max_rewind: Annotated[int, typer.Option(min=0, help="Tokens a row may be rewound.")] = 128,
    numerics: Numerics = NumericsChoice.native,
    device: Device = "cpu",
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    kv_memory: Where = KVMemory.device,
    staged_blocks: Staged = None,
    as_json: AsJson = False,
):
    """Bytes of the weights and of each cache stream, with formulas, and whether they fit the device."""
    from dsv4 import planning
    from dsv4.gqa.choice import attention_named
    from dsv4.host_tier.choice import memory_named

    reads = attention_named(attention and attention.value, attention_tokens)
    document = planning.plan(
        checkpoint,
        max_context,
        batch,
        max_rewind,
        numerics.value,
        device,
        cache,
        index_cache,
        reads,
        memory_named(kv_memory.value, staged_blocks),
    )
    if as_json:
        _print_json(document)
    else:
        tables.plan(document, Console(highlight=False, markup=False, soft_wrap=True))


@contextmanager
def progress_bar(label: str, unit: str = "bytes"):
    """A progress callback (done, total) that draws on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    column = TextColumn("{task.completed:,.0f} / {task.total:,.0f} " + unit)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), column, TimeRemainingColumn(), console=errors, transient=True
    ) as bar:
        task = bar.add_task(label, total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_json(document: dict) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=1, default=str) + "\n")


def main() -> None:
    """Entry point: run a command, turn expected failures into one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    try:
        code = app(standalone_mode=False)  # a command that stopped with typer.Exit returns its code here
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Dsv4Error as error:
        _fail(str(error))
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # the reader left; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _fail("out of memory; lower --max-context, or spread the model with --device-map auto --max-memory")
    except Exception as error:  # usage errors of the command line library, and torch's own out-of-memory error
        if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(error):
            _fail("out of memory; lower --max-context, or spread the model with --device-map auto --max-memory")
        if not hasattr(error, "exit_code"):
            raise
        _fail(error.format_message())


def _fail(message: str) -> None:
    errors.print("error: " + " ".join(message.split()))
    sys.exit(2)
