"""The batch engine with a drafter. Its model chooses a scripted text, and each of its passes is recorded as it
begins."""

from dataclasses import dataclass, field

import torch

from dsv4.cache.paged import PagedCache, new_paged_cache
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.engine.batch import BatchEngine
from dsv4.engine.state import Request, Result
from dsv4.model.cut_values import whole
from dsv4.probes.compare import tokens
from dsv4.probes.scenes.cache_contents import Rows, visible
from dsv4.probes.scenes.scripted import Script, Steered
from dsv4.probes.subject import Subject
from dsv4.speculation.draft import Drafter, Drafts, MTPDrafter
from dsv4.speculation.passes import SingleSteps
from dsv4.speculation.policy import Static

LENGTHS = (121, 6)  # of prompts, by turns: passes cross 128; the window is not full yet
SPARE = 4 * MAX_DRAFTS  # additional tokens of context, for an engine that rewinds too little


class Paced(Steered):
    """`Steered`, where each row counts its own passes: in the engine rows draft at different times."""

    def begin(self, prompts, model, cache, choose) -> None:
        super().begin(prompts, model, cache, choose)
        self.passed = [0] * len(prompts)

    def join(self, b: int, prompt: list[int]) -> None:
        super().join(b, prompt)
        self.passed[b] = 0

    def due(self, b: int) -> int:
        return 0 if self.inner is None else self.inner.due(b)

    def settle(self, b: int) -> None:
        if self.inner is not None:
            self.inner.settle(b)

    @property
    def captured(self):
        return None if self.inner is None else self.inner.captured

    def draft(self, sizes: list[int]) -> Drafts:
        self.logits.append([])
        steps = self.inner.draft(sizes).steps if self.inner is not None else [0] * len(sizes)
        right = [row[min(n, len(row) - 1)] for row, n in zip(self.right, self.passed)]
        self.passed = [n + (size > 0) for n, size in zip(self.passed, sizes)]
        return Drafts(self.script.drafts(self.at, sizes, right), list(sizes), None, steps)


@dataclass
class Pass:
    """One pass of one row: what the row may read as it begins, and its logits [n, vocab]."""

    rows: Rows
    logits: torch.Tensor


@dataclass
class Scene:
    """An engine whose model follows a script. right: accepted drafts of each request, by pass."""

    subject: Subject
    right: list[list[int]]
    together: bool
    seed: int
    rows: int = 0
    passes: dict[int, list[Pass]] = field(default_factory=dict)  # by row
    results: dict[str, Result] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)  # messages about the first wrong length, by kind
    lost: set[int] = field(default_factory=set)  # rows whose length was wrong

    def __post_init__(self) -> None:
        subject, n, g = self.subject, len(self.right), tokens(self.subject, max(LENGTHS), self.seed, len(self.right))
        self.rows = self.rows or n
        self.prompts = [g[b, : LENGTHS[b % len(LENGTHS)]].tolist() for b in range(n)]
        self.most = [1 + sum(a + 1 for a in row) for row in self.right]
        self.limit = max(LENGTHS) + max(self.most) + SPARE
        self.script = Script(subject.config.vocab_size, n, max(self.most) + MAX_DRAFTS + 2, self.seed)
        self.cache: PagedCache = new_paged_cache(subject.model, self.rows, self.limit)
        self.drafter = Paced(self.script, self.right, self.inner())
        self.ran: list[int] = []
        self.engine = BatchEngine(
            subject.model,
            self.cache,
            together=self.together,
            on_result=lambda result: self.results.update({result.id: result}),
            drafter=self.drafter,
            policy=Static(MAX_DRAFTS),
            verify=lambda model, cache: self._watched(SingleSteps(model, cache)),
        )

    def inner(self) -> Drafter | None:
        return MTPDrafter() if len(self.subject.model.mtp) else None

    def submit(self, b: int) -> None:
        self.engine.submit(Request(str(b), tuple(self.prompts[b]), max_tokens=self.most[b]))

    def run(self) -> list[list[int]]:
        for b in range(len(self.right)):
            self.submit(b)
        self.engine.run()
        return [self.results[str(b)].token_ids for b in range(len(self.right))]

    def _watched(self, inner: SingleSteps):
        def watched(ids: torch.Tensor, counts: list[int], want_streams: bool):
            lengths, mtp, active = self.cache.lengths, self.cache.mtp_lengths, [b for b, n in enumerate(counts) if n]
            self._lengths(lengths)
            self.ran = active
            began = {b: visible(self.subject, self.cache, b, lengths[b], mtp[b]) for b in active}
            logits, streams = inner(ids, counts, want_streams)
            seen = whole(logits)
            for b in active:
                self.passes.setdefault(b, []).append(Pass(began[b], seen[b, : counts[b]].cpu().clone()))
            of = {work.row: int(work.request.id) for work in self.engine.running}
            said = [lengths[b] - len(self.prompts[of.get(b, 0)]) + 1 for b in range(len(counts))]
            at = [min(max(1, n), self.script.text.shape[1]) for n in said]
            return self.script.obeyed(logits, ids, at), streams

        return watched

    def _lengths(self, lengths: list[int]) -> None:
        """Each decoding row must hold its prompt and its output except the last token."""
        for work in self.engine.running:
            b, due = work.row, len(work.ids) - 1
            if work.result.token_ids and lengths[b] != due and b not in self.lost:
                self.lost.add(b)
                kind = "engine rewind, of another row" if self.ran and b not in self.ran else "engine rewind, length"
                self.off.setdefault(kind, f"row {b} holds {lengths[b]} tokens and {due} of it are final")
