"""Which queries `influence` looks at, which tokens it changes for the last of them, and how."""

from dataclasses import dataclass

import torch

from dsv4.probes.compare import attended, zeros_like_ids
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import Layer, chosen
from dsv4.probes.subject import Subject

SIZES = (4.0, 1.0, 0.3, 0.1, 0.03)  # of a change of a token (whose RMS is 1), until the selection stays
AIMS = 64  # directions, of which the one that the last query attends to most is taken


@dataclass(frozen=True)
class Change:
    """A token that is changed. kind: what it is to the last query; moves: whether that must notice; part: whom to
    blame."""

    token: int
    kind: str
    moves: bool
    part: str


def judged(layer: Layer, T: int, late: int) -> torch.Tensor:
    """Positions of the queries looked at: where few keys are visible and where that number changes, and the last
    ones."""
    W, r, k = layer.config.sliding_window, layer.ratio, layer.config.index_topk
    few = {0, 1, W - 2, W - 1, W, W + 1} | ({r - 2, r - 1, r, 2 * r - 2, 2 * r - 1, 2 * r} if r else set())
    few |= {r * k - 2, r * k - 1, r * k, r * k + r - 1} if r == kinds.CSA else set()
    return torch.tensor([*sorted(t for t in few if 0 <= t < T - late), *range(max(T - late, 0), T)])


def changes_for(layer: Layer, base: dict[str, torch.Tensor], picks: torch.Tensor | None) -> tuple[Change, ...]:
    """base: the oracle's points (`points_at`), of whose first row the last query is meant; picks [k]: what that
    selects."""
    t = int(base["at"][-1])
    return around_window(layer, t) + entries_of(layer, base, picks, t) + future(layer, t)


def around_window(layer: Layer, t: int) -> tuple[Change, ...]:
    """The oldest token of the window; and on layers where it is in no entry, the one before."""
    W, ratio = layer.config.sliding_window, layer.ratio
    if t < W:
        return ()
    beyond = (Change(t - W, "token just outside the window", False, "window"),)
    free = ratio == 0 or (ratio == kinds.HCA and (t - W) // ratio >= (t + 1) // ratio)
    return (Change(t - W + 1, "oldest token of the window", True, "window"),) + (beyond if free else ())


def entries_of(layer: Layer, base: dict, picks: torch.Tensor | None, t: int) -> tuple[Change, ...]:
    """Tokens outside the window: of attended entries, and on CSA layers of entries that are not."""
    n, outside = (t + 1) // layer.ratio if layer.ratio else 0, t - layer.config.sliding_window
    if layer.ratio == kinds.HCA:
        tokens = {layer.ratio // 2, layer.ratio * (n - 1) + 5} if n else set()
        return tuple(
            Change(j, "token of a visible entry", True, "compressed entries") for j in sorted(tokens) if j <= outside
        )
    if layer.ratio != kinds.CSA:
        return ()
    picked, scores = set(picks.tolist()) - {-1}, base["index_scores"][0, -1]
    last = {name: base[name][:1] for name in ("kv_window", "compressed_kv")} | {"at": base["at"][-1:]}
    mass = attended(layer, last | {"q_after_rope": base["q_after_rope"][:1, -1:]}, None)[1]["entries"][0, 0].sum(0)
    r = layer.ratio
    of = {r * v + 1: [w for w in (v, v + 1) if w < n] for v in range(n) if r * v + 1 <= outside}  # token → its entries
    inside = {j: min(scores[w] for w in ws) for j, ws in of.items() if set(ws) <= picked}
    inside = inside or {j: scores[ws[0]] for j, ws in of.items() if ws[0] in picked}
    unselected = {j: max(scores[w] for w in ws) for j, ws in of.items() if not set(ws) & picked}
    # of those far from the boundary, those that attention would weigh most
    noticed = lambda j: sum(mass[w] for w in of[j])
    best = sorted(sorted(inside, key=inside.get)[len(inside) // 2 if len(inside) > 3 else 0 :], key=noticed)[-2:]
    least = sorted(sorted(unselected, key=unselected.get)[: (len(unselected) + 1) // 2], key=noticed)[-2:]
    return (
        *(Change(j, "token of a selected entry", True, "compressed entries") for j in best),
        *(Change(j, "token of unselected entries only", False, "selection") for j in least),
    )


def future(layer: Layer, t: int) -> tuple[Change, ...]:
    """The last token of an entry in the middle: nothing before it may notice."""
    ratio = layer.ratio or kinds.CSA
    middle = t // 2 // ratio * ratio
    return (Change((middle or ratio) - 1, "later token", False, "causality"),)


def direction(layer: Layer, base: dict, x: torch.Tensor, change: Change, seed: int) -> torch.Tensor:
    """Random [d], by which x [T, d] is changed at a token; a window row is made one that the last query attends to."""
    aims = torch.randn(AIMS, x.shape[-1], generator=torch.Generator().manual_seed(seed))
    if change.part != "window":
        return aims[0]
    size = SIZES[1 if layer.ratio == kinds.CSA else 0]  # what is likely to leave the selection
    rows = (x[change.token] + size * aims).double().unsqueeze(0)
    kv = steps.window_rows(layer, rows, torch.full((AIMS,), change.token))[0]
    return aims[(base["q_after_rope"][0, -1] @ kv.T).amax(0).argmax()]


def resized(
    subject: Subject,
    layer: Layer,
    i: int,
    x: torch.Tensor,
    changes: tuple[Change, ...],
    noise: torch.Tensor,
    picks: torch.Tensor | None,
) -> torch.Tensor:
    """Rows [C, T, d] of x [1, T, d] with one change each, the largest of SIZES by which the last query selects as
    before."""
    rows, pending, n = x.repeat(len(changes), 1, 1), list(range(len(changes))), x.shape[1] // (layer.ratio or 1)
    for size in SIZES:
        for j in pending:
            rows[j, changes[j].token] = x[0, changes[j].token] + size * noise[j]
        rows = rows.bfloat16().float()
        pending = [j for j in pending if changes[j].kind != "later token"]  # it is no concern of the last query
        if picks is None or not pending:
            break
        points = subject.attention(i, rows[pending], zeros_like_ids(rows[pending]), (), ("selection",)).points
        if (i, "selection") not in points:
            break
        found = points[i, "selection"][:, -1:]
        same = chosen(torch.where(found < n, found, -1), n)[:, 0] == chosen(picks.view(1, 1, -1), n)[:, 0]
        pending = [j for j, ok in zip(pending, same.all(-1).tolist()) if not ok]
    return rows
