"""`dsv4 fidelity`: the command line of the measurement."""

from pathlib import Path
from typing import Annotated

from dsv4.commands.console import (
    Backend,
    Checkpoint,
    Device,
    Json,
    Number,
    Numerics,
    Policies,
    Seed,
    Tasks,
    Text,
    Together,
    Word,
    budgets,
    counts,
    names,
    option,
    report_in,
    tasks,
)
from dsv4.commands.measuring import measure
from dsv4.commands.options import ByExpert, Kernels, KVMemory, TensorParallel, choice, joined, spread
from dsv4.runtime.starting import importing


def fidelity(
    checkpoint: Checkpoint,
    topk: Annotated[
        Word,
        option(
            "DeepSeek-V4: entries that CSA selects, e.g. 16,32,64; default: around index_topk. The checkpoint's "
            "own and all entries are measured too."
        ),
    ] = None,
    policy: Policies = None,
    budget: Annotated[
        Word,
        option(
            "GQA: tokens that a policy keeps, e.g. 1K,4K, or blocks of 128 (of --block) tokens, e.g. 8b,16b,32b; "
            "default: an 8th and a 4th of the longest context. Of snapkv, pyramidkv also a share of the prompt, 0.2."
        ),
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
    needle_context: Annotated[Word, option("Contexts that needles are hidden in; default: those of --context.")] = None,
    asked_tasks: Tasks = None,
    needles_a_haystack: Together = 1,
    queries: Annotated[Number, option("Last queries of each context whose selection is looked at.")] = None,
    text: Text = None,
    numerics: Numerics = "native",
    backend: Backend = "auto",
    kernel: Kernels = None,
    device: Device = "cpu",
    tensor_parallel_size: TensorParallel = 1,
    expert_parallel: ByExpert = False,
    kv_memory: KVMemory = "device",
    seed: Seed = 0,
    out: Annotated[Path | None, report_in("fidelity_NAME_FAMILY")] = None,
    as_json: Json = False,
):
    """What reading sparsely changes: each policy, or k of CSA, held against the model reading everything. Exit code 0:
    measured."""
    spread(tensor_parallel_size)
    with importing():
        from dsv4.probes.measure.fidelity.measurement import Fidelity

    measure(
        Fidelity,
        checkpoint,
        (numerics, backend, joined(device, expert_parallel, unhurried=True)),
        out=out,
        as_json=as_json,
        kernel=kernel,
        reads=(counts("--topk", topk), names(policy), budgets(budget, block), block),
        kv_memory=kv_memory,
        text=text,
        effort=effort,
        contexts=counts("--context", context),
        seed=seed,
        rows=rows,
        tail=tail,
        new=new_tokens,
        needles=needles,
        asked=counts("--needle-context", needle_context),
        tasks=tasks(asked_tasks),
        together=needles_a_haystack,
        queries=queries,
    )
