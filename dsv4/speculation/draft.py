"""Drafters propose next tokens for every row of a ragged batch.

Proposals decide how many tokens a verify pass yields, never which tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from dsv4.cache.cache import Cache
from dsv4.errors import InputError
from dsv4.model.causal import CausalLM, captures
from dsv4.model.cut_values import Logits, Values
from dsv4.sending import sent
from dsv4.speculation.captured import CapturedBlock


class Drafts(NamedTuple):
    """tokens int64 [B, W]; row b has its first sizes[b] filled. q fp32 [B, W, V]: the distribution that they were drawn
    from; None if chosen. steps: runs of a drafting model that each row took part in."""

    tokens: torch.Tensor
    sizes: list[int]
    q: Values | None
    steps: list[int]


# logits fp32 [M, V] of row indices [M] → (token ids int64 [M], q [M, V] or None)
Choose = Callable[[Logits, list[int]], tuple[torch.Tensor, Values | None]]


class Drafter(ABC):
    """Drafts for a batch. `needs_streams`: whether it needs the main model's streams before the head; `needs_mtp`:
    whether it needs the MTP block. `draft_tokens`: its default number of drafts a pass."""

    name: str
    draft_tokens = 3
    needs_streams = needs_mtp = False
    captured: CapturedBlock | None = None  # the object that runs a drafting model, once a batch has begun

    @abstractmethod
    def begin(self, prompts: list[list[int]], model: CausalLM, cache: Cache, choose: Choose) -> None:
        """A new batch. `choose` draws a token from a draft's logits as the request samples."""

    @abstractmethod
    def join(self, b: int, prompt: list[int]) -> None:
        """Row b begins anew with another prompt."""

    def prefilled(self, streams: torch.Tensor, next_ids: torch.Tensor, counts: list[int]) -> None:
        """A piece of the prompts ran: as `commit`, for tokens that `begin` or `join` got already."""

    def due(self, b: int) -> int:
        """Final tokens of row b that a drafting model still has to run before its first draft."""
        return 0

    def settle(self, b: int) -> None:
        """Run the tokens that are due in row b, as `draft` would, without drafting."""

    @abstractmethod
    def commit(self, streams: torch.Tensor | None, tokens: torch.Tensor, counts: list[int]) -> None:
        """tokens int64 [B, T] on the host: row b's next counts[b] tokens are final. streams [B, T, n, d]: the main
        model's at the positions before each of them; None unless `needs_streams`."""

    @abstractmethod
    def draft(self, sizes: list[int]) -> Drafts:
        """At most sizes[b] drafts for row b after its last final token."""


def needs_block(drafter: Drafter | None) -> bool:
    """Whether drafts need the MTP block; None drafts nothing."""
    return drafter is not None and drafter.needs_mtp


