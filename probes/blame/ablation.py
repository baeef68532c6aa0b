"""A layer's attention without one of its parts, or with a known mistake in one. Comparison with these names a fault.

`found`: the oracle's points of a layer (`dsv4.probes.compare.points_at`); picks int64 [B, Q, k]: what each query
selects, None but on CSA layers. Outputs are attn_out [B, Q, d] at the positions found["at"].
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4.probes.blame.consult import left_of
from dsv4.probes.compare import attended
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import Layer

SCALES = {
    "softmax scale by the dims that are not rotated": None,
    "softmax scale with mscale": 1.277,
    "softmax scale with mscale squared": 1.277**2,
    "softmax scale doubled": 2.0,
    "softmax scale halved": 0.5,
}
EXPLAINED = 0.3  # share of a difference that may be left if a mistake explains it


def projected(layer: Layer, found: dict, o: torch.Tensor) -> torch.Tensor:
    return steps.output(layer, o, found["at"])


def attend(layer: Layer, found: dict, picks: torch.Tensor | None, window: int | None = None, **other) -> torch.Tensor:
    """attn_out over these picks (None: all visible entries) and this window, with other points if given."""
    found = found | other
    return projected(layer, found, attended(layer, found, picks, window)[0])


def nobody(found: dict) -> torch.Tensor:
    """Picks of queries that select nothing."""
    return torch.full((*found["q_after_rope"].shape[:2], 1), -1)


def paths(layer: Layer, found: dict, picks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """attn_out by which of its branches a query takes."""
    none, T = nobody(found), found["kv_window"].shape[1]
    outs = {"window only": attend(layer, found, none)}
    if layer.ratio == kinds.CSA:
        outs["selected"] = attend(layer, found, picks)
    if layer.ratio:
        outs["all"] = attend(layer, found, None)
        outs["entries only"] = attend(layer, found, picks, window=0)
    else:
        outs["every token"] = attend(layer, found, none, window=T)
    return outs | {"nothing": torch.zeros_like(outs["window only"])}


# ---- mistakes -----------------------------------------------------------------------------


def mistakes(layer: Layer, found: dict, picks: torch.Tensor | None) -> dict[str, tuple[str, Callable]]:
    """Name → (part at fault, how to make attn_out by that mistake)."""
    W, T, own = layer.config.sliding_window, found["kv_window"].shape[1], picks if layer.ratio else nobody(found)
    lengths = {
        "one token short": W - 1,
        "one token long": W + 1,
        "twice as long": 2 * W,
        "without bound": T,
        "missing": 0,
    }
    known = {f"window {name}": ("window", lambda w=w: attend(layer, found, own, w)) for name, w in lengths.items()}
    D, R = layer.config.head_dim, layer.config.qk_rope_head_dim
    for name, factor in SCALES.items():
        q = found["q_after_rope"] * (factor or (D / (D - R)) ** 0.5)
        known[name] = ("softmax scale", lambda q=q: attend(layer, found, own, q_after_rope=q))
    return known | _entries(layer, found, own) | _sinks(layer, found, own) | _projections(layer, found, own)


def _entries(layer: Layer, found: dict, own: torch.Tensor) -> dict[str, tuple[str, Callable]]:
    """Mistakes in which entries a query sees."""
    if not layer.ratio:
        return {}
    at, n, r, W = found["at"], found["compressed_kv"].shape[1], layer.ratio, layer.config.sliding_window
    chosen = own if own is not None else _first(found, torch.clamp((at + 1) // r, max=n), n)
    # layers that attend to everything visible
    few = (at + 1) // r <= (layer.config.index_topk if r == kinds.CSA else n)

    def ruled(count: torch.Tensor) -> torch.Tensor:
        rows = _first(found, count.clamp(0, n), n)
        width = max(rows.shape[-1], chosen.shape[-1])
        fill = lambda t: torch.nn.functional.pad(t, (0, width - t.shape[-1]), value=-1)
        return torch.where(few.view(1, -1, 1), fill(rows), fill(chosen))

    rules = {"one token early": (at + 2) // r, "one token late": at // r, "one entry late": (at + 1) // r - 1}
    known = {
        f"entries visible {name}": ("visibility", lambda c=c: attend(layer, found, ruled(c)))
        for name, c in rules.items()
    }
    recent = torch.where(r * (chosen + 1) - 1 <= at.view(1, -1, 1) - W, chosen, -1)
    known["entries of window tokens left out"] = ("compressed entries", lambda: attend(layer, found, recent))
    known["window only"] = ("compressed entries", lambda: attend(layer, found, nobody(found)))
    if r == kinds.CSA:
        known["selection of the query before"] = ("selection", lambda: attend(layer, found, own.roll(1, 1)))
        known["all entries"] = ("selection", lambda: attend(layer, found, None))
    if len(found["kv_window"]) > 1:  # rows of a batch
        first = found["compressed_kv"][:1].expand_as(found["compressed_kv"])
        known["entries of the first row"] = (
            "rows of the batch",
            lambda: attend(layer, found, own, compressed_kv=first),
        )
        if r == kinds.CSA:
            known["selection of another row"] = ("selection", lambda: attend(layer, found, own.roll(1, 0)))
    return known


def _first(found: dict, count: torch.Tensor, n: int) -> torch.Tensor:
    """Picks of the first count [Q] of n entries."""
    entry = torch.arange(n)
    return torch.where(entry < count.unsqueeze(-1), entry, -1).expand(len(found["kv_window"]), -1, -1)


def _sinks(layer: Layer, found: dict, own: torch.Tensor) -> dict[str, tuple[str, Callable]]:
    """Mistakes in the sink's contribution: a factor of o, by its mass."""

    def scaled(form) -> torch.Tensor:
        o, masses = attended(layer, found, own)
        return projected(layer, found, o * form(masses["sink"]).unsqueeze(-1))

    return {
        "no sink": ("sink", lambda: scaled(lambda s: 1 / (1 - s).clamp(min=1e-9))),
        "sink twice": ("sink", lambda: scaled(lambda s: 1 / (1 + s))),
        "sink of another head": (
            "sink",
            lambda: scaled(lambda s: 1 / (1 - s + s * _against_next(layer)).clamp(min=1e-9)),
        ),
    }


