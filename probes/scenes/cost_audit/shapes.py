"""Bytes of the cost model and bytes counted, part by part, over many shapes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.gqa.steps import Tally


class Shapes:
    """Steps of one policy at several shapes. where: what they share."""

    def __init__(self, where: str):
        self.where, self.parts, self.notes = where, defaultdict(Tally), {}
        self.found, self.said = 0, 0

    def see(
        self,
        found: Mapping[str, int],
        said: Mapping[str, int] | Sequence[Mapping[str, int]],
        mistakes: Mapping[str, Mapping[str, int]],
        at: str,
    ) -> None:
        """Compare one step: bytes counted and bytes of the cost model, by part (of all layers, or of each). mistakes:
        part → cause → bytes of a cost model that makes it."""
        total: Counter = Counter()
        for one in [said] if isinstance(said, Mapping) else said:
            total.update(one)
        self.found, self.said = self.found + sum(found.values()), self.said + sum(total.values())
        for part in found.keys() | total.keys():
            a, b = found.get(part, 0), total.get(part, 0)
            causes = tuple(cause for cause, nbytes in mistakes.get(part, {}).items() if nbytes == b) if a != b else ()
            self.parts[part].see(int(a != b), 1, at, causes)
            if a != b:
                self.notes.setdefault(part, f"the cost model has {b} B, counted are {a} B")

    def checks(self, source: str, of: str) -> Iterator[Check]:
        for part, tally in sorted(self.parts.items()):
            cause = tally.cause
            yield compare(
                f"shapes at which the cost model of {of} has other bytes",
                tally.wrong,
                "==",
                0,
                source,
                tally.samples,
                unit="shapes",
                where=self.where,
                found=tally.first,
                part=f"cost model, {part}" + (f", {cause}" if cause else ""),
                note=self.notes.get(part, ""),
            )
        yield compare(
            f"bytes of {of}, over all shapes",
            self.said,
            "==",
            self.found,
            source,
            sum(t.samples for t in self.parts.values()),
            unit="B",
            where=self.where,
            part="cost model",
        )
