"""Contracts of `experts` and `shared_expert`."""

import math

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Work
from dsv4.kernels.experts import exact
from dsv4.kernels.linear import drawn
from dsv4.kernels.linear.contract import IN_FP8, bytes_of, uneven
from dsv4.kernels.linear.drawn import DENSE, FP8, MXFP4, NVFP4

WIDE = 1024  # from this width on fewer formats are drawn, and as few experts as a token's list needs
BELOW = "inputs of w2 below a step"
FORMS = (DENSE, FP8, MXFP4, NVFP4)


class Stacks:
    """Weights of all experts by format and family, drawn once for a pass over the cases."""

    def __init__(self, w, draw):
        self.d, self.I, self.draw, self.found = w.hidden_size, w.moe_intermediate_size, draw, {}
        self.E = w.n_routed_experts if w.hidden_size < WIDE else min(w.n_routed_experts, w.num_experts_per_tok + 2)

    def __call__(self, form: str, family: str = "random"):
        """(w13, w2) of E experts."""
        if (form, family) not in self.found:
            if self.d >= WIDE:
                self.found.clear()
            made = [self._pair(form, family, e) for e in range(self.E)]
            self.found[form, family] = tuple(drawn.stack(list(ws)) for ws in zip(*made))
        return self.found[form, family]

    def _pair(self, form: str, family: str, e: int):
        d, I, draw = self.d, self.I, self.draw
        gate, up, down = draw.matrix(I, d), draw.matrix(I, d), draw.matrix(d, I)
        if family == "coded experts":
            up, down = up * 2.0 ** (e % 3 - 1), down * 2.0 ** (e % 5 - 2)
        if family == "a few large columns":
            large = torch.arange(d) % 128 < 32
            gate, up = gate.masked_fill(large, 0), up.masked_fill(large, 0)
        if family == "gates far below":
            gate = same_sign(I, d, draw)
        if family == BELOW:
            gate, up, down = below_a_step(I, d, draw)
        pair = torch.cat((gate, up * (1 if form != NVFP4 else 3)))  # two global scales, which differ
        return drawn.weight("nvfp4 of two" if form == NVFP4 else form, pair, draw), drawn.weight(form, down, draw)


def simulations(form: str, draw) -> tuple[bool, ...]:
    """Whether activations are rounded to FP8: not for dense weights, nor for fp32 inputs, of which sums in another
    order would move codes of the second product's inputs."""
    return (False,) if form == DENSE or draw.dtype is torch.float32 else (False, True)


