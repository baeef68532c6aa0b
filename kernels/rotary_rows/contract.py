"""Contract of `rotary_rows`."""

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.rope.contract import POSITIONS, turns
from dsv4.kernels.rotary_rows import reference

SLOTS = 24


def exact(q, k, v, biases, cis, keys, values, start):
    """Rotated queries, keys and values after the step, in fp64: columns i and i + D/2 of a head turn together."""
    (B, KV, _, D), N = keys.shape, len(q)
    add = (0, 0, 0) if biases is None else tuple(t.double() for t in biases)
    q, k, v = (t.double() + bias for t, bias in zip((q, k, v), add, strict=True))
    turned = lambda x: _turn(x.view(N, -1, D), cis)
    keys, values, T = keys.double().clone(), values.double().clone(), N // B
    rows, plain = turned(k), v.view(N, KV, D)
    for n in range(N):
        keys[n // T, :, int(start[n // T]) + n % T] = rows[n]
        values[n // T, :, int(start[n // T]) + n % T] = plain[n]
    return turned(q).view(B, T, -1, D), keys, values


def _turn(x, cis):
    """One complex product a pair."""
    half = x.shape[-1] // 2
    y = torch.complex(x[..., :half], x[..., half:]) * cis.to(torch.complex128).unsqueeze(1)
    return torch.cat((y.real, y.imag), -1)


def cases(w, draw):
    """With biases and without, rows at positions of their own, one and three tokens a row."""
    for biased in (False, True):
        for family in ("random", "coded", "one-hot", "positions", "large biases"):
            if biased or family != "large biases":
                yield _case(family, 2, 3, biased, w, draw)
        yield _case("random", 3, 1, biased, w, draw)


def _case(family, B, T, biased, w, draw) -> Case:
    """The cache is not empty. one-hot: each token has a one at another place of every head."""
    H, KV, D = sizes(w)
    N, start = B * T, torch.tensor([SLOTS - T, 0, 7])[:B]
    q, k, v = (draw.rand(N, heads * D) for heads in (H, KV, KV))
    if family == "coded":
        q, k, v = (draw.coded(N, t.shape[1]).float() for t in (q, k, v))
    if family == "one-hot":
        at = torch.linspace(0, D - 1, N).long()
        q, k, v = (3 * torch.eye(D)[at].repeat(1, heads) for heads in (H, KV, KV))
    size = 8.0 if family == "large biases" else 1.0
    biases = tuple((size * draw.rand(t.shape[1])).to(draw.dtype) for t in (q, k, v)) if biased else None
    cis = draw.angles(D // 2, N)
    if family == "positions":
        cis = turns([POSITIONS[i % len(POSITIONS)] for i in range(N)], D // 2)
    keys, values = draw.act(B, KV, SLOTS, D), draw.act(B, KV, SLOTS, D)
    arguments = *(t.to(draw.dtype) for t in (q, k, v)), biases, cis, keys, values, start
    exempt = {"lower precision": "every number is exact in FP8"} if family in ("coded", "one-hot") else {}
    if family == "large biases":
        exempt = {"lower precision": "biases outweigh what is rounded"}
    return Case(f"{B} rows of {T} tokens{', biases' if biased else ''}", family, arguments, exempt=exempt)


def inputs(w, draw, tokens, batch, biased) -> tuple:
    """The next tokens of rows of a cache that they fill."""
    (H, KV, D), N = sizes(w), batch * tokens
    parts = [draw.act(N, heads * D) for heads in (H, KV, KV)]
    biases = tuple(draw.act(part.shape[1]) for part in parts) if biased else None
    keys, values = draw.large(batch, KV, 8192, D), draw.large(batch, KV, 8192, D)
    start = torch.full((batch,), 8192 - tokens, device=draw.device)
    return *parts, biases, draw.angles(D // 2, N), keys, values, start


def production_sizes(w) -> dict:
    """A decode step and a prompt, of models with biases and without, in both dtypes."""
    shapes = [dict(batch=8, tokens=1), dict(batch=1, tokens=4096)]
    each = [dict(biased=biased, dtype=dtype) for biased in (False, True) for dtype in (torch.bfloat16, torch.float32)]
    return {"compiled": [shape | form for shape in shapes for form in each]}


def work(q, k, v, biases, cis, keys, values, start) -> Work:
    """Rows in and out, biases and rotations once."""
    given = sum(t.numel() for t in biases or ())
    moved = (2 * (q.numel() + k.numel() + v.numel()) + given) * q.element_size() + 8 * cis.numel()
    return Work(moved, 3 * (q.numel() + k.numel()), "2·N·(H + 2·KV)·D·b + biases + 8·rotations; 3 a number")


CACHE = ("batch", "kv_heads", "slots", "head_dim")
CONTRACTS = (
    Contract(
        "rotary_rows",
        "Biases added, queries and keys rotated, keys and values stored at the positions of the step.",
        (
            Argument("q", ("num_tokens", "query_dims"), "activation", "query heads side by side"),
            Argument("k", ("num_tokens", "kv_dims"), "activation", "key heads side by side"),
            Argument("v", ("num_tokens", "kv_dims"), "activation", "value heads side by side"),
            Argument("biases", ("three", "dims"), "activation", "of q, k and v, a tuple", optional=True),
            Argument("cis", ("num_tokens", "pairs"), "complex64", "columns i and i + D/2 of a head turn by cis[i]"),
            Argument("keys", CACHE, "activation", "written at start[b] … start[b] + T − 1"),
            Argument("values", CACHE, "activation", "likewise, not rotated"),
            Argument("start", ("batch",), "int64", "first position of the step, of each row"),
        ),
        (
            Output("q", ("batch", "tokens", "num_heads", "head_dim"), "activation", "fp32 inside, one rounding"),
            Output("keys", CACHE, "activation", "fp32 inside, one rounding", argument=5),
            Output("values", CACHE, "activation", "the bias in fp32, one rounding", argument=6),
        ),
        exact,
        {"fp32": reference.rotary_rows},
        cases,
        work,
        ("other rows of the cache keep their bits",),
        production=Production(inputs, production_sizes),
    ),
)
