"""Options that commands share, and the words that options take; `dsv4.commands.cli` has the commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsv4.errors import InputError, brief
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.parallel.ranks_asked import asked, own_device

NUMERICS = ("fp32", "native", "qat", "qat:fp32")
BACKENDS = ("auto", "reference", "cpu", "triton")
CACHES = ("auto", "bf16", "fp8")
INDEX_CACHES = ("auto", "bf16", "fp8", "fp4", "mxfp8")
DRAFTERS = ("off", "mtp", "lookup")
LOOPS = ("host", "device")
POLICIES = ("dense", "sink-window", "page-bound", "block-bound", "block-mean", "snapkv", "pyramidkv")
MEMORIES = ("device", "host")
LAYOUTS = ("official", "nvfp4", "transformers", "bf16")
DUMMIES = ("flash", "pro", *GEOMETRIES)


def choice(names: tuple[str, ...], about: str, **more):
    """An option that takes one of `names`, or a list of them where it may be given several times. Another value raises
    InputError with one line that lists them; the help and the shell's completion list them too."""

    def check(param: typer.CallbackParam, value: str | list[str] | None) -> str | list[str] | None:
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one not in names:
                raise InputError(f"{param.opts[0]} takes {', '.join(names[:-1])} or {names[-1]}; got {brief(one)!r}")
        return value

    return typer.Option(
        help=f"{about} One of {', '.join(names)}.",
        metavar="NAME",
        callback=check,
        autocompletion=lambda incomplete: [name for name in names if name.startswith(incomplete)],
        **more,
    )


Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint directory (config.json, safetensors).", show_default=False)
]
Numerics = Annotated[
    str,
    choice(
        NUMERICS,
        "fp32: no quantisation. native: weights as stored, bf16 activations. qat: the official quantisation "
        "simulation. qat:fp32: that, in fp32 arithmetic.",
    ),
]
Backend = Annotated[
    str, choice(BACKENDS, "Implementation of the operations. auto: cpu on a host, triton on one GPU, else reference.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="Host threads of torch. Default: OMP_NUM_THREADS if it is set; else 1 for a model of hidden size below "
        "1024, whose threads would wait for each other; else the processors that this process may use.",
    ),
]


def spread(size: int) -> None:
    """What a command with --tensor-parallel-size does first: start that many ranks, unless this process is one of them,
    and exit as they do."""
    if size == 1:
        return
    found = asked()
    if found is None:
        from dsv4.parallel.launch import launch

        raise typer.Exit(launch(size, sys.argv[1:]))
    if found[1] != size:
        raise InputError(f"--tensor-parallel-size {size} was given to one of {found[1]} ranks; give their number")


def joined(device: str, by_expert: bool = False, unhurried: bool = False) -> str:
    """The device of this rank, once it has joined the others; `device` for a single process. unhurried: ranks compute
    long between what they exchange."""
    if asked() is None:
        return device
    from dsv4.parallel.processes import join
    from dsv4.parallel.store import PATIENCE, UNHURRIED

    join(device, by_expert, UNHURRIED if unhurried else PATIENCE)
    return own_device(device)


TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        help="Run the model as so many processes, each with a part of every layer and a GPU of its own. torchrun "
        "starts them too.",
    ),
]
ByExpert = Annotated[
    bool,
    typer.Option(
        "--expert-parallel",
        help="Of several ranks each has whole routed experts, instead of a part of every one's width.",
    ),
]
Drafting = Annotated[
    str,
    choice(
        DRAFTERS,
        "Draft tokens and verify them in one pass: mtp (the checkpoint's MTP block) or lookup (what followed the same "
        "words before).",
    ),
]
Drafts = Annotated[
    str | None,
    typer.Option(
        help="With --speculate: drafts of a pass, 1 to 8 (default 1 with mtp, 3 with lookup); adaptive: 1, 4 or "
        "8 by how "
        "many were accepted (adaptive:weight=0.2,thresholds=0.5/0.8,sizes=1/4/8,…); cost-aware: by --draft-costs. "
        "In a batch at most 2 while over 85 % of the pages are in use.",
        show_default=False,
    ),
]
DraftCosts = Annotated[
    Path | None,
    typer.Option(
        help="What passes cost on this device: a table that scripts/bench_speculation.py measured.", show_default=False
    ),
]
Loop = Annotated[
    str,
    choice(
        LOOPS,
        "Who launches the steps of decoding. device: one launch for the whole response, or for a group of a batch's "
        "requests, on a GPU: the device drafts, verifies, accepts and ends by itself.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Cache = Annotated[
    str,
    choice(CACHES, "Format of window rows and entries. auto: as activations. fp8: 584 B a row at 512 dims."),
]
IndexCache = Annotated[
    str,
    choice(INDEX_CACHES, "Format of index keys. auto: as activations. fp8, mxfp8: 132 B a key at 128 dims. fp4: 68 B."),
]
Reads = Annotated[
    str | None,
    choice(
        POLICIES,
        "Of a GQA model: what decoding reads of the cache. dense: all. sink-window: the first and the last tokens. "
        "page-bound, block-bound: and what may matter most, by bounds of pages of 16 or blocks of 128. block-mean: "
        "by means, which lose short passages. snapkv, pyramidkv: what the last tokens of the prompt attend to, chosen "
        "once, and all later tokens; pyramidkv keeps less in upper layers.",
        show_default=False,
    ),
]
ReadTokens = Annotated[
    str | None,
    typer.Option(
        "--attention-tokens",
        show_default=False,
        help="With --attention: tokens that are kept (4K); of snapkv and pyramidkv also a share of the prompt (0.2).",
    ),
]
Terminate = Annotated[
    bool, typer.Option("--terminate", help="Of a GQA model: a decoding token stops reading when its output is stable.")
]
Rule = Annotated[
    str | None,
    typer.Option(
        "--terminate-rule",
        show_default=False,
        help="With --terminate: when it is, as tau=1e-5,phi=1e-3,patience=5 (the defaults; any of them): how little it "
        "moves and turns, over how many tiles.",
    ),
]
PrefillChunks = Annotated[
    str | None,
    typer.Option(
        "--prefill-chunks",
        show_default=False,
        help="Of a GQA model: CHUNK,LOCAL,HEAVY. The prompt is read in chunks, each beside the last LOCAL and the "
        "heaviest HEAVY tokens before it; decoding reads all. Add ,score=memory to weigh the memory by its own "
        "softmax (default: fused with the chunk's), ,heads=query for a memory of each query head (default: kv).",
    ),
]
KVMemory = Annotated[
    str,
    choice(
        MEMORIES,
        "Where keys and values (of a DeepSeek-V4 model the entries of CSA layers) are: on the device, or in pinned "
        "host memory, of which a step fetches what it reads. The output is the same.",
    ),
]
Staged = Annotated[
    int | None,
    typer.Option(
        "--staged-blocks",
        min=1,
        show_default=False,
        help="With --kv-memory host: blocks of each KV head (of a DeepSeek-V4 model: entries) that stay on the device "
        "(twice what a step reads).",
    ),
]
Guess = Annotated[
    bool,
    typer.Option(
        "--guess-ahead/--no-guess-ahead",
        help="With --kv-memory host and --attention: fetch what the next layer is "
        "guessed to choose. Slower with random weights; not yet measured with "
        "trained ones.",
    ),
]
EmbeddingIn = Annotated[
    str,
    choice(
        MEMORIES,
        "Where the token embedding is: on the device, or in pinned host memory, from which a step reads a row a token. "
        "The output is the same.",
    ),
]
ExpertsIn = Annotated[
    str,
    choice(
        MEMORIES,
        "Where routed experts are: on the device, or in pinned host memory, from which a step fetches those that the "
        "router chose and that the device does not hold. The output is the same.",
    ),
]
Resident = Annotated[
    int | None,
    typer.Option(
        "--resident-experts",
        min=1,
        show_default=False,
        help="With --expert-memory host: experts of each layer that stay on the device (default: as many as fit; on a "
        "host processor a quarter).",
    ),
]
ExpertBudget = Annotated[
    str | None,
    typer.Option(
        "--expert-budget",
        show_default=False,
        help="With --expert-memory host: bytes of the device for all that experts take there (40GiB), instead.",
    ),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="OPERATION=SPEC",
        show_default=False,
        help="Run an operation through a kernel of yours: FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, which takes the "
        "reference's arguments; reference or ours: dsv4's own, taken out of fused kernels. May be given several times.",
    ),
]
DummyWeights = Annotated[
    str | None, choice(DUMMIES, "A published geometry with random weights, instead of a checkpoint.")
]
Layers = Annotated[int | None, typer.Option(min=1, help="With --dummy-weights: the first so many layers.")]
PlannedRanks = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        max=1024,
        help="So many ranks, each with a part of every layer and a device of its own; none is started.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result: no progress and no summary on stderr.")]
