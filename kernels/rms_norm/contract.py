"""Contract of `rms_norm`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.rms_norm import reference


def exact(x, weight, eps: float) -> torch.Tensor:
    """y = w · x / sqrt(mean(x²) + eps) in fp64."""
    x = x.double()
    y = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return y if weight is None else y * weight.double()


def cases(w, draw):
    """Rows of sizes 2^−60 to 2^60 in one tensor, zeros, tiny rows where eps decides, one number alone, with and without
    weight."""
    d, D = w.hidden_size, w.head_dim
    sizes = lambda n: 2.0 ** torch.linspace(-40, 40, n).round().unsqueeze(-1)
    spike = torch.zeros(5, d)
    spike[torch.arange(5), torch.tensor([0, 1, d // 2, d - 2, d - 1])] = 3.0
    weight = draw.act(d)
    for family, x in {
        "random": draw.rand(9, d),
        "sizes": draw.rand(9, d) * sizes(9),
        "where eps decides": 1e-3 * draw.rand(7, d),
        "one number": spike,
        "zeros": torch.cat((torch.zeros(1, d), draw.rand(2, d))),
        "coded": draw.coded(9, d).float(),
    }.items():
        yield Case(f"{len(x)} rows", family, (x.to(draw.dtype), weight, w.rms_norm_eps))
    yield Case("heads, no weight", "random", (draw.act(3, w.num_attention_heads, D), None, w.rms_norm_eps))
    yield Case("1 row", "random", (draw.act(1, d), weight, w.rms_norm_eps))


def inputs(w, draw, rows, width=0) -> tuple:
    """So many rows of the model's width, or of another."""
    width = width or w.hidden_size
    return draw.act(rows, width), draw.act(width), w.rms_norm_eps


def sizes(w) -> dict:
    """Rows of one decode step and of a prefill chunk; compiled for what a model normalises."""
    widths = [width for width in (w.hidden_size, w.q_lora_rank, w.head_dim, w.head_dim // 2) if width]
    return {
        "timed": [dict(rows=N) for N in (1, 32, 2048)],
        "compiled": [dict(rows=N, width=D) for D in widths for N in (1, 4096)],
    }


def work(x, weight, eps) -> Work:
    """Rows in and out, the weight once."""
    moved = 2 * x.numel() * x.element_size() + (0 if weight is None else weight.numel() * weight.element_size())
    return Work(moved, 4 * x.numel(), f"2·rows·D·{x.element_size()} + weight; 4·rows·D")


RMS_NORM = Contract(
    "rms_norm",
    "y = w · x · rsqrt(mean(x²) + eps) over the last axis.",
    (
        Argument("x", ("rows", "hidden"), "activation", "any leading axes"),
        Argument("weight", ("hidden",), "activation", "None: no weight", optional=True),
        Argument("eps", None, "float32", "added to the mean"),
    ),
    (Output("y", ("rows", "hidden"), "activation", "in fp32 with one rounding"),),
    exact,
    {"fp32": reference.rms_norm},
    cases,
    work,
    ("a row of zeros gives zeros",),
    {"x": 0},
    production=Production(inputs, sizes, lambda rows: f"{rows} rows"),
)
CONTRACTS = (RMS_NORM,)
