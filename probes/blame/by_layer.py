"""One layer at a time: the oracle's result from a subject's own values, and how far rounding alone would move it.

Every point is computed from the subject's own inputs to the module behind it, as far as it gives them: queries from its
attn_in, the attention's output from its queries, window rows, entries and selection, and so on. So a fault shows at its
own point, and neither a fault before it nor one after it hides or imitates it.
"""

from dataclasses import dataclass

import torch

from dsv4.probes.compare import TOLERANCES
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import Layer, rms
from dsv4.probes.oracle.blocks import hyper_post, hyper_pre, moe
from dsv4.probes.oracle.config import OracleConfig
from dsv4.probes.oracle.formats import hadamard, simulate_fp4, simulate_fp8
from dsv4.probes.subject import POINTS

# A difference is one above this multiple of the effect of rounding. Sound models have 1.0 to 1.7 times it in bf16; in
# fp32 up to 4 times, because the order of sums and the angles of RoPE are not imitated.
FACTOR = {torch.bfloat16: 3.0, torch.float32: 8.0}
LEAST = 1e-5  # relative: below it are fp32 sums of some thousand terms
# of the tokens, and of those that only rounding moves: more, since steps are few
SHARES = {0.5: 0.75, 0.9: 1.0, 1.0: 1.0}
# the worst token in simulated numerics may move by a step of FP4, or of
STEPS = {"index_keys": 0.25, "index_scores": 0.25}
STEP = 0.0625  # FP8: a value beside a rounding boundary
WRONG_PICKS = 1e-3  # share of decisions beside ties (known_bugs 0.2: at least 99.9 % right)
GATE = "gate"  # beside POINTS: router scores with their bias, [B, T, E]


@dataclass
class Rounded(Layer):
    """A layer whose matrices, their inputs and outputs and the points are held in `dtype`, the rotation tables in
    fp32."""

    dtype: torch.dtype = torch.bfloat16

    def hold(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).double()

    def linear(self, base: str, x: torch.Tensor, quantise: bool = True) -> torch.Tensor:
        x = self.hold(x)
        if quantise and self.simulate and self.weights.quantised(self.prefix + base):
            x = simulate_fp8(x, 128)
        return self.hold(x @ self.hold(self.w(f"{base}.weight")).T)

    @property
    def frequencies(self) -> torch.Tensor:
        return super().frequencies.float().double()


def rounded(layer: Layer, numerics: str) -> Rounded:
    """A copy of the layer, rounded as `numerics` holds its activations and caches; bf16 for names unknown."""
    dtype = dtype_of(numerics)
    return Rounded(layer.config, layer.weights, layer.prefix, layer.ratio, layer.hashed, layer.simulate, dtype, dtype)


def dtype_of(numerics: str) -> torch.dtype:
    return torch.float32 if "fp32" in numerics else torch.bfloat16


