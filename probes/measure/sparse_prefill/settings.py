"""What is read, in which chunks, and how much is asked."""

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import numpy as np

from dsv4.errors import InputError
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.errors import UnsupportedInput
from dsv4.model.gqa.choice import CHUNKS, chunking_named
from dsv4.probes.measure.base import settings as base
from dsv4.probes.measure.base.models import reads_by_policy
from dsv4.probes.measure.base.text import Text

SOURCES = ("dsv4", "dsv4.kernels", "dsv4.loaders", "dsv4.probes")
KEYS = tuple(field.name for field in fields(Chunking))
# the published cut, by the default rule and by the published one
PUBLISHED = Chunking(1024, 256, 256), Chunking(1024, 256, 256, score="memory", heads="query")
SIZES = {512: ((64, 128), (64, 192, 320)), 1024: ((128, 256), (128, 384, 704))}  # chunk: locals, heavies
GRID = *(Chunking(S, L, H) for S, (ls, hs) in SIZES.items() for L in ls for H in hs), *PUBLISHED


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """cuts: ways of reading; asked: those that needles and facts are asked after, and whose maps are drawn; tail: last
    tokens of each context that are decoded after a sparse prompt; needles of a context; asked_contexts; in_prompt:
    questions that end the prompt, in the shortest of these; every: one query in so many has its dense attention looked
    at."""

    cuts: tuple[Chunking, ...]
    asked: tuple[Chunking, ...]
    tail: int
    asked_contexts: tuple[int, ...]
    in_prompt: int
    every: int
    SHOWN: ClassVar = (
        "contexts",
        "cuts",
        "asked",
        "rows",
        "tail",
        "needles",
        "asked_contexts",
        "in_prompt",
        "every",
        "seed",
    )

    def about(self) -> dict:
        return super().about(cuts=[asdict(cut) for cut in self.cuts], asked=[asdict(cut) for cut in self.asked])


def settle(
    model, contexts: list[int] | None, cuts: str | None, asked_contexts: list[int] | None, **given: int
) -> Settings:
    """given: fields of `Settings`. Raises InputError for what cannot be measured."""
    if not reads_by_policy(model) or not any(window is None for window in model.config.windows):
        raise InputError(
            "sparse prefill is of GQA models with layers that attend to everything; this checkpoint has none such"
        )
    most = model.config.max_position_embeddings
    chosen = parse_cuts(cuts) if cuts is not None else GRID
    contexts = base.ascending(contexts, (4096, 8192, 16384), most)
    tail, needles, in_prompt = (given[name] for name in ("tail", "needles", "in_prompt"))
    asked = tuple(sorted(set(asked_contexts or (contexts[0], contexts[-1])))) if needles else ()
    longest = max(c.chunk for c in chosen)
    if contexts[0] < longest + tail + 2 or contexts[-1] > most:
        raise InputError(
            f"--context {contexts[0]} … {contexts[-1]}: expected more than a chunk and the tail ({longest} + {tail} + "
            f"1) and no more than the checkpoint's max_position_embeddings, {most}"
        )
    base.check_least(given, rows=1, tail=1, every=1, needles=0, in_prompt=0)
    if in_prompt > needles:
        raise InputError(f"--in-prompt {in_prompt} asks for more needles than there are, {needles}")
    return Settings(contexts=contexts, cuts=chosen, asked=extremes(chosen), asked_contexts=asked, **given)


def parse_cuts(text: str) -> tuple[Chunking, ...]:
    """'512,64,192 1024,256,256,score=memory' → cuts, each once. Raises InputError."""
    found = []
    for word in text.split():
        try:
            found.append(chunking_named("--cuts", word))
        except UnsupportedInput as error:
            raise InputError(f"--cuts has {word!r}: {error}") from None
    if not found:
        raise InputError(f"--cuts is empty; expected, separated by spaces, {CHUNKS}")
    return tuple(dict.fromkeys(found))


def extremes(cuts: tuple[Chunking, ...]) -> tuple[Chunking, ...]:
    """Of each chunk size the cut with the least and the one with the most memory, and those that differ from another
    in their rule alone; the published cut is always among them."""
    found: dict[Chunking, None] = {}
    for S in dict.fromkeys(c.chunk for c in cuts):
        of = sorted((c for c in cuts if c.chunk == S), key=lambda c: c.memory)
        found |= {of[0]: None, of[-1]: None}
    sizes = Counter((c.chunk, c.local, c.heavy) for c in cuts)
    return (*found, *(c for c in cuts if c not in found and (c in PUBLISHED or sizes[c.chunk, c.local, c.heavy] > 1)))


def texts(prose: Text, alone: bool) -> list[Text]:
    """`prose`, and this project's own sources unless it is to stand alone, or has no tokenizer."""
    if alone or prose.tokenizer is None:
        return [prose]
    files = source_files()
    source = "\n\n".join(f.read_text(encoding="utf-8") for f in files)
    name = f"this project's sources ({len(files)} files of {', '.join(SOURCES)})"
    ids = np.array(prose.tokenizer.encode(source), dtype=np.int64)
    return [prose, Text(name, hashlib.sha256(source.encode()).hexdigest(), ids, prose.tokenizer)]


def source_files() -> list[Path]:
    """The project's own files of Python and prose, wherever it is installed."""
    folders = [Path(import_module(name).__file__).parent for name in SOURCES]
    return sorted({f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".md")})


def name(cut: Chunking) -> str:
    return f"chunk {cut.chunk}, {cut.local} local + {cut.heavy} heavy{cut.rule and f', {cut.rule}'}"


def way(cut: Chunking | None) -> dict:
    """The columns that say how a prompt was read, null for dense."""
    return {key: getattr(cut, key, None) for key in KEYS}
