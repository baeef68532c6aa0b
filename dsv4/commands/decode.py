"""The commands that run a model: generate and batch. Data goes to stdout, all else to stderr.

What needs torch is imported within the commands: help and completion must not wait for it.
"""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.options import (
    AsJson,
    Backend,
    ByExpert,
    Cache,
    Device,
    DraftCosts,
    Drafting,
    Drafts,
    DummyWeights,
    EmbeddingIn,
    ExpertBudget,
    ExpertsIn,
    Guess,
    IndexCache,
    Kernels,
    KVMemory,
    Layers,
    Loop,
    Numerics,
    PrefillChunks,
    Quiet,
    Reads,
    ReadTokens,
    Resident,
    Rule,
    Staged,
    TensorParallel,
    Terminate,
    Threads,
    spread,
)
from dsv4.commands.terminal import errors, print_json, progress_bar, show, wide
from dsv4.errors import InputError
from dsv4.parallel.ranks_asked import asked, speaks
from dsv4.runtime.starting import importing


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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 128,
    max_context: Annotated[
        str | None, typer.Option(help="Tokens the cache holds (128K, 1M …); default: just enough.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; else 1e-06 to 1000000.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with that much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling, and of --prompt-tokens.")] = 0,
    speculate: Drafting = "off",
    draft_tokens: Drafts = None,
    draft_costs: DraftCosts = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="With --speculate: verify a pass as one append. Faster on a host processor, and rounded otherwise: "
            "the text may leave plain decoding's. Steps captured on a GPU do so anyway, with its text.",
        ),
    ] = False,
    loop: Loop = "host",
    numerics: Numerics = "native",
    backend: Backend = "auto",
    kernel: Kernels = None,
    device: Device = "cpu",
    tensor_parallel_size: TensorParallel = 1,
    expert_parallel: ByExpert = False,
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    terminate: Terminate = False,
    terminate_rule: Rule = None,
    prefill_chunks: PrefillChunks = None,
    kv_memory: KVMemory = "device",
    staged_blocks: Staged = None,
    guess_ahead: Guess = False,
    expert_memory: ExpertsIn = "device",
    resident_experts: Resident = None,
    expert_budget: ExpertBudget = None,
    embedding_memory: EmbeddingIn = "device",
    dummy_weights: DummyWeights = None,
    layers: Layers = None,
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread whole layers over GPUs, host memory and disk.")
    ] = None,
    max_memory: Annotated[str | None, typer.Option(help="With --device-map: e.g. 'cpu=4GiB,0=70GiB'.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="At the end also the path of each layer and which implementation ran.")
    ] = False,
):
    """Generate text from a checkpoint. stdout gets the text; stderr gets progress and a summary of three lines."""
    spread(tensor_parallel_size)
    with importing(device) as imports:
        from dsv4.cache.host_tier.choice import memory_named
        from dsv4.commands import generate as run
        from dsv4.commands import tables
        from dsv4.commands.warm import Subject, compiles_ahead, compiling, told
        from dsv4.model.dummy import dummy_config
        from dsv4.model.expert_memory import expert_memory_named
        from dsv4.model.gqa.choice import attention_named
        from dsv4.runtime import user_kernels
        from dsv4.runtime.threads import limited_threads
        from dsv4.sampling import Sampling

    begun = time.perf_counter()
    _check_output(as_json, quiet, verbose)
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
        speculate=speculate,
        draft_tokens=draft_tokens,
        draft_costs=draft_costs,
        together=together,
        loop=loop,
    )
    if together and speculate == "off":
        raise InputError("--together says how drafts are verified, and nothing drafts; add --speculate mtp or lookup")
    if (draft_tokens is not None or draft_costs is not None) and speculate == "off":
        raise InputError(
            "--draft-tokens or --draft-costs was given and nothing is drafted; add --speculate mtp or "
            "--speculate lookup"
        )
    if loop == "device" and not device.startswith("cuda"):
        run.check_device(device)
    if (think or system is not None) and not chat:
        raise InputError("--think and --system belong to the chat format; add --chat")
    reads = attention_named(attention, attention_tokens, terminate, prefill_chunks, terminate_rule)
    where = memory_named(kv_memory, staged_blocks, guess_ahead, reads is not None and not reads.policy.dense)
    experts = expert_memory_named(expert_memory, resident_experts, expert_budget)
    experts = experts and experts.holding(1, request.context)
    kernels = user_kernels.kernels_named(kernel)
    run.parse_max_memory(max_memory)  # options are read before a checkpoint
    opened = run.Inventory.open(checkpoint) if checkpoint and not dummy_weights else None
    config, tokenizer, ids = run.prepare(opened, request) if opened else (None,) * 3
    shown, choices = not quiet, run.Choices(numerics, backend, device, cache, index_cache)
    with limited_threads(config and config.hidden_size, threads), ExitStack() as beside:
        finish = None
        if compiles_ahead(choices, device_map, where, experts, kernels, embedding_memory == "host"):
            held = config or dummy_config(dummy_weights, layers)
            given = ids or request.ids or [0] * (prompt_tokens or 1)
            context = run.context_needed(held, [given], request.max_new_tokens, request.context)
            work = run.work_of(held, len(given), context, request)
            subject = Subject(opened, dummy_weights, layers, reads, (asked() or (0, 1))[1], expert_parallel)
            finish = beside.enter_context(compiling(subject, choices, work, shown=shown))
        with progress_bar("loading", shown=shown) as loading:
            session = run.Session(
                opened or checkpoint,
                choices,
                device_map,
                max_memory,
                loading,
                dummy_weights,
                layers,
                reads,
                where,
                kernels,
                expert_parallel,
                experts,
                embedding_memory,
            )
        if finish is not None:
            told(finish(), quiet)
        _say(user_kernels.before(session.model), quiet)
        session.tokenizer = tokenizer
        ids = ids if ids is not None else session.encode(request)
        loaded = time.perf_counter() - begun
        with progress_bar("prefill", "tokens", shown) as prefilling:

            def stream(text: str) -> None:
                prefilling.close()  # a progress bar that is still drawn would share the terminal's line with the text
                if not as_json:
                    show(text)

            result, text = session.generate(ids, request, stream, prefilling)
    document = session.document(result, text)
    document["timings"] |= {
        "import_torch_seconds": imports.torch,
        "import_seconds": imports.all,
        "load_seconds": loaded,
    }
    if as_json:
        print_json(document)
    else:
        show("\n")
        if verbose:
            tables.generation(document, wide(stderr=True))
        if not quiet:
            tables.generation_summary(document, errors)
    _say(user_kernels.after(session.model), quiet)
    user_kernels.check_reached(session.model)


