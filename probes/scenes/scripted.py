"""A text that the model is made to choose, so that every number of accepted drafts can occur.

The logits are really computed and recorded unchanged; then the scripted token is made the largest. The audited code
decides with these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dsv4.cache.cache import Cache
from dsv4.model.cut_values import Logits, whole
from dsv4.model.deepseek_v4 import Model
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.cache_contents import Rows, visible
from dsv4.probes.subject import Subject
from dsv4.speculation.draft import Drafter, Drafts
from dsv4.speculation.passes import Verify

# a draft that is never chosen; the token chosen after one; the token that ends a row; ids of texts from here on
WRONG, ASTRAY, STOP, FIRST_ID = 0, 1, 2, 3
CERTAIN = 1e9  # a logit beyond all others


class Script:
    """text int64 [B, n]: token i of a row's output, from i = 1 on (prefill chooses token 0). astray, wrong: ids, by
    row."""

    def __init__(self, vocab: int, rows: int, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.text = torch.randint(FIRST_ID, vocab, (rows, n), generator=g)
        self.astray, self.wrong = [ASTRAY] * rows, [WRONG] * rows

    def chosen(self, ids: torch.Tensor, at: list[int]) -> torch.Tensor:
        """int64 [B, W]: what the model chooses after each of ids [B, W], of which the first of row b precedes token
        at[b]."""
        ids, found = ids.cpu(), []
        for b, row in enumerate(ids.tolist()):
            text, right, out = self.text[b].tolist() + [ASTRAY] * len(row), True, []
            for j, token in enumerate(row):
                right = right and (j == 0 or token == text[at[b] + j - 1])
                out.append(text[at[b] + j] if right else self.astray[b])
            found.append(out)
        return torch.tensor(found, dtype=torch.int64)

    def drafts(self, at: list[int], sizes: list[int], right: list[int]) -> torch.Tensor:
        """int64 [B, max size]: row b's first right[b] drafts are what follows, the others wrong; 0 beyond its size."""
        found = torch.zeros(len(at), max(sizes, default=0), dtype=torch.int64)
        for b, size in enumerate(sizes):
            for i in range(size):
                found[b, i] = (
                    self.text[b, at[b] + i] if i < right[b] and at[b] + i < self.text.shape[1] else self.wrong[b]
                )
        return found

    def obeyed(self, logits: Logits, ids: torch.Tensor, at: list[int]) -> torch.Tensor:
        """A copy of logits [B, W, vocab], on every rank all of them, whose largest is what the script chooses."""
        choice = self.chosen(ids, at)[:, : logits.shape[1]].to(logits.device)
        return whole(logits).clone().scatter_(2, choice.unsqueeze(-1), CERTAIN)

    def outcome(
        self, b: int, first: int, size: int, right: list[int], most: int, first_ends: bool = True
    ) -> tuple[list[int], list[int]]:
        """(tokens, drafts accepted in each pass) of a row that is drafted `size` tokens a pass, right[k] of them right
        in pass k, until STOP (also as the first token, if first_ends) or `most` tokens."""
        out, accepted = [first], []
        while len(out) < most and (out[-1] != STOP or len(out) == 1 and not first_ends):
            drafted = min(size, most - len(out) - 1)
            stay = min(right[min(len(accepted), len(right) - 1)], drafted)
            new = self.text[b, len(out) : len(out) + stay + 1].tolist()
            new = new[: new.index(STOP) + 1] if STOP in new else new
            out, accepted = out + new, [*accepted, stay]
        return out, accepted


class Steered(Drafter):
    """Runs `inner` as it is (None: nothing drafts), records its logits, and drafts the tokens of the script.

    right: of each row, by pass; the last one for all later passes.
    """

    name = "scripted"

    def __init__(self, script: Script, right: list[list[int]], inner: Drafter | None = None):
        self.script, self.right, self.inner, self.passes = script, right, inner, 0
        self.needs_streams = self.needs_mtp = inner is not None and inner.needs_streams
        self.logits: list[list[torch.Tensor]] = []  # of each pass and each of its draft steps

    def begin(self, prompts: list[list[int]], model: Model, cache: Cache, choose) -> None:
        self.at = [0] * len(prompts)

        def noted(logits: Logits, rows: list[int]):
            self.logits[-1].append(whole(logits).cpu())
            return choose(logits, rows)

        if self.inner is not None:
            self.inner.begin(prompts, model, cache, noted)

    def join(self, b: int, prompt: list[int]) -> None:
        self.at[b] = 0
        if self.inner is not None:
            self.inner.join(b, prompt)

    def prefilled(self, streams: torch.Tensor, next_ids: torch.Tensor, counts: list[int]) -> None:
        self.inner.prefilled(streams, next_ids, counts)

    def commit(self, streams: torch.Tensor | None, tokens: torch.Tensor, counts: list[int]) -> None:
        self.at = [at + n for at, n in zip(self.at, counts)]
        if self.inner is not None:
            self.inner.commit(streams, tokens, counts)

    def draft(self, sizes: list[int]) -> Drafts:
        self.logits.append([])
        steps = self.inner.draft(sizes).steps if self.inner is not None else [0] * len(sizes)
        right = [row[min(self.passes, len(row) - 1)] for row in self.right]
        self.passes += 1
        return Drafts(self.script.drafts(self.at, sizes, right), list(sizes), None, steps)