def lists(skew: str, N: int, k: int, E: int, draw) -> torch.Tensor:
    """int64 [N, k]: experts of each token, all different, in no order.

    one token an expert: each expert at most once. few: the same k experts for all tokens. half empty: the experts of
    odd numbers below the last, and more if k needs them. zipf: expert e in proportion to 1 / (e + 1).
    """
    if skew == "one token an expert":
        return draw.shuffled(torch.arange(E))[: E // k * k].view(-1, k)
    if skew == "few":
        return draw.shuffled(torch.arange(E))[:k].repeat(N, 1)
    if skew == "half empty":
        live = torch.arange(1, E - 1, 2) if E >= 2 * k + 2 else torch.arange(1, min(E, k + 1))
        return live[draw.choose(len(live), N, k)]
    if skew == "zipf":
        weights = (1 / (1 + torch.arange(E).double())).expand(N, E)
        return torch.multinomial(weights, k, generator=draw.g)
    return draw.choose(E, N, k)


def expert_cases(w, draw):
    """Every format; skewed lists; sizes about tiles; clamps on either side; routing weights of all sizes."""
    stacks, k = Stacks(w, draw), w.num_experts_per_tok
    wide = w.hidden_size >= WIDE
    for form in (FP8, MXFP4) if wide else FORMS:
        for simulate in simulations(form, draw):
            yield _case("random", form, "random", 5, stacks, w, draw, simulate)
            if simulate:
                yield _case("a few large columns", form, "random", 4, stacks, w, draw, True)
        if not wide and form in (FP8, NVFP4):
            yield _case("coded experts", form, "random", 5, stacks, w, draw)
    for skew in ("one token an expert", "few", "half empty", "zipf"):
        yield _case("random", MXFP4, skew, 8 if wide else 17, stacks, w, draw)
    for N in sorted({1, 2, 16 // k, 64 // k, 64 // k + 1}):
        yield _case("random", MXFP4, "random", N, stacks, w, draw)
    for form in (DENSE, FP8):
        for family in ("beyond the clamps", "routing of all sizes", "gates far below", "tokens of zeros"):
            yield _case(family, form, "random", 6, stacks, w, draw)
    if True in simulations(FP8, draw):
        yield _case("routing of all sizes", FP8, "random", 6, stacks, w, draw, True)
        yield _case(BELOW, MXFP4, "random", 4, stacks, w, draw, True)


def same_sign(I: int, d: int, draw) -> torch.Tensor:
    """Gate rows fp32 [I, d], half of each 1/d and half 3/d, rounded to a power of two: with inputs that are all one
    whole number the sums are exact, and whole, whatever their order."""
    first = draw.rand(I, d).argsort(1) < d // 2
    return torch.where(first, 1.0, 3.0) * 2.0 ** -round(math.log2(d))


def below_a_step(I: int, d: int, draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up and down rows fp32, for inputs of one: 32 channels of every 128 between the products are so large that
    all others of their block are less than half a step of E4M3, that is, zero. Down rows weigh the others most."""
    size = 2.0 ** -round(math.log2(d))
    large = torch.arange(I) % 128 < 32
    up = torch.where(large, 16.0, 2.0**-16).unsqueeze(1).expand(I, d) * size
    down = draw.matrix(d, I)
    return torch.full((I, d), 16 * size), up, torch.where(large, down * 2.0**-14, down.abs())


def _inputs(family: str, N: int, d: int, draw) -> torch.Tensor:
    """x [N, d] for a family."""
    if family == "a few large columns":
        return uneven(draw, N, d)[0]
    if family == "gates far below":  # sums of −16, −20 and −24 with `same_sign`, which bf16 holds
        return -torch.tensor([8.0, 10.0, 12.0])[torch.arange(N) % 3].unsqueeze(1).expand(N, d).to(draw.dtype).clone()
    if family == BELOW:
        return torch.ones(N, d, dtype=draw.dtype)
    x = draw.rand(N, d) * (20 if family in ("beyond the clamps", "routing of all sizes") else 1)
    if family == "tokens of zeros":
        x[::2] = 0
    return x.to(draw.dtype)


def _case(family, form, skew, N, stacks, w, draw, simulate=False) -> Case:
    own = family if family in ("coded experts", "a few large columns", "gates far below", BELOW) else "random"
    w13, w2 = stacks(form, own)
    k, E = w.num_experts_per_tok, stacks.E
    indices = lists(skew, N, k, E, draw)
    N = len(indices)
    routing = draw.uniform(0.1, 1, N, k)
    if family == "routing of all sizes":  # small and large in one list would hide the small
        routing *= 10.0 ** draw.uniform(-3, 3, N, 1)
    used = torch.zeros(E, dtype=torch.bool)
    used[indices] = True
    label = f"{N} tokens of {k} experts, {form}" + (", activations in FP8" if simulate else "")
    label += "" if skew == "random" else f", {skew}"
    idle = (~used).view(-1, 1, 1)
    unread = {"w13": idle, "w2": idle} if form == DENSE else {}  # NaN codes of quantised weights differ by tensor
    exempt = IN_FP8 if simulate else {}
    arguments = (_inputs(family, N, stacks.d, draw), indices, routing, w13, w2, w.swiglu_limit, simulate)
    return Case(label, family, arguments, unread, exempt)


def expert_work(x, indices, routing, w13, w2, limit: float, simulate: bool) -> Work:
    """Weights of the experts that a token lists once, inputs, lists, results; 6·N·k·I·D operations."""
    (N, k), (E, I2, _), D = indices.shape, w13.weight.shape, x.shape[1]
    live = len(indices.unique())
    moved = bytes_of(w13, w2) * live // E + bytes_of(x, routing) + 4 * N * k + 4 * N * D
    return Work(moved, 3 * N * k * I2 * D, f"listed experts + N·D·{x.element_size()} + 4·N·D + 8·N·k; 6·N·k·I·D")


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
)


def shared_cases(w, draw):
    """Every format, sizes about tiles, clamps on either side, gates far below zero, large columns."""
    for form in FORMS:
        for simulate in simulations(form, draw):
            yield _shared("random", form, 5, w, draw, simulate)
            if simulate:
                yield _shared("a few large columns", form, 4, w, draw, True)
        for family in ("beyond the clamps", "gates far below", "tokens of zeros"):
            if form == NVFP4 and family == "gates far below":
                continue  # its scales are no powers of two
            yield _shared(family, form, 4, w, draw)
    if True in simulations(MXFP4, draw):
        yield _shared(BELOW, MXFP4, 3, w, draw, True)
    for N in (1, 17, 65):
        yield _shared("random", FP8, N, w, draw)


def _shared(family, form, N, w, draw, simulate=False) -> Case:
    d, I = w.hidden_size, w.moe_intermediate_size
    gate, up, down = draw.matrix(I, d), draw.matrix(I, d), draw.matrix(d, I)
    if family == "a few large columns":
        large = torch.arange(d) % 128 < 32
        gate, up = gate.masked_fill(large, 0), up.masked_fill(large, 0)
    if family == "gates far below":
        gate = same_sign(I, d, draw)
    if family == BELOW:
        gate, up, down = below_a_step(I, d, draw)
    weights = [drawn.weight(form, m, draw) for m in (gate, up, down)]
    label = f"{N} tokens, {form}" + (", activations in FP8" if simulate else "")
    arguments = (_inputs(family, N, d, draw), *weights, w.swiglu_limit, simulate)
    return Case(label, family, arguments, {}, IN_FP8 if simulate else {})


def shared_work(x, w1, w3, w2, limit: float, simulate: bool) -> Work:
    """All weights once, inputs and results; 6·N·I·D operations."""
    (N, D), I = x.shape, w1.out_features
    return Work(
        bytes_of(w1, w3, w2, x) + 4 * N * D, 6 * N * I * D, f"weights + N·D·{x.element_size()} + 4·N·D; 6·N·I·D"
    )


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
)
CONTRACTS = (EXPERTS, SHARED)
