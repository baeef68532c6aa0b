"""P8: what a query really attends to, found by changing inputs and by telling paths apart. See influence.md."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from probes.measure import MAX_TOKENS, at_share, attended, far, heavy_tailed, limit_of, oracle_of, picks_of, zeros_like_ids
from probes.oracle import Oracle
from probes.oracle import attention as steps
from probes.oracle.attention import Layer
from probes.probe import Probe
from probes.result import Check, compare, vacuous
from probes.subject import Subject

QUIET = {"fp32": 1e-6, "qat:fp32": 1e-6}  # relative change of an output that must not change; 2e-3, half a bf16 step, else
SINKS = {"fp32": 1e-3, "native": 0.1, "qat": 0.5, "qat:fp32": 0.05}  # share of a sink's removal in the output
EXPECTED = {0: "window only", 4: "selected", 128: "all"}
SIZES = (1.0, 0.3, 0.1, 0.03)  # of a change of a token, until the selection stays
LATE = 24                      # queries at the end that the path is judged by


@dataclass(frozen=True)
class Change:
    """A token that is changed. kind: what it is to the query; moves: whether the query must notice; part: whom to blame."""

    token: int
    kind: str
    moves: bool
    part: str


@dataclass(frozen=True)
class Rows:
    """One run of a layer: row 0 as drawn, row 1 the same again, row 2 + j with change j; out [B, T, d].

    picks: the selection of each row, None but on CSA layers; found: the oracle's points.
    """

    changes: tuple[Change, ...]
    out: torch.Tensor
    picks: torch.Tensor | None
    found: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Influence(Probe):
    """Every layer, in one step, in chunks, and by decode: causal influence, path, window edge, sinks."""

    name: ClassVar[str] = "influence"
    title: ClassVar[str] = "queries attend to what they should, and to nothing else"
    needs: ClassVar[frozenset[str]] = frozenset({"layer"})

    def run(self, subject: Subject) -> list[Check]:
        oracle, checks, T = oracle_of(subject), [], length(subject, self.effort)
        x = heavy_tailed(subject, T, self.seed)
        for i in range(subject.config.num_hidden_layers):
            layer = oracle.layer(i)
            changes, size, found = choose(subject, oracle, i, x, self.seed)
            for name, schedule in schedules(T, subject.config.sliding_window).items():
                rows = run_rows(subject, layer, i, perturbed(x, changes, size, self.seed), changes, schedule, found)
                where = f"layer {i}, {name}"
                checks += [*influence_checks(subject, layer, rows, where), *path_checks(subject, layer, rows, where)]
                checks += sink_checks(subject, layer, rows, f"layer {i}") if name == "one step" else []
        return checks


def length(subject: Subject, effort: float) -> int:
    """Tokens: 2 · k entries, two of HCA, all beyond the window; and at the end an unfinished HCA window longer than that."""
    c = subject.config
    k = c.index_topk if 4 in c.compress_ratios else 0
    T = c.sliding_window + max(8 * k, 256)
    T += (c.sliding_window + 21 - T) % 128
    return int(min(T, MAX_TOKENS * effort, c.max_position_embeddings))


def schedules(T: int, window: int) -> dict[str, tuple[int, ...]]:
    """One step; chunks that end nowhere in particular; and the last tokens one by one."""
    decoded = min(window + LATE, 48, T - 1)
    chunk = max(T // 5, 1) | 1
    return {"one step": (), "chunks": (chunk,) * (T // chunk) + ((T % chunk,) if T % chunk else ()),
            "decode": (T - decoded, *[1] * decoded)}


def run_rows(subject: Subject, layer: Layer, i: int, x: torch.Tensor, changes=(), schedule=(),
             found: dict | None = None) -> Rows:
    """x [B, T, d] through layer i of the subject and, unless `found` is its answer already, of the oracle."""
    points = subject.attention(i, x, zeros_like_ids(x), schedule, ("selection",)).points
    found, csa = found or steps.attention_layer(layer, x.double()), layer.ratio == 4
    picks = picks_of(points, i, found, found["index_keys"].shape[1]) if csa else None
    return Rows(changes, points[i, "attn_out"].double(), picks, found)


def perturbed(x: torch.Tensor, changes: tuple[Change, ...], size: float, seed: int) -> torch.Tensor:
    """x [1, T, d] → [2 + len(changes), T, d]: twice as it is, then with each change, of RMS `size`."""
    rows, g = x.repeat(2 + len(changes), 1, 1), torch.Generator().manual_seed(seed + 1)
    for j, change in enumerate(changes):
        rows[2 + j, change.token] += size * torch.randn(x.shape[-1], generator=g)
    return rows.bfloat16().float()


# ---- which tokens -------------------------------------------------------------------------


def choose(subject: Subject, oracle: Oracle, i: int, x: torch.Tensor, seed: int) -> tuple[tuple[Change, ...], float, dict]:
    """Changes for the last query of x [1, T, d], the largest size that leaves the selection for it, the oracle's points."""
    layer, t = oracle.layer(i), x.shape[1] - 1
    base = run_rows(subject, layer, i, x)
    changes = around_window(layer, t) + entries_of(layer, base, t) + future(layer, t)
    sizes = SIZES if layer.ratio == 4 else SIZES[:1]
    for size in sizes:
        rows = run_rows(subject, layer, i, perturbed(x, changes, size, seed), changes)
        if layer.ratio != 4 or steady(rows, t).all():
            break
    return changes, size, rows.found


