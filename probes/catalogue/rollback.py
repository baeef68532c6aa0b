"""P14: a run with rewound tokens equals one that never had them; drafts of the MTP block. See rollback.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND
from dsv4.probes import families
from dsv4.probes.compare import agreeing, oracle_of, token_errors, tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted, chance_of
from dsv4.probes.subject import Subject

LENGTH, TAIL = 128 + 40, 8
PLACES = (5, 20, 21, 22, 23, 126, 127, 128, 129, 150)  # every residue mod 4, both sides of 128
DRAFTS = (1, 4, 8)
NAME = "logits after a rewind equal those without it"
LIMIT = 2e-4
SAME = "the same steps on the same numbers, with a rewind between or without: rounding of sums, whatever the numerics"


@dataclass(frozen=True)
class Rollback(Probe):
    """Drafts are appended, rewound, and the true tokens appended: at every residue mod 4, across 128 and the window's
    end, in rows of a batch."""

    name: ClassVar[str] = "rollback"
    title: ClassVar[str] = "a rewound cache equals a fresh one"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "rewind"})

    def run(self, subject: Subject) -> list[Check]:
        ids, checks = tokens(subject, LENGTH, self.seed), []
        mine = "cache" in subject.can and hasattr(subject, "model")
        for at in places(subject.config):
            for n in DRAFTS if not mine else DRAFTS[1:2] if at in (21, 128) else ():
                where = f"{n} forgotten at {at}"
                checks.append(attempted(NAME, where, "rewinding", lambda: self._again(subject, ids, at, n, where)))
            where = f"other tokens forgotten at {at}"
            found = attempted(NAME, where, "rewinding", lambda: self._others(subject, ids, at)) if mine else []
            checks += found if isinstance(found, list) else [found]
        if not mine:
            why = "the subject's cache cannot be asked"
            return [*checks, vacuous("drafts of other tokens, and of the MTP block", why, part="rewinding")]
        return [*checks, *self._rows(subject), *self._mtp(subject)]

    def _again(self, subject: Subject, ids: torch.Tensor, at: int, n: int, where: str) -> Check:
        """The next tokens run, are rewound, and run again."""
        stop = min(LENGTH, at + TAIL)
        run = lambda schedule: subject.run(ids[:, :stop], schedule).logits[:, at:stop]
        decode = [1] * (stop - at)
        return same(run((at, n, -n, *decode)), run((at, *decode)), where)

    def _others(self, subject: Subject, ids: torch.Tensor, at: int) -> list[Check]:
        """Rejected drafts are other tokens than those that follow; once as many as may be rewound. Each has a row of
        its own, compared with the same row of a batch that never drafted: a product may round its last row differently
        from its first."""
        counts = [0, *DRAFTS] if at != 22 else [0, *DRAFTS[:-1], DEFAULT_MAX_REWIND]
        ids = ids.expand(len(counts), -1)
        other = (ids + 1) % subject.config.vocab_size

        def after(rejected: list[int]) -> torch.Tensor:
            cache = subject.model.new_cache(len(counts), LENGTH)
            subject.model.append(ids[:, :at], cache, logits="none")
            if any(rejected):
                subject.model.append(other[:, at : at + max(rejected)], cache, n_new=rejected, logits="none")
                cache.rewind(rejected)
            return one_by_one(subject.model, ids[:, at : min(LENGTH, at + TAIL)], cache)

        found, never = after(counts), after([0] * len(counts))
        return [
            same(found[row : row + 1], never[row : row + 1], f"{n} other tokens forgotten at {at}")
            for row, n in enumerate(counts)
            if n
        ]

    def _equal(
        self, subject: Subject, found: torch.Tensor, wanted: torch.Tensor, where: str, part: str, name: str
    ) -> Check:
        """Two runs of other steps, or two implementations."""
        errors = token_errors(found.cpu(), wanted.cpu())
        value, source, limit = agreeing(errors, subject.numerics)
        return compare(
            name,
            value,
            "<=",
            limit,
            source,
            errors.numel(),
            where=where,
            part=part,
            chance=chance_of(wanted.cpu(), token_errors),
        )

    def _rows(self, subject: Subject) -> list[Check]:
        """Rows of a batch accept differently many tokens of their drafts."""
        B, T, at, rejected = 4, 64, 41, (0, 1, 3, 8)
        ids = tokens(subject, T, self.seed + 1, rows=B)
        # room for rows that rewind too little
        whole, cache = subject.run(ids).logits, subject.model.new_cache(B, T + 8)
        draft = ids[:, : at + 8].clone()
        for row, n in enumerate(rejected):
            draft[row, at + 8 - n :] = (draft[row, at + 8 - n :] + 1) % subject.config.vocab_size
        subject.model.append(draft, cache, logits="none")
        cache.rewind(list(rejected))
        left = [T - at - 8 + n for n in rejected]
        padded = torch.stack(
            [torch.nn.functional.pad(ids[row, T - n :], (0, max(left) - n)) for row, n in enumerate(left)]
        )
        found = subject.model.append(padded, cache, n_new=left)
        name = "rows that rewind by different counts equal rows that never drafted"
        where = lambda row: f"row {row}: {rejected[row]} of 8 rejected"
        return [
            self._equal(subject, found[row : row + 1, :n], whole[row : row + 1, T - n :], where(row), "rewinding", name)
            for row, n in enumerate(left)
        ]

    # ---- the MTP block --------------------------------------------------------------------

    def _mtp(self, subject: Subject) -> list[Check]:
        """The block's streams and logits against the oracle's; its cache in steps, after a rewind, and beside the main
        one."""
        if not len(subject.model.mtp):
            return [vacuous("drafts of the MTP block", "the subject has none", part="MTP")]
        T, at = 3 * subject.config.sliding_window + 10, subject.config.sliding_window + 9
        ids = tokens(subject, T + 1, self.seed + 2)
        _, streams = subject.model.append(ids, subject.model.new_cache(1, T + 1), return_streams=True)
        streams, following = streams[:, :T], ids[:, 1:]
        drafts, after = subject.model.mtp_logits(streams, following, return_streams=True)
        return [
            *self._parity(subject, streams, following, drafts, after),
            self._steps(subject, streams, following, drafts),
            *self._session(subject, ids, streams, at),
        ]

    def _parity(self, subject: Subject, streams, following, drafts, after) -> list[Check]:
        """From the subject's own streams; and the head from the block's own, so that each is judged alone."""
        oracle = oracle_of(subject)
        wanted = oracle.mtp(streams.double().cpu(), following)
        head = oracle.head(after.double().cpu(), "mtp.0.")
        equal = lambda found, want, part, name: self._equal(subject, found.double(), want, "mtp 0", part, name)
        return [
            equal(after, wanted.streams, "MTP streams", "streams of the MTP block are the oracle's"),
            equal(drafts, head, "MTP head", "logits of a draft are the block's streams through its own head"),
        ]

    def _steps(self, subject: Subject, streams, following, drafts) -> Check:
        cache, parts = subject.model.new_cache(1, following.shape[1] + 1), []
        for start, stop in steps_of((11, *[1] * 5, following.shape[1] - 16)):
            parts.append(subject.model.mtp_logits(streams[:, start:stop], following[:, start:stop], cache))
        return self._equal(
            subject,
            torch.cat(parts, 1),
            drafts,
            "in steps of 11, 1 and the rest",
            "MTP cache",
            "drafts in steps equal those in one",
        )

    def _session(self, subject: Subject, ids, streams, at: int) -> list[Check]:
        """Main model and block to `at`; four other tokens and their drafts, rejected; then as if they had never
        been."""
        straight, found = (self._drafting(subject, ids, streams, at, rejected) for rejected in (0, 4))
        alone = subject.model.new_cache(1, at + TAIL)  # without the block, which could disturb both runs alike
        subject.model.append(ids[:, :at], alone, logits="none")
        never, where = one_by_one(subject.model, ids[:, at : at + TAIL], alone), f"4 drafts rejected at {at}"
        return [
            same(found[0], never, where, "main model after drafts", "drafting leaves no trace in the main model"),
            same(found[1], straight[1], where, "MTP cache", "drafts after a rejection equal those without it"),
        ]

    def _drafting(self, subject: Subject, ids, streams, at: int, rejected: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the main model for a few tokens from `at`, then drafts there; `rejected` tokens were run and
        forgotten."""
        model, T = subject.model, at + TAIL
        cache = model.new_cache(1, T + 8)
        model.append(ids[:, :at], cache, logits="none")
        model.mtp_logits(streams[:, : at - 1], ids[:, 1:at], cache)
        if rejected:
            wrong = (ids[:, at : at + rejected] + 1) % subject.config.vocab_size
            _, behind = model.append(wrong, cache, return_streams=True)
            model.mtp_logits(torch.cat((streams[:, at - 1 : at], behind[:, :-1]), 1), wrong, cache)
            cache.rewind(rejected)
        return one_by_one(model, ids[:, at:T], cache), model.mtp_logits(streams[:, at - 1 : T - 1], ids[:, at:T], cache)


def places(config) -> list[int]:
    """Where tokens are forgotten: PLACES, and one before, at and one behind the end of each window that ends
    within the run."""
    windows = families.of(config).windows(config)
    return sorted(
        {*PLACES, *(at for window in windows for at in (window - 1, window, window + 1) if 0 < at <= LENGTH - TAIL)}
    )


def same(found: torch.Tensor, wanted: torch.Tensor, where: str, part: str = "rewinding", name: str = NAME) -> Check:
    """Two runs [B, T, vocab] of the same steps."""
    errors = token_errors(found.cpu(), wanted.cpu())
    worst = torch.nan_to_num(errors, nan=float("inf")).max().item()
    return compare(
        name,
        worst,
        "<=",
        LIMIT,
        SAME,
        errors.numel(),
        where=where,
        part=part,
        chance=chance_of(wanted.cpu(), token_errors),
    )


def one_by_one(model, ids: torch.Tensor, cache) -> torch.Tensor:
    """Logits [B, T, vocab] of ids that are appended a token at a time."""
    return torch.cat([model.append(ids[:, t : t + 1], cache) for t in range(ids.shape[1])], 1)


def steps_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends))


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Rollback)
