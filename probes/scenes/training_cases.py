"""Small inputs of every training operation, and its definition in float64 for automatic differentiation.

Written from the specification (§3), apart from `kernels`. A case's leaves are what the operation is differentiated by;
choices (experts, selected entries) are fixed. Sizes are powers of two where GPU kernels ask for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dsv4.cache.sequence import Band
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.rotary_rows.training import Whole
from dsv4.probes.oracle import blocks
from dsv4.probes.oracle.attention import rms, rotate
from dsv4.probes.oracle.formats import simulate_fp4, simulate_fp8
from dsv4.probes.oracle.gqa import attend, mask, turn

Leaves = dict[str, torch.Tensor]
Draw = torch.Generator
LIMIT, EPS, FACTOR = 1.5, 1e-6, 1.5


@dataclass(frozen=True)
class GradientCase:
    """leaves: fp32 inputs by name. call(operation, leaves) → results; definition(leaves in float64) → the same."""

    label: str
    leaves: Leaves
    call: Callable[[Callable, Leaves], list[torch.Tensor]]
    definition: Callable[[Leaves], list[torch.Tensor]]


def rand(g: Draw, *shape: int, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(*shape, generator=g)


def dense(w: torch.Tensor) -> PackedWeight:
    return PackedWeight(WeightFormat.DENSE, w)


def _rms_norm(g: Draw) -> Iterator[GradientCase]:
    x, w = rand(g, 5, 16), rand(g, 16)
    yield GradientCase(
        "a weight", {"x": x, "w": w}, lambda op, t: [op(t["x"], t["w"], EPS)], lambda t: [rms(t["x"], t["w"], EPS)]
    )
    yield GradientCase("no weight", {"x": x}, lambda op, t: [op(t["x"], None, EPS)], lambda t: [rms(t["x"], None, EPS)])


def _rotate(g: Draw) -> Iterator[GradientCase]:
    x, positions, f = rand(g, 6, 2, 16), torch.arange(6), torch.tensor([1.0, 0.3, 0.05])
    for label, sign in (("forwards", 1), ("backwards", -1)):
        angle = sign * positions.float().unsqueeze(1) * f
        cis = torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        yield GradientCase(
            label,
            {"x": x},
            lambda op, t, cis=cis: [op(t["x"], cis.to(t["x"].device))],
            lambda t, sign=sign: [rotate(t["x"].transpose(0, 1), positions, sign * f.double()).transpose(0, 1)],
        )


def _linear(g: Draw) -> Iterator[GradientCase]:
    yield GradientCase(
        "dense",
        {"x": rand(g, 5, 16), "w": rand(g, 12, 16)},
        lambda op, t: [op(t["x"], dense(t["w"]), False)],
        lambda t: [t["x"] @ t["w"].T],
    )


def _grouped_linear(g: Draw) -> Iterator[GradientCase]:
    def definition(t: Leaves) -> list[torch.Tensor]:
        parts = t["w"].chunk(3)
        return [torch.stack([t["x"][:, i] @ parts[i].T for i in range(3)], 1)]

    yield GradientCase(
        "three groups",
        {"x": rand(g, 5, 3, 8), "w": rand(g, 12, 8)},
        lambda op, t: [op(t["x"], dense(t["w"]))],
        definition,
    )


def _simulate_fp8_blocks(g: Draw) -> Iterator[GradientCase]:
    x = rand(g, 4, 128)
    yield GradientCase(
        "straight through",
        {"x": x},
        lambda op, t: [op(t["x"], 128)],
        lambda t: [t["x"] + (simulate_fp8(t["x"].detach(), 128) - t["x"].detach())],
    )


def _simulate_fp4_blocks(g: Draw) -> Iterator[GradientCase]:
    x = rand(g, 4, 64)
    yield GradientCase(
        "straight through",
        {"x": x},
        lambda op, t: [op(t["x"], 32)],
        lambda t: [t["x"] + (simulate_fp4(t["x"].detach(), 32) - t["x"].detach())],
    )


def _mhc_pre(g: Draw) -> Iterator[GradientCase]:
    S, d = 4, 16
    leaves = {"streams": rand(g, 5, S, d), "fn": rand(g, 2 * S + S * S, S * d, size=0.1)}
    leaves |= {"scale": 1 + rand(g, 3, size=0.2), "base": rand(g, 2 * S + S * S)}

    def definition(t: Leaves) -> list[torch.Tensor]:
        m = blocks.mixes(t["streams"][None], t["fn"], EPS)[0]
        part = lambda i, rows: m[:, rows] * t["scale"][i] + t["base"][rows]
        pre = torch.sigmoid(part(0, slice(S))) + EPS
        post = 2 * torch.sigmoid(part(1, slice(S, 2 * S)))
        comb = blocks.sinkhorn(part(2, slice(2 * S, None)).unflatten(-1, (S, S)), 20, EPS)
        return [(pre.unsqueeze(-1) * t["streams"]).sum(1), post, comb]

    yield GradientCase(
        "20 iterations",
        leaves,
        lambda op, t: list(op(t["streams"], t["fn"], t["scale"], t["base"], 20, EPS, EPS)),
        definition,
    )


def _mhc_post(g: Draw) -> Iterator[GradientCase]:
    names, S, d = ("out", "streams", "post", "comb"), 4, 16
    values = rand(g, 5, d), rand(g, 5, S, d), rand(g, 5, S), rand(g, 5, S, S)
    yield GradientCase(
        "four streams",
        dict(zip(names, values)),
        lambda op, t: [op(*(t[n] for n in names))],
        lambda t: [blocks.hyper_post(*(t[n][None] for n in names))[0]],
    )


def _mhc_head(g: Draw) -> Iterator[GradientCase]:
    S, d = 4, 16
    leaves = {"streams": rand(g, 5, S, d), "fn": rand(g, S, S * d, size=0.1), "scale": torch.tensor([1.3])}
    leaves["base"] = rand(g, S)

    def definition(t: Leaves) -> list[torch.Tensor]:
        m = blocks.mixes(t["streams"][None], t["fn"], EPS)[0]
        return [((torch.sigmoid(m * t["scale"] + t["base"]) + EPS).unsqueeze(-1) * t["streams"]).sum(1)]

    yield GradientCase(
        "four streams",
        leaves,
        lambda op, t: [op(t["streams"], t["fn"], t["scale"], t["base"], EPS, EPS)],
        definition,
    )


def root_softplus(z: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0))


def weighed(t: Leaves, experts: torch.Tensor) -> torch.Tensor:
    picked = root_softplus(t["x"] @ t["w"].T).gather(1, experts)
    return picked / picked.sum(1, keepdim=True) * FACTOR


def _route_scored(g: Draw) -> Iterator[GradientCase]:
    x, w, bias = rand(g, 6, 16), rand(g, 8, 16), rand(g, 8)
    right = (root_softplus(x.double() @ w.double().T) + bias).argsort(-1, descending=True)[:, :3].sort(-1).values

    def call(op, t: Leaves) -> list[torch.Tensor]:
        experts, weights = op(t["x"], t["w"], bias.to(t["x"].device), 3, FACTOR)
        ranked, order = experts.sort(-1)
        return [ranked.to(weights.dtype), weights.gather(-1, order)]

    yield GradientCase("three of eight", {"x": x, "w": w}, call, lambda t: [right.double(), weighed(t, right)])


def _route_hashed(g: Draw) -> Iterator[GradientCase]:
    table = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(11)])
    ids = torch.randint(0, 11, (6,), generator=g)
    yield GradientCase(
        "by token id",
        {"x": rand(g, 6, 16), "w": rand(g, 8, 16)},
        lambda op, t: [op(t["x"], t["w"], table.to(t["x"].device), ids.to(t["x"].device), FACTOR)[1]],
        lambda t: [weighed(t, table[ids])],
    )


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(gate) * up.clamp(-LIMIT, LIMIT)


def _shared_expert(g: Draw) -> Iterator[GradientCase]:
    """Inputs of which many cross the clamps on either side."""
    leaves = {"x": rand(g, 7, 16), "w1": rand(g, 8, 16, size=0.6), "w3": rand(g, 8, 16, size=0.6), "w2": rand(g, 16, 8)}
    yield GradientCase(
        "beyond the clamps",
        leaves,
        lambda op, t: [op(t["x"], dense(t["w1"]), dense(t["w3"]), dense(t["w2"]), LIMIT, False)],
        lambda t: [swiglu(t["x"] @ t["w1"].T, t["x"] @ t["w3"].T) @ t["w2"].T],
    )


def _experts(g: Draw) -> Iterator[GradientCase]:
    E, d, I, N, k = 5, 16, 8, 7, 2
    chosen = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(N)])
    leaves = {"x": rand(g, N, d), "routing": torch.rand(N, k, generator=g) + 0.1}
    leaves |= {"w13": rand(g, E, 2 * I, d, size=0.6), "w2": rand(g, E, d, I)}

    def definition(t: Leaves) -> list[torch.Tensor]:
        rows = []
        for n in range(N):
            parts = []
            for slot, e in enumerate(chosen[n].tolist()):
                gate, up = (t["w13"][e] @ t["x"][n]).chunk(2)
                parts.append(t["w2"][e] @ (swiglu(gate, up) * t["routing"][n, slot]))
            rows.append(sum(parts))
        return [torch.stack(rows)]

    def call(op, t: Leaves) -> list[torch.Tensor]:
        return [op(t["x"], chosen.to(t["x"].device), t["routing"], dense(t["w13"]), dense(t["w2"]), LIMIT, False)]

    yield GradientCase("beyond the clamps", leaves, call, definition)


def _index_scores(g: Draw) -> Iterator[GradientCase]:
    B, T, H, D, n = 2, 9, 4, 16, 2
    visible = ((torch.arange(T) + 1) // 4).expand(B, T)

    def definition(t: Leaves) -> list[torch.Tensor]:
        dots = torch.relu(torch.einsum("bthd,bnd->bthn", t["q"], t["keys"]))
        scores = (dots * t["weights"].unsqueeze(-1)).sum(2)
        return [scores.masked_fill(torch.arange(n) >= visible.unsqueeze(-1), 0.0)]

    def call(op, t: Leaves) -> list[torch.Tensor]:
        at = visible.to(t["q"].device)
        scores = op(t["q"], t["weights"], t["keys"], at)
        hidden = torch.arange(n, device=at.device) >= at.unsqueeze(-1)
        shown = torch.where(hidden & (scores == float("-inf")), 0.0, scores)  # only what is hidden may be −inf
        return [shown]

    leaves = {"q": rand(g, B, T, H, D), "weights": rand(g, B, T, H), "keys": rand(g, B, n, D)}
    yield GradientCase("visible entries", leaves, call, definition)


def attended(t: Leaves, band: Band, selected: torch.Tensor | None, scale: float) -> torch.Tensor:
    """§3, Attention, before the output is rotated back: [B·T, H, D]."""
    B, T, W = band.B, band.T, band.window
    q, window = t["q"].unflatten(0, (B, T)), t["window"].unflatten(0, (B, T))
    entries = t.get("entries", window[:, :0])
    at, n = torch.arange(T), entries.shape[1]
    near = (at <= at.unsqueeze(1)) & (at > at.unsqueeze(1) - W)
    far = torch.arange(n) < ((at + 1) // max(1, band.ratio)).unsqueeze(1)
    far = far.expand(B, T, n) if selected is None else far & selected
    seen = torch.cat((near.expand(B, T, T), far), -1).unsqueeze(2)
    keys = torch.cat((window, entries), 1)
    logits = torch.einsum("bthd,bnd->bthn", q, keys) * scale
    e = torch.exp(logits).masked_fill(~seen, 0.0)
    p = e / (e.sum(-1, keepdim=True) + torch.exp(t["sink"]).view(1, 1, -1, 1))
    return torch.einsum("bthn,bnd->bthd", p, keys).flatten(0, 1)


def _sparse_attention(g: Draw) -> Iterator[GradientCase]:
    B, T, W, H, D, scale = 2, 21, 6, 4, 16, 0.25
    leaves = {"q": rand(g, B * T, H, D), "window": rand(g, B * T, D), "sink": rand(g, H)}
    bare, band = Band(B, T, W), Band(B, T, W, 4)
    yield GradientCase(
        "window only",
        leaves,
        lambda op, t: [op(t["q"], t["window"], bare, None, None, t["sink"], scale)],
        lambda t: [attended(t, bare, None, scale)],
    )
    some = torch.rand(B, T, T // 4, generator=g) < 0.5

    def call(op, t: Leaves) -> list[torch.Tensor]:
        mask = some.to(t["q"].device, torch.uint8)
        return [op(t["q"], t["window"], band, t["entries"], mask, t["sink"], scale)]

    yield GradientCase(
        "window and selected entries",
        leaves | {"entries": rand(g, B, T // 4, D)},
        call,
        lambda t: [attended(t, band, some, scale)],
    )


def _hca_attention(g: Draw) -> Iterator[GradientCase]:
    B, T, H, D, scale = 2, 21, 4, 16, 0.25
    band = Band(B, T, 6, 4)
    leaves = {"q": rand(g, B * T, H, D), "window": rand(g, B * T, D), "sink": rand(g, H)}

    def call(op, t: Leaves) -> list[torch.Tensor]:
        q = t["q"].unflatten(0, (B, T))
        return [op(q, t["window"], band, t["entries"], None, t["sink"], scale).flatten(0, 1)]

    yield GradientCase(
        "window and every visible entry",
        leaves | {"entries": rand(g, B, T // 4, D)},
        call,
        lambda t: [attended(t, band, None, scale)],
    )


# ---- of GQA models ------------------------------------------------------------------------


def _grouped_attention(g: Draw) -> Iterator[GradientCase]:
    B, T, H, KV, D, scale = 2, 11, 4, 2, 16, 0.25

    def call(op, t: Leaves) -> list[torch.Tensor]:
        keys, values = Whole(), Whole()
        keys.rows, values.rows = t["k"], t["v"]
        return [op(t["q"], keys, values, torch.zeros(B, dtype=torch.int64, device=t["q"].device), None, scale)]

    leaves = {"q": rand(g, B, T, H, D), "k": rand(g, B, T, KV, D), "v": rand(g, B, T, KV, D)}
    yield GradientCase("causal", leaves, call, lambda t: [attend(t["q"], t["k"], t["v"], mask(T, None), scale)])


def _rotary_rows(g: Draw) -> Iterator[GradientCase]:
    B, T, H, KV, D = 2, 5, 2, 1, 8
    f = torch.tensor([1.0, 0.4, 0.1, 0.02])
    angle = torch.arange(T).repeat(B).unsqueeze(1) * f
    cis = torch.polar(torch.ones_like(angle), angle)
    leaves = {name: rand(g, B * T, heads * D) for name, heads in (("q", H), ("k", KV), ("v", KV))}
    leaves |= {f"bias of {name}": rand(g, heads * D) for name, heads in (("q", H), ("k", KV), ("v", KV))}

    def call(op, t: Leaves) -> list[torch.Tensor]:
        keys, values, device = Whole(), Whole(), t["q"].device
        biases = tuple(t[f"bias of {name}"] for name in "qkv")
        start = torch.zeros(B, dtype=torch.int64, device=device)
        q = op(t["q"], t["k"], t["v"], biases, cis.to(device), keys, values, start)
        return [q, keys.rows, values.rows]

    def definition(t: Leaves) -> list[torch.Tensor]:
        q, k, v = ((t[n] + t[f"bias of {n}"]).view(B, T, -1, D) for n in "qkv")
        return [turn(q, torch.arange(T), f.double()), turn(k, torch.arange(T), f.double()), v]

    yield GradientCase("with biases", leaves, call, definition)


def _silu_mul(g: Draw) -> Iterator[GradientCase]:
    yield GradientCase(
        "no biases",
        {"gate": rand(g, 5, 8), "up": rand(g, 5, 8)},
        lambda op, t: [op(t["gate"], t["up"], None)],
        lambda t: [t["gate"] * torch.sigmoid(t["gate"]) * t["up"]],
    )


# operation → its cases: the functions here whose names begin with one underscore
CASES = {
    name[1:]: make for name, make in list(globals().items()) if name[:1] == "_" and name[:2] != "__" and callable(make)
}
