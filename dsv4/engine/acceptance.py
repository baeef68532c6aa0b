"""How a pass draws drafts, and which tokens it gives: two rules over the same logits.

`Rejection` is rejection sampling of a whole batch at one temperature. `Drawn` draws each token as plain decoding does,
so that a request's tokens do not depend on how many were drafted where (`dsv4.speculation.accept`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.engine.state import Verdict, Work
from dsv4.errors import NotFinite
from dsv4.model import cut_values
from dsv4.model.cut_values import finite
from dsv4.sampling import Sampling, distribution, draw, sample
from dsv4.sending import sent
from dsv4.speculation.accept import Accepted, accept_drawn, accept_greedy, accept_sampled
from dsv4.speculation.draft import Drafts


class Acceptance(ABC):
    """The interface. Work in row b has place b of every batch."""

    def begin(self, works: Sequence[Work]) -> None:
        """A pass over these rows begins; `choose` may be called for them."""
        self.works = {work.row: work for work in works}

    @abstractmethod
    def choose(self, logits: cut_values.Logits, rows: list[int]) -> tuple[torch.Tensor, cut_values.Values | None]:
        """Tokens int64 [M] from a drafting model's logits [M, vocab] for `rows`, and the distribution [M, vocab] they
        were drawn from; None if they were chosen."""

    @abstractmethod
    def judge(self, works: Sequence[Work], logits: cut_values.Logits, drafts: Drafts) -> list[Verdict]:
        """What each of `works` gets, from logits fp32 [B, W + 1, vocab] after its last token and after each of its
        drafts. Here the host waits for the device, once. Rows that have ended get something that means nothing."""


class Rejection(Acceptance):
    """Each row draws from its own generator, as often as it has drafts, so its draws do not depend on other rows."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling

    def choose(self, logits: cut_values.Logits, rows: list[int]) -> tuple[torch.Tensor, cut_values.Values | None]:
        if self.sampling.temperature == 0:
            return logits.argmax(-1), None
        q = distribution(logits, self.sampling)
        u = torch.stack([torch.rand((), dtype=torch.float64, generator=self.works[b].generator) for b in rows])
        return draw(q, u.to(q.device, non_blocking=True)), q

    def judge(self, works: Sequence[Work], logits: cut_values.Logits, drafts: Drafts) -> list[Verdict]:
        count, tokens = self._accept(logits, drafts, works)
        W = tokens.shape[1]
        read_back = torch.cat((tokens, drafts.tokens.to(tokens.device), count.unsqueeze(1)), 1).tolist()
        rows = [(read_back[work.row], drafts.sizes[work.row]) for work in works]
        return [Verdict(row[: row[-1] + 1], row[-1], row[W : W + size]) for row, size in rows]

    def _accept(self, logits: cut_values.Logits, drafts: Drafts, works: Sequence[Work]) -> Accepted:
        drafted, sizes = drafts.tokens.to(logits.device), torch.tensor(drafts.sizes, device=logits.device)
        if self.sampling.temperature == 0:
            return accept_greedy(logits, drafted, sizes)
        u = torch.zeros(len(logits), drafted.shape[1] + 1, dtype=torch.float64)
        for work in works:
            if work.active:
                n = drafts.sizes[work.row] + 1
                u[work.row, :n] = torch.rand(n, dtype=torch.float64, generator=work.generator)
        u = u.to(logits.device, non_blocking=True)
        return accept_sampled(distribution(logits, self.sampling), drafts.q, drafted, sizes, u[:, 1:], u[:, 0])


class Logits(NamedTuple):
    """values fp32 [M, vocab]; the likeliest token of each of the M, and whether all its logits are finite."""

    values: cut_values.Logits
    best: list[int]
    finite: list[bool]


def read(values: cut_values.Logits, beside: torch.Tensor | None = None) -> tuple[list[Logits], list[list[int]]]:
    """Split values [N, M, vocab] into those of each row; the int64 [N, …] results come as lists. Here the host waits
    for the device, once for all of them."""
    M = values.shape[1]
    read_back = torch.cat((values.argmax(-1), finite(values), *([] if beside is None else [beside])), 1).tolist()
    return [Logits(own, row[:M], list(map(bool, row[M : 2 * M]))) for own, row in zip(values, read_back)], [
        row[2 * M :] for row in read_back
    ]


class Drawn(Acceptance):
    """Each row has a sampling of its own. A draft is drawn as the token in its place will be, so equal logits give
    equal tokens; the request's own generator does not advance. Logits that are not finite end a row."""

    def __init__(self, batch: int, device: torch.device):
        self.batch, self.device = batch, device

    def begin(self, works: Sequence[Work]) -> None:
        super().begin(works)
        self.drawing: dict[int, torch.Generator] = {}  # by row, of those that have drawn a draft
        self.finite = torch.ones(self.batch, dtype=torch.bool, device=self.device)  # rows whose draft logits all were

    def choose(self, logits: cut_values.Logits, rows: list[int]) -> tuple[torch.Tensor, None]:
        tokens, fit = logits.argmax(-1), finite(logits)
        self.finite[sent(rows, fit.device)] &= fit
        for i, b in enumerate(rows):
            work = self.works[b]
            if work.request.sampling.temperature and fit[i]:
                if b not in self.drawing:
                    self.drawing[b] = _copy(work.generator)
                tokens[i] = sample(logits[i], work.request.sampling, self.drawing[b])
        return tokens, None

    def judge(self, works: Sequence[Work], logits: cut_values.Logits, drafts: Drafts) -> list[Verdict]:
        first = works[0].row if len(works) == 1 else 0  # what a row alone does not need is not looked at
        rows = slice(first, first + 1) if len(works) == 1 else slice(None)
        found, beside = read(logits[rows], torch.cat((self.finite.unsqueeze(1), drafts.tokens), 1)[rows])
        return [self._judged(w, found[w.row - first], beside[w.row - first][: 1 + drafts.sizes[w.row]]) for w in works]

    def _judged(self, work: Work, logits: Logits, beside: list[int]) -> Verdict:
        fit, *drafts = beside
        tokens, error = self.accept(work, logits, drafts) if fit else ([], unfit_drafts(len(work.ids)))
        return Verdict(tokens, sum(token == draft for token, draft in zip(tokens, drafts)), drafts, error)

    def accept(self, work: Work, logits: Logits, drafts: list[int]) -> tuple[list[int], NotFinite | None]:
        """The new tokens of a request, from logits [W + 1] after its last token and after each of its drafts; none is
        drawn behind a stop id. Logits that are not finite end them too, and then the error is also returned."""
        tokens, greedy = [], work.request.sampling.temperature == 0

        def choice(place: int) -> int:
            if not logits.finite[place]:
                raise NotFinite(
                    f"the logits after {len(work.ids) + place} tokens are not finite; audit the checkpoint and numerics"
                )
            return logits.best[place] if greedy else sample(logits.values[place], work.request.sampling, work.generator)

        try:
            for token in accept_drawn(drafts, choice):
                tokens.append(token)
                if token in work.stops:
                    break
        except NotFinite as error:
            return tokens, error
        return tokens, None


def unfit_drafts(tokens: int) -> NotFinite:
    return NotFinite(
        f"the draft logits after {tokens} tokens are not finite; audit the checkpoint's MTP block, or decode with "
        "--speculate off"
    )


def _copy(generator: torch.Generator) -> torch.Generator:
    found = torch.Generator()
    found.set_state(generator.get_state())
    return found
