"""Contracts of `simulate_fp8_blocks` and `simulate_fp4_blocks`."""

import torch

from dsv4.kernels.contract import BITS, Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.quantize import reference
from dsv4.kernels.quantize.exact import E2M1_GRID, E4M3_GRID, simulated_fp4, simulated_fp8

FEW = {"lower precision": "a code changes only if a value stands beside a boundary, and these are few"}
SAME = "every value is a code already, or rounds to it from a lower precision too"


def halves(draw, block: int, width: int, grid: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows fp32 [n, width]: every half between two codes with both signs, where the largest of a block is the largest
    code; and the numbers of the activations' dtype beside them."""
    middles = ((grid[1:] + grid[:-1]) / 2).to(draw.dtype)
    up = torch.nextafter(middles, torch.full_like(middles, 1e9))
    down = torch.nextafter(middles, torch.zeros_like(middles))
    return {
        "halves between codes": _in_blocks(draw, torch.cat((middles, -middles)), block, width, grid),
        "beside halves": _in_blocks(draw, torch.cat((up, -up, down, -down)), block, width, grid),
    }


def _in_blocks(draw, values: torch.Tensor, block: int, width: int, grid: torch.Tensor) -> torch.Tensor:
    """Rows [n, width] of the values in no order, each block beginning with the largest code; a row times 2^−4 … 2^4."""
    n = -(-len(values) // (width - -(-width // block)))
    x = torch.zeros(n, width)
    free = torch.arange(width) % block != 0
    x[:, ~free] = float(grid[-1])
    place = torch.arange(n * int(free.sum())).view(n, -1) % len(values)
    x[:, free] = draw.shuffled(values.float())[place]
    return x * 2.0 ** (draw.below(9, n, 1) - 4)


def families(draw, block: int, width: int, grid: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows fp32 [n, width] by family."""
    top = float(grid[-1])
    x = draw.rand(9, width)
    sizes = torch.tensor([-100.0, -60, -30, -14, -3, 3, 30, 60, 100])
    limits = torch.tensor([448.0, 447.9, 464.0, 465.0, 480.0, 6.0, 6.01, 7.0, 1e9])
    edges = x / x.abs().amax(1, keepdim=True) * limits.unsqueeze(1)
    edges[:, 0] = limits
    mixed = x * 2.0 ** ((torch.arange(width) // block * 7 + torch.arange(9).unsqueeze(1)) % 13 - 6)
    codes = torch.cat((grid, -grid)).float()
    return {
        "random": x,
        "sizes": x * 2.0 ** sizes.unsqueeze(1),
        "largest at the limits": edges,
        "blocks of different sizes": mixed,
        "every code": _in_blocks(draw, codes, block, width, grid),
        **halves(draw, block, width, grid),
        "zeros": _zeros(draw, block, width),
        "below the least amax": draw.rand(4, width) * torch.tensor([[1e-5], [1e-9], [1e-4 / 4], [top * 2.0**-22]]),
    }


def _zeros(draw, block: int, width: int) -> torch.Tensor:
    """A row of zeros, one of −0, one with a single number, and rows with a block of zeros."""
    x = draw.rand(5, width)
    x[0], x[1], x[2, 1:] = 0, -0.0, 0
    x[3, :block] = 0
    x[4, -1:] = 0
    return x


def _cases(draw, shapes, grid, tail):
    """Cases of (what, width, block, columns kept) in every family. Values that are codes stay what they are."""
    for what, width, block, keep in shapes:
        for family, x in families(draw, block, width, grid).items():
            x = x.to(draw.dtype)
            if keep:
                x[:, -keep:] = draw.act(len(x), keep)
            exempt = {
                "every code": {"lower precision": SAME, "echo": SAME},
                "halves between codes": {"lower precision": SAME},
                "zeros": FEW,
            }.get(family, few(grid, draw))
            yield Case(f"{len(x)} rows, {what}", family, (x, block, *tail(keep)), {}, exempt)


def few(grid: torch.Tensor, draw) -> dict[str, str]:
    """FEW for fp32 values that become E2M1: bf16 moves one value in some hundreds to another code."""
    return FEW if grid is E2M1_GRID and draw.dtype is torch.float32 else {}


def fp8_cases(w, draw):
    """Activations in blocks of 128 of which the last is short, main rows in blocks of 64 with their rotated columns
    kept, heads, one row."""
    shapes = (
        ("activations", w.hidden_size + 72, 128, 0),
        ("main rows", max(w.head_dim, 512), 64, w.qk_rope_head_dim),
    )
    yield from _cases(draw, shapes, E4M3_GRID, lambda keep: (keep,))
    yield Case("heads", "random", (draw.act(5, 3, w.head_dim), 64, 0))
    yield Case("1 row", "random", (draw.act(1, w.hidden_size), 128, 0), {}, FEW)


def fp4_cases(w, draw):
    """Index keys and queries in blocks of 32, a short last block, and numbers near the smallest."""
    shapes = (("keys", w.index_head_dim, 32, 0), ("short last block", w.index_head_dim + 8, 32, 0))
    yield from _cases(draw, shapes, E2M1_GRID, lambda keep: ())
    yield Case("queries", "random", (draw.act(3, w.index_n_heads, w.index_head_dim), 32), {}, few(E2M1_GRID, draw))
    small = draw.rand(3, w.index_head_dim) * 2.0 ** torch.tensor([[-120.0], [-124], [-126]])
    yield Case("3 rows", "scales near 2^−126", (small.to(draw.dtype), 32), {}, few(E2M1_GRID, draw))
    yield Case("1 row", "random", (draw.act(1, w.index_head_dim), 32), {}, FEW)


def fp8_inputs(w, draw, rows, width, block, keep) -> tuple:
    return draw.act(rows, width), block, keep


def fp8_sizes(w) -> dict:
    """Activations, and rows of the cache with their rotated columns kept."""
    activations = dict(rows=8, width=w.hidden_size, block=128, keep=0)
    return {"compiled": [activations, dict(rows=8, width=w.head_dim, block=64, keep=w.qk_rope_head_dim)]}


def fp4_inputs(w, draw, rows) -> tuple:
    """Index keys."""
    return draw.act(rows, w.index_head_dim), 32


def simulate_work(x, block: int, keep: int = 0) -> Work:
    """Inputs and results once; a comparison, a division and a multiplication a number."""
    return Work(2 * x.numel() * x.element_size(), 3 * x.numel(), f"2·numbers·{x.element_size()}; 3·numbers")


X = Argument("x", ("rows", "columns"), "activation", "any leading axes")
BLOCK = Argument("block", None, "int64", "columns of one scale; the last block of a row may be short")
OUT = Output(
    "y", ("rows", "columns"), "activation", "codes times scales, exact in x's dtype; the sign of zero stays", BITS
)
EDGES = (
    "a block of zeros gives zeros",
    "the largest number of a block never saturates: its scale is rounded up to a power of two",
    "half way between two codes the even code is taken",
    "NaN, infinities and numbers of 1e38 and more do not occur",
)
FP8 = Contract(
    "simulate_fp8_blocks",
    "Round to E4M3 with a power-of-two scale for each block of columns, and back.",
    (X, BLOCK, Argument("keep", None, "int64", "columns at the end that stay as they are")),
    (OUT,),
    simulated_fp8,
    {"bits": reference.simulate_fp8_blocks},
    fp8_cases,
    simulate_work,
    (*EDGES, "amax counts as 1e-4 at least"),
    {"x": 0},
    production=Production(fp8_inputs, fp8_sizes),
)
FP4 = Contract(
    "simulate_fp4_blocks",
    "Round to E2M1 with a power-of-two scale for each block of columns, and back.",
    (X, BLOCK),
    (OUT,),
    simulated_fp4,
    {"bits": reference.simulate_fp4_blocks},
    fp4_cases,
    simulate_work,
    (*EDGES, "amax counts as 6 · 2^−126 at least, so that the scale is 2^−126 at least and codes may be subnormal"),
    {"x": 0},
    production=Production(fp4_inputs, lambda w: {"compiled": [dict(rows=64)]}),
)
CONTRACTS = (FP8, FP4)
