"""What the subject reads: a file, this Python's help topics, or random ids where there is no tokenizer."""

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dsv4.errors import InputError
from dsv4.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Text:
    """ids int64 [tokens], without BOS; sha256 of the text in UTF-8 (None for random ids); tokenizer None likewise."""

    name: str
    sha256: str | None
    ids: np.ndarray
    tokenizer: Tokenizer | None = None

    def about(self) -> dict:
        return {
            "name": self.name,
            "sha256": self.sha256,
            "tokens": len(self.ids),
            "tokenizer": self.tokenizer is not None,
        }


# ids by (hash of tokenizer.json, text), of the last two: help topics take seconds to encode, and a process may read
# them for several reports
ENCODED: dict[tuple[bytes, str], np.ndarray] = {}


def read_text(file: Path | None, checkpoint: Path, vocab_size: int, tokens: int, seed: int) -> Text:
    """The text of `file` (default: help topics), or `tokens` random ids if the checkpoint has no tokenizer.

    Raises InputError for a file that cannot be read, and for one given without a tokenizer to read it with.
    """
    if not (checkpoint / "tokenizer.json").is_file():
        if file is not None:
            raise InputError(
                f"{checkpoint.name} has no tokenizer.json, so --text {file.name} cannot be read; copy the model's "
                "there, or leave --text out for random ids"
            )
        ids = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed)).numpy()
        return Text(f"random ids (seed {seed}): the checkpoint has no tokenizer.json", None, ids)
    name, text = help_topics() if file is None else (file.name, _read(file))
    tokenizer = Tokenizer(checkpoint, vocab_size)
    known = hashlib.sha256((checkpoint / "tokenizer.json").read_bytes()).digest(), text
    if known not in ENCODED:
        ENCODED[known] = np.array(tokenizer.encode(text), dtype=np.int64)
        while len(ENCODED) > 2:
            del ENCODED[next(iter(ENCODED))]
    return Text(name, hashlib.sha256(text.encode()).hexdigest(), ENCODED[known].copy(), tokenizer)


def help_topics() -> tuple[str, str]:
    """Prose with some code that every Python has. A checkpoint may have seen it; pass --text for what it cannot
    know."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("this Python has no help topics (pydoc_data), the default text; pass --text FILE") from None
    name = f"help topics of Python {platform.python_version()} (pydoc_data.topics)"
    return name, "\n\n".join(text for _, text in sorted(topics.items()))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read the text {file.name}: {why}") from None


def rows_of(text: Text, length: int, count: int, bos: int | None) -> torch.Tensor:
    """int64 [count or fewer, length]: BOS, and text from places spread evenly, none read twice. Raises InputError."""
    need = length - (bos is not None)
    if len(text.ids) < need:
        raise InputError(
            f"{text.name} has {len(text.ids)} tokens; a context of {length} needs {need}; pass a longer "
            "--text FILE, or a shorter --context"
        )
    count = min(count, len(text.ids) // need)
    starts = [i * (len(text.ids) // count) for i in range(count)]
    rows = torch.from_numpy(np.stack([text.ids[s : s + need] for s in starts]))
    return rows if bos is None else torch.cat((torch.full((count, 1), bos), rows), 1)
