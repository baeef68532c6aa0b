"""P7: the same tokens in one step, in chunks cut anywhere, and one by one give the same logits. See schedules.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes.compare import agreeing, pieces_of, token_errors, tokens, window_of
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.control import chance_of, controls
from dsv4.probes.subject import Subject

APART = 8  # tokens between the cuts of one run


@dataclass(frozen=True)
class Schedules(Probe):
    """Cuts at every residue mod 128, and so mod 4."""

    name: ClassVar[str] = "schedules"
    title: ClassVar[str] = "one step, chunks and decode agree"
    needs: ClassVar[frozenset[str]] = frozenset({"run"})

    def run(self, subject: Subject) -> list[Check]:
        T = 2 * 128 + 3 * max(8, window_of(subject.config)) // 2 + 7
        ids = tokens(subject, T, self.seed)
        whole = subject.run(ids).logits
        chance = chance_of(whole, token_errors)
        checks = controls(whole, token_errors, subject.numerics)
        for cut in (1, 2, 3, 129, T - 1):
            checks.append(self._check(subject, whole, subject.run(ids, (cut, T - cut)).logits, f"cut at {cut}", chance))
        for r in range(APART):  # every residue mod 128, and so mod 4, is somewhere the end of a step
            grid = (128 + r, *[APART] * (128 // APART - 1))
            where = f"cuts at {128 + r}, and every {APART} tokens up to {sum(grid)}"
            checks.append(self._check(subject, whole, subject.run(ids, (*grid, T - sum(grid))).logits, where, chance))
        for size in (64, 128):
            checks.append(
                self._check(subject, whole, subject.run(ids, pieces_of(T, size)).logits, f"chunks of {size}", chance)
            )
        for size in (5, 1):  # across the end of an HCA window
            some = (233, *[size] * 40, T - 233 - 40 * size) if size == 1 else (173, *[size] * 20, T - 273)
            where = f"tokens {some[0]} to {T - some[-1]} by {size}"
            checks.append(self._check(subject, whole, subject.run(ids, some).logits, where, chance))
        return checks

    def _check(self, subject: Subject, whole: torch.Tensor, found: torch.Tensor, how: str, chance: float) -> Check:
        errors = token_errors(found, whole)
        value, source, limit = agreeing(errors, subject.numerics)
        first = next(iter((errors[0] > limit).nonzero().flatten().tolist()), None)
        return compare(
            "logits equal those of one step",
            value,
            "<=",
            limit,
            source,
            errors.numel(),
            where=how,
            part="caches",
            chance=chance,
            note="" if first is None else f"first beyond it at position {first}",
        )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Schedules)
