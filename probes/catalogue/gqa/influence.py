"""`influence` on GQA models: every query sees all tokens before it, or the last of its window, and no other.

Row 0 of a batch is as drawn, row 1 the same again, each further row has one token of the layer's input exchanged for
another. What changes in the output says who sees that token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.probes.catalogue.influence import Influence
from dsv4.probes.compare import at_share, far, heavy_tailed, limit_of
from dsv4.probes.oracle import gqa
from dsv4.probes.oracle.gqa import GQAOracle
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import Subject

QUIET = {"fp32": 1e-6}  # relative change of an output that must not change; else:
QUIET_BF16 = 3e-4  # sums in another order, 1e-6 apart, round one value in some thousand to another bf16
LOUD = 10  # times as much must the oracle's output change, before a change is asked for
SPECIFIED = "as config.json says"


@dataclass(frozen=True)
class Seen:
    """A layer's run: x [R, T, d] with token places[j] exchanged in row 2 + j; out and the oracle's output [R, T, d]."""

    oracle: GQAOracle
    i: int
    x: torch.Tensor
    places: tuple[int, ...]
    out: torch.Tensor
    points: dict


class GQAInfluence(Influence):
    """Every layer, in one step, in chunks, and by decode."""

    def run(self, subject: Subject) -> list[Check]:
        return list(influence_checks(subject, self.seed))


def influence_checks(subject: Subject, seed: int) -> Iterator[Check]:
    oracle = gqa.oracle_of(subject)
    for i in range(subject.config.num_hidden_layers):
        window = oracle.shape.windows[i]
        T = min(2 * (window or 70) + 60, subject.config.max_position_embeddings)
        places = tuple(sorted({0, 1, T // 3, T - (window or T) - 1, T - (window or T), T - 2, T - 1} & set(range(T))))
        x = exchanged(heavy_tailed(subject, T, seed + i, rows=2), places)
        for name, schedule in schedules(T).items():
            where, ids = f"layer {i}, {name}", torch.zeros(x.shape[:2], dtype=torch.long)
            try:
                points = subject.attention(i, x, ids, schedule, ("q_after_rope", "keys", "values")).points
            except Exception as error:  # an implementation under audit may raise anything
                note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                yield Check("the layer runs", Status.ERROR, where=where, part="attention core", note=note)
                continue
            seen = Seen(oracle, i, x, places, points[i, "attn_out"].double(), points)
            yield from perturbed(subject, seen, where)
            yield path(subject, seen, where)


def exchanged(two: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """two [2, T, d] → rows: the first, the first again, then for each place the first with that token of the second."""
    x = two[:1].repeat(2 + len(places), 1, 1)
    for j, place in enumerate(places):
        x[2 + j, place] = two[1, place]
    return x


def schedules(T: int) -> dict[str, tuple[int, ...]]:
    """One step; chunks that end nowhere in particular; and the last tokens one by one."""
    size, alone = T // 5 | 1, min(30, T // 2)
    chunks = (size,) * (T // size) + ((T % size,) if T % size else ())
    return {"one step": (), "chunks": chunks, "decode": (T - alone, *[1] * alone)}


def perturbed(subject: Subject, seen: Seen, where: str) -> Iterator[Check]:
    """Which outputs change with a token, against which may."""
    T, quiet = seen.x.shape[1], QUIET.get(subject.numerics, QUIET_BF16)
    sees = gqa.mask(T, seen.oracle.shape.windows[seen.i])  # [query, key]
    wanted = seen.oracle.layer(seen.i, seen.x.double())["attn_out"]
    size = seen.out[:1].norm(dim=-1).clamp(min=1e-12)
    found, expected = ((out[2:] - out[:1]).norm(dim=-1) / size for out in (seen.out, wanted))  # [places, T]
    found = torch.nan_to_num(found, nan=float("inf"))
    may = sees[:, list(seen.places)].T
    at = torch.tensor(seen.places).unsqueeze(1)
    future, beyond = torch.arange(T) < at, ~may & (torch.arange(T) > at)
    must = may & (expected > LOUD * quiet)
    quietly = ((seen.out[1] - seen.out[0]).norm(dim=-1) / size[0]).max().item()
    source = f"{subject.numerics}: an output that does not see the token does not change"
    yield compare(
        "two rows with the same tokens differ", quietly, "<=", quiet, source, T, where=where, part="attention core"
    )
    for name, region, part in (
        ("a token changes outputs before it", future, "causal mask"),
        ("a token changes outputs beyond the window", beyond, "window"),
    ):
        if not bool(region.any()):
            continue
        value = found[region].max().item()
        first = (region & (found > quiet)).nonzero().tolist()
        note = f"first: token {seen.places[first[0][0]]} in output {first[0][1]}" if first else ""
        yield compare(
            name, value, "<=", quiet, source, int(region.sum()), where=where, part=part, note=note, unit="relative"
        )
    if not bool(must.any()):
        yield vacuous(
            "a token changes the outputs that see it",
            "no output of the oracle changes enough",
            where=where,
            part="causal mask",
        )
        return
    silent = must & (found <= quiet)
    first = silent.nonzero().tolist()
    note = f"first: token {seen.places[first[0][0]]} in output {first[0][1]}" if first else ""
    part = "window" if first and first[0][1] != seen.places[first[0][0]] else "causal mask"
    yield compare(
        "outputs that see a token and do not change with it",
        int(silent.sum()),
        "==",
        0,
        f"the oracle's change by more than {LOUD} times {quiet:g}",
        int(must.sum()),
        where=where,
        part=part,
        note=note,
        unit="outputs",
        chance=int(must.sum()),
    )


def path(subject: Subject, seen: Seen, where: str) -> Check:
    """Which mask explains the output, given the subject's own queries, keys and values."""
    (limit, share, source), oracle, window = limit_of(subject), seen.oracle, seen.oracle.shape.windows[seen.i]
    q, k, v = (seen.points[seen.i, name][:1].double() for name in ("q_after_rope", "keys", "values"))
    T = q.shape[1]
    masks = {
        SPECIFIED: (gqa.mask(T, window), "attention core"),
        "each query sees one token of the future": (gqa.mask(T, window, 1), "causal mask"),
        "no query sees itself": (gqa.mask(T, window, -1), "causal mask"),
        "no mask": (torch.ones(T, T, dtype=torch.bool), "causal mask"),
        "itself only": (torch.eye(T, dtype=torch.bool), "attention core"),
    }
    if window is not None:
        masks |= {f"window of {w}": (gqa.mask(T, w), "window") for w in (window - 1, window + 1, 2 * window) if w > 0}
        masks["no window"] = gqa.mask(T, None), "window"
    else:
        masks |= {
            f"window of {w}": (gqa.mask(T, w), "window")
            for w in (subject.config.max_position_embeddings // 2, 128, 32)
            if w < T
        }
    errors = {}
    for name, (mask, _) in masks.items():
        o = gqa.attend(q, oracle.kept(k), oracle.kept(v), mask, oracle.shape.scale)
        errors[name] = at_share(far(seen.out[:1], oracle.output(seen.i, o)), share)
    best = min(errors, key=errors.get)
    part = masks[best][1] if errors[best] < 0.5 * errors[SPECIFIED] else masks[SPECIFIED][1]
    note = "; ".join(f"{name} {e:.2g}" for name, e in sorted(errors.items(), key=lambda pair: pair[1])[:4])
    return compare(
        "output is attention over what the layer sees",
        errors[SPECIFIED],
        "<=",
        limit,
        source,
        T,
        where=where,
        part=part,
        note=note,
        unit="relative",
        chance=errors["itself only"],
    )