def steady(rows: Rows, t: int) -> torch.Tensor:
    """bool [changes]: the query at t selects the same entries as without the change. A change after t is no concern of t."""
    if rows.picks is None:
        return torch.ones(len(rows.changes), dtype=torch.bool)
    picks = rows.picks[:, t].sort(-1).values
    same = (picks[2:] == picks[0]).all(-1)
    return same | torch.tensor([change.kind == "later token" for change in rows.changes], dtype=torch.bool)


def around_window(layer: Layer, t: int) -> tuple[Change, ...]:
    """The oldest token of the window; and on layers where it is in no entry, the one before."""
    W, ratio = layer.config.sliding_window, layer.ratio
    if t < W:
        return ()
    beyond = (Change(t - W, "token just outside the window", False, "window"),)
    free = ratio == 0 or (ratio == 128 and (t - W) // ratio >= (t + 1) // ratio)
    return (Change(t - W + 1, "oldest token of the window", True, "window"),) + (beyond if free else ())


def entries_of(layer: Layer, base: Rows, t: int) -> tuple[Change, ...]:
    """Tokens outside the window: of attended entries, and on CSA layers of entries that are not."""
    n, outside = (t + 1) // layer.ratio if layer.ratio else 0, t - layer.config.sliding_window
    if layer.ratio == 128:
        tokens = {layer.ratio // 2, layer.ratio * (n - 1) + 5} if n else set()
        return tuple(Change(j, "token of a visible entry", True, "compressed entries") for j in sorted(tokens) if j <= outside)
    if layer.ratio != 4:
        return ()
    chosen, scores = set(base.picks[0, t].tolist()) - {-1}, base.found["index_scores"][0, t]
    of = {4 * v + 1: [w for w in (v, v + 1) if w < n] for v in range(n) if 4 * v + 1 <= outside}  # token → its entries
    inside = {j: min(scores[w] for w in ws) for j, ws in of.items() if set(ws) <= chosen}
    inside = inside or {j: scores[ws[0]] for j, ws in of.items() if ws[0] in chosen}
    unselected = {j: max(scores[w] for w in ws) for j, ws in of.items() if not set(ws) & chosen}
    best, least = sorted(inside, key=inside.get)[-2:], sorted(unselected, key=unselected.get)[:2]
    return (*(Change(j, "token of a selected entry", True, "compressed entries") for j in best),
            *(Change(j, "token of unselected entries only", False, "selection") for j in least))


def future(layer: Layer, t: int) -> tuple[Change, ...]:
    """The last token of an entry in the middle: nothing before it may notice."""
    ratio = layer.ratio or 4
    middle = t // 2 // ratio * ratio
    return (Change((middle or ratio) - 1, "later token", False, "causality"),)


# ---- influence ----------------------------------------------------------------------------


def influence_checks(subject: Subject, layer: Layer, rows: Rows, where: str) -> list[Check]:
    """One check a kind of change: the worst of its tokens."""
    kinds, needed = list(dict.fromkeys(change.kind for change in rows.changes)), {4: ("token of a selected entry", "token of "
                    "unselected entries only"), 128: ("token of a visible entry",)}.get(layer.ratio, ())
    checks = [vacuous(f"influence: {kind}", "no such token within reach", where=where, part="compressed entries")
              for kind in needed if kind not in kinds]
    mine, other = oracle_changes(layer, rows)
    return checks + [_kind(subject, rows, kind, mine, other, where) for kind in kinds]


def oracle_changes(layer: Layer, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative change [changes] of the last query's output by the oracle: as it should attend, and attending to everything."""
    T = rows.out.shape[1]
    if "everything" not in rows.found:  # the same for every schedule
        rows.found["everything"] = projected(layer, attended(layer, rows.found, None, window=T)[0])[:, -1]
    return moved(projected(layer, attended(layer, rows.found, rows.picks)[0])[:, -1]), moved(rows.found["everything"])


def projected(layer: Layer, o: torch.Tensor) -> torch.Tensor:
    return steps.output(layer, o, torch.arange(o.shape[1]))


def moved(out: torch.Tensor) -> torch.Tensor:
    """out [2 + changes, d] → relative change of each changed row against row 0."""
    return (out[2:] - out[0]).norm(dim=-1) / out[0].norm().clamp(min=1e-12)


def _kind(subject: Subject, rows: Rows, kind: str, mine: torch.Tensor, other: torch.Tensor, where: str) -> Check:
    t, out, named = rows.out.shape[1] - 1, rows.out, f"influence: {kind}"
    noise = ((out[1, t] - out[0, t]).norm() / out[0, t].norm().clamp(min=1e-12)).item()
    quiet = QUIET.get(subject.numerics, 2e-3) + 10 * noise
    mask = steady(rows, t) & torch.tensor([change.kind == kind for change in rows.changes])
    change = next(change for change in rows.changes if change.kind == kind)
    about = dict(where=where, part=change.part, unit="relative change", 
                 note=f"tokens {[c.token for c in rows.changes if c.kind == kind]}, query {t}, "
                 f"change of an identical rerun {noise:.2g}")
    if kind == "later token":
        return later(rows, quiet, named, about)
    seen = torch.nan_to_num(moved(out[:, t]), nan=float("inf"))
    if not change.moves:
        return compare(named + " has none", *_worst(seen[mask]), "<=", quiet,
                       "ten times an identical rerun, and rounding of the output", int(mask.sum()),
                       chance=other[mask].min().item() if mask.any() else None, **about)
    mask &= mine > 10 * quiet
    ratio = torch.where(torch.isfinite(seen), seen / mine.clamp(min=1e-12), 0)[mask]
    return compare(named + " has its share", ratio.min().item() if len(ratio) else None, ">=", 0.25,
                   "a quarter of the oracle's own change; changes within ten times the noise are not counted", len(ratio),
                   chance=noise / mine[mask].min().item() if len(ratio) else None, **about | {"unit": "of the oracle's change"})


def _worst(values: torch.Tensor) -> tuple[float | None]:
    return (values.max().item() if len(values) else None,)


def later(rows: Rows, quiet: float, name: str, about: dict) -> Check:
    """Nothing before the changed token may change, at any query."""
    j, change = next((j, c) for j, c in enumerate(rows.changes) if c.kind == "later token")
    before, base = rows.out[2 + j, :change.token], rows.out[0, :change.token]
    errors = torch.nan_to_num((before - base).norm(dim=-1) / base.norm(dim=-1).clamp(min=1e-12), nan=float("inf"))
    return compare(name + " has none", errors.max().item() if len(errors) else None, "<=", quiet,
                   "ten times an identical rerun, and rounding of the output", len(errors), **about)


# ---- the path -----------------------------------------------------------------------------


def paths(layer: Layer, rows: Rows) -> dict[str, torch.Tensor]:
    """What attn_out [1, T, d] of row 0 would be, by path."""
    found, T = {name: v[:1] for name, v in rows.found.items()}, rows.out.shape[1]  # of row 0
    none = torch.full((1, T, 1), -1)
    outs = {"window only": projected(layer, attended(layer, found, none)[0])}
    if layer.ratio == 4:
        outs["selected"] = projected(layer, attended(layer, found, rows.picks[:1])[0])
    if layer.ratio:
        outs["all"] = projected(layer, attended(layer, found, None)[0])
    else:
        outs["every token"] = projected(layer, attended(layer, found, none, window=T)[0])
    return outs | {"nothing": torch.zeros_like(outs["window only"])}


def path_checks(subject: Subject, layer: Layer, rows: Rows, where: str) -> list[Check]:
    """Which path the late queries take, and how near their output is to it."""
    limit, share, source = limit_of(subject)
    outs, expected, late = paths(layer, rows), EXPECTED[layer.ratio], slice(-LATE, None)
    out, about = rows.out[:1, late], dict(where=where, samples=min(LATE, rows.out.shape[1]))
    distance = {name: at_share(apart(out, v[:, late], outs[expected][:, late]), 0.5) for name, v in outs.items()}
    power = min(at_share(far(v[:, late], outs[expected][:, late]), 0.5) for name, v in outs.items() if name != expected)
    part = {0: "window", 4: "selection", 128: "compressed entries"}[layer.ratio]
    nearest, note = min(distance, key=distance.get), "; ".join(f"{name} {d:.2g}" for name, d in distance.items())
    part = "compressed entries" if nearest == "window only" and layer.ratio else part
    if power < 3 * limit:
        path = vacuous("path", f"the paths differ by {power:.2g} only", where=where, part=part)
    else:
        path = compare("path", nearest, "==", expected, "nearest of the oracle's paths, median relative error", part=part,
                       note=f"distances: {note}", **about)
    error = at_share(far(out, outs[expected][:, late]), share)
    return [path, compare("attn_out equals the oracle's on the specified path", error, "<=", limit, source,
                          part="attention core", unit="relative", chance=1.0, **about)]


def apart(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """‖found − wanted‖ / ‖scale‖ by token: one denominator for all paths, so that 'nothing' has a distance too."""
    errors = (found - wanted).norm(dim=-1) / scale.norm(dim=-1).clamp(min=1e-12)
    return torch.nan_to_num(errors, nan=float("inf"))


# ---- sinks --------------------------------------------------------------------------------


def sink_checks(subject: Subject, layer: Layer, rows: Rows, where: str) -> list[Check]:
    """How much of each head's sink is missing in the output: 0 with it, 1 without it, about −1 with it twice.

    Without its sink, a head's output grows by 1 / (1 − sink mass). The coefficients of all heads together are a least-squares
    fit of what the subject's output differs from the oracle's.
    """
    found, plain = {name: v[:1] for name, v in rows.found.items()}, replace(layer, simulate=False)
    o, masses = attended(layer, found, None if rows.picks is None else rows.picks[:1])
    late = torch.arange(o.shape[1])[-(128 if o.shape[2] <= 16 else 8):]
    o, mass = o[:, late], masses["sink"][:, late, :, None]
    without = o * (mass / (1 - mass).clamp(min=1e-9))
    heads = torch.eye(o.shape[2], dtype=o.dtype)
    grown = torch.stack([steps.output(plain, without * head[:, None], late).flatten() for head in heads], 1)  # [n · d, H]
    missing = rows.out[0, late].flatten() - steps.output(layer, o, late).flatten()
    share = torch.linalg.lstsq(grown, missing.nan_to_num(nan=1e9).unsqueeze(1)).solution.flatten()
    size = grown.norm(dim=0) / rows.out[0, late].norm().clamp(min=1e-12)
    limit = SINKS.get(subject.numerics, SINKS["native"])
    seen = size > max(QUIET.get(subject.numerics, 2e-3), 1e-6 / limit)  # or rounding alone could look like a share
    worst = int((share.abs() * seen).argmax())
    return [compare("every head's sink is in its softmax, once", share[worst].abs().item(), "<=", limit,
                    "0 is the oracle with the sink, 1 without; by numerics", int(seen.sum()), where=f"{where}, head {worst}",
                    part="sink", unit="share of its removal", chance=1.0,
                    note=f"{int((~seen).sum())} of {len(seen)} heads have a sink too small to be seen")]
