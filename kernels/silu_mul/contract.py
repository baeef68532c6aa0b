"""Contract of `silu_mul`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.silu_mul import reference


def exact(gate, up, biases) -> torch.Tensor:
    """g / (1 + exp(−g)) · u in fp64, with biases added to both."""
    g, u = gate.double(), up.double()
    if biases is not None:
        g, u = g + biases[0].double(), u + biases[1].double()
    return g / (1 + (-g).exp()) * u


def cases(w, draw):
    """Both tails of the gate, zeros, widths beside powers of two, with and without biases."""
    I = w.moe_intermediate_size
    pair = lambda: (draw.act(I), draw.act(I))
    far = torch.cat((draw.uniform(-80, -10, 3, I), draw.uniform(10, 80, 3, I)))
    for family, gate, up in (
        ("random", draw.rand(5, I), draw.rand(5, I)),
        ("both tails", 6 * draw.rand(5, I), draw.rand(5, I)),
        ("far tails", far, draw.rand(6, I)),
        ("very large gates", draw.rand(3, I) * 1e4, draw.rand(3, I)),
        ("coded", draw.shuffled(draw.coded(7, I).T).T.contiguous().float(), draw.coded(7, I).float()),
        ("rows of zeros", torch.cat((torch.zeros(1, I), draw.rand(2, I))), draw.rand(3, I)),
    ):
        gate, up = gate.to(draw.dtype), up.to(draw.dtype)
        yield Case(f"{len(gate)} rows", family, (gate, up, None))
        if family in ("random", "both tails"):
            yield Case(f"{len(gate)} rows, biases", family, (gate, up, pair()))
    for N, width in ((1, I), (17, I + 3), (2, 1)):
        yield Case(f"{N} rows of {width}", "random", (draw.act(N, width), draw.act(N, width), None))


def inputs(w, draw, tokens, biased) -> tuple:
    gate, up, *biases = (draw.act(*lead, w.moe_intermediate_size) for lead in ((tokens,), (tokens,), (), ()))
    return gate, up, tuple(biases) if biased else None


def sizes(w) -> dict:
    """Models with biases and without, in both dtypes."""
    both = (torch.bfloat16, torch.float32)
    return {"compiled": [dict(tokens=8, biased=biased, dtype=dtype) for biased in (False, True) for dtype in both]}


def work(gate, up, biases) -> Work:
    """Both inputs, the result, and biases once; an exponential, a division and two products a number."""
    moved = 3 * gate.numel() * gate.element_size() + (0 if biases is None else 2 * biases[0].nbytes)
    return Work(moved, 4 * gate.numel(), f"3·N·I·{gate.element_size()} + biases; 4·N·I")


SILU_MUL = Contract(
    "silu_mul",
    "silu(gate + b) · (up + c).",
    (
        Argument("gate", ("rows", "width"), "activation", "gate projection"),
        Argument("up", ("rows", "width"), "activation", "up projection"),
        Argument("biases", ("two", "width"), "activation", "a pair of vectors [width], b and c", optional=True),
    ),
    (Output("out", ("rows", "width"), "activation", "in fp32 with one rounding"),),
    exact,
    {"fp32": reference.silu_mul},
    cases,
    work,
    ("gates of −80 and less may give zero", "a gate of zero gives zero"),
    {"gate": 0, "up": 0},
    production=Production(inputs, sizes),
)
CONTRACTS = (SILU_MUL,)
