"""P7: the same tokens in one step, in chunks cut anywhere, and one by one give the same logits. See schedules.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from probes.control import chance_of, controls
from probes.measure import agreeing, pieces_of, token_errors, tokens
from probes.probe import Probe
from probes.result import Check, compare
from probes.subject import Subject


@dataclass(frozen=True)
class Schedules(Probe):
    """Cuts at every residue mod 4, and mod 128 (every eighth at effort 1, all from effort 8 on)."""

    name: ClassVar[str] = "schedules"
    title: ClassVar[str] = "one step, chunks and decode agree"
    needs: ClassVar[frozenset[str]] = frozenset({"run"})

    def run(self, subject: Subject) -> list[Check]:
        T = 2 * 128 + 3 * subject.config.sliding_window // 2 + 7
        ids = tokens(subject, T, self.seed)
        whole = subject.run(ids).logits
        chance = chance_of(whole, token_errors)
        stride = max(1, round(8 / self.effort))
        cuts = sorted({128 + r for r in range(0, 128, stride)} | {129 + r for r in range(4)} | {1, 2, 3, T - 1})
        checks = controls(whole, token_errors, subject.numerics)
        checks += [self._check(subject, whole, subject.run(ids, (cut, T - cut)).logits,
                               f"cut at {cut} (mod 128: {cut % 128}, mod 4: {cut % 4})", chance) for cut in cuts if 0 < cut < T]
        for size in (5, 64, 128):
            checks.append(self._check(subject, whole, subject.run(ids, pieces_of(T, size)).logits, f"chunks of {size}", chance))
        decoded = 140 if T > 140 else T
        checks.append(self._check(subject, whole[:, :T], subject.run(ids, (T - decoded, *[1] * decoded)).logits,
                                  f"the last {decoded} tokens one by one", chance))
        return checks

    def _check(self, subject: Subject, whole: torch.Tensor, found: torch.Tensor, how: str, chance: float) -> Check:
        errors = token_errors(found, whole)
        value, source, limit = agreeing(errors, subject.numerics)
        first = next(iter((errors[0] > limit).nonzero().flatten().tolist()), None)
        return compare("logits equal those of one step", value, "<=", limit, source, errors.numel(), where=how, part="caches",
                       chance=chance, note="" if first is None else f"first beyond it at position {first}")


if __name__ == "__main__":
    from probes.main import main
    main(Schedules)
