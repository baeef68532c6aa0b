"""One pass over rows of a cache: draft, verify, decide, give, keep. The engine's text in pieces runs here too.

A row always holds one final token that the model has not run yet. A pass runs it and the drafts after it, position by
position as plain decoding would, and keeps the longest prefix that plain decoding could have produced. Caches are
addressed by position, so a rewind only sets lengths: of window, entries, index keys, compressor rows and the MTP
block's window.

On pages the last token takes its pages as text does: other requests may be evicted for it. Drafts get only free pages,
and there are as few drafts as those allow: no request is evicted for a draft. Text is known before it runs: a prompt,
or the tokens of an evicted request. The MTP block runs one token behind, because its entry at a token needs the next
token too. So its pieces are the same whether a row began cold or with a borrowed prefix.
"""

from collections.abc import Callable, Sequence

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paging import BLOCK
from dsv4.engine.acceptance import Acceptance
from dsv4.engine.state import PagedWork, Verdict, Work
from dsv4.errors import Dsv4Error
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits
from dsv4.sending import sent
from dsv4.speculation.draft import Drafter, Drafts
from dsv4.speculation.passes import Verify


class Passes:
    """Runs rows of `cache`, on pages or not. drafter None: nothing is drafted. verify(model, cache): makes what runs a
    pass. prompts: of the rows that are there already. pressure(): whether pages are short, by default as the cache
    says. on_end(work, error): called when a request has ended, or cannot go
    on."""

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        drafter: Drafter | None,
        acceptance: Acceptance,
        verify: Callable[[CausalLM, Cache], Verify],
        prompts: Sequence[list[int]] | None = None,
        pressure: Callable[[], bool] | None = None,
        on_end: Callable[[Work, Dsv4Error | None], None] = lambda work, error: None,
    ):
        self.model, self.cache, self.drafter, self.acceptance = model, cache, drafter, acceptance
        self.verify, self.on_end = verify(model, cache), on_end
        self.pressure = pressure or (lambda: cache.under_pressure)
        self.wants_streams = drafter is not None and drafter.needs_streams
        if drafter is not None:
            drafter.begin(prompts or [[] for _ in range(cache.batch)], model, cache, acceptance.choose)

    # ---- a pass --------------------------------------------------------------------------

    def advance(self, works: Sequence[Work]) -> bool:
        """Run one pass over `works`, which get its tokens; one that has ended rests. Returns whether its sizes were
        chosen under pressure. Raises OutOfPages before it runs anything."""
        for work in works:  # all rows get pages for final tokens before any row gets pages for drafts
            self.cache.make_room(slice(work.row, work.row + 1), 1)
        pressed, before = self.pressure(), self.cache.lengths
        self.acceptance.begin(works)
        drafts = self._draft(self._sizes(works, pressed))
        ids, counts = self._pending(works, drafts)
        logits, streams = self.verify(ids, counts, self.wants_streams)
        back = [now - was for now, was in zip(self.cache.lengths, before)]
        came, places = {}, [work.row for work in works]
        for work, b, verdict in zip(works, places, self.acceptance.judge(works, logits, drafts)):
            if work.active:  # else it rested, or the callback of another result cancelled it
                n = work.take(verdict, drafts.steps[b], pressed)
                back[b] -= n
                self._settle(work, verdict, n, came)
        for work, b in zip(works, places):
            if work.row is None:  # it has left its row, which is empty
                back[b] = 0
                came.pop(b, None)
        if any(back) or came:
            self._hold(streams, came, back)
        return pressed

    def first(self, works: Sequence[Work], logits: Logits, streams: torch.Tensor | None) -> None:
        """Give the token after each prompt. logits fp32 [B, 1, vocab] and, if the drafter wants them, streams [B, 1, n,
        d]: of the prompts' last tokens."""
        self.acceptance.begin(works)
        none, came = self._draft([0] * self.cache.batch), {}
        for work, verdict in zip(works, self.acceptance.judge(works, logits, none)):
            self._settle(work, verdict, work.give(verdict.tokens), came)
        self._commit(streams, came)

    def _settle(self, work: Work, verdict: Verdict, n: int, came: dict[int, list[int]]) -> None:
        """A request got the first n tokens of a verdict: note them in `came` if it goes on, else end it."""
        if work.active and verdict.error is None:
            came[work.row] = verdict.tokens[:n]
        else:
            self.on_end(work, verdict.error)

    def _hold(self, streams: torch.Tensor | None, came: dict[int, list[int]], back: list[int]) -> None:
        """Rewind each row by what it ran and does not keep; came[b]: the tokens of row b that came out, of which the
        last has not run yet."""
        self.cache.rewind(back)
        for b in came:
            self.cache.commit(b)
        self._commit(streams, came)

    def _commit(self, streams: torch.Tensor | None, came: dict[int, list[int]]) -> None:
        """Report tokens to the drafter. streams [B, T, n, d]: the model's at the positions before them."""
        if self.drafter is not None and came:
            counts = [len(came.get(b, ())) for b in range(self.cache.batch)]
            ids = torch.tensor([came.get(b, []) + [0] * (max(counts) - n) for b, n in enumerate(counts)])
            self.drafter.commit(streams, ids, counts)

    def _sizes(self, works: Sequence[Work], pressed: bool) -> list[int]:
        """The number of drafts of each row: the policy's size, within what the request and the cache allow, and the
        free pages. Takes the pages."""
        sizes = [0] * self.cache.batch
        if self.drafter is None:
            return sizes
        for policy in dict.fromkeys(work.policy for work in works):  # rows of one policy are decided together
            own = [work for work in works if work.policy is policy]
            chosen = policy.choose([work.state if work.active else None for work in own], pressed)
            for work, wanted in zip(own, chosen, strict=True):
                sizes[work.row] = self._reserve(work, work.drafts(wanted, self.cache.max_rewind))
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

    def _draft(self, sizes: list[int]) -> Drafts:
        """Drafts of these sizes, on the device."""
        if not any(sizes):
            none = torch.zeros(len(sizes), 0, dtype=torch.int64, device=self.model.device)
            return Drafts(none, sizes, None, [0] * len(sizes))
        drafts = self.drafter.draft(sizes)
        return drafts._replace(tokens=sent(drafts.tokens, self.model.device))

    def _pending(self, works: Sequence[Work], drafts: Drafts) -> tuple[torch.Tensor, list[int]]:
        """What a pass runs: each row's last token and its drafts int64 [B, W + 1], on the device, and how many of each
        row."""
        pending = torch.zeros(self.cache.batch, 1, dtype=torch.int64)
        counts = [0] * self.cache.batch
        for work in works:
            pending[work.row, 0], counts[work.row] = work.ids[-1], (1 + drafts.sizes[work.row]) * work.active
        return torch.cat((sent(pending, self.model.device), drafts.tokens), 1), counts

    # ---- text, on pages ------------------------------------------------------------------

    def join(self, work: PagedWork, text: int) -> None:
        """`work` has joined its row, which is empty; its first `text` tokens will run as text."""
        work.text, work.again, work.streams = text, 0, None
        if text == len(work.ids):
            work.passes.clear()
        if self.drafter is not None:
            self.drafter.join(work.row, work.ids[:text])

    def read(self, work: PagedWork, start: int, end: int, last: bool) -> Logits | None:
        """Run tokens start … end − 1 of a row's text; returns the logits [B, 1, vocab], right in that row, after the
        last if wanted. Raises OutOfPages before it runs anything."""
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
            whole=False,
        )
        logits, streams = out if self.wants_streams else (out, None)
        if self.wants_streams:
            behind = torch.cat((work.streams, streams[b])) if begun else streams[b]
            work.streams = streams[b, -1:].clone()
            if len(behind) > 1:
                following, counts = self._alone(b, torch.tensor(work.ids[end - len(behind) + 1 : end]))
                self.drafter.prefilled(self._alone(b, behind[:-1])[0], following, counts)
        return logits

    def read_chunks(self, works: Sequence[PagedWork], ends: Sequence[int], last: bool) -> Logits | None:
        """Run the prompts of several rows on to `ends`, as one batch where neighbouring rows begin at one position: the
        model reads prompts in chunks. Returns logits [B, 1, vocab], right in these rows, if wanted. Raises OutOfPages
        before it runs anything."""
        counts, pieces = [0] * self.cache.batch, [torch.zeros(0, dtype=torch.int64)] * self.cache.batch
        for work, end in zip(works, ends):
            start = self.cache.lengths[work.row]
            self.cache.make_room(slice(work.row, work.row + 1), end - start)
            pieces[work.row], counts[work.row] = torch.tensor(work.ids[start:end]), end - start
        ids = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        wanted = "last" if last else "none"
        return self.model.append(ids, self.cache, n_new=counts, logits=wanted, prompt=True, whole=False)

    def behind(self, work: PagedWork) -> torch.Tensor | None:
        """Streams [B, 1, n, d] of the last token of a row's text, which are then forgotten; None if nobody wants
        them."""
        streams, work.streams = work.streams, None
        return None if streams is None else self._alone(work.row, streams)[0]

    def follow(self, work: PagedWork, token: int) -> None:
        """`token` comes after the text, all of which has run."""
        self._commit(self.behind(work), {work.row: [token]})

    def again(self, work: PagedWork) -> None:
        """Run the next pass of a row that resumes, as it first ran. Raises OutOfPages before it runs anything."""
        drafts, kept = work.passes[work.again]
        row, start = slice(work.row, work.row + 1), self.cache.lengths[work.row]
        self.cache.make_room(row, 1 + len(drafts))
        if drafts and self.wants_streams:
            self.cache.make_room(row, self.drafter.due(work.row), mtp=True)
            self.drafter.settle(work.row)
        ids, counts = self._alone(work.row, torch.tensor([work.ids[start], *drafts]))
        _, streams = self.verify(ids, counts, self.wants_streams)
        back = [n - kept if n else 0 for n in counts]
        self._hold(streams, {work.row: work.ids[start + 1 : start + 1 + kept]}, back)
        work.again += 1

    def _alone(self, b: int, values: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """values [T, ...] of row b as a batch [B, T, ...] in which the other rows rest, and the counts."""
        whole = values.new_zeros(self.cache.batch, *values.shape)
        whole[b] = values
        return whole, [len(values) * (row == b) for row in range(self.cache.batch)]
