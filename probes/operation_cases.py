"""Inputs of every operation at a model's own widths, for `backend_matrix`."""

import torch

from dsv4.gqa.config import GQAConfig
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.drawing import Draw
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.probes.case_inputs import Case, Inputs, cases_of, of_codes, simulations
from dsv4.probes.format_decode import awkward
from dsv4.probes.gqa.operation_cases import gqa_cases
from dsv4.probes.layouts import PAGE
from dsv4.probes.packed_rows import formats_of, rows_of

# held against fp64 by the limits of their contracts, with inputs that make faults stand out
BY_CONTRACT = ("hca_attention", "index_scores", "sparse_attention", "topk_entries")
MAIN_BLOCK, ACTIVATION_BLOCK, KEY_BLOCK = 64, 128, 32  # columns of one scale in the quantisation simulation


def operation_cases(name: str, i: Inputs) -> list[Case]:
    """Cases of the operation called `name`; none if it is unknown here. Those of GQA models are in
    `dsv4.probes.gqa.operation_cases`. Those of `BY_CONTRACT` are the contract's, whatever the number of tokens."""
    if name in BY_CONTRACT and not isinstance(i.config, GQAConfig):
        cases = contract_of(name).cases(i.config, Draw(i.seed, i.dtype))
        return [Case(f"{case.family}, {case.label}", list(case.arguments)) for case in cases]
    return gqa_cases(name, i) if isinstance(i.config, GQAConfig) else cases_of(globals().get(f"_{name}"), i)


# ---- norms, rotations, formats ------------------------------------------------------------


def _rms_norm(i: Inputs):
    c = i.config
    return [
        ("", [i.act(i.N, c.hidden_size), i.act(c.hidden_size), c.rms_norm_eps]),
        ("no weight", [i.act(i.N, c.num_attention_heads, c.head_dim), None, c.rms_norm_eps]),
    ]


def _rotate(i: Inputs):
    c, cis = i.config, i.angles(i.N)
    return [
        ("heads", [i.act(i.N, c.num_attention_heads, c.head_dim), cis.unsqueeze(1)]),
        ("rows", [i.act(i.N, c.head_dim), cis]),
        ("index queries", [i.act(i.N, c.index_n_heads, c.index_head_dim), cis.unsqueeze(1)]),
    ]


def _hadamard(i: Inputs):
    H, D = i.config.index_n_heads, i.config.index_head_dim
    return [("queries", [i.act(i.N, H, D)]), ("keys", [i.act(i.N, D)])]


def _simulate_fp8_blocks(i: Inputs):
    c = i.config
    # rows of zeros, halves between codes, values at and beside limits
    odd = lambda width: awkward(width, i.N).to(i.dtype)
    return [
        ("activations", [odd(max(c.hidden_size, 200)), ACTIVATION_BLOCK], (), "bits"),
        ("main KV", [odd(c.head_dim), MAIN_BLOCK, c.qk_rope_head_dim], (), "bits"),
        ("heads", [i.act(i.N, 3, c.head_dim), MAIN_BLOCK], (), "bits"),
    ]


def _simulate_fp4_blocks(i: Inputs):
    c = i.config
    return [
        ("keys", [awkward(c.index_head_dim, i.N).to(i.dtype), KEY_BLOCK], (), "bits"),
        ("queries", [i.act(i.N, c.index_n_heads, c.index_head_dim), KEY_BLOCK], (), "bits"),
    ]


def _write_rows(i: Inputs):
    """Into a pool of three pages that is not empty; every byte of it is a result."""
    found = []
    for form in formats_of(i.config):
        pool = torch.full((3, form.page), 0xA5, dtype=torch.uint8)
        slots = torch.randperm(3 * PAGE, generator=i.g)[: i.N]
        for how, values in (
            ("awkward", awkward(form.width, i.N)[: i.N].to(i.dtype)),
            ("random", i.act(i.N, form.width)),
        ):
            found.append((f"{form.kind}, {how}", [rows_of(form, pool), slots, values], (0,), "bits"))
    return found


# ---- hyper-connections --------------------------------------------------------------------


