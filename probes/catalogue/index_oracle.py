"""P6: the indexer's keys, scores and picks, against the oracle in the same numerics and in float64. See
index_oracle.md."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.probes.blame.consult import culprit, left_of
from dsv4.probes.compare import (
    MAX_TOKENS,
    at_share,
    far,
    heavy_tailed,
    limit_of,
    oracle_of,
    steps_of_all_sizes,
    zeros_like_ids,
)
from dsv4.probes.oracle import Oracle, kinds
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.oracle.indexer import KEYS, QUERIES, SCORES, indexed, mistakes
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import Subject

WANT = ("index_keys", "index_scores", "selection")
FLOORS = {"fp32": 0.999, "native": 0.98, "bf16": 0.98, "qat": 0.75, "qat:fp32": 0.75}  # known_bugs 2.1, loosely
LIMIT = {"fp32": 1e-4, "native": 2e-2, "qat": 2e-2, "qat:fp32": 1e-4}  # relative, of the median query
TIES = {"fp32": 1e-5, "native": 2e-2, "qat": 2e-2, "qat:fp32": 1e-3}  # of a query's largest score
ENTRY, ROUGHLY = 0.5, "half of an entry's score: FP4 moves scores by 0.13 to 0.18 (known bugs, 2.1), a lost one by 1"


@dataclass(frozen=True)
class Case:
    """One CSA layer: what the subject gave, what the oracle of its numerics has, and of float64; k picks, B = 1."""

    subject: Subject
    layer: Layer
    x: torch.Tensor
    points: dict[str, torch.Tensor]
    wanted: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    k: int
    how: str = ""  # the steps it ran in, and its row
    since: int = 0  # queries from here on are judged

    @property
    def where(self) -> str:
        return self.layer.prefix.replace("layers.", "layer ").strip(".") + self.how

    @property
    def judged(self) -> torch.Tensor:
        """bool [T]"""
        return torch.arange(self.x.shape[1]) >= self.since

    @property
    def visible(self) -> torch.Tensor:
        """int64 [T]: how many entries each query sees."""
        return (torch.arange(self.x.shape[1]) + 1) // self.layer.ratio

    @property
    def crowded(self) -> torch.Tensor:
        """bool [T]: whether there is anything to choose, for a query that is judged."""
        return (self.visible > self.k) & self.judged

    @property
    def picks(self) -> torch.Tensor:
        """The subject's selection, anything that is no entry −1."""
        found, n = self.points["selection"], self.wanted["index_scores"].shape[-1]
        return torch.where((found < 0) | (found >= n), -1, found)


@dataclass(frozen=True)
class IndexOracle(Probe):
    """Every CSA layer on at least 8 · index_topk entries of heavy-tailed random input."""

    name: ClassVar[str] = "index_oracle"
    title: ClassVar[str] = "the indexer scores and selects as specified"
    needs: ClassVar[frozenset[str]] = frozenset({"layer"})
    reads: ClassVar[frozenset[str]] = frozenset(WANT)

    def run(self, subject: Subject) -> list[Check]:
        c = subject.config
        layers = [i for i in range(c.num_hidden_layers) if c.compress_ratios[i] == kinds.CSA]
        T = kinds.CSA * 8 * c.index_topk + 7
        if not layers:
            return [vacuous(self.title, "no CSA layer")]
        if T > min(MAX_TOKENS * self.effort, c.max_position_embeddings):
            why = f"8 · k entries need {T} tokens, more than this effort or the model allows"
            return [vacuous(self.title, why, where=f"layer {i}", part="selection") for i in layers]
        x, matched, exact = heavy_tailed(subject, T, self.seed), oracle_of(subject), oracle_of(subject, matched=False)
        return [check for i in layers for check in self._layer(subject, matched, exact, i, x)]

    def _layer(self, subject: Subject, matched: Oracle, exact: Oracle, i: int, x: torch.Tensor) -> list[Check]:
        layer, k = matched.layer(i), matched.config.index_topk
        case = Case(subject, layer, x, run_of(subject, i, x)[0], indexed(layer, x), indexed(exact.layer(i), x), k)
        checks = [keys_check(case), scores_check(case), entries_check(case)]
        if "selection" not in case.points:
            return checks + [vacuous("selection", "the subject gives none", where=case.where, part="selection")]
        checks += [matched_check(case), own_check(case), exact_check(case), *shape_checks(case)]
        checks += [ties_check(replace(case, points=run_of(subject, i, torch.zeros_like(x))[0]))]
        return checks + [check for stepped in self._in_steps(case, i) for check in stepped]

    def _in_steps(self, case: Case, i: int) -> Iterator[list[Check]]:
        """A third in one step, chunks, single tokens; in two rows of different tokens. Single tokens are judged alone
        too."""
        T, rows = case.x.shape[1], 2 if "batch" in case.subject.can else 1
        x = torch.cat((case.x, heavy_tailed(case.subject, T, self.seed + 1)))[:rows]
        schedule = steps_of_all_sizes(T)
        for row, points in enumerate(run_of(case.subject, i, x, schedule)):
            wanted = indexed(case.layer, x[row : row + 1]) if row else case.wanted
            for how, since in (("chunks", 0), ("decode", T - schedule.count(1))):
                now = replace(
                    case, x=x[row : row + 1], points=points, wanted=wanted, how=f", {how}, row {row}", since=since
                )
                yield [
                    keys_check(now),
                    scores_check(now),
                    entries_check(now),
                    matched_check(now),
                    own_check(now),
                    *shape_checks(now),
                ]


