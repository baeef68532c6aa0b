"""`dsv4 warm`, and how other commands compile their kernels while weights are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.options import (
    DUMMIES,
    AsJson,
    Cache,
    DraftCosts,
    Drafting,
    Drafts,
    IndexCache,
    Numerics,
    Quiet,
    Reads,
    ReadTokens,
    Rule,
    Terminate,
    choice,
)
from dsv4.commands.terminal import errors, print_json, progress_bar
from dsv4.errors import InputError
from dsv4.parallel.ranks_asked import asked


def warm(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; its weights are not read.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of a prompt: 300, 4K …")] = "1K",
    max_context: Annotated[
        str | None, typer.Option(help="Tokens a row; default: the prompt and 128 more.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows that decode at once.")] = 1,
    numerics: Numerics = "native",
    device: Annotated[
        str, typer.Option(help="cuda or cuda:N of this machine, or a card by name (h100, h200, a100 …), here or not.")
    ] = "cuda",
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    terminate: Terminate = False,
    terminate_rule: Rule = None,
    speculate: Drafting = "off",
    draft_tokens: Drafts = None,
    draft_costs: DraftCosts = None,
    dummy_weights: Annotated[str | None, choice(DUMMIES, "A published geometry, instead of a checkpoint.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --dummy-weights: the first so many layers.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a processor.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
):
    """Compile the kernels that a request will launch, into Triton's cache (TRITON_CACHE_DIR), which may be copied to
    other machines. Needs no GPU where the card is named. Exit code 1 if a kernel does not compile."""
    from triton import knobs

    from dsv4.commands import generate as run
    from dsv4.model.gqa.choice import attention_named
    from dsv4.runtime.launches import Work
    from dsv4.units import count_named

    prompt = count_named("--prompt-tokens", prompt_tokens)
    context = prompt + 128 if max_context is None else count_named("--max-context", max_context)
    if not 0 < prompt <= context:
        raise InputError(f"a prompt of {prompt} tokens was asked for; expected 1 to the {context} of the context")
    if (checkpoint is None) == (dummy_weights is None):
        raise InputError("a checkpoint directory or --dummy-weights is needed, and not both")
    request = run.Request("", speculate=speculate, draft_tokens=draft_tokens, draft_costs=draft_costs)
    reads = attention_named(attention, attention_tokens, terminate, None, terminate_rule)
    choices = run.Choices(numerics, "triton", device, cache, index_cache)
    work = Work(prompt, context, batch, sizes_of(request))
    with compiling(checkpoint, dummy_weights, layers, choices, reads, work, jobs, not quiet) as finish:
        found = finish()
    place = Path(knobs.cache.dir)
    document = found._asdict() | {"cache": str(place)}
    if as_json:
        print_json(document)
    elif found.kernels or found.why:
        print(f"{found}; cache {place}")
    else:
        print(f"nothing to do: these kernels were compiled before; cache {place}")
    if found.failed or found.why:
        raise typer.Exit(1)


def sizes_of(request) -> tuple[int, ...]:
    """How many tokens its passes may draft."""
    from dsv4.commands.generate import make_drafter

    if request.speculate == "off":
        return ()
    return request.policy.sizes if request.policy else (make_drafter(request.speculate).draft_tokens,)


@contextmanager
def compiling(
    checkpoint: Path | None,
    dummy: str | None,
    layers: int | None,
    choices,
    reads,
    work,
    jobs: int | None = None,
    shown: bool = True,
) -> Iterator[Callable[[], "Compiled"]]:  # noqa: F821
    """Compile what `work` launches beside the block, which gets a function that waits until it is done and says what it
    was. Nothing may have used CUDA. Left by an exception, it ends."""
    from dsv4.runtime.compiling import Compiling

    begun = Compiling(*_planned(checkpoint, dummy, layers, choices, reads), work, _gpu(choices.device), jobs)

    def finish():
        with progress_bar("compiling", "kernels", shown and begun.needed) as bar:
            return begun.wait(bar)

    try:
        yield finish
    except BaseException:
        begun.cancel()
        raise


def compiles_ahead(choices, *others: object) -> bool:
    """Whether a command with these options can know before it loads what it will launch: one process on one GPU, with
    kernels of this project and all memory on the GPU. others: options that must be left out."""
    if choices.device.partition(":")[0] != "cuda" or choices.backend not in ("auto", "triton"):
        return False
    if any(others) or asked() is not None:
        return False
    try:
        return _gpu(choices.device).capability >= (8, 0)
    except InputError:  # loading will say it
        return False


def told(found, quiet: bool) -> None:
    """What was compiled, to stderr, if anything was."""
    if not quiet and (found.new or found.failed or found.why):
        errors.print(str(found))


def _planned(checkpoint, dummy, layers, choices, reads):
    """What makes the model without weights, and all that it depends on."""
    from dsv4.model.dummy import plan_dummy

    names = choices.numerics, choices.cache, choices.index_cache
    if dummy is not None:
        numerics, *caches = names
        made = partial(plan_dummy, dummy, layers, numerics, "triton", *caches, attention=reads)
        return partial(_reading, made, reads), (dummy, layers, names, reads)
    from dsv4.loaders.load import Inventory
    from dsv4.model import families
    from dsv4.model.numerics import numerics_named

    inventory = Inventory.open(checkpoint)
    numerics = numerics_named(choices.numerics).with_caches(*names[1:])
    made = partial(families.plan_model, inventory, numerics, "triton", None)
    return partial(_reading, made, reads), (inventory.config, inventory.layout.name, names, reads)


def _reading(plan, reads):
    model = plan()
    model.max_context = None
    if reads is not None:
        model.attention = reads
    return model


def _gpu(device: str):
    from dsv4.runtime.compiling import present_gpu
    from dsv4.runtime.gpus import chip_named

    name, _, index = device.partition(":")
    if name == "cuda":
        if index and not index.isdecimal():
            raise InputError(f"device {device!r} is unknown; expected cuda, cuda:N, or a card's name")
        return present_gpu(int(index or 0))
    return chip_named(device)