@dataclass
class Look:
    """The batch as a pass begins, and the model's logits of it. lengths: tokens of each row; rows: what each may
    read."""

    lengths: list[int]
    rows: list[Rows]
    ids: torch.Tensor
    logits: torch.Tensor | None = None


class Watched:
    """Runs `inner`, a way to run a pass; records the batch before each pass, and makes the model choose the script.
    prompts: tokens of each row."""

    def __init__(
        self,
        subject: Subject,
        cache: Cache,
        inner: Verify,
        script: Script,
        prompts: list[int],
        looks: list[Look] | None = None,
    ):
        self.subject, self.cache, self.inner, self.script, self.prompts, self.looks = (
            subject,
            cache,
            inner,
            script,
            prompts,
            looks,
        )

    def __call__(self, ids: torch.Tensor, counts: list[int], want_streams: bool):
        lengths, blocks = self.cache.lengths, self.cache.mtp_lengths
        at = [max(1, n - prompt + 1) for n, prompt in zip(lengths, self.prompts)]
        look = None
        if self.looks is not None:
            rows = [visible(self.subject, self.cache, b, n, m) for b, (n, m) in enumerate(zip(lengths, blocks))]
            look = Look(lengths, rows, ids.clone())
            self.looks.append(look)
        logits, streams = self.inner(ids, counts, want_streams)
        if look is not None:
            look.logits = whole(logits).cpu()
        return self.script.obeyed(logits, ids, at), streams


@contextmanager
def obeying(model: Model, script: Script, at, seen=lambda ids, streams, logits: None) -> Iterator[None]:
    """Captured steps of the model choose the script's tokens; at(): number of the token after the first of a step, by
    row. seen(ids [B, T], streams, logits [N, vocab]): what was really computed."""
    real = model.captured

    def captured(step, cache):
        streams, logits = real(step, cache)
        logits = whole(logits)
        ids = step.ids.view(step.B, step.T)
        seen(ids, streams, logits)
        return streams, script.obeyed(logits.view(step.B, step.T, -1), ids, at()).flatten(0, 1)

    model.captured = captured
    try:
        yield
    finally:
        del model.captured


# ---- what comes out -----------------------------------------------------------------------


def cases(script: Script, rows: int, drafts: int) -> list[list[int]]:
    """Accepted drafts, by row and pass, and the script's STOP tokens: inside an accepted block; as a rejected draft; as
    the model's choice after a wrong draft. Other rows: 0, 1, … of `drafts`."""
    right = [[b % (drafts + 1), 1] for b in range(rows)]
    script.text[0, 3], right[0] = STOP, [drafts]
    script.wrong[1], script.astray[2] = STOP, STOP
    return right


def came_out(
    where: str,
    script: Script,
    right: list[list[int]],
    found: list[list[int]],
    accepted: list[list[int]] | None,
    most: list[int],
    size: int,
    first_ends: bool = True,
) -> Iterator[Check]:
    """Tokens of each row against those of the script: tokens that were not chosen, where rows end, and how many drafts
    were accepted."""
    wanted = [script.outcome(b, row[0], size, right[b], most[b], first_ends) for b, row in enumerate(found)]
    about = dict(unit="rows", where=where)
    ids = lambda b: {script.wrong[b], script.astray[b]} - {STOP}
    strange = [b for b, row in enumerate(found) if set(row[1:]) & ids(b)]
    yield compare(
        "rows with a token that was drafted and not chosen",
        len(strange),
        "==",
        0,
        "rejected drafts do not come out",
        len(found),
        part="rejected drafts in the output",
        **about,
    )
    ends = [b for b, row in enumerate(found) if b < 3 and len(row) != len(wanted[b][0])]
    yield compare(
        "rows that do not end at their stop id alone",
        len(ends),
        "==",
        0,
        "the first stop id that is chosen ends a row",
        3,
        part="stop id",
        note=", ".join(f"row {b}: {len(found[b])} tokens, expected {len(wanted[b][0])}" for b in ends),
        **about,
    )
    other = [b for b, row in enumerate(found) if row != wanted[b][0]]
    yield compare(
        "rows whose tokens are not those that the model chose",
        len(other),
        "==",
        0,
        "plain greedy decoding of the same logits",
        len(found),
        part="accepted tokens",
        note=f"row {other[0]}: {found[other[0]][:8]}, expected {wanted[other[0]][0][:8]}" if other else "",
        **about,
    )
    if accepted is not None:
        off = [b for b, row in enumerate(accepted) if row != wanted[b][1]]
        yield compare(
            "rows that keep other numbers of drafts than were right",
            len(off),
            "==",
            0,
            "the longest right prefix stays",
            len(found),
            part="accepted drafts",
            note=f"row {off[0]}: {accepted[off[0]]}, expected {wanted[off[0]][1]}" if off else "",
            **about,
        )
