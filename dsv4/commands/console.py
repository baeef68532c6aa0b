"""Options that the measuring commands (`dsv4 recall`, `fidelity`, `termination`, `sparse-prefill`) share, and how their
texts are read."""

import re
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.options import BACKENDS, NUMERICS, choice
from dsv4.errors import InputError
from dsv4.parallel.ranks_asked import speaks


def option(about: str, **more):
    return typer.Option(help=about, show_default=False, **more)


def folder(value: Path | None) -> Path | None:
    """Callback of --out: a folder that cannot be written is an error before anything is loaded."""
    return _written(value)


def file(value: Path | None) -> Path | None:
    """Callback of --out where it names a file."""
    return _written(value, file=True)


def _written(value: Path | None, file: bool = False) -> Path | None:
    """`value`, which can be written; None in a rank that does not speak for all, and so writes nothing."""
    from dsv4.outputs import writable

    return writable(value, file) if speaks() else None


Word = str | None
Number = int | None
Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint directory: DeepSeek-V4 or a GQA model.", show_default=False)
]
Text = Annotated[Path | None, option("UTF-8 text to read and to hide needles in; default: Python's help topics.")]
Policies = Annotated[
    Word,
    option(
        "GQA: sink-window, page-bound, block-bound, block-mean, snapkv, pyramidkv, separated by commas; default: all, "
        "or of early ends the first three."
    ),
]
Rows = Annotated[int, typer.Option(help="Rows of each text.")]
Numerics = Annotated[str, choice(NUMERICS, "native or fp32; of DeepSeek-V4 qat and qat:fp32 too.")]
Backend = Annotated[str, choice(BACKENDS, "Implementation of the operations.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="Of needles, and of random ids.")]
Tasks = Annotated[
    Word,
    typer.Option(
        "--tasks",
        show_default=False,
        help="What is asked, --needles trials of each, as in RULER: single, multi-key, multi-value, multi-query, "
        "tracking, common-words, frequent-words, separated by commas. Default: single needles, without generating.",
    ),
]
Together = Annotated[
    int,
    typer.Option(
        "--needles-a-haystack",
        help="Single needles hidden in one haystack, which is then read once for all of them; each is asked by itself.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def report_in(stem: str):
    """The option --out of a measurement whose files are called `stem`."""
    return option(f"Directory for {stem}.md, .json and plots.", callback=folder)


def counts(name: str, text: str | None) -> list[int] | None:
    """'4096,16K' → [4096, 16384]. Raises InputError."""
    from dsv4.units import parse_count

    if text is None:
        return None
    if not all(part.strip() for part in text.split(",")):
        raise InputError(f"{name} is {text!r}; expected numbers separated by commas, such as 4096,16K")
    return [parse_count(part.strip()) for part in text.split(",")]


BLOCK = 128  # tokens of a block in which budgets are counted, where --block gives no other


def budgets(text: str | None, block: int | None = None) -> list[int | float] | None:
    """'1K,8b,0.2' → tokens, tokens of so many blocks, and shares of the prompt. block: tokens of a block, 128 by
    default, so that a budget in blocks is as many tokens under every policy. Raises InputError."""
    if text is None:
        return None
    return [_budget(part.strip(), BLOCK if block is None else block) for part in text.split(",")]


def _budget(text: str, block: int) -> int | float:
    from dsv4.model.gqa.choice import amount_named

    blocks = re.fullmatch(r"([0-9]+)b", text)
    if blocks is None:
        return amount_named("--budget", text)
    if not int(blocks[1]):
        raise InputError(f"--budget is {text}; expected a number of blocks from 1, such as 8b")
    return int(blocks[1]) * block


def names(text: str | None) -> list[str] | None:
    """'dense, block-bound' → names. Raises InputError for an empty one."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise InputError(f"--policy is {text!r}; expected names separated by commas, such as sink+window,block-bound")
    return list(dict.fromkeys(names))


def tasks(text: str | None) -> list[str]:
    """'single,multi-key' → names, which the measurement checks; none for None."""
    return [] if text is None else [part.strip() for part in text.split(",")]


def numbers(name: str, text: str | None) -> list[float]:
    """'1e-3,1e-2' → [0.001, 0.01]. Raises InputError."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{name} is {text!r}; expected numbers separated by commas, such as 1e-3,1e-2") from None
