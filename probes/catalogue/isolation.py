"""P12: a row's logits depend neither on other rows of the batch nor on earlier runs. See isolation.md."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dsv4.probes.compare import agreeing, token_errors, tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.control import attempted, chance_of
from dsv4.probes.subject import Subject

BESIDE = "a row in a batch equals the row alone"


@dataclass(frozen=True)
class Isolation(Probe):
    """Rows of different lengths together and alone; the same request three times."""

    name: ClassVar[str] = "isolation"
    title: ClassVar[str] = "a request does not see its neighbours"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        T = 150
        ids, lengths = tokens(subject, T, self.seed, rows=4), (T, 37, 129, 90)
        padded = ids.clone()
        for row, length in enumerate(lengths):
            padded[row, length:] = -1
        together, checks = [], []

        def beside(row: int, length: int) -> Check:
            if not together:
                together.append(subject.run(padded, (64, 64, T - 128)).logits)
            alone = subject.run(ids[row : row + 1, :length]).logits
            return self._check(
                subject, together[0][row : row + 1, :length], alone, f"row {row} of {length} tokens", "batching"
            )

        for row, length in enumerate(lengths):
            checks.append(attempted(BESIDE, f"row {row} of {length} tokens", "batching", partial(beside, row, length)))
        first = subject.run(ids[:1]).logits
        for again in (2, 3):
            subject.run(ids[1:2])
            found = subject.run(ids[:1]).logits
            checks.append(
                compare(
                    "the same request gives the same bits",
                    int((found != first).sum()),
                    "==",
                    0,
                    "the same program on the same numbers",
                    found.numel(),
                    where=f"repeat {again}",
                    part="state left behind",
                )
            )
        return checks

    def _check(self, subject: Subject, found: torch.Tensor, alone: torch.Tensor, where: str, part: str) -> Check:
        errors = token_errors(found, alone)
        value, source, limit = agreeing(errors, subject.numerics)
        return compare(
            BESIDE,
            value,
            "<=",
            limit,
            source,
            errors.numel(),
            where=where,
            part=part,
            chance=chance_of(alone, token_errors),
        )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Isolation)
