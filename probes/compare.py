"""The distance of two runs, token by token, and the distance that their numerics allow.

Also what the attention probes (rope, index_oracle, influence) share: the oracle in a subject's numerics, inputs,
tolerances.
"""

from itertools import accumulate

import torch

from dsv4.probes import families
from dsv4.probes.oracle import Oracle, OracleConfig, Weights, kinds, weights_of
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.subject import Subject

TOLERANCES = {  # numerics → (share of tokens that must agree, relative error allowed of those), and why
    "fp32": (1.0, 2e-4, "fp32 sums in another order, measured against transformers: 2e-4 of logits of size 10"),
    "native": (
        0.9,
        5e-2,
        "bf16 activations: 8 bits, some 20 roundings a layer; a pick beside the k boundary may differ",
    ),
    "qat": (0.8, 1e-1, "simulated FP8 and FP4: a value beside a rounding boundary moves by a whole step"),
    "qat:fp32": (0.8, 1e-1, "simulated FP8 and FP4: a value beside a rounding boundary moves by a whole step"),
}
SIMULATED_ROWS = (
    0.5,
    0.25,
    "simulated FP8 and FP4: a value beside a rounding boundary moves by a whole step, and every later token of the row "
    "with it; medians up to 0.1 were measured in rows of ten tokens, one token then up to 0.5",
)
CHAINED = {  # of numerics that round, where every token of a row is computed from those before it
    "native": (
        0.5,
        5e-2,
        "bf16 activations: a pick beside the k boundary moves its token and every later one of the row; medians up to "
        "0.005 were measured in rows of ten tokens, one token then up to 0.06",
    ),
    "qat": SIMULATED_ROWS,
    "qat:fp32": SIMULATED_ROWS,
}
LIMITS = {  # numerics → (relative error, of which share of tokens), and why
    "fp32": (1e-4, 1.0, "fp32 against float64: sums of some thousand terms"),
    "native": (2e-2, 0.9, "bf16 activations and cache: 8 bits, a few roundings; nine tokens in ten"),
    "qat": (
        6e-2,
        0.5,
        "simulated FP8 in bf16: a value beside a rounding boundary moves by a step of 6 %; the median token",
    ),
    "qat:fp32": (
        1e-4,
        0.5,
        "simulated FP8 and FP4: the median token, since a value beside a rounding boundary moves its own",
    ),
}
MAX_TOKENS = 4096  # of what an attention probe runs at effort 1


def token_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """‖found − wanted‖ / ‖wanted‖ of each token, [B, T] of [B, T, ...]. NaN where either holds one."""
    a, b = found.double().flatten(2), wanted.double().flatten(2)
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)


def agreeing(errors: torch.Tensor, numerics: str, chained: bool = False) -> tuple[float, str, float]:
    """(the error that the required share of tokens stays below, where its limit comes from, the limit).

    chained: errors are those of a few tokens of one row, of which each is computed from those before it: they do not
    err by themselves. A NaN anywhere makes the error infinite: it is never within what numerics explain.
    """
    own = TOLERANCES.get(numerics, TOLERANCES["native"])
    share, limit, source = CHAINED.get(numerics, own) if chained else own
    flat = errors.flatten()
    if flat.numel() == 0:
        return float("nan"), source, limit
    if torch.isnan(flat).any():
        return float("inf"), source, limit
    return torch.quantile(flat, share).item(), f"{share:.0%} of tokens; {source}", limit


def tokens(subject, T: int, seed: int, rows: int = 1) -> torch.Tensor:
    """Random ids int64 [rows, T] of the subject's vocabulary."""
    return torch.randint(0, subject.config.vocab_size, (rows, T), generator=torch.Generator().manual_seed(seed))


def window_of(config) -> int:
    """Tokens of the longest sliding window; 0 where every layer sees all tokens before."""
    return max(families.of(config).windows(config), default=0)


def pieces_of(T: int, size: int) -> list[int]:
    """T in steps of `size`, the last shorter."""
    return [min(size, T - start) for start in range(0, T, size)]


def steps_of_all_sizes(T: int) -> tuple[int, ...]:
    """A third of T in one step, then chunks of an odd size, and the last tokens one by one."""
    first, alone = T // 3, min(24, T // 4)
    return (first, *pieces_of(T - first - alone, 61), *[1] * alone)


# ---- shared by the attention probes -------------------------------------------------------


def limit_of(subject: Subject) -> tuple[float, float, str]:
    """(relative error, share of tokens that must stay within, source) by numerics; those of bf16 for names unknown."""
    limit, share, why = LIMITS.get(subject.numerics, LIMITS["native"])
    return limit, share, f"{subject.numerics or 'bf16'}: {why}"


