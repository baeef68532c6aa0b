"""Contracts of `linear` and `grouped_linear`."""

import torch
import torch.nn.functional as F

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work, tensors
from dsv4.kernels.honest import tensor_core_sums
from dsv4.kernels.linear import drawn
from dsv4.kernels.linear.drawn import DENSE, DENSE_FP32, FORMS, FP8, MXFP4, NVFP4, QUANTISED
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.quantize.exact import simulated_fp8, values
from dsv4.kernels.quantize.weights import to_float
from dsv4.kernels.widths import VOCABULARY

ACTIVATION_BLOCK = 128
ROWS = 1096  # of a wide model's matrix, so that a pass of all cases stays short
IN_FP8 = {"lower precision": "inputs are rounded to FP8 by definition"}
SAME_IN_FP8 = {"lower precision": "the inputs are whole numbers or powers of two, exact in a lower precision too"}


def exact_linear(x, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    """y[n, o] = Σ_k x[n, k] · w[o, k], block after block of columns, in fp64."""
    x = simulated_fp8(x, ACTIVATION_BLOCK) if simulate else x.double()
    w = values(w)
    parts = [
        torch.einsum("nk,ok->no", a, b) for a, b in zip(x.split(ACTIVATION_BLOCK, 1), w.split(ACTIVATION_BLOCK, 1))
    ]
    return torch.stack(parts).sum(0)


def honest_linear(x, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    """fp32 products and sums of the values as they are, one rounding to x's dtype."""
    x32 = simulated_fp8(x, ACTIVATION_BLOCK).float() if simulate else x.float()
    return F.linear(x32, to_float(w)).to(x.dtype)


def on_tensor_cores(x, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    """As `honest_linear`, with sums as tensor cores make them."""
    x64 = simulated_fp8(x, ACTIVATION_BLOCK) if simulate else x.double()
    return tensor_core_sums(x64, values(w)).to(x.dtype)


def with_fp8_activations(x, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    """As `honest_linear`, with activations rounded to E4M3 in blocks of 128 for every quantised weight."""
    return honest_linear(x, w, w.format is not WeightFormat.DENSE)


def uneven(draw, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [N, K] in the activations' dtype, bool [K]): the first 32 of every 128 columns are 2^17 times as large. They
    decide the scale that FP8 rounds the others of their block by; the weights there are zero."""
    large = torch.arange(K) % ACTIVATION_BLOCK < 32
    return (draw.rand(N, K) * torch.where(large, 2.0**17, 1.0)).to(draw.dtype), large


def one_hot(draw, N: int, K: int) -> torch.Tensor:
    """Rows that pick one column each, the first, the last and those beside the ends of blocks among them."""
    at = torch.tensor([0, K - 1, 1, K - 2, 31, 32, 127, 128, K // 2])[:N] % K
    x = torch.zeros(N, K)
    x[torch.arange(len(at)), at] = torch.tensor([1.0, -2.0, 1.0])[torch.arange(len(at)) % 3]
    return x.to(draw.dtype)


def cancelling(draw, N: int, K: int, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, w fp32 [O, K]): the sums of both halves of K are large and cancel but for noise, so that narrow accumulators
    show."""
    half = K // 2
    w = w.abs()
    w[:, half : 2 * half] = w[:, :half]
    x = draw.rand(N, K)
    size = 64 * (1 + draw.below(3, N, half) / 4)
    x[:, :half] += size
    x[:, half : 2 * half] -= size
    return x.to(draw.dtype), w


def linear_cases(w, draw):
    """Every format, plain and with activations in FP8, at sizes about tiles, and families for faults of formats."""
    d = w.hidden_size
    O, every = min(d + 128, ROWS), lambda forms: drawn.allowed(forms, w, d)
    for form in every(FORMS):
        plain = drawn.weight(form, draw.matrix(O, d), draw)
        for simulate in (False, True) if form in QUANTISED else (False,):
            yield _case("random", form, draw.act(5, d), plain, simulate)
        odd = drawn.weight(form, draw.matrix(200, d + 96), draw)
        x = draw.act(9, d + 96)
        x[::4] = 0
        yield _case("short last blocks, rows of zeros", form, x, odd, form in QUANTISED)
        yield _case("one column", form, one_hot(draw, 9, d), drawn.every_byte(form, O, d, draw), exempt=SAME_IN_FP8)
    for form in every(QUANTISED):
        yield _case("coded scales", form, draw.act(4, d), drawn.coded(form, O, d, draw))
        x, large = uneven(draw, 4, d)
        matrix = draw.matrix(O, d).masked_fill(large, 0)
        yield _case("a few large columns", form, x, drawn.weight(form, matrix, draw), True)
    for form in every((FP8, MXFP4)):
        size = 2.0 ** (18 * (torch.arange(d) // ACTIVATION_BLOCK % 2))
        x, matrix = (draw.rand(4, d) / size).to(draw.dtype), draw.matrix(O, d) * size
        yield _case("blocks of different sizes", form, x, drawn.weight(form, matrix, draw), True)
    for form in every((DENSE, FP8, MXFP4)):
        x, matrix = cancelling(draw, 4, d, draw.matrix(O, d))
        yield _case("cancellation", form, x, drawn.weight(form, matrix, draw))
        whole = drawn.whole_numbers(form, O, d, draw)
        yield _case("integers", form, draw.integers(-2, 2, 4, d), whole, exempt=SAME_IN_FP8)
    for form in every((FP8, MXFP4)):
        for byte in (0, 1, 127, 254):  # results of size 2^±27, of normal numbers
            x = (draw.rand(3, d) * 2.0 ** {0: 100, 1: 100, 127: 0, 254: -100}[byte]).to(draw.dtype)
            yield _case(f"scale byte {byte}", form, x, drawn.scale_byte(form, byte, O, d, draw))
    yield from _sizes(every((DENSE, MXFP4)), O, d, draw)


def _sizes(forms, O: int, d: int, draw):
    for form in forms:
        plain = drawn.weight(form, draw.matrix(O, d), draw)
        for N in (1, 8, 17, 65):
            yield _case("random", form, draw.act(N, d), plain)
    head = PackedWeight(WeightFormat.DENSE, draw.matrix(24, d).to(torch.bfloat16))
    yield _case("random", "bf16 head of fp32", draw.rand(5, d), head)


def _case(family, form, x, weight, simulate=False, exempt=None) -> Case:
    label = f"{len(x)} tokens, {form}" + (", activations in FP8" if simulate else "")
    return Case(label, family, (x, weight, simulate), {}, IN_FP8 if simulate else exempt or {})


def bytes_of(*arguments) -> int:
    """Bytes of every tensor of arguments and results."""
    return sum(t.nbytes for argument in arguments for t in tensors(argument))


def linear_work(x, w: PackedWeight, simulate: bool = False) -> Work:
    """The weight as stored, inputs and results once; 2·N·O·K operations."""
    (N, K), O = x.shape, w.out_features
    moved = bytes_of(w, x) + N * O * x.element_size()
    return Work(moved, 2 * N * O * K, f"weight + N·(K + O)·{x.element_size()}; 2·N·O·K")


def linear_inputs(w, draw, form, rows, columns, tokens, simulate=False) -> tuple:
    """A weight as a checkpoint holds it."""
    return draw.act(tokens, columns), drawn.stored(form, rows, columns, draw=draw), simulate


def linear_sizes(w) -> dict:
    """Matrices of a V4 model in its formats, for one token to a prompt; compiled in every format."""
    d, queries = w.hidden_size, w.num_attention_heads * w.head_dim
    square, plain, both = (d, d), (False,), (False, True)
    fp8 = [
        (FP8, shape, tokens, rounded)
        for shape in ((queries, w.q_lora_rank), (d, w.o_groups * w.o_lora_rank), square)
        for tokens, rounded in (((1, 8, 16, 64), both), ((256, 4096), (True,)))
    ]
    bench = [
        (MXFP4, square, (1, 2, 4, 8, 16), plain),
        (MXFP4, square, (1, 8), (True,)),
        (NVFP4, square, (1, 8), plain),
        *fp8,
        (DENSE, (VOCABULARY, d), (1, 8), plain),
        (DENSE, (4 * w.head_dim, d), (1,), plain),
        *((form, square, (4096,), plain) for form in (MXFP4, FP8, DENSE)),
        (MXFP4, square, (4096,), (True,)),
    ]
    compiled = [
        dict(form=form, rows=d, columns=d, tokens=N, simulate=form in (FP8, MXFP4, NVFP4), dtype=dtype)
        for form in FORMS[:-1]
        for dtype, tokens in ((torch.bfloat16, (1, 16, 32, 4096)), (torch.float32, (1, 16, 100)))
        for N in tokens
        if form in (DENSE, MXFP4, NVFP4) or dtype is torch.bfloat16 or N == 1
    ]
    each = [
        dict(form=form, rows=O, columns=K, tokens=N, simulate=simulate)
        for form, (O, K), tokens, simulated in bench
        for N in tokens
        for simulate in simulated
    ]
    return {"bench": each, "compiled": compiled}


WEIGHT = Argument("w", ("out_features", "in_features"), "weight", "dense, FP8 128 × 128, MXFP4 or NVFP4, as stored")
LINEAR = Contract(
    "linear",
    "y = x Wᵀ with a weight as stored.",
    (
        Argument("x", ("num_tokens", "in_features"), "activation", "inputs"),
        WEIGHT,
        Argument("simulate", None, "bool", "round x to E4M3 in blocks of 128 first; not for dense weights"),
    ),
    (Output("y", ("num_tokens", "out_features"), "activation", "fp32 sums, one rounding"),),
    exact_linear,
    {"tensor-cores": on_tensor_cores, "fp32": honest_linear, "fp8-activations": with_fp8_activations},
    linear_cases,
    linear_work,
    (
        "the last block of columns or rows may be short",
        "E8M0 scale byte 0 is 2^−127, a subnormal number; byte 255 does not occur",
        "NVFP4 may hold several matrices along O, each with a global scale",
        "a dense weight may be fp32 beside bf16 inputs, or bf16 beside fp32 ones",
    ),
    {"x": 0},
    production=Production(linear_inputs, linear_sizes),
)


def exact_grouped(x, w: PackedWeight) -> torch.Tensor:
    """y[n, g, r] = Σ_k x[n, g, k] · w[g·R + r, k], group after group, in fp64."""
    each = values(w).chunk(x.shape[1], 0)
    return torch.stack([torch.einsum("nk,rk->nr", x[:, g].double(), part) for g, part in enumerate(each)], 1)


def honest_grouped(x, w: PackedWeight) -> torch.Tensor:
    """fp32 products and sums of the values as they are, one rounding."""
    each = to_float(w).unflatten(0, (x.shape[1], -1))
    return torch.einsum("ngk,grk->ngr", x.float(), each).to(x.dtype)


def grouped_on_tensor_cores(x, w: PackedWeight) -> torch.Tensor:
    """As `honest_grouped`, with sums as tensor cores make them."""
    each = values(w).chunk(x.shape[1], 0)
    return torch.stack([tensor_core_sums(x[:, g], part) for g, part in enumerate(each)], 1).to(x.dtype)


def grouped_with_fp8(x, w: PackedWeight) -> torch.Tensor:
    """As `honest_grouped`, with activations rounded to E4M3 in blocks of 128 for every quantised weight."""
    return honest_grouped(x if w.format is WeightFormat.DENSE else simulated_fp8(x, ACTIVATION_BLOCK).to(x.dtype), w)


def grouped_cases(w, draw):
    """Every format; groups of different sizes, so that a group that meets another group's rows shows."""
    G, K = w.o_groups, w.num_attention_heads * w.head_dim // w.o_groups
    O = G * min(w.o_lora_rank, ROWS // G // 64 * 64)
    every = lambda forms: drawn.allowed(forms, w, K)
    for form in every(FORMS):
        plain = drawn.weight(form, draw.matrix(O, K), draw)
        yield _grouped("random", form, draw.act(5, G, K), plain)
    for form in every(QUANTISED):
        yield _grouped("coded scales", form, draw.act(3, G, K), drawn.coded(form, O, K, draw))
    for form in every((DENSE, NVFP4)):
        size = 2.0 ** (torch.arange(G) % 5 - 2)
        matrix = draw.matrix(O, K) * size.repeat_interleave(O // G).unsqueeze(1)
        yield _grouped("coded groups", form, draw.act(3, G, K), drawn.weight(form, matrix, draw))
    for form in every((DENSE, FP8, MXFP4)):
        x, matrix = cancelling(draw, 3 * G, K, draw.matrix(O, K))
        yield _grouped("cancellation", form, x.view(3, G, K), drawn.weight(form, matrix, draw))
        whole = drawn.whole_numbers(form, O, K, draw)
        yield _grouped("integers", form, draw.integers(-2, 2, 3, G, K), whole, SAME_IN_FP8)
    for N in (1, 17, 65):
        yield _grouped("random", FP8, draw.act(N, G, K), drawn.weight(FP8, draw.matrix(O, K), draw))
    x = draw.act(3, G, K)
    x[0], x[1, 0] = 0, 0
    yield _grouped("rows of zeros", DENSE_FP32, x, drawn.weight(DENSE_FP32, draw.matrix(O, K), draw))


def _grouped(family, form, x, weight, exempt=None) -> Case:
    return Case(f"{len(x)} tokens of {x.shape[1]} groups, {form}", family, (x, weight), {}, exempt or {})


def grouped_work(x, w: PackedWeight) -> Work:
    """The weight as stored, inputs and results once; 2·N·G·R·K operations."""
    (N, G, K), O = x.shape, w.out_features
    moved = bytes_of(w, x) + N * O * x.element_size()
    return Work(moved, 2 * N * O * K, f"weight + N·(G·K + G·R)·{x.element_size()}; 2·N·G·R·K")


def grouped_inputs(w, draw, form, tokens) -> tuple:
    """Heads in groups, through a weight as a checkpoint holds it."""
    G, K = w.o_groups, w.num_attention_heads * w.head_dim // w.o_groups
    return draw.act(tokens, G, K), drawn.stored(form, G * w.o_lora_rank, K, draw=draw)


def grouped_sizes(w) -> dict:
    return {"compiled": [dict(form=form, tokens=N) for form in (FP8, DENSE) for N in (1, 10, 512)]}


GROUPED = Contract(
    "grouped_linear",
    "Block-diagonal product: group g of the inputs meets rows g·R to (g + 1)·R of the weight.",
    (
        Argument("x", ("num_tokens", "groups", "in_features"), "activation", "inputs, never quantised here"),
        WEIGHT,
    ),
    (Output("y", ("num_tokens", "groups", "rank"), "activation", "fp32 sums, one rounding"),),
    exact_grouped,
    {"tensor-cores": grouped_on_tensor_cores, "fp32": honest_grouped, "fp8-activations": grouped_with_fp8},
    grouped_cases,
    grouped_work,
    ("a scale block may span two groups", "a row of zeros gives zeros"),
    {"x": 0},
    production=Production(grouped_inputs, grouped_sizes),
)
CONTRACTS = (LINEAR, GROUPED)
