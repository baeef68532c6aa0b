"""`dsv4 warm`, and how other commands compile their kernels while weights are read."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dsv4.commands.options import (
    AsJson,
    ByExpert,
    Cache,
    DraftCosts,
    Drafting,
    Drafts,
    DummyWeights,
    IndexCache,
    Layers,
    Numerics,
    PlannedRanks,
    Quiet,
    Reads,
    ReadTokens,
    Rule,
    Terminate,
)
from dsv4.commands.terminal import errors, print_json, progress_bar
from dsv4.errors import InputError
from dsv4.parallel.ranks_asked import asked
from dsv4.runtime.starting import importing

if TYPE_CHECKING:  # what needs torch is imported within the commands
    from dsv4.commands.generate import Choices
    from dsv4.kernels.launch import GPU
    from dsv4.loaders.load import Inventory
    from dsv4.model.causal import CausalLM
    from dsv4.model.gqa.choice import Attention
    from dsv4.model.ranks import Ranks
    from dsv4.runtime.compiling import Compiled
    from dsv4.runtime.launches import Runs


def warm(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; its weights are not read.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of a prompt: 300, 4K …")] = "1K",
    max_context: Annotated[
        str | None, typer.Option(help="Tokens a row; default: as much as 128 new tokens need.", show_default=False)
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
    tensor_parallel_size: PlannedRanks = 1,
    expert_parallel: ByExpert = False,
    speculate: Drafting = "off",
    draft_tokens: Drafts = None,
    draft_costs: DraftCosts = None,
    dummy_weights: DummyWeights = None,
    layers: Layers = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a processor.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
):
    """Compile the kernels that a request will launch, into Triton's cache (TRITON_CACHE_DIR), which may be copied to
    other machines. Needs no GPU where the card is named. Exit code 1 if a kernel does not compile."""
    with importing(device):
        from triton import knobs

        from dsv4.commands import generate as run
        from dsv4.model.dummy import dummy_config
        from dsv4.model.gqa.choice import attention_named
        from dsv4.units import count_named

    prompt = count_named("--prompt-tokens", prompt_tokens)
    context = prompt + 127 if max_context is None else count_named("--max-context", max_context)
    if not 0 < prompt <= context:
        raise InputError(f"a prompt of {prompt} tokens was asked for; expected 1 to the {context} of the context")
    if (checkpoint is None) == (dummy_weights is None):
        raise InputError("a checkpoint directory or --dummy-weights is needed, and not both")
    request = run.Request("", speculate=speculate, draft_tokens=draft_tokens, draft_costs=draft_costs)
    reads = attention_named(attention, attention_tokens, terminate, None, terminate_rule)
    choices = run.Choices(numerics, "triton", device, cache, index_cache)
    inventory = None if checkpoint is None else run.Inventory.open(checkpoint)
    config = dummy_config(dummy_weights, layers) if inventory is None else run.config_of(inventory)
    work = run.work_of(config, prompt, context, request, batch)
    subject = Subject(inventory, dummy_weights, layers, reads, tensor_parallel_size, expert_parallel)
    with compiling(subject, choices, work, jobs, not quiet, launches=False) as finish:
        found = finish()
    if found.why:
        raise InputError(f"nothing was compiled: {found.why}")
    place = Path(knobs.cache.dir)
    document = found._asdict() | {"cache": str(place)}
    if as_json:
        print_json(document)
    elif found.kernels:
        print(f"{found}; cache {place}")
    else:
        print(f"nothing to do: these kernels were compiled before; cache {place}")
    if found.failed:
        raise typer.Exit(1)


class Subject(NamedTuple):
    """Which model it is: a checkpoint, or the first `layers` layers of a published geometry; what it reads of its
    caches; and of how many ranks of one host."""

    checkpoint: "Inventory | None"
    dummy: str | None
    layers: int | None
    reads: "Attention | None" = None
    ranks: int = 1
    by_expert: bool = False

    def planned(self, choices: "Choices", gpu: "GPU") -> tuple[Callable[[], "CausalLM"], object]:
        """What makes the model of rank 0 without weights, and all that it depends on."""
        from dsv4.model import families
        from dsv4.model.dummy import plan_dummy
        from dsv4.model.numerics import numerics_named

        numerics, *caches = names = choices.numerics, choices.cache, choices.index_cache
        inventory = self.checkpoint

        def plan() -> "CausalLM":
            ranks = self.held_by(gpu)
            if inventory is None:
                given = self.dummy, self.layers, numerics, "triton", *caches
                model = plan_dummy(*given, attention=self.reads, ranks=ranks)
            else:
                family, choice = families.of(inventory), numerics_named(numerics).with_caches(*caches)
                model = family.plan(inventory, choice, "triton", None, None, ranks)
            model.max_context = None
            if self.reads is not None:
                model.attention = self.reads
            return model

        of_file = None if inventory is None else (inventory.config, inventory.layout.name)
        return plan, (self._replace(checkpoint=None), names, of_file)

    def held_by(self, gpu: "GPU") -> "Ranks":
        from dsv4.model.ranks import ALONE
        from dsv4.parallel.planned import planned_ranks

        return ALONE if self.ranks == 1 else planned_ranks(0, self.ranks, self.by_expert, gpu)


@contextmanager
def compiling(
    subject: Subject,
    choices: "Choices",
    work: "Runs",
    jobs: int | None = None,
    shown: bool = True,
    launches: bool = True,
) -> Iterator[Callable[[], "Compiled"]]:
    """Compile what `work` launches beside the block, which gets a function that waits until it is done and says what it
    was. Of several ranks the first compiles, and all wait for it. Nothing may have used CUDA. Left by an exception, it
    ends. launches: whether this process will launch what was compiled, so that it needs Triton's hash too."""
    from dsv4.model.ranks import here
    from dsv4.runtime.compiling import Compiled, Compiling, hashing_triton

    begun = None
    if (asked() or (0, 1))[0] == 0:
        gpu = _gpu(choices.device)
        begun = Compiling(*subject.planned(choices, gpu), work, gpu, jobs)
    hashed = hashing_triton() if launches else None

    def finish() -> Compiled:
        with progress_bar("compiling", "kernels", shown and begun is not None and begun.needed) as bar:
            found = Compiled() if begun is None else begun.wait(bar)
        if hashed is not None:
            hashed.join()
        if here().group is not None:
            here().group.exchange("compiled kernels", b"")
        return found

    try:
        yield finish
    except BaseException:
        if begun is not None:
            begun.cancel()
        raise


def compiles_ahead(choices: "Choices", *others: object) -> bool:
    """Whether a command with these options can know before it loads what it will launch: on one GPU, or ranks of one
    host, with kernels of this project and all memory on the GPU. others: options that must be left out."""
    if choices.device.partition(":")[0] != "cuda" or choices.backend not in ("auto", "triton") or any(others):
        return False
    _, size = asked() or (0, 1)
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        return False
    try:
        return _gpu(choices.device).capability >= (8, 0)
    except InputError:  # loading will say it
        return False


def told(found: "Compiled", quiet: bool) -> None:
    """What was compiled, to stderr, if anything was."""
    if not quiet and (found.new or found.failed or found.why):
        errors.print(str(found))


def _gpu(device: str) -> "GPU":
    from dsv4.runtime.compiling import present_gpu
    from dsv4.runtime.gpus import chip_named

    name, _, index = device.partition(":")
    if name == "cuda":
        if index and not index.isdecimal():
            raise InputError(f"device {device!r} is unknown; expected cuda, cuda:N, or a card's name")
        return present_gpu(int(index or 0))
    return chip_named(device)
