"""Options that commands share, and the words that options take; `dsv4.cli` has the commands."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class NumericsChoice(str, Enum):
    fp32 = "fp32"
    native = "native"
    qat = "qat"
    qat_fp32 = "qat:fp32"


class Speculate(str, Enum):
    off = "off"
    mtp = "mtp"
    lookup = "lookup"


class AttentionChoice(str, Enum):
    dense = "dense"
    sink_window = "sink-window"
    page_bound = "page-bound"
    block_bound = "block-bound"
    block_mean = "block-mean"


class KVMemory(str, Enum):
    device = "device"
    host = "host"


class Target(str, Enum):
    official = "official"
    nvfp4 = "nvfp4"
    transformers = "transformers"
    bf16 = "bf16"


Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint directory (config.json, safetensors).", show_default=False)
]
Numerics = Annotated[
    NumericsChoice,
    typer.Option(
        help="fp32: no quantisation. native: weights as stored, bf16 activations. qat: the official quantisation "
        "simulation. qat:fp32: that, in fp32 arithmetic."
    ),
]
Backend = Annotated[str, typer.Option(help="auto, reference, cpu or triton.")]
Drafting = Annotated[
    Speculate,
    typer.Option(
        help="Draft tokens and verify them in one pass: mtp (the checkpoint's MTP block) or lookup (what "
        "followed the same words before)."
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
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Cache = Annotated[
    str,
    typer.Option(
        help="Format of window rows and entries: auto (as activations), bf16 or fp8 (584 B a row at 512 dims)."
    ),
]
IndexCache = Annotated[
    str, typer.Option(help="Format of index keys: auto, bf16, fp8 (132 B a key at 128 dims) or fp4 (68 B).")
]
Reads = Annotated[
    AttentionChoice | None,
    typer.Option(
        "--attention",
        show_default=False,
        help="Of a GQA model: what decoding reads of the cache. dense: all. sink-window: the first and the last "
        "tokens. "
        "page-bound, block-bound: and what may matter most, by bounds of pages of 16 or blocks of 128. block-mean: "
        "by means, which lose short passages.",
    ),
]
ReadTokens = Annotated[
    str | None,
    typer.Option("--attention-tokens", show_default=False, help="With --attention: tokens that are kept (4K)."),
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
Where = Annotated[
    KVMemory,
    typer.Option(
        "--kv-memory",
        help="Where keys and values (of a DeepSeek-V4 model the entries of CSA layers) are: on the "
        "device, or in pinned host memory, of which a step fetches what "
        "it reads. The output is the same.",
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
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
