"""P6: the indexer's keys, scores and picks, against the oracle in the same numerics and in float64. See index_oracle.md."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from probes.measure import MAX_TOKENS, at_share, far, heavy_tailed, limit_of, oracle_of, zeros_like_ids
from probes.oracle import Oracle
from probes.oracle import attention as steps
from probes.oracle.attention import Layer
from probes.oracle.formats import hadamard, simulate_fp4
from probes.probe import Probe
from probes.result import Check, Status, compare, vacuous
from probes.subject import Subject

FLOORS = {"fp32": 0.999, "native": 0.98, "bf16": 0.98, "qat": 0.75, "qat:fp32": 0.75}  # known_bugs 2.1, loosely
SCORES = {"fp32": 1e-4, "native": 2e-2, "qat": 2e-2, "qat:fp32": 1e-4}                 # relative, of the median query
TIES = {"fp32": 1e-5, "native": 2e-2, "qat": 2e-2, "qat:fp32": 1e-3}                   # of a query's largest score
PARTS = {"keys": "indexer keys", "queries": "indexer queries", "weights": "indexer weights"}


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

    @property
    def where(self) -> str:
        return self.layer.prefix.replace("layers.", "layer ").strip(".")

    @property
    def visible(self) -> torch.Tensor:
        """int64 [T]: how many entries each query sees."""
        return (torch.arange(self.x.shape[1]) + 1) // self.layer.ratio

    @property
    def crowded(self) -> torch.Tensor:
        """bool [T]: whether there is anything to choose."""
        return self.visible > self.k

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

    def run(self, subject: Subject) -> list[Check]:
        c = subject.config
        layers = [i for i in range(c.num_hidden_layers) if c.compress_ratios[i] == 4]
        T = 4 * 8 * c.index_topk + 7
        if not layers:
            return [vacuous(self.title, "no CSA layer")]
        if T > min(MAX_TOKENS * self.effort, c.max_position_embeddings):
            why = f"8 · k entries need {T} tokens, more than this effort or the model allows"
            return [vacuous(self.title, why, where=f"layer {i}", part="selection") for i in layers]
        x, matched, exact = heavy_tailed(subject, T, self.seed), oracle_of(subject), oracle_of(subject, matched=False)
        return [check for i in layers for check in self._layer(subject, matched, exact, i, x)]

    def _layer(self, subject: Subject, matched: Oracle, exact: Oracle, i: int, x: torch.Tensor) -> list[Check]:
        want = ("index_keys", "index_scores", "selection")
        run = lambda x: {name: v for (_, name), v in subject.attention(i, x, zeros_like_ids(x), want=want).points.items()}
        wanted = indexed(matched.layer(i), x)
        case = Case(subject, matched.layer(i), x, run(x), wanted, indexed(exact.layer(i), x), subject.config.index_topk)
        checks = [keys_check(case), scores_check(case)]
        if "selection" not in case.points:
            return checks + [vacuous("selection", "the subject gives none", where=case.where, part="selection")]
        checks += [matched_check(case), own_check(case), exact_check(case), *shape_checks(case)]
        return checks + [ties_check(replace(case, points=run(torch.zeros_like(x))))]


def indexed(layer: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """attn_in [1, T, d] → index keys, queries, weights, scores, by the oracle."""
    x, positions = x.double(), torch.arange(x.shape[1])
    parts = {"keys": keys(layer, x), "queries": queries(layer, x, positions),
             "weights": held(layer, steps.index_weights(layer, x))}
    return parts | {"index_scores": score(layer, parts)}


def held(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x as activations hold it before FP4: a matched oracle quantises the same numbers, or values at the boundaries flip."""
    return layer.store(x) if layer.simulate else x