def run_of(subject: Subject, i: int, x: torch.Tensor, schedule: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """The indexer's points of layer i by row of x [B, T, d], each [1, ...]."""
    points = subject.attention(i, x, zeros_like_ids(x), schedule, WANT).points
    return [{name: value[row : row + 1] for (_, name), value in points.items()} for row in range(len(x))]


def keys_check(case: Case) -> Check:
    """Index keys, entry by entry."""
    limit, share, source = limit_of(case.subject)
    name, found, wanted = "index keys equal the oracle's", case.points.get("index_keys"), case.wanted["keys"]
    if found is None or found.shape != wanted.shape:
        return vacuous(name, "the subject gives none of this shape", where=case.where, part=KEYS)
    return compare(
        name,
        at_share(far(found, wanted), share),
        "<=",
        limit,
        source,
        found.shape[1],
        where=case.where,
        part=KEYS,
        unit="relative",
        chance=far(wanted.roll(1, 1), wanted).median().item(),
    )


def scores_check(case: Case) -> Check:
    """Scores over visible entries, query by query: recall alone does not see a wrong temperature (known_bugs 0.2)."""
    name, found, wanted = (
        "index scores equal the oracle's",
        case.points.get("index_scores"),
        case.wanted["index_scores"],
    )
    if found is None or found.shape != wanted.shape:
        return vacuous(name, "the subject gives none of this shape", where=case.where, part=SCORES)
    limit = LIMIT.get(case.subject.numerics, LIMIT["native"])
    error = score_error(case, wanted)
    part, note = (QUERIES, "") if error <= limit else blame(case)
    return compare(
        name,
        error,
        "<=",
        limit,
        f"{limit_of(case.subject)[2]}; the median query",
        int(case.crowded.sum()),
        where=case.where,
        part=part,
        unit="relative",
        note=note,
        chance=far(finite(wanted.roll(1, 2))[:, case.crowded], finite(wanted)[:, case.crowded]).median().item(),
    )


def entries_check(case: Case) -> Check:
    """Scores entry by entry: the median query does not see a stretch of entries that is lost."""
    name, found, wanted = "scores of every entry, roughly", case.points.get("index_scores"), case.wanted["index_scores"]
    if found is None or found.shape != wanted.shape:
        return vacuous(name, "the subject gives none of this shape", where=case.where, part=SCORES)
    errors = entry_errors(case)
    worst = int(errors.argmax()) if len(errors) else 0
    off = int((errors > ENTRY).sum())
    part, note = (SCORES, "") if off == 0 else blame(case)
    note = "; ".join(filter(None, (f"worst entry {worst}; {off} of {len(errors)} entries are off", note)))
    return compare(
        name,
        errors.max().item() if len(errors) else None,
        "<=",
        ENTRY,
        ROUGHLY,
        len(errors),
        where=case.where,
        part=part,
        unit="relative",
        note=note,
    )


def finite(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores == -math.inf, 0, scores)


def score_error(case: Case, wanted: torch.Tensor) -> float:
    """Of the median query with a choice; infinite where the subject hides or shows other entries than it should.

    One key beside a rounding boundary moves a score of every later query: where `keys_check` allows such keys they are
    left out.
    """
    found = case.points["index_scores"].double()
    if not torch.equal((found == -math.inf)[:, case.judged], (wanted == -math.inf)[:, case.judged]):
        return math.inf
    rounded = rounded_otherwise(case)
    keep = lambda scores: torch.where(rounded, 0, finite(scores)[:, case.crowded, :])
    return at_share(far(keep(found), keep(wanted)), 0.5)


def rounded_otherwise(case: Case) -> torch.Tensor:
    """bool [entries]: keys that differ from the oracle's as rounding differs; none where more do than `keys_check`
    allows."""
    found, wanted = case.points.get("index_keys"), case.wanted["keys"]
    none = torch.zeros(case.wanted["index_scores"].shape[-1], dtype=torch.bool)
    if found is None or found.shape != wanted.shape:
        return none
    limit, share, _ = limit_of(case.subject)
    errors = far(found, wanted)[0, : len(none)]
    off = (errors > limit) & (errors < ENTRY)
    return off if 0 < off.float().mean() <= 1 - share else none


def entry_errors(case: Case) -> torch.Tensor:
    """Relative error [entries] over the queries with a choice that see the entry; infinite where NaN or hidden."""
    found, wanted = (s.double()[:, case.crowded] for s in (case.points["index_scores"], case.wanted["index_scores"]))
    seen = (wanted > -math.inf).any(1)[0]
    a, b = found[..., seen].transpose(1, 2), finite(wanted)[..., seen].transpose(1, 2)
    a = torch.where(wanted[..., seen].transpose(1, 2) == -math.inf, 0, a)
    return far(torch.where(a.isinf(), math.nan, a), b)[0]


def blame(case: Case) -> tuple[str, str]:
    """(part at fault, why): the nearest of the oracle's mistaken scores, the subject's own keys among them."""
    found, right = case.points["index_scores"][:, case.judged], case.wanted["index_scores"][:, case.judged]
    gone, seen = found == -math.inf, right > -math.inf
    hidden, shown = int((gone & seen).sum()), int((~gone & ~seen).sum())
    if hidden or shown:
        return SCORES, f"{hidden} scores of visible entries are −inf, {shown} of invisible ones are not"
    known = mistakes(case.layer, case.x, case.wanted, case.points.get("index_keys"))
    errors = {name: score_error(case, scores) for name, (_, scores) in known.items()}
    best = min(errors, key=errors.get)
    whole = score_error(case, case.wanted["index_scores"])
    if errors[best] <= 0.5 * whole:
        return known[best][0], left_of(errors, whole)
    of_entries, own = entry_errors(case), case.points.get("index_keys")
    wrong = of_entries > 0.1 * of_entries.max()
    if wrong.float().mean() < 0.9:  # a wrong query or weight spares no entry
        judged = own is not None and own.shape == case.wanted["keys"].shape
        sound = judged and bool((far(own, case.wanted["keys"])[0, : len(wrong)][wrong] < ENTRY).all())
        why = f"{int(wrong.sum())} of {len(wrong)} entries are off, the first is {int(wrong.nonzero()[0])}"
        return (SCORES if sound else KEYS), why
    known_better = culprit(case.subject, int(case.layer.prefix.split(".")[1]), "index_scores")
    return known_better or (QUERIES, left_of(errors, whole))


# ---- selection ----------------------------------------------------------------------------


def recall(case: Case, scores: torch.Tensor, margin: float) -> tuple[float, int]:
    """(share of decisions that are right, decisions): entries clearly above or below the k-th score of `scores`.

    Those within `margin` of a query's largest |score| from the boundary are ties, and not counted. An entry clearly
    below that is picked counts against it, as does one clearly above that is not.
    """
    scores, picked = scores[:, case.crowded], steps.chosen(case.picks, scores.shape[-1])[:, case.crowded]
    ranked = scores.sort(-1, descending=True).values
    middle = (ranked[..., case.k - 1 : case.k] + ranked[..., case.k : case.k + 1]) / 2
    near = margin * finite(scores).abs().amax(-1, keepdim=True)
    above, below = scores > middle + near, scores < middle - near
    wrong = (above & ~picked).sum() + (below & picked).sum()
    return 1 - (wrong / above.sum().clamp(min=1)).item(), int(above.sum())


def chance_recall(case: Case) -> float:
    return (case.k / case.visible[case.crowded]).mean().item()


def matched_check(case: Case) -> Check:
    """(a) The oracle in the same numerics: what rounding cannot explain."""
    share, samples = recall(case, case.wanted["index_scores"], TIES.get(case.subject.numerics, TIES["native"]))
    return compare(
        "selection recall, oracle of the same numerics",
        share,
        ">=",
        0.999,
        f"known_bugs 0.2: at least 99.9 %, ties within {TIES.get(case.subject.numerics, TIES['native']):g} excluded",
        samples,
        where=case.where,
        part="selection",
        chance=chance_recall(case),
    )


def own_check(case: Case) -> Check:
    """The picks are the best of the subject's own scores: no rounding stands between these two."""
    name, scores = "selection is the best of the subject's own scores", case.points.get("index_scores")
    if scores is None or scores.shape != case.wanted["index_scores"].shape:
        return vacuous(name, "the subject gives no scores of this shape", where=case.where, part="selection")
    share, samples = recall(case, scores.double(), 1e-6)
    return compare(
        name,
        share,
        ">=",
        0.9999,
        "fp32 scores, ties within 1e-6 excluded",
        samples,
        where=case.where,
        part="selection",
        chance=chance_recall(case),
    )


def exact_check(case: Case) -> Check:
    """(b) The float64 oracle: what quantisation costs."""
    scores, picked = case.exact["index_scores"][:, case.crowded], case.picks[:, case.crowded]
    picked = steps.chosen(picked, scores.shape[-1])
    best = steps.chosen(steps.select(scores, case.k), scores.shape[-1])
    value = ((best & picked).sum() / best.sum()).item()
    mass = kept(scores, picked, best)
    floor = FLOORS.get(case.subject.numerics, FLOORS["native"])
    return compare(
        "selection recall, float64 oracle",
        value,
        ">=",
        floor,
        "known_bugs 2.1: a loose floor by format",
        int(best.sum()),
        where=case.where,
        part="selection",
        chance=chance_recall(case),
        note=f"score mass kept {mass:.2%}",
    )


def kept(scores: torch.Tensor, picked: torch.Tensor, best: torch.Tensor) -> float:
    """Sum of the picked scores above each query's lowest visible one, over that of the best picks."""
    lowest = torch.where(scores == -math.inf, math.inf, scores).amin(-1, keepdim=True)
    above = finite(scores - lowest)
    return ((above * picked).sum() / (above * best).sum().clamp(min=1e-30)).item()


def shape_checks(case: Case) -> list[Check]:
    """Sentinels, invisible and double picks: of all queries, those with fewer visible entries than k included."""
    raw, n = case.points["selection"][0][case.judged], case.wanted["index_scores"].shape[-1]
    real, about, visible = raw >= 0, dict(where=case.where, part="selection"), case.visible[case.judged]
    invisible = (real & (raw >= visible.unsqueeze(-1))).sum().item()
    double = sum(len(row) - len(set(row)) for row in (r[r >= 0].tolist() for r in raw))
    wrong = (real.sum(-1) != visible.clamp(max=case.k)).sum().item()
    few = int((visible < case.k).sum())
    return [
        compare("no pick is invisible", invisible, "==", 0, "specification §3, Visibility", int(real.sum()), **about),
        compare("no entry is picked twice", double, "==", 0, "specification §3, Indexer", int(real.sum()), **about),
        compare(
            "−1 wherever fewer than k entries are visible, and nowhere else",
            wrong,
            "==",
            0,
            "specification §3, Indexer",
            len(raw) if few or case.since else 0,
            unit="queries",
            note=f"{few} queries see fewer than k of {n} entries",
            **about,
        ),
    ]


def ties_check(case: Case) -> Check:
    """On zero inputs all scores are equal: the lowest entries win. Others than this project may choose freely."""
    rows = case.picks[0][case.crowded]
    wrong = (rows.sort(-1).values != torch.arange(rows.shape[-1])).any(-1).sum().item()
    check = compare(
        "equal scores go to the lowest entries",
        wrong,
        "==",
        0,
        "this project's promise, so that runs repeat",
        len(rows),
        where=case.where,
        part="selection",
        unit="queries",
    )
    free = check.status is Status.FAIL and "kernels" not in case.subject.can
    return (
        replace(check, status=Status.WARN, note="any choice among equals is right, but runs may differ")
        if free
        else check
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(IndexOracle)
