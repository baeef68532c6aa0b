"""Contracts of compositions that make rows: query heads, latents, index queries, the compressors' rows and entries."""

import torch

from dsv4.kernels.contract import CODES, Argument, Case, Contract, Output, Production, Work, of_tokens
from dsv4.kernels.fusions import exact
from dsv4.kernels.hadamard.contract import exact as hadamard
from dsv4.kernels.rope.contract import POSITIONS, turns
from dsv4.kernels.rope.contract import exact as rotate

ROWS = ("random", "coded", "uneven blocks", "sizes", "where eps decides", "one number", "zeros")
BESIDE = 1.5 * 2.0**-8  # relative: three roundings to bf16
PLAIN_FP8 = {"lower precision": "every number is exact in FP8"}


def rows_of(family: str, N: int, D: int, draw) -> torch.Tensor:
    """fp32 [N, D]."""
    x = draw.rand(N, D)
    match family:
        case "coded":
            return draw.coded(N, D).float()
        case "uneven blocks":  # each 32 columns of another size, so that another block's scale shows
            return x * 2.0 ** ((torch.arange(D) // 32 * 3 + torch.arange(N).unsqueeze(1)) % 8 - 4)
        case "sizes":
            return x * 2.0 ** torch.linspace(-30, 30, N).round().unsqueeze(1)
        case "where eps decides":
            return 1e-3 * x
        case "one number":
            x = torch.zeros(N, D)
            x[torch.arange(N), torch.linspace(0, D - 1, N).long()] = 3.0
            return x
        case "zeros":
            x[0] = 0
    return x


def exempt(family: str, simulate=None) -> dict:
    if simulate:
        return {"lower precision": "its result is in FP8 or FP4 itself"}
    return PLAIN_FP8 if family in ("coded", "one number") else {}


def rotations(family: str, N: int, half: int, draw) -> torch.Tensor:
    """complex64 [N, half]: any, or of positions up to a million."""
    if family != "positions":
        return draw.angles(half, N)
    return turns([POSITIONS[i % len(POSITIONS)] for i in range(N)], half)


# ---- query heads ------------------------------------------------------------------------------


def head_cases(w, draw):
    """Heads of unequal sizes, since each has its own norm."""
    H, D, half = w.num_attention_heads, w.head_dim, w.qk_rope_head_dim // 2
    for family, N in [(f, 5) for f in (*ROWS, "positions", "uneven heads")] + [("random", n) for n in (1, 17)]:
        q = rows_of(family, N * H, D, draw).view(N, H, D)
        if family == "uneven heads":
            q = q * 2.0 ** (4 * (torch.arange(H) % 5) - 8).view(H, 1)
        arguments = q.to(draw.dtype), rotations(family, N, half, draw), w.rms_norm_eps
        yield Case(f"{N} tokens", family, arguments, exempt=exempt(family))


def head_work(q, cis, eps) -> Work:
    moved = 2 * q.numel() * q.element_size() + 8 * cis.numel()
    return Work(moved, 6 * q.numel(), "2·N·H·D·b + 8·rotations; 6·N·H·D")


def heads_of(w, draw, tokens, heads, width) -> tuple:
    """(q [tokens, heads, width], cis): heads and the rotation of each token."""
    return draw.act(tokens, heads, width), draw.angles(w.qk_rope_head_dim // 2, tokens)


def query_inputs(w, draw, tokens) -> tuple:
    return *heads_of(w, draw, tokens, w.num_attention_heads, w.head_dim), w.rms_norm_eps


def latent_inputs(w, draw, tokens) -> tuple:
    kv, cis = heads_of(w, draw, tokens, 1, w.head_dim)
    return kv[:, 0], draw.act(w.head_dim), w.rms_norm_eps, cis, True


def index_inputs(w, draw, tokens) -> tuple:
    return *heads_of(w, draw, tokens, w.index_n_heads, w.index_head_dim), True


TOKENS = of_tokens(1, 8, 4096)
CIS = Argument("cis", ("num_tokens", "pairs"), "complex64", "rotation of the last 2·pairs columns, one a token")
EPS = Argument("eps", None, "float32", "of the norm")
HEADS = ("num_tokens", "num_heads", "head_dim")
QUERY_HEADS = Contract(
    "query_heads",
    "Each query head normalised without a weight, then rotated.",
    (Argument("q", HEADS, "activation", "may be overwritten", scratch=True), CIS, EPS),
    (Output("heads", HEADS, "activation", "fp32 inside", liberty="the norm may be rounded before the rotation"),),
    exact.query_heads,
    {"rounded-norm": exact.DEFINED.query_heads},
    head_cases,
    head_work,
    ("a head of zeros gives zeros",),
    {"q": 0, "cis": 0},
    production=Production(query_inputs, TOKENS),
)


# ---- latents ----------------------------------------------------------------------------------


def latent_cases(w, draw):
    """Every family plain and through FP8; the norm's weight is of another size in each block of 64 columns."""
    D, half = w.head_dim, w.qk_rope_head_dim // 2
    for simulate in (False, True):
        for family, N in [(f, 9) for f in (*ROWS, "positions")] + [("random", n) for n in (1, 33)]:
            weight = draw.rand(D)
            if family == "uneven blocks":  # half of each 64 columns is so small that codes lose their precision
                weight = weight * 2.0 ** (torch.arange(D) // 64 * 3 % 8 - 13 * (torch.arange(D) // 32 % 2))
            kv = rows_of(family, N, D, draw).to(draw.dtype)
            weight, cis = weight.to(draw.dtype), rotations(family, N, half, draw)
            if simulate and (N == 1 or family == "coded"):
                weight = _settled(kv, weight, w.rms_norm_eps, cis, draw)
            arguments = kv, weight, w.rms_norm_eps, cis, simulate
            about = {"rules": {"rows": CODES}, "kept": 2 * half} if simulate else {}
            label = f"{N} tokens{', simulated' if simulate else ''}"
            yield Case(label, family, arguments, exempt=exempt(family, simulate), **about)


def _settled(kv, weight, eps, cis, draw) -> torch.Tensor:
    """The norm's weight, drawn again in columns of which a value stands so near to the boundary between two codes that
    roundings to bf16 move it. For rows that are one, or alike, of which those would be too many."""
    for _ in range(20):
        rows = exact.latent(kv, weight, eps, cis, False)[:, : kv.shape[1] - 2 * cis.shape[-1]]
        near = (exact.fp8(rows * (1 + BESIDE), 64) != exact.fp8(rows * (1 - BESIDE), 64)).any(0)
        if not near.any():
            break
        weight[: len(near)][near] = draw.act(int(near.sum()))
    return weight


def latent_work(kv, weight, eps, cis, simulate) -> Work:
    moved = 2 * kv.numel() * kv.element_size() + 8 * cis.numel() + weight.numel() * weight.element_size()
    return Work(moved, 8 * kv.numel(), "2·N·D·b + D·b + 8·rotations; 8·N·D")


SIMULATE = Argument("simulate", None, "bool", "through the cache's format and back")
LATENT = Contract(
    "latent",
    "Latents of the window: normalised, rotated, and through FP8 but for the rotated columns if simulated.",
    (
        Argument("kv", ("num_tokens", "head_dim"), "activation", "before the norm"),
        Argument("weight", ("head_dim",), "activation", "of the norm"),
        EPS,
        CIS,
        SIMULATE,
    ),
    (
        Output(
            *("rows", ("num_tokens", "head_dim"), "activation"),
            "simulated: E4M3 in blocks of 64 columns, scale 2^⌈log2(amax / 448)⌉, the rotated columns as they are",
            liberty="roundings to the activations' dtype between norm, rotation and FP8",
        ),
    ),
    exact.latent,
    {"rounded-between": exact.DEFINED.latent},
    latent_cases,
    latent_work,
    ("a row of zeros gives zeros", "amax is at least 1e-4"),
    {"kv": 0, "cis": 0},
    production=Production(latent_inputs, TOKENS),
)


# ---- index queries ----------------------------------------------------------------------------


def index_cases(w, draw):
    """Every family plain and through Hadamard and FP4."""
    H, D, half = w.index_n_heads, w.index_head_dim, w.qk_rope_head_dim // 2
    for simulate in (False, True):
        for family, N in [(f, 5) for f in (*ROWS[:4], "one number", "zeros", "positions")] + [("random", 1)]:
            q, cis = rows_of(family, N * H, D, draw).view(N, H, D), rotations(family, N, half, draw)
            if family == "uneven blocks":  # of the result: the way back through transform and rotation
                q = rotate(hadamard(q), cis.conj().unsqueeze(1))
            rules = {"queries": CODES} if simulate else {}
            label = f"{N} tokens{', simulated' if simulate else ''}"
            arguments = q.to(draw.dtype), cis, simulate
            yield Case(label, family, arguments, exempt=exempt(family, simulate), rules=rules)


def index_work(q, cis, simulate) -> Work:
    moved = 2 * q.numel() * q.element_size() + 8 * cis.numel()
    D = q.shape[-1]
    return Work(moved, q.numel() * (2 + D.bit_length()), "2·N·H·D·b + 8·rotations; N·H·D·(3 + log2(D))")


INDEX = ("num_tokens", "index_heads", "index_dim")
INDEX_QUERIES = Contract(
    "index_queries",
    "Index queries: rotated, and through the Hadamard transform and FP4 if simulated.",
    (Argument("q", INDEX, "activation", "may be overwritten", scratch=True), CIS, SIMULATE),
    (
        Output(
            *("queries", INDEX, "activation"),
            "simulated: E2M1 in blocks of 32 columns, scale 2^⌈log2(amax / 6)⌉, halves to the even code",
            liberty="roundings to the activations' dtype between rotation, transform and FP4",
        ),
    ),
    exact.index_queries,
    {"rounded-between": exact.DEFINED.index_queries},
    index_cases,
    index_work,
    ("a row of zeros gives zeros",),
    {"q": 0, "cis": 0},
    production=Production(index_inputs, TOKENS),
)
CONTRACTS = (QUERY_HEADS, LATENT, INDEX_QUERIES)
