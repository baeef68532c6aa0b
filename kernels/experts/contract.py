"""Contracts of `experts` and `shared_expert`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.experts import exact
from dsv4.kernels.experts.drawn import (
    BELOW,
    FORMS,
    MANY,
    OWN,
    WIDE,
    Stacks,
    between,
    inputs,
    lists,
    matrices,
    simulations,
)
from dsv4.kernels.linear import drawn
from dsv4.kernels.linear.contract import IN_FP8, bytes_of
from dsv4.kernels.linear.drawn import DENSE, FP8, MXFP4, NVFP4


def expert_cases(w, draw):
    """Every format; skewed lists; sizes about tiles; clamps on either side; routing weights of all sizes."""
    stacks, k = Stacks(w, draw), w.num_experts_per_tok
    if w.hidden_size >= WIDE:
        yield from _wide_cases(stacks, w, draw)
        return
    forms = drawn.allowed(FORMS, w, w.hidden_size, w.moe_intermediate_size)
    usual = MXFP4 if MXFP4 in forms else DENSE
    for form in forms:
        for simulate in simulations(form, draw):
            yield _case("random", form, "random", MANY if simulate else 5, stacks, w, draw, simulate)
            if simulate and form != NVFP4:
                yield _case("a few large columns", form, "random", MANY, stacks, w, draw, True)
        if form == NVFP4:
            yield _case("coded experts", form, "random", 5, stacks, w, draw)
    for skew in ("one token an expert", "few", "half empty", "zipf"):
        yield _case("random", usual, skew, 17, stacks, w, draw)
    for N in sorted({1, 2, 16 // k, 64 // k, 64 // k + 1}):
        yield _case("random", usual, "random", N, stacks, w, draw)
    for form in (DENSE, FP8):
        for family in ("beyond the clamps", "routing of all sizes", "gates far below", "tokens of zeros"):
            yield _case(family, form, "random", 6, stacks, w, draw)
    if True in simulations(FP8, draw):
        yield _case("routing of all sizes", FP8, "random", MANY, stacks, w, draw, True)
    if True in simulations(usual, draw):
        yield _case(BELOW, MXFP4, "random", 4, stacks, w, draw, True)


def _wide_cases(stacks, w, draw):
    """What fits a pass of minutes: three stacks of a few experts."""
    yield _case("random", FP8, "random", 3, stacks, w, draw)
    for simulate in simulations(MXFP4, draw):
        yield _case("random", MXFP4, "random", MANY if simulate else 11, stacks, w, draw, simulate)
    for family, skew, N in (
        ("random", "one token an expert", 1),
        ("random", "few", 17),
        ("random", "half empty", 1),
        ("beyond the clamps", "random", 3),
        ("routing of all sizes", "random", 3),
    ):
        yield _case(family, MXFP4, skew, N, stacks, w, draw)
    if True in simulations(MXFP4, draw):
        yield _case("a few large columns", MXFP4, "random", MANY, stacks, w, draw, True)


def _case(family, form, skew, N, stacks, w, draw, simulate=False) -> Case:
    own = family if family in OWN else "random"
    w13, w2 = stacks(form, own, simulate)
    k, E = w.num_experts_per_tok, stacks.count(own)
    indices = lists(skew, N, k, E, draw)
    N = len(indices)
    routing = draw.uniform(0.1, 1, N, k)
    if family == "routing of all sizes":  # small and large in one list would hide the small
        routing *= 10.0 ** draw.uniform(-3, 3, N, 1)
    if family == BELOW:
        routing = 2.0 ** -draw.below(3, N, k).float()
    used = torch.zeros(E, dtype=torch.bool)
    used[indices] = True
    label = f"{N} tokens of {k} experts, {form}" + (", activations in FP8" if simulate else "")
    label += "" if skew == "random" else f", {skew}"
    idle = (~used).view(-1, 1, 1)
    unread = {"w13": idle, "w2": idle} if form == DENSE else {}  # NaN codes of quantised weights differ by tensor
    exempt = IN_FP8 if simulate else {}
    arguments = (inputs(family, N, stacks.d, draw), indices, routing, w13, w2, w.swiglu_limit, simulate)
    return Case(label, family, arguments, unread, exempt)


def expert_work(x, indices, routing, w13, w2, limit: float, simulate: bool) -> Work:
    """Weights of the experts that a token lists once, inputs, lists, results; 6·N·k·I·D operations."""
    (N, k), (E, I2, _), D = indices.shape, w13.weight.shape, x.shape[1]
    live = len(indices.unique())
    moved = bytes_of(w13, w2) * live // E + bytes_of(x, routing) + 4 * N * k + 4 * N * D
    return Work(moved, 3 * N * k * I2 * D, f"listed experts + N·D·{x.element_size()} + 4·N·D + 8·N·k; 6·N·k·I·D")


def expert_inputs(w, draw, form, tokens, simulate=False) -> tuple:
    """Lists of experts that are all as likely."""
    d, I, E, k = w.hidden_size, w.moe_intermediate_size, w.n_routed_experts, w.num_experts_per_tok
    indices, routing = draw.chosen(E, tokens, k), draw.uniform(0, 1 / 3, tokens, k)
    w13 = drawn.stored(form, E, 2 * I, d, draw=draw, parts=2)
    return draw.act(tokens, d), indices, routing, w13, drawn.stored(form, E, d, I, draw=draw), w.swiglu_limit, simulate


def expert_sizes(w) -> dict:
    """Decode steps and prompts in both FP4 formats; compiled for fp32 tokens in every format."""
    tokens = {MXFP4: (1, 2, 4, 8, 16, 32, 64, 256, 4096), NVFP4: (1, 8)}
    return {
        "bench": [dict(form=f, tokens=N, simulate=s) for f in tokens for N in tokens[f] for s in (False, True)],
        "compiled": [dict(form=form, tokens=8, dtype=torch.float32) for form in SHARED_FORMS],
    }


def moe_inputs(w, draw, form, tokens, simulate=False) -> tuple:
    """Routed experts together with the shared one, in the format that goes with theirs."""
    x, *routed, limit, _ = expert_inputs(w, draw, form, tokens)
    shared = shared_inputs(w, draw, SHARED_FORMS[form], tokens)[1:4]
    return x, *routed, shared, limit, simulate, simulate


def moe_sizes(w) -> dict:
    """Decode steps; compiled for prompts and the other formats too."""
    most = [dict(form=MXFP4, tokens=N, simulate=s) for N in (1, 8, 16, 64, 300, 1500, 6000) for s in (False, True)]
    others = [dict(form=form, tokens=N) for form in (NVFP4, FP8, DENSE) for N in (1, 12, 1500)]
    return {"bench": [dict(form=MXFP4, tokens=N) for N in (1, 8)], "compiled": most + others}


SHARED_FORMS = {MXFP4: FP8, NVFP4: NVFP4, FP8: FP8, DENSE: DENSE}  # of the shared expert, by that of the routed ones
# of the composition, which has no contract: its parts have
PRODUCTIONS = {"moe": Production(moe_inputs, moe_sizes)}
X = Argument("x", ("num_tokens", "hidden"), "activation", "inputs")
TAIL = (
    Argument("limit", None, "float32", "gate counts at most limit, up counts within ±limit"),
    Argument("simulate", None, "bool", "round the inputs of both products to E4M3 in blocks of 128"),
)
EDGES = (
    "the gate is clamped from above alone, up from both sides",
    "a token of zeros gives zeros",
)
EXPERTS = Contract(
    "experts",
    "The sum over a token's experts of w2 · (routing weight · silu(gate) · up).",
    (
        X,
        Argument("indices", ("num_tokens", "topk"), "int64", "experts of each token, all different"),
        Argument("routing", ("num_tokens", "topk"), "float32", "their weights"),
        Argument("w13", ("experts", "twice_intermediate", "hidden"), "weight", "gate rows, then up rows, of each"),
        Argument("w2", ("experts", "hidden", "intermediate"), "weight", "down projection of each"),
        *TAIL,
    ),
    (
        Output(
            *(
                "out",
                ("num_tokens", "hidden"),
                "float32",
                "the weighted product of gate and up is rounded to x's dtype",
            ),
            liberty="class weight-after-w2: the routing weight multiplies the results of w2",
        ),
    ),
    exact.exact_experts,
    {
        "weight-before-w2": exact.kernel,
        "weight-after-w2": exact.weight_after_w2,
        "fp8-activations": exact.experts_with_fp8,
    },
    expert_cases,
    expert_work,
    (*EDGES, "experts may be empty, or have all tokens", "weights of an expert that no token lists are not read"),
    {"x": 0, "indices": 0, "routing": 0},
    production=Production(expert_inputs, expert_sizes),
)


def shared_cases(w, draw):
    """Every format, sizes about tiles, clamps on either side, gates far below zero, large columns. Of wide models FP8
    and MXFP4 alone."""
    kept = {}
    case = lambda *about: _shared(*about, kept, w, draw)
    forms = drawn.allowed(FORMS, w, w.hidden_size, w.moe_intermediate_size)
    for form in (FP8, MXFP4) if w.hidden_size >= WIDE else forms:
        for simulate in simulations(form, draw):
            yield case("random", form, MANY if simulate else 5, simulate)
        for N in (1, 17, 65) if form == FP8 else ():
            yield case("random", form, N, False)
        for family in ("beyond the clamps", "tokens of zeros"):
            yield case(family, form, 4, False)
        if form != NVFP4:  # its scales are no powers of two
            yield case("gates far below", form, 4, False)
        if True in simulations(form, draw):
            yield case("a few large columns", form, MANY, True)
    if MXFP4 in forms and True in simulations(MXFP4, draw):
        yield case(BELOW, MXFP4, 3, True)


def _shared(family, form, N, simulate, kept: dict, w, draw) -> Case:
    """`kept` holds the weights of the last case, for cases of one format and one kind of weights."""
    d, I = w.hidden_size, between(w, simulate)
    own = family if family in OWN else "random"
    if (form, own, I) not in kept:
        kept.clear()
        kept[form, own, I] = [drawn.weight(form, m, draw) for m in matrices(own, I, d, draw)]
    label = f"{N} tokens, {form}" + (", activations in FP8" if simulate else "")
    arguments = (inputs(family, N, d, draw), *kept[form, own, I], w.swiglu_limit, simulate)
    return Case(label, family, arguments, {}, IN_FP8 if simulate else {})


def shared_work(x, w1, w3, w2, limit: float, simulate: bool) -> Work:
    """All weights once, inputs and results; 6·N·I·D operations."""
    (N, D), I = x.shape, w1.out_features
    return Work(
        bytes_of(w1, w3, w2, x) + 4 * N * D, 6 * N * I * D, f"weights + N·D·{x.element_size()} + 4·N·D; 6·N·I·D"
    )


def shared_inputs(w, draw, form, tokens) -> tuple:
    """Three matrices as a checkpoint holds them."""
    d, I = w.hidden_size, w.moe_intermediate_size
    w1, w3, w2 = (drawn.stored(form, *shape, draw=draw) for shape in ((I, d), (I, d), (d, I)))
    return draw.act(tokens, d), w1, w3, w2, w.swiglu_limit, False


def shared_sizes(w) -> dict:
    return {"compiled": [dict(form=form, tokens=1) for form in SHARED_FORMS.values()]}


SHARED = Contract(
    "shared_expert",
    "One SwiGLU expert for all tokens: w2 · (silu(w1 x) · w3 x), clamped.",
    (
        X,
        Argument("w1", ("intermediate", "hidden"), "weight", "gate projection"),
        Argument("w3", ("intermediate", "hidden"), "weight", "up projection"),
        Argument("w2", ("hidden", "intermediate"), "weight", "down projection"),
        *TAIL,
    ),
    (Output("out", ("num_tokens", "hidden"), "float32", "the product of gate and up is rounded to x's dtype"),),
    exact.exact_shared,
    {"fp32": exact.shared_kernel, "fp8-activations": exact.shared_with_fp8},
    shared_cases,
    shared_work,
    EDGES,
    {"x": 0},
    production=Production(shared_inputs, shared_sizes),
)
CONTRACTS = (EXPERTS, SHARED)
