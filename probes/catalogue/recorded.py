"""P17: a recorded run of any implementation, layer by layer against the oracle on its own recorded values. See
recorded.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes.blame.bisect_report import PARTS
from dsv4.probes.blame.by_layer import GATE, Difference, attend, differences, entries_only, expected, rounded
from dsv4.probes.compare import TOLERANCES, agreeing, oracle_of
from dsv4.probes.oracle import Oracle, kinds
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.subject import POINTS, Subject

SOURCE = "nearest of the oracle's paths over the recorded values; median of the queries that tell them apart best"
TELLING = 32  # queries by which the path is judged: those where the nearest other path is furthest away
NEEDED = ("q_after_rope", "kv_window", "attn_out")
AT_PATH = {kinds.WINDOW: "window", kinds.CSA: "selection", kinds.HCA: "compressed entries"}


@dataclass(frozen=True)
class Recorded(Probe):
    """Every recorded point of every layer, the selection, and the path that each layer's attention took."""

    name: ClassVar[str] = "recorded"
    title: ClassVar[str] = "a recorded run is what its own values should give"
    needs: ClassVar[frozenset[str]] = frozenset({"recorded", "files"})
    reads: ClassVar[frozenset[str]] = frozenset(POINTS)

    def run(self, subject: Subject) -> list[Check]:
        oracle, checks = oracle_of(subject), []
        oracle.cache = None  # rounding is in the tolerance
        before = oracle.weights("embed.weight")[subject.ids].unsqueeze(2).repeat(1, 1, subject.config.hc_mult, 1)
        streams = {"before": before}

        def see(i: int, points: dict) -> None:
            checks.extend(layer_checks(subject, oracle, i, streams["before"], points, subject.ids))
            streams["before"] = points.get("streams")

        subject.stream(subject.ids, tuple(POINTS), see)
        return checks


def layer_checks(
    subject: Subject, oracle: Oracle, i: int, before: torch.Tensor | None, points: dict, ids: torch.Tensor
) -> list[Check]:
    """Of one layer. before: the streams that entered it, None if they were not recorded; ids int64 [B, T]."""
    layer, where = oracle.layer(i), f"layer {i}"
    if not points:
        return [vacuous("recorded points", "none of this layer", where=where)]
    exact = expected(layer, before, ids, points)
    noisy = expected(rounded(layer, subject.numerics), before, ids, points)
    found = differences(i, points, exact, noisy, oracle.config, subject.numerics)
    checks = [_point_check(subject, d, where) for d in found]
    missing = [p for p in points if p not in {d.point for d in found}]
    checks += [
        vacuous(f"{p} equals the oracle's", "its inputs were not recorded", where=where, part=PARTS[p]) for p in missing
    ]
    return checks + [path_check(subject, oracle, i, points, exact, where)]


def _point_check(subject: Subject, d: Difference, where: str) -> Check:
    if d.point == "selection":
        return compare(
            "selection: wrong decisions",
            d.errors.mean().item(),
            "<=",
            1e-3,
            "known_bugs 0.2: at least 99.9 %, ties excluded",
            int((d.errors >= 0).sum()),
            where=where,
            part=PARTS[d.point],
            unit="of the picks",
        )
    value, source, limit = agreeing(d.errors, subject.numerics if subject.numerics in TOLERANCES else "native")
    left = 0 if d.kept is None else int((~d.kept).sum())
    return compare(
        f"{d.point} equals the oracle's on the recorded values",
        value,
        "<=",
        limit,
        source,
        len(d.errors),
        where=where,
        part=PARTS[d.point],
        unit="relative",
        note=f"{left} tokens left out, whose experts rounding may change" if left else "",
    )


# ---- the path ---------------------------------------------------------------------------------


def path_check(subject: Subject, oracle: Oracle, i: int, points: dict, exact: dict, where: str) -> Check:
    """Whether queries attended to the window and the selected entries, to all, to the window only, or to
    nothing."""
    layer, name = oracle.layer(i), "path"
    part = AT_PATH[layer.ratio]
    missing = [p for p in (*NEEDED, *(["compressed_kv"] if layer.ratio else [])) if p not in points]
    if missing:
        return vacuous(name, f"not recorded: {', '.join(missing)}", where=where, part=part)
    outs = paths(layer, {p: _wide(points.get(p, v)) for p, v in exact.items() if p != GATE})
    wanted = kinds.PATHS[layer.ratio]
    size = outs[wanted].norm(dim=-1).clamp(min=1e-12)
    gaps = lambda a, b: ((a - b).norm(dim=-1) / size).nan_to_num(nan=torch.inf).flatten()
    apart = torch.stack([gaps(out, outs[wanted]) for words, out in outs.items() if words != wanted])
    telling = apart.amin(0).topk(min(TELLING, apart.shape[1])).indices  # of the oracle alone, whatever the run did
    distance = {words: gaps(points["attn_out"].double(), out)[telling].median().item() for words, out in outs.items()}
    power = apart[:, telling].median(1).values.min().item()
    said = "; ".join(f"{words} {d:.2g}" for words, d in distance.items())
    limit = TOLERANCES.get(subject.numerics, TOLERANCES["native"])[1]
    if power < 2 * min(distance.values()) or power < 1e-6:
        why = f"the paths differ by {power:.2g} only, the run by {min(distance.values()):.2g}: longer runs tell more"
        return vacuous(name, why, where=where, part=part)
    nearest = min(distance, key=distance.get)
    part = "compressed entries" if nearest in ("window only", "nothing") and layer.ratio else part
    return compare(
        name,
        nearest if distance[nearest] < max(limit, 0.5 * power) else "none of them",
        "==",
        wanted,
        SOURCE,
        len(telling),
        where=where,
        part=part,
        note=f"distances: {said}",
    )


def paths(layer, points: dict) -> dict[str, torch.Tensor]:
    """What attn_out [1, T, d] would be, by path; the selection is the recorded one, or the oracle's where none is."""
    q = points["q_after_rope"]
    none = torch.full((*q.shape[:2], 1), -1)
    outs = {"window only": attend(layer, points, none)}
    if layer.ratio == kinds.CSA:
        wanted = entries_only(points["selection"], points["compressed_kv"].shape[1])
        outs["selected"] = attend(layer, points, wanted)
    if layer.ratio:
        outs["all"] = attend(layer, points, None)
    else:
        outs["every token"] = attend(layer, points, none, window=q.shape[1])
    return outs | {"nothing": torch.zeros_like(outs["window only"])}


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Recorded)