def _against_next(layer: Layer) -> torch.Tensor:
    """exp(sink of the head before − own sink) [H]."""
    sink = layer.w("attn.attn_sink")
    return torch.exp(sink.roll(1) - sink)


def _projections(layer: Layer, found: dict, own: torch.Tensor) -> dict[str, tuple[str, Callable]]:
    """Mistakes in values and in the projection from heads to the output."""
    c, R = layer.config, layer.config.qk_rope_head_dim
    o = lambda: attended(layer, found, own)[0]
    still = lambda: torch.cat((o()[..., :-R], torch.zeros_like(o()[..., -R:])), -1)
    known = {"values without rotated dims": ("values", lambda: projected(layer, found, still()))}
    groups = lambda: (
        steps.rotate_heads(o(), found["at"], layer.frequencies, inverse=True).flatten(2).chunk(c.o_groups, -1)
    )
    wo_a = lambda: layer.w("attn.wo_a.weight").split(c.o_lora_rank)
    ranks = lambda order: [group @ wo_a()[g].T for g, group in zip(order, groups())]
    out = lambda z: layer.linear("attn.wo_b", z)
    dealt = lambda: o().unflatten(2, (-1, c.o_groups)).transpose(2, 3).flatten(2, 3)
    part = "output projection"
    known["heads dealt out to groups"] = (part, lambda: projected(layer, found, dealt()))
    known["wo_a in reverse"] = (part, lambda: out(torch.cat(ranks(range(c.o_groups)[::-1]), -1)))
    known["groups in reverse"] = (part, lambda: out(torch.cat(ranks(range(c.o_groups)[::-1])[::-1], -1)))
    known["ranks interleaved"] = (part, lambda: out(torch.stack(ranks(range(c.o_groups)), -1).flatten(-2)))
    for g in range(c.o_groups):
        lost = lambda g=g: out(torch.cat([z * (i != g) for i, z in enumerate(ranks(range(c.o_groups)))], -1))
        known[f"group {g} lost"] = (part, lost)
    return known


def blame(
    out: torch.Tensor, wanted: torch.Tensor, known: dict[str, tuple[str, Callable]], default: str
) -> tuple[str, str]:
    """(part, note): the mistake that gives the seen output, if one leaves at most `EXPLAINED` of the difference to
    `wanted`."""
    away = lambda made: torch.nan_to_num((out - made).norm(), nan=float("inf"), posinf=float("inf")).item()
    whole = away(wanted)
    if whole == math.inf:
        return default, "NaN"
    errors = {name: away(make()) for name, (_, make) in known.items()}
    best = min(errors, key=errors.get)
    return known[best][0] if errors[best] <= EXPLAINED * whole else default, left_of(errors, whole)


# ---- sinks --------------------------------------------------------------------------------


def sink_shares(layer: Layer, found: dict, picks: torch.Tensor | None, out: torch.Tensor):
    """(share of each head's sink missing in out [B, Q, d], size of its removal, standard error, part of the difference
    left).

    Without its sink, a head's output grows by 1 / (1 − sink mass). The shares of all heads together are a least-squares
    fit of what `out` differs from the oracle's: 0 with the sink, 1 without, about −1 with it twice.
    """
    plain, at = replace(layer, simulate=False), found["at"]
    o, masses = attended(layer, found, picks)
    mass = masses["sink"].unsqueeze(-1)
    without = o * (mass / (1 - mass).clamp(min=1e-9))
    heads = torch.eye(o.shape[2], dtype=o.dtype)
    grown = torch.stack([steps.output(plain, without * head[:, None], at).flatten() for head in heads], 1)  # [Q · d, H]
    missing = (out - steps.output(layer, o, at)).flatten().nan_to_num(nan=1e9)
    share = torch.linalg.lstsq(grown, missing.unsqueeze(1)).solution.flatten()
    left = (missing - grown @ share).norm()
    variance = torch.linalg.inv(grown.T @ grown + 1e-30 * heads).diagonal()
    error = variance.sqrt() * left / max(len(missing) - len(share), 1) ** 0.5
    size = grown.norm(dim=0) / out.norm().clamp(min=1e-12)
    return share, size, error, (left / missing.norm().clamp(min=1e-30)).item()
