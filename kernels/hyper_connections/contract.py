"""Contracts of `mhc_pre`, `mhc_post` and `mhc_head`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work, of_tokens
from dsv4.kernels.hyper_connections import exact, inputs, reference

COUNTS = (1, 3, 5, 17, 33)  # tokens: one, few, and about the tiles of kernels


# of decode steps and prompts; fp32 streams have their own kernel for many tokens
COMPILED = lambda w: {"compiled": [dict(tokens=N) for N in (1, 8, 64, 4096)] + [dict(tokens=4096, dtype=torch.float32)]}


def pre_cases(w, draw):
    """Every family for a few tokens, random ones for other numbers of tokens."""
    for family in inputs.FAMILIES:
        for turn in range(3 if family == "asymmetric" else 1):
            yield _pre_case(family, 9, w, draw, turn)
    for N in COUNTS:
        yield _pre_case("random", N, w, draw)


def _pre_case(family, N, w, draw, turn=0) -> Case:
    arguments = inputs.connection(family, N, w, draw, turn)
    exempt = {"lower precision": "every number is exact in FP8"} if family == "coded" else {}
    return Case(f"{N} tokens, {arguments[4]} iterations", family, arguments, exempt=exempt)


def pre_work(streams, fn, scale, base, iters, eps, norm_eps) -> Work:
    """Streams in, one row a token out, fn once; products of fn, squares, and the weighted sum."""
    (N, n, d), M = streams.shape, fn.shape[0]
    moved = streams.element_size() * N * d * (n + 1) + 4 * (fn.numel() + N * (M - n))
    return Work(moved, 2 * N * n * d * (M + 2), "N·(n + 1)·d·b + 4·(M·n·d + N·(n + n²)); 2·N·n·d·(M + 2)")


STREAMS = Argument("streams", ("num_tokens", "streams", "hidden"), "activation", "n residual streams of each token")
MIXING = (
    Argument("fn", ("mixes", "stream_dims"), "float32", "mixes = 2n + n² rows: n of pre, n of post, n² of comb"),
    Argument("scale", ("parts",), "float32", "one for each of pre, post and comb"),
    Argument("base", ("mixes",), "float32", "added to the scaled products"),
    Argument("iters", None, "int64", "Sinkhorn's column steps; row steps are one fewer"),
    Argument("eps", None, "float32", "added to pre, to the softmax and to every denominator of Sinkhorn's iteration"),
    Argument("norm_eps", None, "float32", "added to the mean square of all n·d numbers of a token"),
)
WEIGHTS = (
    Output("post", ("num_tokens", "streams"), "float32", "2σ(m·scale₁ + base)"),
    Output("comb", ("num_tokens", "streams", "streams"), "float32", "[old, new]; columns sum to 1", row=2),
)
PRE = Contract(
    "mhc_pre",
    "A sublayer's input from the streams, and the weights that merge its output: pre = σ(m·scale₀ + base) + eps, "
    "post = 2σ(m·scale₁ + base), comb = Sinkhorn(m·scale₂ + base), m = fn·x / sqrt(mean(x²) + norm_eps).",
    (STREAMS, *MIXING),
    (Output("y", ("num_tokens", "hidden"), "activation", "Σ_j pre[j]·stream[j], not normalised"), *WEIGHTS),
    exact.mhc_pre,
    {"fp32": reference.mhc_pre, "tf32": exact.mhc_pre_tf32},
    pre_cases,
    pre_work,
    (
        "the softmax of comb runs over new streams, then a column step (over old streams) comes first and last",
        "a token of zeros has m = 0",
        "the factor of post is 2",
    ),
    {"streams": 0},
    production=Production(lambda w, draw, tokens: inputs.connection("random", tokens, w, draw), COMPILED),
)


def post_cases(w, draw):
    """Every family for a few tokens, random ones for other numbers of tokens."""
    for family in inputs.MERGES:
        yield _post_case(family, 9, w, draw)
    for N in COUNTS:
        yield _post_case("random", N, w, draw)


def _post_case(family, N, w, draw) -> Case:
    whole = family in ("coded", "integers", "permutation")
    exempt = {"lower precision": "weights and numbers are exact in FP8"} if whole and family != "permutation" else {}
    return Case(f"{N} tokens", family, inputs.merge(family, N, w, draw), exempt=exempt)


def post_work(out, streams, post, comb) -> Work:
    """Streams in and out, the output and the weights in."""
    N, n, d = streams.shape
    moved = streams.element_size() * N * d * (2 * n + 1) + 4 * N * (n + n * n)
    return Work(moved, 2 * N * n * d * (n + 1), "N·(2n + 1)·d·b + 4·N·(n + n²); 2·N·n·d·(n + 1)")


MERGE = (
    Argument("out", ("num_tokens", "hidden"), "activation", "the sublayer's output"),
    STREAMS,
    Argument("post", ("num_tokens", "streams"), "float32", "weight of the output in each new stream"),
    Argument("comb", ("num_tokens", "streams", "streams"), "float32", "[old, new]; not symmetric"),
)
POST = Contract(
    "mhc_post",
    "A sublayer's output back into the streams: new[k] = post[k]·out + Σ_j comb[j, k]·old[j].",
    MERGE,
    (
        Output(
            "new", ("num_tokens", "streams", "hidden"), "activation", "sums in fp32, one rounding; not written in place"
        ),
    ),
    exact.mhc_post,
    {"fp32": reference.mhc_post},
    post_cases,
    post_work,
    ("comb may be any matrix: columns need not sum to 1",),
    {"out": 0, "streams": 0, "post": 0, "comb": 0},
    production=Production(lambda w, draw, tokens: inputs.merge("random", tokens, w, draw), of_tokens(1, 4096)),
)


def head_cases(w, draw):
    """Families that gates alone show."""
    for family in inputs.FAMILIES:
        if family != "asymmetric":
            yield _head_case(family, 9, w, draw)
    for N in COUNTS:
        yield _head_case("random", N, w, draw)


def _head_case(family, N, w, draw) -> Case:
    exempt = {"lower precision": "every number is exact in FP8"} if family == "coded" else {}
    return Case(f"{N} tokens", family, inputs.head(family, N, w, draw), exempt=exempt)


def head_work(streams, fn, scale, base, eps, norm_eps) -> Work:
    """Streams in, one row a token out, fn once."""
    N, n, d = streams.shape
    moved = streams.element_size() * N * d * (n + 1) + 4 * fn.numel()
    return Work(moved, 2 * N * n * d * (n + 2), "N·(n + 1)·d·b + 4·n·n·d; 2·N·n·d·(n + 2)")


HEAD_MIXING = (
    Argument("fn", ("streams", "stream_dims"), "float32", "one row a stream"),
    Argument("scale", ("one",), "float32", "one number"),
    Argument("base", ("streams",), "float32", "added to the scaled products"),
    Argument("eps", None, "float32", "added to each gate"),
    Argument("norm_eps", None, "float32", "added to the mean square of all n·d numbers of a token"),
)
HEAD = Contract(
    "mhc_head",
    "The collapse before the final norm: y = Σ_j (σ(m[j]·scale + base[j]) + eps)·stream[j].",
    (STREAMS, *HEAD_MIXING),
    (Output("y", ("num_tokens", "hidden"), "activation", "sums in fp32, one rounding; not normalised"),),
    exact.mhc_head,
    {"fp32": reference.mhc_head, "tf32": exact.mhc_head_tf32},
    head_cases,
    head_work,
    ("a token of zeros gives zeros",),
    {"streams": 0},
    production=Production(lambda w, draw, tokens: inputs.head("random", tokens, w, draw), COMPILED),
)
CONTRACTS = (PRE, POST, HEAD)
