"""P11: nothing reads memory that was never written, and repeats are bitwise equal. See poison.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes.compare import pieces_of, tokens, window_of
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.buffers import poison
from dsv4.probes.subject import Subject


@dataclass(frozen=True)
class Poison(Probe):
    """The cache is filled with NaN before the first token; then the same run again and again."""

    name: ClassVar[str] = "poison"
    title: ClassVar[str] = "unwritten memory is not read"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        ids = tokens(subject, 2 * window_of(subject.config) + 150, self.seed)
        checks = []
        for name, schedule in (
            ("one step", ()),
            ("chunks of 37", pieces_of(ids.shape[1], 37)),
            ("decode", [130, *[1] * 20]),
        ):
            ids_now = ids[:, : sum(schedule)] if schedule else ids
            clean = self._run(subject, ids_now, schedule, poisoned=False)
            found = self._run(subject, ids_now, schedule, poisoned=True)
            checks.append(
                compare(
                    "logits with a cache of NaN equal those with one of zeros",
                    int((found != clean).sum()),
                    "==",
                    0,
                    "the same program on the same written values; NaN differs from itself",
                    clean.numel(),
                    where=name,
                    part="unwritten slots",
                )
            )
        repeats = max(2, round(20 * min(1.0, self.effort)))
        first = self._run(subject, ids, (), poisoned=False)
        differing = sum(int((self._run(subject, ids, (), poisoned=False) != first).sum()) for _ in range(repeats - 1))
        return checks + [
            compare(
                "repeats are bitwise equal",
                differing,
                "==",
                0,
                "the same program on the same numbers",
                repeats - 1,
                where=f"{repeats} runs",
                part="determinism",
            )
        ]

    def _run(self, subject: Subject, ids: torch.Tensor, schedule, poisoned: bool) -> torch.Tensor:
        cache = subject.model.new_cache(ids.shape[0], ids.shape[1])
        if poisoned:
            poison(subject, cache)
        parts, start = [], 0
        for n in schedule or [ids.shape[1]]:
            parts.append(subject.model.append(ids[:, start : start + n], cache, chunk=n))
            start += n
        return torch.cat(parts, 1).cpu()


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Poison)
