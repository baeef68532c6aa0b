"""How rows of the engine run: text in pieces, and passes that verify drafts.

Text is known before it runs: a prompt, or the tokens of an evicted request. The MTP block runs one token behind,
because its entry at a token needs the next token too. So its pieces are the same whether a row began cold or with a
borrowed prefix.

A pass runs a row's last token and the drafts after it. The last token takes its pages as text does: other requests may
be evicted for it. Drafts get only free pages, and there are as few drafts as those allow: no request is evicted for a
draft.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.cache.paged import PagedCache
from dsv4.cache.paging import BLOCK
from dsv4.engine.work import Pass, Work
from dsv4.model.causal import CausalLM
from dsv4.sampling import sample
from dsv4.sending import sent
from dsv4.speculation.draft import Drafter, Drafts
from dsv4.speculation.policy import room


@dataclass
class PassOutcome:
    """A pass that ran. logits: of each row after its last token and after each of its drafts; streams [B, W + 1, n, d],
    None if not wanted; ran: how many tokens of each row; drafts: of each row; steps: of the drafting model; pressed:
    whether sizes were chosen under pressure; broken: rows whose draft logits were not finite."""

    logits: dict[int, "Logits"]
    streams: torch.Tensor | None
    ran: list[int]
    drafts: dict[int, list[int]]
    steps: dict[int, int]
    pressed: bool
    broken: set[int]


class Logits(NamedTuple):
    """values fp32 [M, vocab]; the likeliest token of each of the M, and whether all its logits are finite."""

    values: torch.Tensor
    best: list[int]
    finite: list[bool]


def read(values: torch.Tensor, beside: torch.Tensor | None = None) -> tuple[list[Logits], list[list[int]]]:
    """Split values [N, M, vocab] into those of each row; the int64 [N, …] results come as lists. Here the host waits
    for the device, once for all of them."""
    M = values.shape[1]
    read_back = torch.cat(
        (values.argmax(-1), values.isfinite().all(-1), *([] if beside is None else [beside])), 1
    ).tolist()
    return [Logits(own, row[:M], list(map(bool, row[M : 2 * M]))) for own, row in zip(values, read_back)], [
        row[2 * M :] for row in read_back
    ]


class Passes:
    """Runs rows of `cache`. drafter None: nothing is drafted. verify(model, cache): makes what runs a pass."""

    def __init__(self, model: CausalLM, cache: PagedCache, drafter: Drafter | None, verify):
        self.model, self.cache, self.drafter, self.verify = model, cache, drafter, verify(model, cache)
        self.wants_streams = drafter is not None and drafter.needs_streams
        self._drawing: dict[int, tuple[Work, torch.Generator]] = {}
        if drafter is not None:
            drafter.begin([[] for _ in range(cache.batch)], model, cache, self._choose)

    def join(self, work: Work, text: int) -> None:
        """`work` has joined its row, which is empty; its first `text` tokens will run as text."""
        work.text, work.again, work.streams = text, 0, None
        if text == len(work.ids):
            work.passes.clear()
        if self.drafter is not None:
            self.drafter.join(work.row, work.ids[:text])

    # ---- text ----------------------------------------------------------------------------

    def read(self, work: Work, start: int, end: int, last: bool) -> Logits | None:
        """Run tokens start … end − 1 of a row's text; returns the logits [1] after the last if wanted. Raises
        OutOfPages before it runs anything."""
        b, row = work.row, slice(work.row, work.row + 1)
        begun = work.streams is not None
        self.cache.make_room(row, end - start)
        if self.wants_streams:
            self.cache.make_room(row, end - start - 1 + begun, mtp=True)
        ids, counts = self._alone(b, torch.tensor(work.ids[start:end]))
        out = self.model.append(
            ids,
            self.cache,
            n_new=counts,
            logits="last" if last else "none",
            chunk=BLOCK,
            return_streams=self.wants_streams,
            prompt=True,
        )
        logits, streams = out if self.wants_streams else (out, None)
        if self.wants_streams:
            behind = torch.cat((work.streams, streams[b])) if begun else streams[b]
            work.streams = streams[b, -1:].clone()
            if len(behind) > 1:
                following, counts = self._alone(b, torch.tensor(work.ids[end - len(behind) + 1 : end]))
                self.drafter.prefilled(self._alone(b, behind[:-1])[0], following, counts)
        return read(logits[b : b + 1])[0][0] if last else None

    def commit_next(self, work: Work, token: int) -> None:
        """`token` comes after the text, all of which has run."""
        if self.drafter is not None:
            streams = None if work.streams is None else self._alone(work.row, work.streams)[0]
            ids, counts = self._alone(work.row, torch.tensor([token]))
            self.drafter.commit(streams, ids, counts)
        work.streams = None

    def _alone(self, b: int, values: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """values [T, ...] of row b as a batch [B, T, ...] in which the other rows rest, and the counts."""
        whole = values.new_zeros(self.cache.batch, *values.shape)
        whole[b] = values
        return whole, [len(values) * (row == b) for row in range(self.cache.batch)]

    # ---- passes --------------------------------------------------------------------------

    def take(self, works: list[Work]) -> PassOutcome:
        """Run one pass over `works`: draft and verify. Raises OutOfPages before it runs anything."""
        for work in works:  # all rows get pages for final tokens before any row gets pages for drafts
            self.cache.make_room(slice(work.row, work.row + 1), 1)
        pressed = self.cache.under_pressure
        drafts, finite = self._draft(works, self._sizes(works, pressed))
        ids, counts = self._pending(works, drafts)
        values, streams = self.verify(ids, counts, self.wants_streams)
        rows = slice(works[0].row, works[0].row + 1) if len(works) == 1 else slice(0, self.cache.batch)
        logits, read_back = read(values[rows], torch.cat((finite.unsqueeze(1), ids[:, 1:]), 1)[rows])
        of = dict(zip(range(rows.start, rows.stop), zip(logits, read_back)))
        return PassOutcome(
            {w.row: of[w.row][0] for w in works},
            streams,
            counts,
            {w.row: of[w.row][1][1 : counts[w.row]] for w in works},
            {w.row: drafts.steps[w.row] for w in works},
            pressed,
            {w.row for w in works if not of[w.row][1][0]},
        )

    def again(self, work: Work) -> None:
        """Run the next pass of a row that resumes, as it first ran. Raises OutOfPages before it runs anything."""
        drafts, kept = work.passes[work.again]
        row, start = slice(work.row, work.row + 1), self.cache.lengths[work.row]
        self.cache.make_room(row, 1 + len(drafts))
        if drafts and self.wants_streams:
            self.cache.make_room(row, self.drafter.due(work.row), mtp=True)
            self.drafter.settle(work.row)
        ids, counts = self._alone(work.row, torch.tensor([work.ids[start], *drafts]))
        _, streams = self.verify(ids, counts, self.wants_streams)
        self._hold(streams, {work.row: work.ids[start + 1 : start + 1 + kept]}, counts)
        work.again += 1

    def keep(self, outcome: PassOutcome, came: list[tuple[Work, list[int]]]) -> None:
        """Keep the tokens that the pass gave to rows that continue, except the last of each row, which has not run
        yet."""
        self._hold(outcome.streams, {work.row: tokens for work, tokens in came}, outcome.ran)
        for work, tokens in came:
            work.passes.append(Pass(outcome.drafts[work.row], len(tokens)))
            work.again = len(work.passes)

    def _hold(self, streams: torch.Tensor | None, came: dict[int, list[int]], ran: list[int]) -> None:
        """Of the ran[b] tokens that row b just ran, keep as many as were accepted."""
        counts = [len(came.get(b, ())) for b in range(self.cache.batch)]
        self.cache.rewind([ran[b] - n if n else 0 for b, n in enumerate(counts)])
        for b in came:
            self.cache.commit(b)
        if self.drafter is not None:
            ids = torch.tensor([came.get(b, []) + [0] * (max(counts) - n) for b, n in enumerate(counts)])
            self.drafter.commit(streams, ids, counts)

    def _sizes(self, works: list[Work], pressed: bool) -> list[int]:
        """The number of drafts of each row: the policy's size, within the context, the tokens still to generate, the
        cache's rewind, and the free pages. Takes the pages."""
        sizes = [0] * self.cache.batch
        if self.drafter is None:
            return sizes
        for policy in dict.fromkeys(work.policy for work in works):  # rows of one policy are decided together
            own = [work for work in works if work.policy is policy]
            for work, wanted in zip(own, policy.choose([w.state for w in own], pressed), strict=True):
                most = room(work.left, self.cache.max_context - self.cache.lengths[work.row])
                sizes[work.row] = self._reserve(work, min(wanted, most, self.cache.max_rewind - 1))
        return sizes

    def _reserve(self, work: Work, size: int) -> int:
        """Take pages for up to `size` drafts. Returns for how many there were free ones."""
        b, row, due = work.row, slice(work.row, work.row + 1), self.drafter.due(work.row)
        block = self.drafter.needs_mtp
        while size > 0 and not (
            self.cache.fits([b], 1 + size) and (not block or self.cache.fits([b], due + size - 1, mtp=True))
        ):
            size -= 1
        if size <= 0:
            return 0
        if block:
            self.cache.make_room(row, due, mtp=True)
        self.cache.speculate(b, final=1)
        self.cache.make_room(row, 1 + size)
        if block:
            self.cache.make_room(row, due + size - 1, mtp=True)
        return size

    def _draft(self, works: list[Work], sizes: list[int]) -> tuple[Drafts, torch.Tensor]:
        """Drafts of these sizes, and bool [B]: the rows whose draft logits were all finite."""
        finite = self._finite = torch.ones(self.cache.batch, dtype=torch.bool, device=self.model.device)
        if not any(sizes):
            return Drafts(torch.zeros(self.cache.batch, 0, dtype=torch.int64), sizes, None, sizes), finite
        # a draft is drawn as the token in its place will be, so equal logits give equal tokens; the request's own
        # generator does not advance
        self._drawing = {w.row: (w, _copy(w.generator)) for w in works}
        return self.drafter.draft(sizes), finite

    def _choose(self, logits: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, None]:
        """Tokens int64 [M] of a drafting model's logits [M, vocab] for `rows`."""
        tokens, finite = logits.argmax(-1), logits.isfinite().all(-1)
        self._finite[sent(rows, finite.device)] &= finite
        for i, b in enumerate(rows):
            work, generator = self._drawing[b]
            if work.request.sampling.temperature and finite[i]:
                tokens[i] = sample(logits[i], work.request.sampling, generator)
        return tokens, None

    def _pending(self, works: list[Work], drafts: Drafts) -> tuple[torch.Tensor, list[int]]:
        """What a pass runs: each row's last token and its drafts int64 [B, W + 1], on the device, and how many of each
        row."""
        pending = torch.zeros(self.cache.batch, 1, dtype=torch.int64)
        counts = [0] * self.cache.batch
        for work in works:
            pending[work.row, 0], counts[work.row] = work.ids[-1], 1 + drafts.sizes[work.row]
        return torch.cat([sent(ids, self.model.device) for ids in (pending, drafts.tokens)], 1), counts


def _copy(generator: torch.Generator) -> torch.Generator:
    found = torch.Generator()
    found.set_state(generator.get_state())
    return found