def held(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.hold(x) if isinstance(layer, Rounded) else x


# ---- what each point should be --------------------------------------------------------------


def expected(layer: Layer, before: torch.Tensor | None, ids: torch.Tensor, given: dict[str, torch.Tensor]) -> dict:
    """Every point of a layer by the oracle, float64, each from the `given` ones before it.

    before: streams [B, T, S, d] that enter the layer, None if unknown; ids int64 [B, T]. Points whose inputs are
    neither given nor computable are absent. GATE holds the router's scores.
    """
    found: dict[str, torch.Tensor] = {}
    mix = None
    if before is not None:
        before = before.double()
        y, *mix = hyper_pre(layer, before, "hc_attn")
        found["attn_in"] = held(layer, rms(y, layer.w("attn_norm.weight"), layer.config.rms_norm_eps))
    x = _use("attn_in", given, found)
    if x is not None:
        found |= attention_points(layer, x, given)
    out = _use("attn_out", given, found)
    if mix is not None and out is not None:
        found |= ffn_points(layer, held(layer, hyper_post(out, before, *mix)), ids, given)
    return found


def _use(name: str, given: dict, found: dict) -> torch.Tensor | None:
    value = given.get(name, found.get(name))
    return value if value is None or not value.is_floating_point() else value.double()


def attention_points(layer: Layer, x: torch.Tensor, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Points of attention on attn_in x [B, T, d]."""
    c, positions, found = layer.config, torch.arange(x.shape[1]), {}
    qr, q = steps.queries(layer, x, positions)
    found["q_after_rope"], found["kv_window"] = held(layer, q), steps.window_rows(layer, x, positions)
    selection = None
    if layer.ratio:
        found["compressed_kv"] = steps.main_kv(layer, compressed(layer, x, "attn.compressor"))
    if layer.ratio == kinds.CSA:
        found["index_keys"] = layer.store(index_form(layer, compressed(layer, x, "attn.indexer.compressor")))
        q = layer.linear("attn.indexer.wq_b", qr).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        q = index_form(layer, held(layer, steps.rotate_heads(q, positions, layer.frequencies)))
        found["index_scores"] = steps.index_scores(
            q, steps.index_weights(layer, x), _use("index_keys", given, found), positions, layer.ratio
        )
        found["selection"] = steps.select(_use("index_scores", given, found), c.index_topk)
        selection = entries_only(_use("selection", given, found), found["index_keys"].shape[1])
    found["attn_out"] = attend(layer, {name: _use(name, given, found) for name in found}, selection)
    return found


def compressed(layer: Layer, x: torch.Tensor, name: str) -> torch.Tensor:
    """`steps.compress`, its intermediate values held as activations: before FP8 or FP4 a rounding may move a whole
    step."""
    w = lambda leaf: layer.w(f"{name}.{leaf}")
    pooled = steps.pool(x, w("wkv.weight"), w("wgate.weight"), w("ape"), layer.ratio, overlap=layer.ratio == kinds.CSA)
    entries = held(layer, rms(held(layer, pooled), w("norm.weight"), layer.config.rms_norm_eps))
    return held(layer, steps.rotate(entries, layer.ratio * torch.arange(entries.shape[1]), layer.frequencies))


def index_form(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return simulate_fp4(held(layer, hadamard(x)), 32) if layer.simulate else x


def attend(layer: Layer, points: dict, selection: torch.Tensor | None, window: int | None = None) -> torch.Tensor:
    """attn_out [B, T, d] of queries, window rows and entries in `points`; selection None: every visible entry."""
    q, kv = points["q_after_rope"], points["kv_window"]
    entries = points.get("compressed_kv", kv[:, :0])
    o, _ = steps.attention(
        q, kv, entries, selection, layer.w("attn.attn_sink"), window or layer.config.sliding_window, layer.ratio
    )
    return held(layer, steps.output(layer, held(layer, o), torch.arange(q.shape[1])))


def entries_only(selection: torch.Tensor, n: int) -> torch.Tensor:
    """A selection in which whatever is no entry is −1."""
    return torch.where((selection < 0) | (selection >= n), -1, selection)


def ffn_points(layer: Layer, streams: torch.Tensor, ids: torch.Tensor, given: dict) -> dict[str, torch.Tensor]:
    """ffn_out, streams after the layer and the router's scores, from the streams [B, T, S, d] between the sublayers."""
    y, post, C = hyper_pre(layer, streams, "hc_ffn")
    x = held(layer, rms(y, layer.w("ffn_norm.weight"), layer.config.rms_norm_eps))
    found = {"ffn_out": held(layer, moe(layer, x, ids))}
    if not layer.hashed:
        z = layer.linear("ffn.gate", x, quantise=False)
        found[GATE] = torch.nn.functional.softplus(z).sqrt() + layer.w("ffn.gate.bias")
    return found | {"streams": held(layer, hyper_post(_use("ffn_out", given, found), streams, post, C))}


# ---- how far a subject is from it -----------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One point of one layer. errors, noise [n]: of each token (or entry), of the subject and of rounding, both
    relative to the oracle; kept bool [B, T]: tokens that count, None for all; the others are those where rounding alone
    may choose other experts. NaN in a subject is infinitely far."""

    layer: int
    point: str
    errors: torch.Tensor
    noise: torch.Tensor
    numerics: str = "native"
    kept: torch.Tensor | None = None

    def at(self, share: float) -> tuple[float, float]:
        """(error, floor) of that share of the tokens."""
        quantile = lambda v, share: v.sort().values[max(round(share * len(v)) - 1, 0)].item()
        return quantile(self.errors, share), max(self.factor * quantile(self.noise, SHARES[share]), self._least(share))

    def _least(self, share: float) -> float:
        if self.point == "selection":
            return WRONG_PICKS
        return STEPS.get(self.point, STEP) if share == 1.0 and self.numerics.startswith("qat") else LEAST

    @property
    def factor(self) -> float:
        return FACTOR[dtype_of(self.numerics)]

    @property
    def worst(self) -> tuple[float, float, float]:
        """(share, error, floor) where the error is the largest multiple of its floor."""
        return max(((share, *self.at(share)) for share in SHARES), key=lambda row: row[1] / row[2])

    @property
    def ratio(self) -> float:
        _, error, floor = self.worst
        return error / floor

    @property
    def found(self) -> bool:
        return self.ratio > 1


class Accumulated(Difference):
    """The streams or logits of two whole runs. In simulated numerics a value beside a rounding boundary moves by a
    step, and every later layer keeps the difference: below `measure.TOLERANCES` two sound runs cannot be
    distinguished."""

    def _least(self, share: float) -> float:
        return TOLERANCES[self.numerics][1] if self.numerics.startswith("qat") else LEAST


def differences(
    i: int,
    points: dict,
    exact: dict,
    noisy: dict,
    config: OracleConfig,
    numerics: str,
    wanted: dict | None = None,
    chained: bool = True,
) -> list[Difference]:
    """Of every point that the subject gives (name → tensor) in layer i, in the order of POINTS.

    exact, noisy: `expected` of the oracle's layer and of the `rounded` one, whose distance is the noise. wanted: values
    of another reference, to be held against instead of the oracle's. chained: whether those are computed from the
    subject's own values of the same layer; otherwise its own scores do not decide what it should have selected.
    """
    wanted, found = exact if wanted is None else wanted, []
    unsure = undecided(exact, noisy, config.num_experts_per_tok, FACTOR[dtype_of(numerics)])
    for point in POINTS:
        if point not in points or point not in exact or point not in wanted:
            continue
        if point == "selection":
            own = points.get("index_scores") if chained else None
            found.append(Difference(i, point, *picks(points[point], own, exact, noisy, config.index_topk), numerics))
            continue
        keep = ~unsure if point == "ffn_out" or (point == "streams" and not chained) else None
        errors, noise = far(points[point], wanted[point], keep), far(noisy[point], exact[point], keep)
        if len(errors):
            found.append(Difference(i, point, errors, noise, numerics, keep))
    return found


def far(found: torch.Tensor, wanted: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """‖found − wanted‖ / ‖wanted‖ of each row of [B, T, ...], flat; infinite where NaN, where one is −inf and the other
    is not, and everywhere if the shapes differ. keep bool [B, T]: the rows that count.

    A row much smaller than most (the scores of a query that sees one entry) is measured by a twentieth of the median.
    """
    if found.shape != wanted.shape:
        return torch.full((max(1, wanted.shape[1]),), float("inf"), dtype=torch.float64)
    a, b = found.double().flatten(2), wanted.double().flatten(2)
    hidden = (a == -torch.inf) & (b == -torch.inf)
    a, b = a.masked_fill(hidden, 0), b.masked_fill(hidden, 0)
    size = b.norm(dim=-1)
    size = size.clamp(min=max(0.05 * size.nan_to_num().median().item(), 1e-12))
    errors = (a - b).norm(dim=-1) / size
    errors = torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf)
    return errors.flatten() if keep is None else errors[keep]


def undecided(exact: dict, noisy: dict, k: int, factor: float) -> torch.Tensor:
    """bool [B, T]: tokens whose k-th and next expert are nearer than rounding moves their scores."""
    if GATE not in exact:
        return torch.zeros(exact["streams"].shape[:2] if "streams" in exact else (1, 1), dtype=torch.bool)
    ranked = exact[GATE].sort(-1, descending=True).values
    gap = ranked[..., k - 1] - ranked[..., min(k, ranked.shape[-1] - 1)]
    if k >= ranked.shape[-1]:
        return torch.zeros_like(gap, dtype=torch.bool)
    return gap <= 2 * factor * (noisy[GATE] - exact[GATE]).abs().amax(-1) + LEAST


def picks(
    selection: torch.Tensor, own: torch.Tensor | None, exact: dict, noisy: dict, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong decisions of each query as a share of its picks, and no noise: [B·T] each. Entries near the k-th score are
    ties.

    By the subject's own scores if it gives them, with ties at fp32; else by the oracle's, with ties at what rounding
    moves.
    """
    scores = exact["index_scores"] if own is None or own.shape != exact["index_scores"].shape else own.double()
    n, shown = scores.shape[-1], scores > -torch.inf
    above, below = shown, torch.zeros_like(shown)
    if n > k:
        near = 1e-6 * scores.masked_fill(~shown, 0).abs().amax(-1, keepdim=True)
        if own is None:
            moved = (noisy["index_scores"] - exact["index_scores"]).masked_fill(~shown, 0).abs()
            near = near + max(FACTOR.values()) * moved.amax(-1, keepdim=True)
        ranked = scores.sort(-1, descending=True).values
        above, below = shown & (scores > ranked[..., k : k + 1] + near), scores < ranked[..., k - 1 : k] - near
    picked, real = steps.chosen(entries_only(selection, n), n), selection >= 0
    twice_or_none = real.sum(-1) - picked.sum(-1)  # entries picked again, and picks beyond the last entry
    missing = (shown.sum(-1).clamp(max=k) - picked.sum(-1)).clamp(min=0)  # among ties too, k have to be picked
    wrong = (below & picked & shown).sum(-1) + (~shown & picked).sum(-1) + twice_or_none
    wrong = wrong + torch.maximum(missing, (above & ~picked).sum(-1))
    share = (wrong / above.sum(-1).clamp(min=1)).double().flatten()
    return share, torch.zeros_like(share)