def form(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """`steps.index_form`, with what Hadamard gives held before FP4."""
    return simulate_fp4(held(layer, hadamard(held(layer, x))), 32) if layer.simulate else x


def keys(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Index keys [B, n, Di] of attn_in x [B, T, d], as the cache holds them."""
    w = lambda leaf: layer.w(f"attn.indexer.compressor.{leaf}")
    pooled = held(layer, steps.pool(x, w("wkv.weight"), w("wgate.weight"), w("ape"), layer.ratio, overlap=True))
    entries = held(layer, steps.rms(pooled, w("norm.weight"), layer.config.rms_norm_eps))
    return layer.store(form(layer, steps.rotate(entries, layer.ratio * torch.arange(entries.shape[1]), layer.frequencies)))


def queries(layer: Layer, x: torch.Tensor, positions: torch.Tensor, turn: bool = True) -> torch.Tensor:
    """Index queries [B, T, Hi, Di] of attn_in x [B, T, d], with activations held in the cache's dtype if simulated."""
    c = layer.config
    a = held(layer, layer.linear("attn.wq_a", x))
    qr = held(layer, steps.rms(a, layer.w("attn.q_norm.weight"), c.rms_norm_eps))
    q = held(layer, layer.linear("attn.indexer.wq_b", qr)).unflatten(-1, (c.index_n_heads, c.index_head_dim))
    return form(layer, steps.rotate_heads(q, positions, layer.frequencies) if turn else q)


def score(layer: Layer, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    positions = torch.arange(parts["queries"].shape[1])
    return steps.index_scores(parts["queries"], parts["weights"], parts["keys"], positions, layer.ratio)


def keys_check(case: Case) -> Check:
    """Index keys, entry by entry."""
    limit, share, source = limit_of(case.subject)
    name, found, wanted = "index keys equal the oracle's", case.points.get("index_keys"), case.wanted["keys"]
    if found is None or found.shape != wanted.shape:
        return vacuous(name, "the subject gives none of this shape", where=case.where, part=PARTS["keys"])
    return compare(name, at_share(far(found, wanted), share), "<=", limit, source, found.shape[1],
                   where=case.where, part=PARTS["keys"], unit="relative", chance=far(wanted.roll(1, 1), wanted).median().item())


def scores_check(case: Case) -> Check:
    """Scores over visible entries, query by query: recall alone does not see a wrong temperature (known_bugs 0.2)."""
    name, found, wanted = "index scores equal the oracle's", case.points.get("index_scores"), case.wanted["index_scores"]
    if found is None or found.shape != wanted.shape:
        return vacuous(name, "the subject gives none of this shape", where=case.where, part="indexer scores")
    limit = SCORES.get(case.subject.numerics, SCORES["native"])
    error = score_error(case, wanted)
    part, note = ("", "") if error <= limit else blame(case)
    return compare(name, error, "<=", limit, f"{limit_of(case.subject)[2]}; the median query", int(case.crowded.sum()),
                   where=case.where, part=part or "indexer queries", unit="relative", note=note,
                   chance=far(finite(wanted.roll(1, 2))[:, case.crowded], finite(wanted)[:, case.crowded]).median().item())


def finite(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores == -math.inf, 0, scores)


def score_error(case: Case, wanted: torch.Tensor) -> float:
    """Of the median query with a choice; infinite where the subject hides or shows other entries than it should."""
    found = case.points["index_scores"].double()
    if not torch.equal(found == -math.inf, wanted == -math.inf):
        return math.inf
    return at_share(far(finite(found)[:, case.crowded], finite(wanted)[:, case.crowded]), 0.5)


def blame(case: Case) -> tuple[str, str]:
    """(part at fault, why): the nearest of the oracle's variants of the score, the subject's own keys among them."""
    errors = {name: score_error(case, scores) for name, (_, scores) in variants(case).items()}
    best = min(errors, key=errors.get)
    note = "; ".join(f"{name} {e:.2g}" for name, e in sorted(errors.items(), key=lambda item: item[1])[:3])
    if errors[best] > 0.5 * score_error(case, case.wanted["index_scores"]):
        return "indexer queries", f"no known mistake explains it: {note}"
    return variants(case)[best][0], f"nearest: {note}"


def variants(case: Case) -> dict[str, tuple[str, torch.Tensor]]:
    """Mistaken scores by name, each with the part that is at fault."""
    layer, right, c = case.layer, case.wanted, case.subject.config
    scores = lambda **other: score(layer, right | other)
    hide = right["index_scores"] == -math.inf
    size, everywhere = (c.index_n_heads * c.index_head_dim)**0.5, torch.arange(case.x.shape[1])
    raw = torch.einsum("bth,bthd,bnd->btn", right["weights"], right["queries"], right["keys"]).masked_fill(hide, -math.inf)
    found = {
        "ReLU missing": ("indexer scores", raw),
        "temperature missing": ("indexer weights", scores(weights=right["weights"] * size)),
        "temperature twice": ("indexer weights", scores(weights=right["weights"] / size)),
        "sigmoid of the weights": ("indexer weights", scores(weights=sigmoid_weights(right["weights"], c))),
        "weights missing": ("indexer weights", scores(weights=torch.ones_like(right["weights"]))),
        "half the heads": ("indexer queries", scores(weights=half_of(right["weights"]))),
        "queries not rotated": ("indexer queries", scores(queries=queries(layer, case.x.double(), everywhere, False))),
    }
    own = case.points.get("index_keys")
    if own is not None and own.shape == right["keys"].shape:
        found["the subject's own keys"] = (PARTS["keys"], scores(keys=own.double()))
    if layer.simulate:
        found["Hadamard of queries missing"] = (PARTS["queries"], scores(queries=hadamard(right["queries"])))
        found["Hadamard of keys missing"] = (PARTS["keys"], scores(keys=hadamard(right["keys"])))
    return found


def sigmoid_weights(weights: torch.Tensor, c) -> torch.Tensor:
    scale = (c.index_n_heads * c.index_head_dim)**-0.5
    return torch.sigmoid(weights / scale) * scale


def half_of(weights: torch.Tensor) -> torch.Tensor:
    return torch.cat((weights[..., :weights.shape[-1] // 2], torch.zeros_like(weights[..., weights.shape[-1] // 2:])), -1)


# ---- selection ----------------------------------------------------------------------------


def recall(case: Case, scores: torch.Tensor, margin: float) -> tuple[float, int]:
    """(share of decisions that are right, decisions): entries clearly above or below the k-th score of `scores`.

    Those within `margin` of a query's largest |score| from the boundary are ties, and not counted. An entry clearly below that
    is picked counts against it, as does one clearly above that is not.
    """
    scores, picked = scores[:, case.crowded], steps.chosen(case.picks, scores.shape[-1])[:, case.crowded]
    ranked = scores.sort(-1, descending=True).values
    middle = (ranked[..., case.k - 1:case.k] + ranked[..., case.k:case.k + 1]) / 2
    near = margin * finite(scores).abs().amax(-1, keepdim=True)
    above, below = scores > middle + near, scores < middle - near
    wrong = (above & ~picked).sum() + (below & picked).sum()
    return 1 - (wrong / above.sum().clamp(min=1)).item(), int(above.sum())


def chance_recall(case: Case) -> float:
    return (case.k / case.visible[case.crowded]).mean().item()


def matched_check(case: Case) -> Check:
    """(a) The oracle in the same numerics: what rounding cannot explain."""
    share, samples = recall(case, case.wanted["index_scores"], TIES.get(case.subject.numerics, TIES["native"]))
    return compare("selection recall, oracle of the same numerics", share, ">=", 0.999,
                   f"known_bugs 0.2: at least 99.9 %, ties within {TIES.get(case.subject.numerics, TIES['native']):g} excluded",
                   samples, where=case.where, part="selection", chance=chance_recall(case))


def own_check(case: Case) -> Check:
    """The picks are the best of the subject's own scores: no rounding stands between these two."""
    name, scores = "selection is the best of the subject's own scores", case.points.get("index_scores")
    if scores is None or scores.shape != case.wanted["index_scores"].shape:
        return vacuous(name, "the subject gives no scores of this shape", where=case.where, part="selection")
    share, samples = recall(case, scores.double(), 1e-6)
    return compare(name, share, ">=", 0.9999, "fp32 scores, ties within 1e-6 excluded", samples, where=case.where,
                   part="selection", chance=chance_recall(case))


def exact_check(case: Case) -> Check:
    """(b) The float64 oracle: what quantisation costs."""
    scores, picked = case.exact["index_scores"][:, case.crowded], case.picks[:, case.crowded]
    picked = steps.chosen(picked, scores.shape[-1])
    best = steps.chosen(steps.select(scores, case.k), scores.shape[-1])
    value = ((best & picked).sum() / best.sum()).item()
    mass = kept(scores, picked, best)
    floor = FLOORS.get(case.subject.numerics, FLOORS["native"])
    return compare("selection recall, float64 oracle", value, ">=", floor, "known_bugs 2.1: a loose floor by format",
                   int(best.sum()), where=case.where, part="selection", chance=chance_recall(case),
                   note=f"score mass kept {mass:.2%}")


def kept(scores: torch.Tensor, picked: torch.Tensor, best: torch.Tensor) -> float:
    """Sum of the picked scores above each query's lowest visible one, over that of the best picks."""
    lowest = torch.where(scores == -math.inf, math.inf, scores).amin(-1, keepdim=True)
    above = finite(scores - lowest)
    return ((above * picked).sum() / (above * best).sum().clamp(min=1e-30)).item()


def shape_checks(case: Case) -> list[Check]:
    """Sentinels, invisible and double picks: of all queries, those with fewer visible entries than k included."""
    raw, n = case.points["selection"][0], case.wanted["index_scores"].shape[-1]
    real, about = raw >= 0, dict(where=case.where, part="selection")
    invisible = (real & (raw >= case.visible.unsqueeze(-1))).sum().item()
    double = sum(len(row) - len(set(row)) for row in (r[r >= 0].tolist() for r in raw))
    wrong = (real.sum(-1) != case.visible.clamp(max=case.k)).sum().item()
    few = int((case.visible < case.k).sum())
    return [compare("no pick is invisible", invisible, "==", 0, "specification §3, Visibility", int(real.sum()), **about),
            compare("no entry is picked twice", double, "==", 0, "specification §3, Indexer", int(real.sum()), **about),
            compare("−1 wherever fewer than k entries are visible, and nowhere else", wrong, "==", 0,
                    "specification §3, Indexer", len(raw) if few else 0, unit="queries",
                    note=f"{few} queries see fewer than k of {n} entries", **about)]


def ties_check(case: Case) -> Check:
    """On zero inputs all scores are equal: the lowest entries win. Others than this project may choose freely."""
    rows = case.picks[0][case.crowded]
    wrong = (rows.sort(-1).values != torch.arange(rows.shape[-1])).any(-1).sum().item()
    check = compare("equal scores go to the lowest entries", wrong, "==", 0, "this project's promise, so that runs repeat",
                    len(rows), where=case.where, part="selection", unit="queries")
    free = check.status is Status.FAIL and "kernels" not in case.subject.can
    return replace(check, status=Status.WARN, note="any choice among equals is right, but runs may differ") if free else check
