"""Weights, inputs and lists of experts, for the cases of contracts."""

import math

import torch

from dsv4.kernels.linear import drawn
from dsv4.kernels.linear.contract import ACTIVATION_BLOCK, uneven
from dsv4.kernels.linear.drawn import DENSE, FP8, MXFP4, NVFP4

WIDE = 1024  # from this width on fewer cases are drawn, of as few experts as a token's list needs
FEW = 8  # experts that are enough where a family needs stacks of its own
MANY = 16  # tokens where roundings move codes of FP8: rows differ in how many are moved
BELOW = "inputs of w2 below a step"
OWN = ("coded experts", "a few large columns", "gates far below", BELOW)  # families with weights of their own
FORMS = (DENSE, FP8, MXFP4, NVFP4)


class Stacks:
    """Weights of all experts by format and family, drawn once for a pass over the cases; of wide models the last one
    alone is kept."""

    def __init__(self, w, draw):
        self.w, self.d, self.k, self.draw, self.found = w, w.hidden_size, w.num_experts_per_tok, draw, {}
        self.E = w.n_routed_experts if w.hidden_size < WIDE else min(w.n_routed_experts, self.k + 2)

    def count(self, family: str) -> int:
        """Experts of a stack: of families with weights of their own not more than `FEW`, or than a list needs."""
        return min(self.E, max(FEW, self.k + 2)) if family in OWN else self.E

    def __call__(self, form: str, family: str, simulate: bool):
        """(w13, w2) of E experts."""
        key = form, family, between(self.w, simulate)
        if key not in self.found:
            if self.d >= WIDE:
                self.found.clear()
            made = [self._pair(*key, e) for e in range(self.count(family))]
            self.found[key] = tuple(drawn.stack(list(ws)) for ws in zip(*made))
        return self.found[key]

    def _pair(self, form: str, family: str, I: int, e: int):
        gate, up, down = matrices(family, I, self.d, self.draw)
        if family == "coded experts":
            up, down = up * 2.0 ** (e % 3 - 1), down * 2.0 ** (e % 5 - 2)
        pair = torch.cat((gate, up * (1 if form != NVFP4 else 3)))  # two global scales, which differ
        whole = drawn.weight("nvfp4 of two" if form == NVFP4 else form, pair, self.draw)
        return whole, drawn.weight(form, down, self.draw)


def between(w, simulate: bool) -> int:
    """Channels between the products: of a narrow model at least a scale block where their codes are judged, because one
    code that moves beside a boundary is a large share of a sum of few."""
    return max(w.moe_intermediate_size, ACTIVATION_BLOCK) if simulate else w.moe_intermediate_size


def matrices(family: str, I: int, d: int, draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate and up rows fp32 [I, d] and down rows [d, I] of one expert."""
    if family == BELOW:
        return below_a_step(I, d, draw)
    gate, up, down = draw.matrix(I, d), draw.matrix(I, d), draw.matrix(d, I)
    if family == "a few large columns":
        large = torch.arange(d) % 128 < 32
        gate, up = gate.masked_fill(large, 0), up.masked_fill(large, 0)
    return same_sign(I, d, draw) if family == "gates far below" else gate, up, down


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


def same_sign(I: int, d: int, draw) -> torch.Tensor:
    """Gate rows fp32 [I, d], half of each 1/d and half 3/d, rounded to a power of two: with inputs that are all one
    whole number the sums are exact, and whole, whatever their order."""
    order = draw.shuffled(torch.arange(d))
    first = order[(torch.arange(I).unsqueeze(1) + torch.arange(d)) % d] < d // 2
    return torch.where(first, 1.0, 3.0) * 2.0 ** -round(math.log2(d))


def below_a_step(I: int, d: int, draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up and down rows fp32, for inputs of one: 32 channels of every 128 between the products are so large that
    all others of their block are less than half a step of E4M3, that is, zero. Large ones are 80 times a
    power of two, a code far from halves. Down rows weigh the others most."""
    size = 2.0 ** -round(math.log2(d))
    large = torch.arange(I) % 128 < 32
    up = torch.where(large, 8.0, 2.0**-16).unsqueeze(1).expand(I, d) * size
    down = draw.matrix(d, I)
    return torch.full((I, d), 16 * size), up, torch.where(large, down * 2.0**-14, down.abs())


def inputs(family: str, N: int, d: int, draw) -> torch.Tensor:
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