def connection(i: Inputs) -> list:
    """streams, fn, scale, base, iterations, eps, norm eps."""
    c = i.config
    n, d = c.hc_mult, c.hidden_size
    return [
        i.act(i.N, n, d),
        i.matrix(2 * n + n * n, n * d),
        torch.tensor([0.7, 1.3, 2.0]),
        i.rand(2 * n + n * n),
        c.hc_sinkhorn_iters,
        c.hc_eps,
        c.rms_norm_eps,
    ]


def merge(i: Inputs) -> list:
    """out, streams, post, comb."""
    n, d = i.config.hc_mult, i.config.hidden_size
    return [i.act(i.N, d), i.act(i.N, n, d), torch.rand(i.N, n, generator=i.g), torch.rand(i.N, n, n, generator=i.g)]


def _mhc_pre(i: Inputs):
    return [("", connection(i))]


def _mhc_post(i: Inputs):
    return [("", merge(i))]


def _mhc_head(i: Inputs):
    n, (streams, fn, scale, base, _, eps, norm_eps) = i.config.hc_mult, connection(i)
    return [("", [streams, fn[:n], scale[:1], base[:n], eps, norm_eps])]


# ---- linear maps, experts, routing --------------------------------------------------------


def _linear(i: Inputs):
    d = i.config.hidden_size
    found = []
    for how, w in i.weights(2 * d, d).items():
        found += [(f"{how}{', simulated' if s else ''}", [i.act(i.N, d), w, s]) for s in simulations(how)]
    found += [
        (f"{how}, simulated, of a few large columns", [i.uneven(i.N, d), w, True])
        for how, w in i.weights(2 * d, d, even=False).items()
        if True in simulations(how)
    ]
    head = PackedWeight(WeightFormat.DENSE, i.matrix(24, d).to(torch.bfloat16))
    return [*found, ("a bf16 head", [i.act(i.N, d).float(), head, False])]


def _grouped_linear(i: Inputs):
    c = i.config
    K = c.num_attention_heads * c.head_dim // c.o_groups
    return [(how, [i.act(i.N, c.o_groups, K), w]) for how, w in i.weights(c.o_groups * c.o_lora_rank, K).items()]


def _shared_expert(i: Inputs):
    c = i.config
    d, I = c.hidden_size, c.moe_intermediate_size
    w1, w3, w2 = i.weights(I, d), i.weights(I, d), i.weights(d, I)
    return [
        of_codes(how, s, [i.act(i.N, d), w1[how], w3[how], w2[how], c.swiglu_limit, s])
        for how in w2
        if how in w1
        for s in simulations(how)
    ]


def _experts(i: Inputs):
    c = i.config
    E, d, I, k = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    indices = torch.stack([torch.randperm(E, generator=i.g)[:k] for _ in range(i.N)])
    w13, w2, routing = i.stack(E, 2 * I, d, 2), i.stack(E, d, I), torch.rand(i.N, k, generator=i.g)
    return [
        of_codes(how, s, [i.act(i.N, d), indices, routing, w13[how], w2[how], c.swiglu_limit, s])
        for how in w2
        if how in w13
        for s in simulations(how)
    ]


def _route_scored(i: Inputs):
    c = i.config
    d, E = c.hidden_size, c.n_routed_experts
    return [
        ("", [i.act(i.N, d), i.matrix(E, d).to(i.dtype), i.rand(E), c.num_experts_per_tok, c.routed_scaling_factor])
    ]


def _route_hashed(i: Inputs):
    c = i.config
    d, E = c.hidden_size, c.n_routed_experts
    table = torch.stack([torch.randperm(E, generator=i.g)[: c.num_experts_per_tok] for _ in range(5)])
    return [("", [i.act(i.N, d), i.matrix(E, d).to(i.dtype), table, torch.arange(i.N) % 5, c.routed_scaling_factor])]


# ---- compressor, indexer, attention -------------------------------------------------------


def _gated_pool(i: Inputs):
    """Windows of both ratios; some slots absent, and in the first window all but one."""
    found = []
    for ratio, slots in ((4, 8), (128, 128)):
        kv, gate = i.rand(i.N, slots, i.config.head_dim), i.rand(i.N, slots, i.config.head_dim)
        gate[:, : slots // 3] = float("-inf")
        gate[0, :-1] = float("-inf")
        found.append((f"ratio {ratio}", [kv, gate]))
    return found
