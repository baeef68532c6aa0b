"""Contract of `rotate`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.rope import reference

POSITIONS = (0, 1, 4095, 65535, 131072, 1_000_000)


def exact(x, cis) -> torch.Tensor:
    """The rotated rows in fp64: each pair (a, b) of the last columns becomes (a·cos − b·sin, a·sin + b·cos)."""
    half = cis.shape[-1]
    kept, turned = x.double().split((x.shape[-1] - 2 * half, 2 * half), -1)
    cos, sin = cis.real.double(), cis.imag.double()
    a, b = turned[..., 0::2], turned[..., 1::2]
    return torch.cat((kept, torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)), -1)


def turns(positions, half: int, inverse: bool = False) -> torch.Tensor:
    """Rotations complex64 [n, half] of positions, of frequencies 10000^(−i/half)."""
    angle = torch.tensor(positions).double().unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half).double()
    return torch.polar(torch.ones_like(angle), -angle if inverse else angle).to(torch.complex64)


def cases(w, draw):
    """Heads, rows and index queries; positions up to a million; a one at each place; the inverse rotation."""
    H, D, half = w.num_attention_heads, w.head_dim, w.qk_rope_head_dim // 2
    by_head = lambda cis: cis.unsqueeze(1)
    inexact = {"lower precision": "every number of x is exact in FP8"}
    yield Case("heads", "random", (draw.act(5, H, D), by_head(draw.angles(half, 5))))
    yield Case("rows", "random", (draw.act(9, D), draw.angles(half, 9)))
    yield Case("1 row", "random", (draw.act(1, D), draw.angles(half, 1)))
    heads, index = w.index_n_heads, w.index_head_dim
    yield Case("index queries", "random", (draw.act(5, heads, index), by_head(draw.angles(half, 5))))
    yield Case("every column", "random", (draw.act(33, 2 * half), draw.angles(half, 33)))
    for inverse in (False, True):
        x, cis = draw.act(len(POSITIONS), H, D), by_head(turns(POSITIONS, half, inverse))
        yield Case(f"positions up to 1e6{', inverse' if inverse else ''}", "positions", (x, cis))
    ones = 3 * torch.eye(D).to(draw.dtype)
    yield Case("a one at each place", "one-hot", (ones, draw.angles(half, D)), exempt=inexact)
    yield Case("rows", "coded", (draw.coded(9, D), draw.angles(half, 9)), exempt=inexact)
    quarter = torch.tensor([1, 1j, -1, -1j], dtype=torch.complex64)[torch.arange(4 * half).view(4, half) % 4]
    yield Case("quarter turns", "integers", (draw.integers(-3, 3, 4, D), quarter), exempt=inexact)
    loud = torch.cat((draw.rand(5, D - 2 * half) / 64, 8 * draw.rand(5, 2 * half)), 1).to(draw.dtype)
    yield Case("rotated columns of size 8", "uneven", (loud, draw.angles(half, 5)))


def inputs(w, draw, tokens, width=0, pairs=0) -> tuple:
    """Rows of a model's latents, or of other columns and rotated pairs."""
    return draw.act(tokens, width or w.head_dim), draw.angles(pairs or w.qk_rope_head_dim // 2, tokens)


def sizes(w) -> dict:
    """Latents, index keys, and latents of a small model."""
    return {"compiled": [dict(tokens=8) | shape for shape in ({}, dict(width=w.index_head_dim), dict(pairs=16))]}


def work(x, cis) -> Work:
    """Rotated columns in and out, rotations once; 6 operations a pair."""
    half = cis.shape[-1]
    pairs = x.numel() // x.shape[-1] * half
    return Work(4 * pairs * x.element_size() + 8 * cis.numel(), 6 * pairs, "2·rows·rope·b + 8·rotations; 6 a pair")


CONTRACTS = (
    Contract(
        "rotate",
        "The last 2·pairs columns of x, pair (2i, 2i + 1) as one complex number times cis[i]; in place.",
        (
            Argument("x", ("rows", "dims"), "activation", "any leading axes, contiguous; overwritten and returned"),
            Argument(
                *("cis", ("rows", "pairs"), "complex64", "unit complex numbers"),
            ),
        ),
        (
            Output(
                *("x", ("rows", "dims"), "activation", "fp32 inside, one rounding; other columns keep their bits"),
                argument=0,
                liberty="only the last 2·pairs columns need be written",
            ),
        ),
        exact,
        {"fp32": reference.rotate},
        cases,
        work,
        (
            "with heads, x is [rows, heads, dims] and cis [rows, 1, pairs]",
            "the inverse rotation comes as the conjugate of cis",
            "all columns may be rotated",
        ),
        {"x": 0, "cis": 0},
        production=Production(inputs, sizes),
    ),
)
