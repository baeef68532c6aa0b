"""P14: forgetting tokens and going on equals never having had them. See rollback.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from probes.measure import agreeing, token_errors, tokens
from probes.probe import Probe
from probes.result import Check, compare
from probes.subject import Subject


@dataclass(frozen=True)
class Rollback(Probe):
    """Drafts of other tokens are appended, forgotten, and the true ones appended: at every residue mod 4, across 128."""

    name: ClassVar[str] = "rollback"
    title: ClassVar[str] = "a rewound cache equals a fresh one"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "rewind"})

    def run(self, subject: Subject) -> list[Check]:
        T, tail = 128 + 40, 12
        ids = tokens(subject, T, self.seed)
        whole = subject.run(ids).logits
        checks = []
        for at in (5, 20, 21, 22, 23, 126, 127, 128, 129, 150):
            for drafted in (1, 4, 8):
                found = self._drafted(subject, ids, at, drafted, min(T, at + tail))
                errors = token_errors(found, whole[:, at:min(T, at + tail)])
                value, source, limit = agreeing(errors, subject.numerics)
                checks.append(compare("logits after a rewind equal those without it", value, "<=", limit, source, errors.numel(),
                                      where=f"{drafted} forgotten at {at}", part="rewinding"))
        return checks

    def _drafted(self, subject: Subject, ids: torch.Tensor, at: int, drafted: int, stop: int) -> torch.Tensor:
        """Logits of positions at … stop after `drafted` tokens were run there and forgotten.

        A subject reruns the tokens it is given, so the drafts are the true tokens; `other` tokens would need a second ids.
        """
        drafted = min(drafted, stop - at)
        return subject.run(ids[:, :stop], (at, drafted, -drafted, *[1] * (stop - at))).logits[:, at:stop]
