"""What a pass costs: seconds of a draft step and of a verify pass by batch and size, from a JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError, brief
from dsv4.speculation.documents import expect_header, read_document

FORMAT, VERSION = "dsv4-speculation-costs", 1
SHORTEST, LONGEST = 1e-9, 1e9  # seconds: values outside, infinity included, cannot have been measured


@dataclass(frozen=True)
class BatchCost:
    """Costs of the passes of one batch. draft: seconds of one draft step; verify[k]: seconds of a pass in which every
    row verifies k drafted tokens and its own, k = 0 … 8; measured[k]: whether verify[k] was, rather than modelled.

    catch_up: (n, seconds) ascending: of a step in which the drafter runs the tokens of up to n passes in a row that
    drafted nothing, before the next draft or when the last n is reached; empty if it runs after every pass. plain:
    seconds of a step without a drafter; None where that was not measured, and verify[0] stands for it.
    """

    draft: float
    verify: tuple[float, ...]
    measured: tuple[bool, ...]
    catch_up: tuple[tuple[int, float], ...] = ()
    plain: float | None = None

    @property
    def rests(self) -> int:
        """The most passes without drafts in a row that may wait for the drafter; 0: it runs after each."""
        return self.catch_up[-1][0] if self.catch_up else 0

    def following(self, rested: int) -> float:
        """Seconds of the drafter's step over that many passes without drafts."""
        return next((seconds for n, seconds in self.catch_up if n >= rested), 0.0) if rested else 0.0

    @property
    def step(self) -> float:
        """Seconds of a step of decoding that never drafts."""
        return self.verify[0] if self.plain is None else self.plain


def after_rest(rested: int, most: int) -> int:
    """The number of passes without drafts that wait for the drafter after one more, if up to `most` may wait. When
    there are that many, the drafter runs them first."""
    return rested % most + 1 if most else 0


@dataclass(frozen=True)
class CostTable:
    """padding: the share of a token's cost that an unused token still has, because the pass is as wide as its largest
    size. 1: a pass costs as much as its largest size (a captured step computes unused tokens and discards them); 0: a
    pass costs its live tokens. provenance: how the figures were obtained."""

    name: str
    padding: float
    batches: Mapping[int, BatchCost]
    provenance: Mapping[str, object]

    def of(self, batch: int) -> BatchCost:
        """The costs of that batch. Raises InputError if it is not in the table: costs are not guessed."""
        if batch not in self.batches:
            raise InputError(
                f"cost table {self.name!r} has no batch {batch}; it has {sorted(self.batches)}: measure it, or use "
                "one of those"
            )
        return self.batches[batch]

    def uniform(self, batch: int, size: int) -> float:
        """Seconds of drafting and verifying `size` tokens in every row. For size 0 that includes the pass's share of
        the drafter's step over as many as may wait."""
        cost = self.of(batch)
        share = 0.0 if size or not cost.catch_up else cost.following(cost.rests) / cost.rests
        return cost.draft * size + cost.verify[size] + share

    def seconds(self, batch: int, sizes: Sequence[int], width: int | None = None) -> float:
        """Seconds of a pass whose live rows have these sizes, without the drafter's step after passes that drafted
        nothing. All rows share the draft steps; rows at rest cost no live tokens. width: of a pass that is wider than
        its largest size."""
        cost = self.of(batch)
        largest = max(sizes) if width is None else width
        # drafted tokens of the average row
        share = min(max((sum(sizes) + len(sizes)) / batch - 1, 0.0), float(largest))
        below = min(int(share), largest)
        above = min(below + 1, largest)
        live = cost.verify[below] + (share - below) * (cost.verify[above] - cost.verify[below])
        return cost.draft * largest + self.padding * cost.verify[largest] + (1 - self.padding) * live

    def linear(self, batch: int) -> tuple[list[float], list[float]]:
        """(base, price), each by the pass's largest size m: a pass costs about base[m] + price[m] · all drafted tokens.

        The tangent where every row drafts m: exact there. If verify is concave in the size it is never less than the
        true cost, so a row that drafts less because of the price really saves. price is 0 at padding 1.
        """
        cost, base, price = self.of(batch), [], []
        for m in range(MAX_DRAFTS + 1):
            slope = (cost.verify[m] - cost.verify[m - 1]) / batch if m else 0.0
            price.append((1 - self.padding) * slope)
            base.append(self.uniform(batch, m) - price[m] * batch * m)
        return base, price

    def document(self) -> dict:
        batches = {
            str(n): {"draft": c.draft, "verify": list(c.verify), "measured": list(c.measured)}
            | ({"catch_up": list(map(list, c.catch_up))} if c.catch_up else {})
            | ({} if c.plain is None else {"plain": c.plain})
            for n, c in sorted(self.batches.items())
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "unit": "seconds",
            "name": self.name,
            "provenance": dict(self.provenance),
            "padding": self.padding,
            "batches": batches,
        }