def _say(lines: list[str], quiet: bool) -> None:
    """Of users' kernels, to stderr."""
    for line in () if quiet else lines:
        errors.print(line)


def _check_output(as_json: bool, quiet: bool, verbose: bool) -> None:
    """Raises InputError for options of the output that contradict each other."""
    if as_json and (quiet or verbose):
        raise InputError(
            f"--json and --{'quiet' if quiet else 'verbose'} were given; --json prints one document, which holds "
            "everything, and nothing else: leave out one"
        )
    if quiet and verbose:
        raise InputError("--quiet and --verbose were given; they contradict each other: leave out one")


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
            "--together",
            help="Decode all rows as one batch, and read prompts in chunks together (--prefill-chunks): faster, and "
            "equal to running alone up to rounding.",
        ),
    ] = False,
    speculate: Drafting = "off",
    draft_tokens: Drafts = None,
    draft_costs: DraftCosts = None,
    loop: Loop = "host",
    report: Annotated[
        Path | None,
        typer.Option(
            help="Directory for batch_<name of the file>.json, .md and .svg: sizes, latencies, pages.",
            show_default=False,
        ),
    ] = None,
    numerics: Numerics = "native",
    backend: Backend = "auto",
    kernel: Kernels = None,
    device: Device = "cpu",
    tensor_parallel_size: TensorParallel = 1,
    expert_parallel: ByExpert = False,
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    terminate: Terminate = False,
    terminate_rule: Rule = None,
    kv_memory: KVMemory = "device",
    expert_memory: ExpertsIn = "device",
    resident_experts: Resident = None,
    expert_budget: ExpertBudget = None,
    embedding_memory: EmbeddingIn = "device",
    prefill_chunks: PrefillChunks = None,
    threads: Threads = None,
    quiet: Quiet = False,
):
    """Run many requests over one pool of pages. stdout gets a JSON result a line as each ends, then the figures; stderr
    gets a table at the end. Exit code 1 if any request failed."""
    spread(tensor_parallel_size)
    with importing(device):
        from dsv4.commands import generate as run
        from dsv4.commands import tables
        from dsv4.commands.batch import Options, run_batch
        from dsv4.commands.foreseen import Foreseen
        from dsv4.commands.warm import Subject, compiles_ahead, compiling, told
        from dsv4.engine.state import Request
        from dsv4.model.expert_memory import expert_memory_named
        from dsv4.model.gqa.choice import attention_named
        from dsv4.runtime import user_kernels
        from dsv4.runtime.threads import limited_threads
        from dsv4.speculation.one_launch import check_device

    if kv_memory == "host":
        raise InputError(
            "--kv-memory host was given; requests of a batch share the pages of one pool, which is on the device: "
            "leave it out, or run single requests with dsv4 generate"
        )
    report = report if speaks() else None
    options = Options(rows, max_context, pool_tokens, together, speculate, draft_tokens, draft_costs, loop, report)
    reads = attention_named(attention, attention_tokens, terminate, prefill_chunks, terminate_rule)
    experts = expert_memory_named(expert_memory, resident_experts, expert_budget)
    experts = experts and experts.holding(rows, options.context)
    kernels, opened = user_kernels.kernels_named(kernel), []
    if loop == "device":
        check_device(device)

    documents, begun = [], time.perf_counter()

    def load(asked_for: list[Request]) -> run.Session:
        inventory = run.Inventory.open(checkpoint)
        stack.enter_context(limited_threads(run.config_of(inventory).hidden_size, threads))
        choices, finish = run.Choices(numerics, backend, device, cache, index_cache), None
        on_device = loop == "device" or embedding_memory == "host"
        if asked_for and compiles_ahead(choices, experts, kernels, on_device):
            subject = Subject(inventory, None, None, reads, (asked() or (0, 1))[1], expert_parallel)
            work = Foreseen.of(asked_for, options)
            finish = stack.enter_context(compiling(subject, choices, work, shown=not quiet))
        with progress_bar("loading", shown=not quiet) as loading:
            session = run.Session(
                inventory,
                choices,
                progress=loading,
                attention=reads,
                kernels=kernels,
                by_expert=expert_parallel,
                expert_memory=experts,
                embedding_memory=embedding_memory,
            )
        if finish is not None:
            told(finish(), quiet)
        opened.append(session.model)
        _say(user_kernels.before(session.model), quiet)
        return session

    def write(document: dict) -> None:
        documents.append(document)
        show(json.dumps(document, ensure_ascii=False) + "\n")

    with ExitStack() as stack:
        failed = run_batch(load, checkpoint, requests, options, write)
    if not quiet:
        tables.batch(documents[:-1], documents[-1]["figures"], time.perf_counter() - begun, wide(stderr=True))
    for model in opened:
        _say(user_kernels.after(model), quiet)
        user_kernels.check_reached(model)
    if failed:
        raise typer.Exit(1)
