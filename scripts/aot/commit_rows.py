"""The end of a round of speculative decoding to compile ahead of time, for one row and for many, of one token and of
nine."""

from unittest.mock import patch

import torch

from dsv4.kernels.commit_rows import HEAD
from dsv4.kernels.commit_rows import triton as commit_rows
from scripts.aot.linear import empty, launches

TOKENS, ROOM, ROUNDS = 9, 1024, 64


def cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options)."""
    ints, found = lambda *shape: empty(*shape, dtype=torch.int64), []
    for B, T, S in ((1, 1, 1), (1, 9, 3), (32, 5, 1), (128, 9, 1), (128, 9, 8)):

        def call(B=B, T=T, S=S):
            chosen, done, rows = ints(B, T), empty(B, dtype=torch.bool), [ints(B) for _ in range(5)]
            commit_rows.commit(
                chosen, *rows[:2], ints(S), ROOM, *rows[2:], done, ints(B, ROOM + TOKENS), ints(ROOM + 8, 3, B), ints(1)
            )
            commit_rows.record(chosen, *rows[:4], done, rows[4], ints(1), ints(ROUNDS, B, HEAD + TOKENS))

        with patch.object(commit_rows, "require_device", lambda *_: None):
            found += launches(f"commit rows, {B} rows of {T} tokens, {S} stops", call)
    return found
