"""Contracts of compositions of hyper-connections."""

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work, of_tokens
from dsv4.kernels.fusions import exact
from dsv4.kernels.hyper_connections import contract as mhc
from dsv4.kernels.hyper_connections import inputs


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


def pre_inputs(w, draw, tokens) -> tuple:
    return _normed(inputs.connection("random", tokens, w, draw), w, draw)


def post_pre_inputs(w, draw, tokens) -> tuple:
    return *inputs.merge("random", tokens, w, draw), *pre_inputs(w, draw, tokens)[1:]


def post_head_inputs(w, draw, tokens) -> tuple:
    return *inputs.merge("random", tokens, w, draw), *_normed(inputs.head("random", tokens, w, draw)[1:], w, draw)


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
    production=Production(pre_inputs, lambda w: of_tokens(1, 4096)(w) | mhc.COMPILED(w)),
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
    production=Production(post_pre_inputs, lambda w: of_tokens(1, 8, 64, 4096)(w) | mhc.COMPILED(w)),
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
    production=Production(post_head_inputs, mhc.COMPILED),
)
CONTRACTS = (MHC_PRE_NORM, MHC_POST_PRE_NORM, MHC_POST_HEAD_NORM)