class MTPDrafter(Drafter):
    """Chained drafts of the MTP block.

    The block's entry at position t is computed from the streams at t and the token at t + 1. Beyond the last final
    token the main model's streams do not exist yet, so the block's own are fed back. Such entries are dropped after
    drafting, and computed again from the main model's streams after verification. So between drafts the block's cache
    equals that of a block that never drafted.

    Final tokens wait in `_due` until the row drafts again. Then they run through the block as one step, which also
    gives the first draft.
    """

    name, needs_streams, needs_mtp = "mtp", True, True
    # the best static size, or close to it, wherever it was measured: each draft costs a layer and a head, and the first
    # is right most often
    draft_tokens = 1

    def begin(self, prompts: list[list[int]], model: CausalLM, cache: Cache, choose: Choose) -> None:
        self._model, self._cache, self._choose = model, cache, choose
        self._run = self.captured = CapturedBlock(model, cache, captures(model))
        # (streams [c, n, d], next ids [c]) of a row
        self._due: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in prompts]

    def join(self, b: int, prompt: list[int]) -> None:
        self._due[b] = []

    def due(self, b: int) -> int:
        return sum(len(ids) for _, ids in self._due[b])

    def settle(self, b: int) -> None:
        if self._due[b]:
            streams, ids, counts = self._take([b])
            self._model.mtp_logits(streams, ids, self._cache, n_new=counts, logits="none")

    def prefilled(self, streams: torch.Tensor, next_ids: torch.Tensor, counts: list[int]) -> None:
        self._model.mtp_logits(streams, next_ids, self._cache, n_new=counts, logits="none")

    def commit(self, streams: torch.Tensor | None, tokens: torch.Tensor, counts: list[int]) -> None:
        for b, n in enumerate(counts):
            if n:
                self._due[b].append((streams[b, :n], tokens[b, :n]))

    def draft(self, sizes: list[int]) -> Drafts:
        width, B = max(sizes, default=0), len(sizes)
        tokens, q = torch.zeros(B, width, dtype=torch.int64, device=self._model.device), None
        streams, step_ids, counts = self._take([b for b in range(B) if sizes[b]])
        for i in range(width):
            rows = [b for b in range(B) if sizes[b] > i]
            logits, streams = self._run(streams, step_ids, counts)
            which = sent(rows, logits.device)
            chosen, from_ = self._choose(logits[which, 0], rows)
            tokens[which, i] = chosen
            if from_ is not None:
                q = from_.new_zeros(B, width, from_.shape[-1]) if q is None else q
                q[which, i] = from_
            step_ids, counts = tokens[:, i : i + 1], [int(size > i + 1) for size in sizes]
        # all but the first were computed from the block's own streams
        self._cache.rewind_mtp([max(0, size - 1) for size in sizes])
        return Drafts(tokens, list(sizes), q, list(sizes))

    def _take(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The tokens due in `rows`: streams [B, T, n, d], next ids [B, T], and how many of each row."""
        counts = [0] * len(self._due)
        if not rows:
            return torch.empty(0), torch.empty(0), counts
        due = {b: tuple(torch.cat(parts) for parts in zip(*self._due[b])) for b in rows}
        widest, some = max(len(ids) for _, ids in due.values()), due[rows[0]][0]
        streams = some.new_zeros(len(self._due), widest, *some.shape[1:])
        ids = torch.zeros(len(self._due), widest, dtype=torch.int64)
        for b, (own, following) in due.items():
            counts[b], self._due[b] = len(following), []
            streams[b, : counts[b]], ids[b, : counts[b]] = own, following
        return streams, ids, counts


class LookupDrafter(Drafter):
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). It drafts the tokens after the latest
    earlier occurrence of the longest suffix of the row, in prompt and output alike. It needs no drafting model."""

    name = "lookup"

    def __init__(self, longest: int = 4, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise InputError(
                f"prompt lookup of {shortest} to {longest} tokens was asked for; expected 1 <= shortest <= longest"
            )
        self.longest, self.shortest = longest, shortest

    def begin(self, prompts: list[list[int]], model: CausalLM, cache: Cache, choose: Choose) -> None:
        self._rows = [_NGrams(self.longest, self.shortest) for _ in prompts]
        for b, prompt in enumerate(prompts):
            self.join(b, prompt)

    def join(self, b: int, prompt: list[int]) -> None:
        self._rows[b] = _NGrams(self.longest, self.shortest)
        self._rows[b].extend(prompt)

    def commit(self, streams: torch.Tensor | None, tokens: torch.Tensor, counts: list[int]) -> None:
        for row, found, n in zip(self._rows, tokens.tolist(), counts):
            row.extend(found[:n])

    def draft(self, sizes: list[int]) -> Drafts:
        found = [row.continuation(size) if size else [] for row, size in zip(self._rows, sizes)]
        width = max(map(len, found), default=0)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.int64).view(
            len(sizes), width
        )
        return Drafts(tokens, list(map(len, found)), None, [0] * len(sizes))


class _NGrams:
    """Tokens of one row and the position after each n-gram's last occurrence: a constant amount of work a token."""

    def __init__(self, longest: int, shortest: int):
        self.tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → position of the token after its last occurrence

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            for n in self._lengths:  # the n-grams that end at the previous token: only now does a token follow them
                if n <= len(self.tokens):
                    self._after[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def continuation(self, size: int) -> list[int]:
        """Up to `size` tokens after the longest known suffix. A match that reaches the end continues into its own
        drafts (a period)."""
        for n in self._lengths:
            position = self._after.get(tuple(self.tokens[-n:])) if n <= len(self.tokens) else None
            if position is not None:
                drafted: list[int] = []
                for i in range(position, position + size):
                    drafted.append(self.tokens[i] if i < len(self.tokens) else drafted[i - len(self.tokens)])
                return drafted
        return []


def check_can_speculate(model: CausalLM, drafter: Drafter) -> None:
    """Raises InputError, naming what to do instead, where `drafter` cannot run on this model."""
    if model.backend == "training":
        raise InputError(
            "the training backend runs whole sequences and keeps no cache to rewind; speculate with reference, "
            "cpu or triton"
        )
    if drafter.needs_mtp and not len(model.mtp):
        raise InputError(
            "drafting with the MTP block was asked for, and this model has none; use --speculate lookup, which "
            "drafts from the text itself, or --speculate off"
        )
