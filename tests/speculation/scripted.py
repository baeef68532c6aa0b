"""Drafters that know what plain decoding will say, and are right for as long as a test wants."""

import torch

from dsv4.engine.generate import generate, generate_speculative
from dsv4.speculation.draft import Drafter, Drafts
from dsv4.speculation.policy import Static


class Scripted(Drafter):
    """Drafts the first `right` tokens of the row's known continuation, then wrong ones. right: also a list, a row each,
    or a function of the number of the pass."""

    name = "scripted"

    def __init__(self, continuations: list[list[int]], right, vocab: int):
        self.known, self.right, self.vocab, self.passes = continuations, right, vocab, 0

    def begin(self, prompts, model, cache, choose):
        self.at = [0] * len(prompts)

    def join(self, b, prompt):
        self.at[b] = 0

    def commit(self, streams, tokens, counts):
        for b, n in enumerate(counts):
            self.at[b] += n

    def draft(self, sizes):
        drafted = torch.zeros(len(sizes), max(sizes, default=0), dtype=torch.int64)
        for b, size in enumerate(sizes):
            right = (
                self.right(self.passes)
                if callable(self.right)
                else self.right
                if isinstance(self.right, int)
                else self.right[b]
            )
            for i in range(size):
                place = self.at[b] + i
                true = self.known[b][place] if place < len(self.known[b]) else 0
                drafted[b, i] = true if i < right else (true + 1) % self.vocab
        self.passes += 1
        return Drafts(drafted, list(sizes), None, [0] * len(sizes))


def prompt_of(model, length: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed + 1000 * length)
    return torch.randint(2, model.config.vocab_size, (length,), generator=g).tolist()


def plain(model, ids: list[int], n: int, **options) -> list[int]:
    return generate(model, ids, n, **options).token_ids


def drafted(model, prompts: list[list[int]], n: int, drafter, size: int = 4, **options):
    """Results of `prompts`, with `size` drafts a pass."""
    return generate_speculative(model, prompts, n, drafter, policy=Static(size), **options)
