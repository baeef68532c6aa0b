"""P8: what a query really attends to, found by changing inputs and by comparing with known paths. See influence.md."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.probes.blame.ablation import attend, blame, mistakes, nobody, paths, sink_shares
from dsv4.probes.blame.consult import culprit
from dsv4.probes.blame.perturbation import Change, changes_for, direction, judged, resized
from dsv4.probes.compare import (
    MAX_TOKENS,
    at_share,
    far,
    heavy_tailed,
    limit_of,
    oracle_of,
    picks_of,
    points_at,
    zeros_like_ids,
)
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import Layer, chosen
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import Subject

QUIET = {"fp32": 1e-6, "qat:fp32": 1e-6}  # relative change of an output that must not change; else:
QUIET_BF16 = 3e-4  # sums in another order, 1e-6 apart, round one value in some thousand to another bf16
STEP = 2e-2  # change of an output below which a step of simulated FP8 (6 % of a value, taken or not) is part of it
SINKS = {"fp32": 1e-3, "native": 0.1, "qat": 0.5, "qat:fp32": 0.05}  # share of a sink's removal in the output
# change of the output by a sink's removal; below it rounding could look like a share
LEAST = {"fp32": 1e-3, "native": 2e-3}
SURE = 5  # standard errors that a share must be off by, and by which a missing sink would show
LATE = 24  # queries at the end by which the path is judged


@dataclass(frozen=True)
class Case:
    """A layer and its inputs x [2 + C + 1, T, d]: row 0 as drawn, 1 the same again, 2 + j with change j, the last an
    independent row.

    base: the oracle's points of rows 0 and −1, at the judged queries; changed: of rows 0 and 2 … 2 + C at the last
    query.
    """

    subject: Subject
    layer: Layer
    i: int
    x: torch.Tensor
    changes: tuple[Change, ...]
    base: dict[str, torch.Tensor]
    changed: dict[str, torch.Tensor]

    @property
    def quiet(self) -> float:
        return QUIET.get(self.subject.numerics, QUIET_BF16)


@dataclass(frozen=True)
class Seen:
    """A run of a case by one schedule: out [rows, T, d], and the picks of `base` and `changed`, None but on CSA
    layers."""

    case: Case
    where: str
    out: torch.Tensor
    base: torch.Tensor | None
    changed: torch.Tensor | None
    raw: torch.Tensor | None  # selection as given, of rows 0 and −1 at the judged queries


@dataclass(frozen=True)
class Influence(Probe):
    """Every layer, in one step, in chunks, and by decode: causal influence, path, window edge, sinks."""

    name: ClassVar[str] = "influence"
    title: ClassVar[str] = "queries attend to what they should, and to nothing else"
    needs: ClassVar[frozenset[str]] = frozenset({"layer"})
    reads: ClassVar[frozenset[str]] = frozenset({"selection", "attn_out"})

    def run(self, subject: Subject) -> list[Check]:
        oracle, checks, T = oracle_of(subject), [], length(subject, self.effort)
        x = heavy_tailed(subject, T, self.seed, rows=2)
        for i in range(subject.config.num_hidden_layers):
            case = choose(subject, oracle.layer(i), i, x, self.seed)
            plan, single = schedules(T, subject.config.sliding_window), only_row(case)
            for name, schedule in plan.items():
                checks += scheduled(case, schedule, f"layer {i}, {name}")
            checks += scheduled(single, plan["decode"], f"layer {i}, decode, one row")
        return checks


def length(subject: Subject, effort: float) -> int:
    """Tokens: 1.5 · k entries, two of HCA, all beyond the window; and at the end an unfinished HCA window longer than
    that."""
    c = subject.config
    k = c.index_topk if kinds.CSA in c.compress_ratios else 0
    T = c.sliding_window + max(6 * k, 256)
    T += (c.sliding_window + 21 - T) % 128
    return int(min(T, MAX_TOKENS * effort, c.max_position_embeddings))


def schedules(T: int, window: int) -> dict[str, tuple[int, ...]]:
    """One step; chunks that end nowhere in particular; and the first and the last tokens one by one."""
    decoded, first = min(window + LATE, 48, T // 2), min(window + 4, 20, T // 4)
    chunk = max(T // 5, 1) | 1
    return {
        "one step": (),
        "chunks": (chunk,) * (T // chunk) + ((T % chunk,) if T % chunk else ()),
        "decode": (*[1] * first, T - first - decoded, *[1] * decoded),
    }


def only_row(case: Case) -> Case:
    """Its first row alone: special kernels serve one token of one row."""
    first = lambda found: {name: v if name == "at" else v[:1] for name, v in found.items()}
    return replace(case, x=case.x[:1], changes=(), base=first(case.base), changed=first(case.changed))


def scheduled(case: Case, schedule: tuple[int, ...], where: str) -> list[Check]:
    """All checks of one schedule. If the subject raises, that is an ERROR of this schedule, and the other schedules
    still run."""
    try:
        seen = run_case(case, schedule, where)
    except Exception as error:  # an implementation under audit may raise anything
        note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return [Check("the layer runs", Status.ERROR, where=where, part="attention core", note=note)]
    return [*(influence_checks(seen) if case.changes else ()), *path_checks(seen), sink_check(seen)]


def ends_of(case: Case) -> list[int]:
    """The row itself and the independent row."""
    return [0, -1] if len(case.x) > 1 else [0]


def run_case(case: Case, schedule: tuple[int, ...], where: str) -> Seen:
    points = case.subject.attention(case.i, case.x, zeros_like_ids(case.x), schedule, ("selection",)).points
    out, csa = points[case.i, "attn_out"].double(), case.layer.ratio == kinds.CSA
    mine = lambda rows: {key: v[rows] for key, v in points.items() if key[1] == "selection"}
    of = lambda found, rows: picks_of(mine(rows), case.i, found, found["compressed_kv"].shape[1]) if csa else None
    ends, others = ends_of(case), [0, *range(2, len(out) - 1)]
    raw = mine(ends).get((case.i, "selection"))
    raw = None if raw is None else raw[:, case.base["at"]]
    return Seen(case, where, out, of(case.base, ends), of(case.changed, others), raw)


def choose(subject: Subject, layer: Layer, i: int, x: torch.Tensor, seed: int) -> Case:
    """Changes for the last query of x [2, T, d] (the row and an independent one), each as large as leaves the selection
    for it."""
    base, last = points_at(layer, x, judged(layer, x.shape[1], LATE)), torch.tensor([x.shape[1] - 1])
    picks = None
    if layer.ratio == kinds.CSA:
        points = subject.attention(i, x, zeros_like_ids(x), (), ("selection",)).points
        picks = picks_of(points, i, base, base["compressed_kv"].shape[1])[0, -1]
    changes = changes_for(layer, base, picks)
    noise = torch.stack([direction(layer, base, x[0], change, seed + j) for j, change in enumerate(changes)])
    rows = resized(subject, layer, i, x[:1], changes, noise, picks)
    changed = points_at(layer, torch.cat((x[:1], rows)), last)
    return Case(subject, layer, i, torch.cat((x[:1], x[:1], rows, x[1:])), changes, base, changed)


# ---- influence ----------------------------------------------------------------------------


def influence_checks(seen: Seen) -> list[Check]:
    """One check a kind of change: the worst of its tokens."""
    case = seen.case
    kinds, needed = (
        list(dict.fromkeys(change.kind for change in case.changes)),
        {4: ("token of a selected entry", "token of unselected entries only"), 128: ("token of a visible entry",)}.get(
            case.layer.ratio, ()
        ),
    )
    checks = [
        vacuous(f"influence: {kind}", "no such token within reach", where=seen.where, part="compressed entries")
        for kind in needed
        if kind not in kinds
    ]
    mine = attend(case.layer, case.changed, seen.changed)[:, -1]
    if "everything" not in case.changed:  # the same for every schedule
        case.changed["everything"] = attend(case.layer, case.changed, None, case.x.shape[1])[:, -1]
    return checks + [_kind(seen, kind, mine[1:] - mine[0], case.changed["everything"]) for kind in kinds]


def steady(seen: Seen) -> torch.Tensor:
    """bool [C]: the last query selects the same entries as without the change. Later changes do not matter to it."""
    changes = seen.case.changes
    if seen.changed is None:
        return torch.ones(len(changes), dtype=torch.bool)
    picks = seen.changed[:, -1].sort(-1).values
    same = (picks[1:] == picks[0]).all(-1)
    return same | torch.tensor([change.kind == "later token" for change in changes], dtype=torch.bool)


def _kind(seen: Seen, kind: str, mine: torch.Tensor, everything: torch.Tensor) -> Check:
    """mine: the oracle's change of the last query's output [C, d]; everything: its output with attention to
    everything."""
    out, changes, named = seen.out, seen.case.changes, f"influence: {kind}"
    t, size = out.shape[1] - 1, out[0, -1].norm().clamp(min=1e-12)
    noise = ((out[1, t] - out[0, t]).norm() / size).item()
    quiet, mask = seen.case.quiet + 10 * noise, steady(seen) & torch.tensor([change.kind == kind for change in changes])
    change = next(change for change in changes if change.kind == kind)
    at = [c.token for c in changes if c.kind == kind]
    about = dict(
        where=seen.where,
        part=change.part,
        unit="relative change",
        note=f"tokens {at}, query {t}, change of an identical rerun {noise:.2g}",
    )
    if kind == "later token":
        return later(seen, quiet, named, about)
    moved = out[2:-1, t] - out[0, t]
    if not change.moves:
        found = torch.nan_to_num(moved.norm(dim=-1) / size, nan=float("inf"))[mask]
        chance = ((everything[1:] - everything[0]).norm(dim=-1) / everything[0].norm().clamp(min=1e-12))[mask]
        return compare(
            named + " has none",
            found.max().item() if len(found) else None,
            "<=",
            quiet,
            "ten times an identical rerun, and rounding of the output",
            len(found),
            chance=chance.min().item() if len(found) else None,
            **about,
        )
    wanted = mine.norm(dim=-1) / size
    mask &= wanted > max(10 * quiet, STEP if seen.case.subject.numerics.startswith("qat") else 0)
    ratio = torch.nan_to_num((moved * mine).sum(-1) / mine.square().sum(-1).clamp(min=1e-30), nan=0.0, posinf=0.0)[mask]
    return compare(
        named + " has its share",
        ratio.min().item() if len(ratio) else None,
        ">=",
        0.25,
        "a quarter of the oracle's own change; changes within ten times the noise are not counted",
        len(ratio),
        chance=noise / wanted[mask].min().item() if len(ratio) else None,
        **about | {"unit": "of the oracle's change"},
    )


def later(seen: Seen, quiet: float, name: str, about: dict) -> Check:
    """Nothing before the changed token may change, at any query."""
    j, change = next((j, c) for j, c in enumerate(seen.case.changes) if c.kind == "later token")
    before, base = seen.out[2 + j, : change.token], seen.out[0, : change.token]
    errors = torch.nan_to_num((before - base).norm(dim=-1) / base.norm(dim=-1).clamp(min=1e-12), nan=float("inf"))
    return compare(
        name + " has none",
        errors.max().item() if len(errors) else None,
        "<=",
        quiet,
        "ten times an identical rerun, and rounding of the output",
        len(errors),
        **about,
    )


# ---- the path -----------------------------------------------------------------------------


def path_checks(seen: Seen) -> list[Check]:
    """Which path the late queries take, how near they are to it, and the queries that see few keys."""
    case, expected = seen.case, kinds.PATHS[seen.case.layer.ratio]
    outs, (limit, share, source) = paths(case.layer, case.base, seen.base), limit_of(case.subject)
    out = seen.out[ends_of(case)][:, case.base["at"]]
    checks = [_path(seen, {name: v[:, -LATE:] for name, v in outs.items()}, out[:, -LATE:])]
    for name, part in (("late", slice(-LATE, None)), ("few", slice(0, -LATE))):
        found, wanted = out[:, part], outs[expected][:, part]
        error = at_share(far(found, wanted), share) if found.numel() else None
        label = {
            "late": "attn_out equals the oracle's on the specified path",
            "few": "attn_out equals the oracle's where few keys are visible, and where one more becomes so",
        }[name]
        default, note = {"late": "attention core", "few": "absent keys"}[name], ""
        if error is not None and error > limit:
            default, note = _blame(seen, found, wanted, part, default)
        checks.append(
            compare(
                label,
                error,
                "<=",
                limit,
                source,
                found[..., 0].numel(),
                where=seen.where,
                part=default,
                unit="relative",
                chance=1.0,
                note=note,
            )
        )
    return checks + _counts(seen)


def _blame(seen: Seen, found: torch.Tensor, wanted: torch.Tensor, part: slice, default: str) -> tuple[str, str]:
    """The known mistake that explains the output of these judged queries."""
    base = seen.case.base | {name: seen.case.base[name][:, part] for name in ("q_after_rope",)}
    base["at"] = seen.case.base["at"][part]
    known = mistakes(seen.case.layer, base, None if seen.base is None else seen.base[:, part])
    named, note = blame(found, wanted, known, default)
    return (named == default and culprit(seen.case.subject, seen.case.i, "attn_out")) or (named, note)


def _path(seen: Seen, outs: dict[str, torch.Tensor], out: torch.Tensor) -> Check:
    limit, _, _ = limit_of(seen.case.subject)
    ratio, expected = seen.case.layer.ratio, kinds.PATHS[seen.case.layer.ratio]
    distance = {name: at_share(apart(out, v, outs[expected]), 0.5) for name, v in outs.items()}
    power = min(at_share(far(v, outs[expected]), 0.5) for name, v in outs.items() if name != expected)
    nearest, note = min(distance, key=distance.get), "; ".join(f"{name} {d:.2g}" for name, d in distance.items())
    part = {0: "window", 4: "selection", 128: "compressed entries"}[ratio]
    part = {"window only": "compressed entries", "entries only": "window"}.get(nearest, part) if ratio else part
    if power < 2 * limit:  # otherwise an output within the limit of one path is nearer to it than to any other
        return vacuous("path", f"the paths differ by {power:.2g} only", where=seen.where, part=part)
    return compare(
        "path",
        nearest,
        "==",
        expected,
        "nearest of the oracle's paths, median relative error",
        out[..., 0].numel(),
        part=part,
        where=seen.where,
        note=f"distances: {note}",
    )


def apart(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """‖found − wanted‖ / ‖scale‖ by token: one denominator for all paths, so that 'nothing' has a distance too."""
    errors = (found - wanted).norm(dim=-1) / scale.norm(dim=-1).clamp(min=1e-12)
    return torch.nan_to_num(errors, nan=float("inf"))


def _counts(seen: Seen) -> list[Check]:
    """A CSA query selects as many entries as it should, whatever the schedule."""
    if seen.raw is None:
        return []
    at, k = seen.case.base["at"], seen.case.layer.config.index_topk
    wanted, n = ((at + 1) // 4).clamp(max=k), seen.case.base["compressed_kv"].shape[1]
    held = torch.where((seen.raw < 0) | (seen.raw >= n), -1, seen.raw)
    wrong = (chosen(held, n).sum(-1) != wanted).sum().item()
    return [
        compare(
            "queries select k entries, or all that are visible",
            wrong,
            "==",
            0,
            "specification §3, Indexer",
            held[..., 0].numel(),
            where=seen.where,
            part="selection",
            unit="queries",
        )
    ]


def sink_check(seen: Seen) -> Check:
    """How much of each head's sink is missing in the output of the last queries: 0 with it, 1 without it, −1 with it
    twice."""
    case, part = seen.case, slice(-LATE, None)
    found = case.base | {"at": case.base["at"][part], "q_after_rope": case.base["q_after_rope"][:, part]}
    picks = nobody(found) if case.layer.ratio == 0 else None if seen.base is None else seen.base[:, part]
    out = seen.out[ends_of(case)][:, found["at"]]
    share, size, error, left = sink_shares(case.layer, found, picks, out)
    limit, name = SINKS.get(case.subject.numerics, SINKS["native"]), "every head's sink is in its softmax, once"
    counted = (SURE * error < 1 - limit) & (size > LEAST.get(case.subject.numerics, LEAST["native"]))
    least = (share.abs() - SURE * error).clamp(min=0) * counted
    worst, (near, within, _) = int(least.argmax()), limit_of(case.subject)
    about = dict(where=seen.where, part="sink", unit="share of its removal, at least", chance=1.0)
    if left > 0.5 and not at_share(far(out, attend(case.layer, found, picks)), within) <= near:
        return vacuous(
            name, f"the output differs, and sinks explain {1 - left:.0%} of it", where=seen.where, part="sink"
        )
    return compare(
        name,
        least[worst].item() if counted.any() else None,
        "<=",
        limit,
        "0 is the oracle with the sink, 1 without; by numerics",
        int(counted.sum()),
        found=f"head {worst}",
        note=f"share {share[worst]:.2g} ± {error[worst]:.1g}; {int((~counted).sum())} of {len(counted)} heads "
        "have a sink "
        "that cannot be told from noise",
        **about,
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Influence)
