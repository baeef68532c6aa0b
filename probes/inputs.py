"""Tokens to run a subject on: random ones of its vocabulary, or a text through the checkpoint's tokenizer."""

from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.model.config import ModelConfig
from dsv4.probes.compare import tokens
from dsv4.probes.oracle import kinds
from dsv4.probes.subject import Subject

MOST = 2048  # tokens by default: the oracle is in float64, and attention is quadratic


def enough(config: ModelConfig) -> int:
    """Tokens after which a query has left its window, chooses among twice as many entries as it may, and sees HCA
    entries."""
    compressed = kinds.CSA * 2 * config.index_topk if kinds.CSA in config.compress_ratios else 0
    T = config.sliding_window + max(compressed, 2 * 128) + 3
    return min(T, MOST, config.max_position_embeddings)


def ids_for(subject: Subject, checkpoint: Path, text: Path | None, count: int | None, seed: int = 0) -> torch.Tensor:
    """int64 [1, T]: of a text file if given, else random; T is `count`, else `enough` (all of a shorter text).

    Raises InputError for a count that the model has no positions for, an empty or unreadable text, a missing tokenizer.
    """
    limit = subject.config.max_position_embeddings
    if count is not None and not 1 <= count <= limit:
        raise InputError(f"--tokens is {count}; expected 1 … {limit}, the checkpoint's max_position_embeddings")
    T = count or enough(subject.config)
    if text is None:
        return tokens(subject, T, seed)
    from dsv4.model.tokenizer import Tokenizer

    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the text {text}: {error}") from None
    ids = Tokenizer(checkpoint, subject.config.vocab_size).encode(content)[:T]
    if not ids:
        raise InputError(f"the text {text} has no tokens")
    return torch.tensor([ids])