def read_costs(path: str | Path) -> CostTable:
    """Raises InputError, naming the file and the field."""
    return read_document(path, parse_costs)


def parse_costs(document: object) -> CostTable:
    """Raises InputError for another format, missing fields, or costs that are not positive, not finite, or too large to
    have been measured."""
    document = expect_header(document, "a cost table", FORMAT, VERSION)
    if document.get("unit") != "seconds":
        raise InputError(f"unit is {brief(document.get('unit'))}; expected 'seconds'")
    padding, batches, provenance = (document.get(key) for key in ("padding", "batches", "provenance"))
    if not _number(padding) or not 0 <= padding <= 1:
        raise InputError(f"padding is {brief(padding)}; expected a share from 0 to 1")
    if not isinstance(provenance, dict) or not provenance:
        raise InputError(
            f"provenance is {brief(provenance)}; expected an object that says how the figures were obtained"
        )
    if not isinstance(batches, dict) or not batches or not all(n.isdecimal() and int(n) > 0 for n in batches):
        raise InputError('batches is not an object from batch sizes to costs; expected at least one, like "1"')
    return CostTable(
        str(document.get("name", "")),
        float(padding),
        {int(n): parse_batch(n, c) for n, c in batches.items()},
        provenance,
    )


def parse_batch(batch: str, cost: object) -> BatchCost:
    """The costs of one batch in a document. Raises InputError, naming the batch and the field."""
    cost = cost if isinstance(cost, dict) else {}
    draft, verify, measured = (cost.get(key) for key in ("draft", "verify", "measured"))
    if not _number(draft) or draft < 0:
        raise InputError(f"draft of batch {batch} is {brief(draft)}; expected seconds, 0 or more")
    if (
        not isinstance(verify, list)
        or len(verify) != MAX_DRAFTS + 1
        or not all(_number(t) and t >= SHORTEST for t in verify)
    ):
        raise InputError(
            f"verify of batch {batch} is {brief(verify, 80)}; expected {MAX_DRAFTS + 1} positive numbers of seconds, "
            f"for 0 … {MAX_DRAFTS} drafted tokens"
        )
    if (
        not isinstance(measured, list)
        or len(measured) != MAX_DRAFTS + 1
        or not all(isinstance(m, bool) for m in measured)
    ):
        raise InputError(
            f"measured of batch {batch} is {brief(measured, 80)}; expected true or false for each of the "
            f"{MAX_DRAFTS + 1} figures"
        )
    catch_up, plain = cost.get("catch_up", []), cost.get("plain")
    if not _ascending_pairs(catch_up):
        raise InputError(
            f"catch_up of batch {batch} is {brief(catch_up, 80)}; expected pairs [passes, seconds], more passes "
            "in each than in the one before"
        )
    if plain is not None and not (_number(plain) and plain >= SHORTEST):
        raise InputError(f"plain of batch {batch} is {brief(plain)}; expected a positive number of seconds")
    return BatchCost(
        float(draft),
        tuple(map(float, verify)),
        tuple(measured),
        tuple((n, float(t)) for n, t in catch_up),
        None if plain is None else float(plain),
    )


def _ascending_pairs(found: object) -> bool:
    if not isinstance(found, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        return False
    counts = [0, *(n for n, _ in found)]
    return (
        all(type(n) is int for n in counts)
        and all(a < b for a, b in zip(counts, counts[1:]))
        and all(_number(t) and t >= 0 for _, t in found)
    )


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LONGEST  # NaN is not