def oracle_of(subject: Subject, matched: bool = True) -> Oracle:
    """The float64 oracle on the subject's files, or on its own tensors where it has none.

    matched: with the simulation and the cache dtype of its numerics; else nothing is rounded.
    """
    simulate = matched and subject.numerics.startswith("qat")
    cache = torch.bfloat16 if matched and subject.numerics not in ("fp32", "qat:fp32") else None
    files = getattr(subject, "files", None)
    if files is None:
        weights = Weights({}, lambda name: _wide(subject.weight(name)), lambda base: False)
    else:
        weights = weights_of(files.path, independent=files.layout.name == "official")
    return Oracle(config_of(subject), weights, simulate, cache)


def config_of(subject: Subject) -> OracleConfig:
    """The subject's config.json by the oracle's own table; of a subject without files, what its model states."""
    files = getattr(subject, "files", None)
    return OracleConfig.of(subject.stated) if files is None else OracleConfig.read(files.path)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def heavy_tailed(subject: Subject, T: int, seed: int, rows: int = 1) -> torch.Tensor:
    """Attention inputs fp32 [rows, T, d], each token of RMS about 1, a few channels far larger; numbers that bf16
    holds."""
    g = torch.Generator().manual_seed(seed)
    d = subject.config.hidden_size
    x = torch.randn(rows, T, d, generator=g) * torch.exp(0.8 * torch.randn(d, generator=g))
    return (x / x.square().mean(-1, keepdim=True).sqrt()).bfloat16().float()


def zeros_like_ids(x: torch.Tensor) -> torch.Tensor:
    """Token ids for attn_in x [B, T, d]; attention alone does not look at them."""
    return torch.zeros(x.shape[:2], dtype=torch.long)


def far(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """‖found − wanted‖ / ‖wanted‖ by row of [B, T, ...]: [B, T]; infinite where NaN."""
    a, b = found.double().flatten(2), wanted.double().flatten(2)
    return torch.nan_to_num((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12), nan=float("inf"))


def at_share(errors: torch.Tensor, share: float) -> float:
    """The error that `share` of all stay within; None-like NaN for none."""
    flat = errors.flatten().sort().values
    return flat[max(int(share * len(flat) + 0.5) - 1, 0)].item() if len(flat) else float("nan")


def points_at(layer: Layer, x: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle's points of attention on attn_in x [B, T, d], those of queries at positions `at` [Q] only, and `at`
    itself."""
    x, queried = x.double(), x[:, at].double()
    qr, q = steps.queries(layer, queried, at)
    found = {"at": at, "q_after_rope": q, "kv_window": steps.window_rows(layer, x, torch.arange(x.shape[1]))}
    if layer.ratio:
        found["compressed_kv"] = steps.main_kv(layer, steps.compress(layer, x, "attn.compressor"))
    if layer.ratio == kinds.CSA:
        scores = steps.index_scores(
            steps.index_queries(layer, qr, at),
            steps.index_weights(layer, queried),
            steps.index_keys(layer, x),
            at,
            layer.ratio,
        )
        found |= {"index_scores": scores, "selection": steps.select(scores, layer.config.index_topk)}
    return found


def picks_of(points: dict, layer: int, found: dict, n: int) -> torch.Tensor:
    """The subject's own selection int64 [B, Q, k], −1 for none; the oracle's for queries where it selects too few
    entries.

    An empty or missing selection must not define what should be attended to. Of the queries of `found`.
    """
    wanted = found["selection"]
    picks = (
        points[layer, "selection"][:, found.get("at", slice(None))]
        if (layer, "selection") in points
        else wanted[..., :0]
    )
    picks = torch.where((picks < 0) | (picks >= n), -1, picks)
    fill = lambda t, width: torch.nn.functional.pad(t, (0, width - t.shape[-1]), value=-1)
    width = max(picks.shape[-1], wanted.shape[-1])
    count = lambda t: steps.chosen(t, n).sum(-1, keepdim=True)
    return torch.where(count(picks) == count(wanted), fill(picks, width), fill(wanted, width))


def attended(layer: Layer, found: dict, selection: torch.Tensor | None, window: int | None = None):
    """(o, masses) of the oracle's attention over other entries: `selection` None for all visible ones; 0 for no
    window."""
    q, kv = found["q_after_rope"], found["kv_window"]
    entries = found.get("compressed_kv", kv[:, :0])
    window = layer.config.sliding_window if window is None else window
    return steps.attention(q, kv, entries, selection, layer.w("attn.attn_sink"), window, layer.ratio, found.get("at"))


def starts_of(schedule: tuple[int, ...]) -> torch.Tensor:
    """int64 [T]: where the step of each token begins."""
    return torch.tensor([start for start, n in zip(accumulate(schedule, initial=0), schedule) for _ in range(n)])
