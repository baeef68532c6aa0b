"""The figures of README.md, from what a layer did and what the oracles score: sums over queries, so that texts add
up."""

import math
from dataclasses import dataclass, field

import torch

from dsv4.probes.measure.base.mass import mask
from dsv4.probes.measure.recall.observe import Seen
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import select

BINS = 32  # of distance: the window, then by powers of two
BY_DISTANCE = ("entries", "wanted", "found", "mass", "mass_kept")


@dataclass
class Tally:
    """Sums over `queries` queries by name, and by distance [len(BY_DISTANCE), BINS]."""

    sums: dict[str, float] = field(default_factory=dict)
    by_distance: torch.Tensor = field(default_factory=lambda: torch.zeros(len(BY_DISTANCE), BINS, dtype=torch.float64))

    def __add__(self, other: "Tally") -> "Tally":
        names = self.sums.keys() | other.sums.keys()
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Tally(sums, self.by_distance + other.by_distance)


def tally(seen: Seen, k: int, topk: int, margin: float, window: int) -> Tally:
    """Sums of one layer at one context for k picks.

    k = topk: the subject's own selection; else the best k of its own scores. margin: of a query's largest matched
    |score|, within which an entry is too near the k-th to be right or wrong.
    window: tokens of the first bin of distances.
    """
    n = seen.scores.shape[-1]
    visible = (seen.positions + 1) // kinds.CSA
    own = seen.selection if k == topk else select(seen.scores.double().unsqueeze(0), k)[0]
    picked = mask(own, n)
    best, size = mask(select(seen.exact.unsqueeze(0), k)[0], n), visible.clamp(max=k).double()
    chance = size / visible.clamp(min=1)
    sums = {
        "queries": len(visible),
        "wanted": best.sum().item(),
        "found": (best & picked).sum().item(),
        "picked": picked.sum().item(),
        "chance": chance.sum().item(),
    }
    sums |= _matched(seen, picked, k, margin) | _score_mass(seen.exact, picked, best, chance)
    mass = seen.mass.double()
    sums |= {
        "mass": mass.sum().item(),
        "mass_kept": (mass * picked).sum().item(),
        "mass_random": (mass.sum(-1) * chance).sum().item(),
        "mass_best": mass.topk(min(k, n), dim=-1).values.sum().item(),
    }
    sums |= {"again": (picked[1:] & picked[:-1]).sum().item(), "pairs": size[1:].sum().item()}
    sums["nan"] = (torch.isnan(seen.scores).any(-1) | torch.isnan(seen.mass).any(-1)).sum().item()
    return Tally(sums, _distances(seen.positions, picked, best, mass, window))


def finite(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores == -math.inf, 0, scores)


def _matched(seen: Seen, picked: torch.Tensor, k: int, margin: float) -> dict[str, float]:
    """Entries clearly above and clearly below the k-th matched score: those of the former that are picked, picks of the
    latter.

    Where no more than k entries are visible, all of them are clearly above.
    """
    scores = seen.matched
    ranked = torch.nn.functional.pad(scores.sort(-1, descending=True).values, (0, k + 1), value=-math.inf)
    middle = (ranked[:, k - 1 : k] + ranked[:, k : k + 1]) / 2
    near = margin * finite(scores).abs().amax(-1, keepdim=True)
    above, below = scores > middle + near, (scores < middle - near) & (scores > -math.inf)
    own, right = finite(seen.scores).double(), finite(scores)
    return {
        "clear": above.sum().item(),
        "clear_found": (above & picked).sum().item(),
        "clearly_wrong": (below & picked).sum().item(),
        "scale_own": (own * right).sum().item(),
        "scale_right": (right * right).sum().item(),
    }


def _score_mass(
    scores: torch.Tensor, picked: torch.Tensor, best: torch.Tensor, chance: torch.Tensor
) -> dict[str, float]:
    """Scores above each query's lowest visible one: of the picks, of the best picks, of as many at random."""
    lowest = torch.where(scores == -math.inf, math.inf, scores).amin(-1, keepdim=True)
    above = torch.where(scores == -math.inf, 0, scores - lowest)
    return {
        "score_kept": (above * picked).sum().item(),
        "score_best": (above * best).sum().item(),
        "score_random": (above.sum(-1) * chance).sum().item(),
    }


def _distances(
    positions: torch.Tensor, picked: torch.Tensor, best: torch.Tensor, mass: torch.Tensor, window: int
) -> torch.Tensor:
    """BY_DISTANCE [5, BINS], by tokens from an entry's last token to the query."""
    last = kinds.CSA * torch.arange(picked.shape[-1]) + kinds.CSA - 1
    distance = positions.unsqueeze(1) - last
    bins = (distance / window).log2().floor().long() + 1
    bins = torch.where(distance < window, 0, bins).clamp(max=BINS - 1)
    seen = distance >= 0
    what = (torch.ones_like(seen), best, best & picked, mass, mass * picked)
    return torch.stack(
        [torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins[seen], part[seen].double()) for part in what]
    )


def row(total: Tally, window: int) -> dict:
    """The figures as JSON values; None where nothing was there to be divided by."""
    s = total.sums
    ratio = lambda a, b: s[a] / s[b] if s[b] and math.isfinite(s[a] / s[b]) else None
    return {
        "queries": int(s["queries"]),
        "nan_queries": int(s["nan"]),
        "chance": ratio("chance", "queries"),
        "recall_fp32": ratio("found", "wanted"),
        "recall_matched": ratio("clear_found", "clear"),
        "clear_share": ratio("clear", "wanted"),
        "clearly_wrong": ratio("clearly_wrong", "picked"),
        "score_mass_kept": ratio("score_kept", "score_best"),
        "score_mass_chance": ratio("score_random", "score_best"),
        "attention_mass_kept": ratio("mass_kept", "mass"),
        "attention_mass_chance": ratio("mass_random", "mass"),
        "attention_mass_best": ratio("mass_best", "mass"),
        "attention_mass_of_entries": ratio("mass", "queries"),
        "overlap": ratio("again", "pairs"),
        "score_scale": ratio("scale_own", "scale_right"),
        "by_distance": _rows_by_distance(total.by_distance, window),
    }


def _rows_by_distance(sums: torch.Tensor, window: int) -> list[dict]:
    """One row a bin that has entries: distances `from` … `to` (tokens)."""
    rows = []
    for b, column in enumerate(sums.T.tolist()):
        of = dict(zip(BY_DISTANCE, column))
        if of["entries"]:
            rows.append(
                {
                    "from": 0 if b == 0 else window << (b - 1),
                    "to": (window << b) - 1,
                    "entries": int(of["entries"]),
                    "wanted": int(of["wanted"]),
                    "recall_fp32": of["found"] / of["wanted"] if of["wanted"] else None,
                    "attention_mass_share": of["mass"] / sums[3].sum().item() if sums[3].sum() else None,
                    "attention_mass_kept": of["mass_kept"] / of["mass"] if of["mass"] else None,
                }
            )
    return rows
