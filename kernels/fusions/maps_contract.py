"""Contracts of compositions of linear maps."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work, tensors
from dsv4.kernels.fusions import exact
from dsv4.kernels.fusions.rows_contract import CIS, rows_of
from dsv4.kernels.linear import drawn
from dsv4.kernels.quantize import PackedWeight, WeightFormat, simulate_fp8_blocks, to_float
from dsv4.kernels.quantize.weights import spread
from dsv4.kernels.widths import VOCABULARY

FP8_ACTIVATIONS = 128  # columns of one scale


def sizes_by_block(O: int, K: int, draw) -> torch.Tensor:
    """fp32 [O, K] of another size in each block of 128 × 128 and 32 columns, so that another block's scale shows."""
    row, column = torch.arange(-(-O // 128)).unsqueeze(1), torch.arange(-(-K // 32))
    size = 2.0 ** ((row * 3 + column * 2 + column // 4) % 7 - 3)
    return draw.matrix(O, K).mul_(spread(spread(size, 32, K, 1), 128, O, 0))


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


def linear_inputs(w, draw, kind, tokens, simulate=False) -> tuple:
    """One token a row through the maps of `kinds`, those of FP8 with activations in FP8 if `simulate`."""
    parts, width, normed = kinds(w)[kind]
    weights = tuple(drawn.stored(form, O, width, draw=draw) for form, O in parts)
    flags = tuple(simulate and form == drawn.FP8 for form, _ in parts)
    dtypes = tuple(torch.float32 if form == drawn.DENSE and O > w.index_n_heads else None for form, O in parts)
    return draw.act(tokens, width), draw.act(width) if normed else None, w.rms_norm_eps, weights, flags, dtypes


def kinds(w) -> dict[str, tuple]:
    """What a V4 model does in one launch: name → ((format, rows) of each map, columns, whether a norm comes first)."""
    compressor = ((drawn.DENSE, 4 * w.head_dim), (drawn.DENSE, 4 * w.index_head_dim))
    latents = ((drawn.FP8, w.q_lora_rank), (drawn.FP8, w.head_dim))
    queries = (
        (drawn.FP8, w.num_attention_heads * w.head_dim),
        (drawn.FP8, w.index_n_heads * w.index_head_dim),
    )
    return {
        "maps of a CSA layer": ((*latents, *compressor, (drawn.DENSE, w.index_n_heads)), w.hidden_size, False),
        "compressor projections": (compressor, w.hidden_size, False),
        "maps of queries": (queries, w.q_lora_rank, True),
        "head": (((drawn.DENSE, VOCABULARY),), w.hidden_size, False),
    }


def linear_sizes(w) -> dict:
    """Decode steps of a token and of several."""
    quantised = [kind for kind, (parts, *_) in kinds(w).items() if any(form != drawn.DENSE for form, _ in parts)]
    bench = [
        dict(kind=kind, tokens=N, simulate=simulate)
        for kind in kinds(w)
        for N in (1, 8, *((32, 64) if kind in quantised else ()))
        for simulate in ((False, True) if kind in quantised else (False,))
    ]
    compiled = [dict(kind=k, tokens=N, simulate=s) for N in (1, 10, 32, 64) for s in (True, False) for k in quantised]
    return {"bench": bench, "compiled": compiled}


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
    production=Production(linear_inputs, linear_sizes),
)


# ---- output heads -----------------------------------------------------------------------------


def fp8_heads(o, cis, w, groups: int) -> torch.Tensor:
    """An honest kernel that quantises the rotated heads to FP8 in blocks of 128 columns."""
    turned = exact.rotate(o, cis.unsqueeze(1)).to(o.dtype).flatten(1).unflatten(1, (groups, -1))
    coded = simulate_fp8_blocks(turned, FP8_ACTIVATIONS).float()
    rows = to_float(w).view(groups, -1, coded.shape[-1])
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


def head_inputs(w, draw, tokens) -> tuple:
    """Heads in bf16 through a weight in FP8."""
    H, D, G = w.num_attention_heads, w.head_dim, w.o_groups
    matrix = drawn.stored(drawn.FP8, G * w.o_lora_rank, H * D // G, draw=draw)
    return draw.act(tokens, H, D), draw.angles(w.qk_rope_head_dim // 2, tokens), matrix, G


def head_sizes(w) -> dict:
    return {
        "bench": [dict(tokens=N) for N in (1, 8, 32, 64, 512)],
        "compiled": [dict(tokens=N) for N in (1, 10, 32, 64)],
    }


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
    production=Production(head_inputs, head_sizes),
)


CONTRACTS = (LINEARS, PROJECT_HEADS)
