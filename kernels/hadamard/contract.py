"""Contract of `hadamard`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.hadamard import reference

STAGE = 16  # columns of one factor of a kernel on tensor cores


def transform(x: torch.Tensor, rounded=lambda t: t) -> torch.Tensor:
    """x [..., D] · H_D by butterflies: at distance h, pairs (a, b) become (a + b, a − b). rounded: after every fourth
    step."""
    D, h = x.shape[-1], 1
    while h < D:
        a, b = x.unflatten(-1, (-1, 2, h)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        h *= 2
        if h in (STAGE, STAGE**2, STAGE**3) and h < D:
            x = rounded(x)
    return x


def exact(x) -> torch.Tensor:
    """x · H_D · D^−0.5 in fp64, by butterflies."""
    return transform(x.double()) / x.shape[-1] ** 0.5


def staged(x) -> torch.Tensor:
    """An honest kernel of factors of 16 columns, with numbers rounded to bf16 between them."""
    y = transform(x.float() * STAGE**-0.5, lambda t: t.bfloat16().float())
    return (y * (STAGE / x.shape[-1]) ** 0.5).to(x.dtype)


def cases(w, draw):
    """Index queries and keys; a one at each place, which shows order and factor; whole numbers; sizes."""
    H, D = w.index_n_heads, w.index_head_dim
    ones = 3 * torch.eye(D)
    exact_in_fp8 = {"lower precision": "every number is exact in FP8"}
    yield Case("queries", "random", (draw.act(5, H, D),))
    yield Case("keys", "random", (draw.act(9, D),))
    yield Case("1 row", "random", (draw.act(1, D),))
    yield Case("37 rows", "random", (draw.act(37, D),))
    yield Case("a one at each place", "one-hot", (ones.to(draw.dtype),), exempt=exact_in_fp8)
    yield Case("whole numbers", "integers", (draw.integers(-3, 3, 9, D),), exempt=exact_in_fp8)
    yield Case("9 rows", "coded", (draw.coded(9, D),), exempt=exact_in_fp8)
    yield Case("9 rows", "sizes", ((draw.rand(9, D) * 2.0 ** torch.linspace(-40, 40, 9).view(9, 1)).to(draw.dtype),))
    yield Case("a row of zeros", "zeros", (torch.cat((torch.zeros(1, D), draw.rand(2, D))).to(draw.dtype),))
    spread = 2.0 ** (torch.arange(D) % 8 * 2 - 8)
    yield Case("columns of unequal size", "uneven", ((draw.rand(9, D) * spread).to(draw.dtype),))


def inputs(w, draw, rows, width) -> tuple:
    return (draw.act(rows, width),)


def sizes(w) -> dict:
    """Index queries of a token, of a model and of a small one."""
    return {"compiled": [dict(rows=w.index_n_heads, width=D) for D in (w.index_head_dim, w.index_head_dim // 2)]}


def work(x) -> Work:
    """Rows in and out; D·log2(D) sums a row."""
    D = x.shape[-1]
    return Work(2 * x.numel() * x.element_size(), x.numel() * (D.bit_length() - 1), "2·rows·D·b; rows·D·log2(D)")


CONTRACTS = (
    Contract(
        "hadamard",
        "x · H_D · D^−0.5 over the last axis, H_D in Sylvester's order.",
        (Argument("x", ("rows", "dims"), "activation", "any leading axes; dims a power of two"),),
        (
            Output(
                *("y", ("rows", "dims"), "activation", "fp32 inside, one rounding"),
                liberty="fp32 sums in any order",
            ),
        ),
        exact,
        {"fp32": reference.hadamard, "bf16-between-factors": staged},
        cases,
        work,
        ("twice the transform is the input again", "x is not changed"),
        {"x": 0},
        production=Production(inputs, sizes),
    ),
)
