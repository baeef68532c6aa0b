"""Contracts of compositions of linear maps and of hyper-connections."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Work, doubles, tensors
from dsv4.kernels.fusions import exact
from dsv4.kernels.fusions.rows_contract import CIS, rows_of
from dsv4.kernels.hyper_connections import contract as mhc
from dsv4.kernels.hyper_connections import inputs
from dsv4.kernels.linear import drawn
from dsv4.kernels.quantize import PackedWeight, WeightFormat, simulate_fp8_blocks

FP8_ACTIVATIONS = 128  # columns of one scale


def sizes_by_block(O: int, K: int, draw) -> torch.Tensor:
    """fp32 [O, K] of another size in each block of 128 × 128 and 32 columns, so that another block's scale shows."""
    row, column = torch.arange(O).unsqueeze(1), torch.arange(K)
    return draw.matrix(O, K) * 2.0 ** ((row // 128 * 3 + column // 32 * 2 + column // 128) % 7 - 3)


def weight_bytes(*weights) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(weights))


# ---- several maps of one input ----------------------------------------------------------------


def linear_cases(w, draw):
    """Every format, with a norm and without, simulated where the format allows it; the second map is in fp32."""
    d = w.hidden_size
    plain = draw.weight(WeightFormat.DENSE, draw.matrix(24, d))
    wide = PackedWeight(WeightFormat.DENSE, draw.matrix(48, d))
    for form in _forms(w, d):
        for made in (draw.matrix, lambda O, K: sizes_by_block(O, K, draw)):
            first = draw.weight(form, made(2 * d, d))
            family = "random" if made == draw.matrix else "scales by block"
            for simulate in (False, True) if form is not WeightFormat.DENSE else (False,):
                yield _linear_case(family, 9, (first, wide, plain), simulate, True, w, draw)
            yield _linear_case("sizes", 5, (first, wide, plain), False, False, w, draw)
    for N in (1, 2, 33):
        yield _linear_case("random", N, (first, wide, plain), False, N != 2, w, draw)
    yield _linear_case("where eps decides", 5, (first, wide, plain), False, True, w, draw)
    yield _linear_case("zeros", 3, (first, wide, plain), False, True, w, draw)
    if form is not WeightFormat.DENSE:
        yield _linear_case("uneven columns", 9, (first, wide, plain), True, False, w, draw)


def _forms(w, K: int) -> list[WeightFormat]:
    """Formats that matrices of K columns can have."""
    return [WeightFormat(form) for form in drawn.allowed(tuple(form.value for form in WeightFormat), w, K)]


def _linear_case(family, N, weights, simulate, norm, w, draw) -> Case:
    d = w.hidden_size
    x = rows_of(family, N, d, draw)
    if family == "uneven columns":  # every 128 columns are of another size: a scale of the whole row is too coarse
        x = x * 2.0 ** (torch.arange(d) // 128 * 5 % 16 - 8)
    norm = draw.act(d) if norm else None
    arguments = x.to(draw.dtype), norm, w.rms_norm_eps, weights, (simulate, False, False), (None, torch.float32, None)
    label = ", ".join(
        (f"{N} tokens", weights[0].format.value, "a norm" if norm is not None else "no norm")
        + (("simulated",) if simulate else ())
    )
    return Case(label, family, arguments)


def linear_work(x, norm, eps, weights, simulate, dtypes) -> Work:
    """The input, every weight as stored and the results."""
    N, K = x.shape
    O = [w.out_features for w in weights]
    sizes = [4 if dtype is torch.float32 else x.element_size() for dtype in dtypes]
    moved = x.numel() * x.element_size() + weight_bytes(*weights)
    moved += N * sum(o * size for o, size in zip(O, sizes, strict=True))
    return Work(moved, 2 * N * K * sum(O), "N·K·b + weights + N·ΣO·b; 2·N·K·ΣO")


LINEARS = Contract(
    "linears",
    "Several linear maps of one input, normalised first unless there is no norm.",
    (
        Argument("x", ("num_tokens", "hidden"), "activation", "input of every map"),
        Argument("norm", ("hidden",), "activation", "weight of the norm; None: no norm", optional=True),
        Argument("eps", None, "float32", "of the norm"),
        Argument("weights", ("maps", "out", "hidden"), "weight", "a tuple; the first in any format"),
        Argument("simulate", None, "bool", "a tuple: x through FP8 in blocks of 128 columns for this map"),
        Argument(
            "dtypes", None, "dtype", "a tuple: float32 for a result that is not rounded to x's dtype, None if it is"
        ),
    ),
    (
        Output("first", ("num_tokens", "out"), "activation", "fp32 sums, one rounding"),
        Output("second", ("num_tokens", "out"), "float32", "fp32 sums of x as it is"),
        Output("third", ("num_tokens", "out"), "activation", "fp32 sums, one rounding"),
    ),
    exact.linears,
    {"rounded-norm": exact.DEFINED.linears},
    linear_cases,
    linear_work,
    ("a simulated map quantises the norm's result after its rounding", "a row of zeros gives zeros"),
    {"x": 0},
)


# ---- output heads -----------------------------------------------------------------------------


def fp8_heads(o, cis, w, groups: int) -> torch.Tensor:
    """An honest kernel that quantises the rotated heads to FP8 in blocks of 128 columns."""
    turned = exact.rotate(o, cis.unsqueeze(1)).to(o.dtype).flatten(1).unflatten(1, (groups, -1))
    coded = simulate_fp8_blocks(turned, FP8_ACTIVATIONS).float()
    rows = doubles(w).float().view(groups, -1, coded.shape[-1])
    return torch.einsum("ngk,grk->ngr", coded, rows).flatten(1).to(o.dtype)


def head_cases(w, draw):
    """Every format; of FP8 groups of unequal sizes, rotated columns alone, one token, and more than a tile."""
    H, D, G, half = w.num_attention_heads, w.head_dim, w.o_groups, w.qk_rope_head_dim // 2
    O, K = G * w.o_lora_rank, H * D // G
    for form in _forms(w, K):
        matrix = draw.weight(form, sizes_by_block(O, K, draw) if form is WeightFormat.FP8 else draw.matrix(O, K))
        more = (("groups of unequal sizes", 3), ("rotated columns", 3), ("random", 1), ("random", 17))
        for family, N in (("random", 5), *(more if form is WeightFormat.FP8 else ())):
            o = draw.rand(N, H, D)
            if family == "groups of unequal sizes":
                o = o * 2.0 ** (torch.arange(H) // (H // G) * 3 % 8).view(H, 1)
            if family == "rotated columns":
                o[..., : D - 2 * half] = 0
            arguments = o.to(draw.dtype), draw.angles(half, N), matrix, G
            yield Case(f"{N} tokens, {form.value}", family, arguments)


def heads_work(o, cis, w, groups) -> Work:
    moved = o.numel() * o.element_size() + weight_bytes(w) + o.shape[0] * w.out_features * o.element_size()
    flops = 2 * o.shape[0] * w.out_features * (o[0].numel() // groups)
    return Work(moved, flops, "N·H·D·b + weight + N·O·b; 2·N·O·H·D / groups")


PROJECT_HEADS = Contract(
    "project_heads",
    "Output heads, rotated, through the grouped projection.",
    (
        Argument(
            *("o", ("num_tokens", "num_heads", "head_dim"), "activation", "output heads; may be overwritten"),
            scratch=True,
        ),
        CIS,
        Argument("w", ("out", "group_dims"), "weight", "rows of group 0, of group 1, …"),
        Argument("groups", None, "int64", "group g holds heads g·H/groups … and meets its own rows"),
    ),
    (Output("y", ("num_tokens", "out"), "activation", "fp32 sums, one rounding"),),
    exact.project_heads,
    {"rounded-heads": exact.DEFINED.project_heads, "fp8-activations": fp8_heads},
    head_cases,
    heads_work,
    ("cis is the conjugate already: it undoes the rotation",),
    {"o": 0, "cis": 0},
)


# ---- hyper-connections ------------------------------------------------------------------------


def _normed(connection, w, draw) -> tuple:
    return *connection, draw.act(w.hidden_size), w.rms_norm_eps


def pre_cases(w, draw):
    for family in inputs.FAMILIES:
        yield Case("5 tokens", family, _normed(inputs.connection(family, 5, w, draw), w, draw), exempt=_exempt(family))
    yield Case("1 token", "random", _normed(inputs.connection("random", 1, w, draw), w, draw))


def _exempt(family: str) -> dict:
    return {"lower precision": "every number is exact in FP8"} if family in ("coded", "integers") else {}


def _both(merges, connections, w):
    """Pairs of families, each of them at least once."""
    n = max(len(merges), len(connections))
    return [(merges[i % len(merges)], connections[i % len(connections)]) for i in range(n)]


def post_pre_cases(w, draw):
    """Families of both halves; the streams between them are what the first half makes."""
    connections = [f for f in inputs.FAMILIES if f not in ("zeros", "where eps decides", "cancellation", "steep gates")]
    for turn, (family, other) in enumerate(_both(inputs.MERGES, connections, w)):
        merge = inputs.merge(family, 5, w, draw)
        rest = _normed(inputs.connection(other, 5, w, draw, turn)[1:], w, draw)
        yield Case("5 tokens", f"{family}, {other}", (*merge, *rest), exempt=_exempt(family))
    for N in (1, 17):
        rest = _normed(inputs.connection("random", N, w, draw)[1:], w, draw)
        yield Case(f"{N} tokens", "random", (*inputs.merge("random", N, w, draw), *rest))


def post_head_cases(w, draw):
    """As `post_pre_cases`, with the head's gates."""
    connections = ("random", "closed gates", "open gates")
    for family, other in _both(inputs.MERGES, connections, w):
        rest = _normed(inputs.head(other, 5, w, draw)[1:], w, draw)
        yield Case("5 tokens", f"{family}, {other}", (*inputs.merge(family, 5, w, draw), *rest), exempt=_exempt(family))
    for N in (1, 17):
        rest = _normed(inputs.head("random", N, w, draw)[1:], w, draw)
        yield Case(f"{N} tokens", "random", (*inputs.merge("random", N, w, draw), *rest))


def pre_work(streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps) -> Work:
    """As `mhc_pre`, and the norm's weight."""
    found = mhc.pre_work(streams, fn, scale, base, iters, eps, norm_eps)
    return Work(found.bytes + weight.numel() * weight.element_size(), found.flops, f"{found.formula}; norm d·b")


def post_pre_work(out, streams, post, comb, fn, *rest) -> Work:
    """As `mhc_post`, fn, and one row a token out: the new streams need not be read again."""
    found, (N, n, d) = mhc.post_work(out, streams, post, comb), streams.shape
    moved = found.bytes + N * d * streams.element_size() + 4 * (fn.numel() + N * (fn.shape[0] - n))
    return Work(
        moved, found.flops + 2 * N * n * d * (fn.shape[0] + 2), f"{found.formula}; N·d·b + 4·fn; 2·N·n·d·(M + 2)"
    )


NORM = (
    Argument("weight", ("hidden",), "activation", "of the norm of the sublayer's input"),
    Argument("rms_eps", None, "float32", "of that norm"),
)
NEW = mhc.POST.outputs[0]
X = Output("x", ("num_tokens", "hidden"), "activation", "normalised", liberty="it may be rounded before the norm")
MHC_PRE_NORM = Contract(
    "mhc_pre_norm",
    "`mhc_pre`, and the norm of the sublayer's input.",
    (*mhc.PRE.arguments, *NORM),
    (X, *mhc.WEIGHTS),
    exact.mhc_pre_norm,
    {"rounded-between": exact.DEFINED.mhc_pre_norm},
    pre_cases,
    pre_work,
    mhc.PRE.edges,
    {"streams": 0},
)
MHC_POST_PRE_NORM = Contract(
    "mhc_post_pre_norm",
    "`mhc_post`, then `mhc_pre` of the new streams, and the norm of the sublayer's input.",
    (*mhc.MERGE, *mhc.MIXING, *NORM),
    (NEW, X, *mhc.WEIGHTS),
    exact.mhc_post_pre_norm,
    {"rounded-between": exact.DEFINED.mhc_post_pre_norm},
    post_pre_cases,
    post_pre_work,
    ("gates are of the new streams, which may be rounded before", *mhc.PRE.edges),
    mhc.POST.batch,
)
MHC_POST_HEAD_NORM = Contract(
    "mhc_post_head_norm",
    "`mhc_post`, then `mhc_head` of the new streams, and the final norm.",
    (*mhc.MERGE, *mhc.HEAD_MIXING, *NORM),
    (NEW, X),
    exact.mhc_post_head_norm,
    {"rounded-between": exact.DEFINED.mhc_post_head_norm},
    post_head_cases,
    post_pre_work,
    ("gates are of the new streams, which may be rounded before",),
    mhc.POST.batch,
)
CONTRACTS = (LINEARS, PROJECT_HEADS, MHC_PRE_NORM, MHC_POST_PRE_NORM, MHC_POST_HEAD_NORM)
