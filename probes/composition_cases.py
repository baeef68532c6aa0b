"""Inputs of every composition at a model's own widths, for `backend_matrix`: as `dsv4.probes.operation_cases`."""

import torch

from dsv4.gqa.config import GQAConfig
from dsv4.kernels.fusions.compositions import IndexHeads, Kept, Latents, Windows
from dsv4.probes.case_inputs import Case, Inputs, cases_of, of_codes, simulations
from dsv4.probes.gqa.operation_cases import gqa_cases
from dsv4.probes.operation_cases import connection, merge
from dsv4.probes.packed_rows import formats_of

OVERLAP = {4: 2, 128: 1}  # pieces of a compressor's row, by ratio
PLAIN_AND_SIMULATED = ("", False, "sums"), ("simulated", True, "codes")


def composition_cases(name: str, i: Inputs) -> list[Case]:
    """Cases of the composition called `name`; none if it is unknown here. GQA models have one alone, `linears`."""
    if isinstance(i.config, GQAConfig):
        return gqa_cases(name, i)
    return cases_of(globals().get(f"_{name}"), i)


def _linears(i: Inputs):
    """One map with a norm, as of the low-rank queries; several of one input without, as of a compressed layer."""
    c, d = i.config, i.config.hidden_size
    first, found = i.weights(2 * d, d), []
    for how, w in first.items():
        simulate = how != "dense"
        plain = i.weights(24, d)["dense"]
        wide = plain._replace(weight=i.matrix(48, d))  # a compressor's: fp32 products of x as it is
        normed = [i.act(i.N, d), i.act(d), c.rms_norm_eps, (w, plain), (simulate, False), (None, None)]
        several = [i.act(i.N, d), None, 0.0, (w, wide, plain), (simulate, False, False), (None, torch.float32, None)]
        found += [(f"{how}, with a norm", normed, (), "of codes" if simulate else "sums"), (f"{how}, without", several)]
    return found


def _query_heads(i: Inputs):
    c = i.config
    return [("", [i.act(i.N, c.num_attention_heads, c.head_dim), i.angles(i.N), c.rms_norm_eps])]


def _latent(i: Inputs):
    c = i.config
    return [
        (how, [i.act(i.N, c.head_dim), i.act(c.head_dim), c.rms_norm_eps, i.angles(i.N), s], (), rule)
        for how, s, rule in PLAIN_AND_SIMULATED
    ]


def _index_queries(i: Inputs):
    c = i.config
    return [
        (how, [i.act(i.N, c.index_n_heads, c.index_head_dim), i.angles(i.N), s], (), rule)
        for how, s, rule in PLAIN_AND_SIMULATED
    ]


def _store_rows(i: Inputs):
    """Into a ring that is not empty; all of it is the result."""
    found = []
    for ratio, c in OVERLAP.items():
        w = c * i.config.head_dim
        ring, slots = i.rand(3 * ratio + 5, 2 * w), torch.randperm(3 * ratio + 5, generator=i.g)[: i.N]
        found.append((f"ratio {ratio}", [i.rand(i.N, 2 * w), i.rand(ratio, w), i.below(ratio, i.N), ring, slots], (3,)))
    return found


def _pool_entries(i: Inputs):
    """Windows of both ratios, with absent slots; one window is not complete: none of its slots is there."""
    c, found = i.config, []
    cases = [(4, c.head_dim, "kv"), (128, c.head_dim, "kv"), (4, c.head_dim, None)]
    for ratio, D, simulate in cases + [(4, c.index_head_dim, "key"), (4, c.index_head_dim, None)]:
        overlap = OVERLAP[ratio]
        M, S, R = 3, overlap * ratio, overlap * ratio + 40
        slots = torch.stack([torch.randperm(R, generator=i.g)[:S] for _ in range(M)])
        slots[0, : S // 3], slots[-1] = -1, -1
        found.append(
            (
                f"ratio {ratio}, {D} dims, simulate {simulate}",
                [i.rand(R, 2 * overlap * D), slots, overlap, i.dtype, i.act(D), c.rms_norm_eps, i.angles(M), simulate],
                (),
                "codes" if simulate else "sums",
            )
        )
    return found


def _select_entries(i: Inputs):
    """More entries than are selected; the second row sees fewer than that."""
    c = i.config
    k, n = c.index_topk, 8 * c.index_topk
    shape = (2, i.N, c.index_n_heads, c.index_head_dim)
    visible = torch.stack((torch.full((i.N,), n - 3), torch.full((i.N,), k // 2)))
    keys = {"": i.act(2, n, shape[-1])} | {form.kind: i.packed(form, 2, count=n) for form in formats_of(c)[1:]}
    return [(how, [i.act(*shape), i.rand(*shape[:3]), held, visible, k]) for how, held in keys.items()]


def _project_heads(i: Inputs):
    c = i.config
    K = c.num_attention_heads * c.head_dim // c.o_groups
    return [
        (how, [i.act(i.N, c.num_attention_heads, c.head_dim), i.angles(i.N), w, c.o_groups])
        for how, w in i.weights(c.o_groups * c.o_lora_rank, K).items()
    ]


def _mhc_pre_norm(i: Inputs):
    return [("", [*connection(i), i.act(i.config.hidden_size), i.config.rms_norm_eps])]


def _mhc_post_pre_norm(i: Inputs):
    return [("", [*merge(i), *connection(i)[1:], i.act(i.config.hidden_size), i.config.rms_norm_eps])]


def _mhc_post_head_norm(i: Inputs):
    c = i.config
    n, d = c.hc_mult, c.hidden_size
    return [
        ("", [*merge(i), i.matrix(n, n * d), i.rand(1), i.rand(n), c.hc_eps, c.rms_norm_eps, i.act(d), c.rms_norm_eps])
    ]


def _attention_inputs(i: Inputs):
    """Rows of one token each, at the end of a window of either ratio: layers with an indexer, with long windows, and
    without."""
    c, found = i.config, []
    kinds = {"csa": (4, (c.head_dim, c.index_head_dim)), "hca": (128, (c.head_dim,)), "window": (4, ())}
    for kind, (ratio, widths) in kinds.items():
        for how, s, rule in PLAIN_AND_SIMULATED:
            windows = tuple(_windows(i, ratio, D, ("key" if j else "kv") if s else None) for j, D in enumerate(widths))
            latents = Latents(
                i.act(i.N, c.head_dim), i.act(c.head_dim), s, i.act(i.N + 9, c.head_dim), torch.arange(i.N).flip(0)
            )
            asked = IndexHeads(i.act(i.N, c.index_n_heads, c.index_head_dim), i.act(i.N, c.index_n_heads), 0.1, s)
            q = i.act(i.N, c.num_attention_heads, c.head_dim)
            found.append(
                (
                    ", ".join(filter(None, (kind, how))),
                    [i.N, q, i.angles(i.N), c.rms_norm_eps, latents, asked if kind == "csa" else None, windows],
                    (),
                    rule,
                )
            )
    return found


def _windows(i: Inputs, ratio: int, D: int, simulate: str | None) -> Windows:
    """One whole window a row, of the ring's own rows and of the row that is stored; the first row's begins at position
    0."""
    overlap = OVERLAP[ratio]
    S, R, w = overlap * ratio, overlap * ratio + 5, overlap * D
    rows = torch.stack([R * b + torch.randperm(R, generator=i.g)[:S] for b in range(i.N)])
    rows[0, : S - ratio] = -1
    return Windows(
        i.rand(i.N, 2 * w),
        i.rand(ratio, w),
        torch.full((i.N,), ratio - 1),
        i.rand(i.N * R, 2 * w),
        rows[:, -1].clone(),
        rows,
        torch.ones(i.N, dtype=torch.bool),
        overlap,
        i.act(D),
        i.angles(i.N),
        simulate,
        i.act(3 * i.N, D),
        torch.arange(i.N) * 3 + 1,
    )


def _place(i: Inputs):
    """Steps of one and of five tokens, from rows at any position."""
    c = i.config
    f = tuple(10000.0 ** -i.rand(c.qk_rope_head_dim // 2).abs() for _ in range(2))
    kept = (Kept(4, 2, 8 + 128, (300, 320)), Kept(128, 1, 128 + 128, (9,)))
    return [
        (f"{T} a row", [i.below(1000, i.N), T, f, (c.sliding_window, c.sliding_window + 128), kept]) for T in (1, 5)
    ]


def _embed_streams(i: Inputs):
    c = i.config
    return [("", [i.below(c.vocab_size, i.N), i.act(c.vocab_size, c.hidden_size), c.hc_mult, i.dtype])]


def _chosen_rows(i: Inputs):
    """Several rows of a batch; a third of the entries is absent."""
    k = i.config.index_topk
    return [("", [(i.below(3 * k, i.N + 1, 2, k) - k).clamp(min=-1), 3 * k])]


def _moe(i: Inputs):
    c = i.config
    E, d, I, k = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    indices = torch.stack([torch.randperm(E, generator=i.g)[:k] for _ in range(i.N)])
    routing, w13, w2, found = torch.rand(i.N, k, generator=i.g), i.stack(E, 2 * I, d, 2), i.stack(E, d, I), []
    w1, w3, down = i.weights(I, d), i.weights(I, d), i.weights(d, I)
    for how in w13:
        shared = "fp8" if how in ("mxfp4", "nvfp4") else how  # as checkpoints have them
        if how in w2:
            beside = w1[shared], w3[shared], down[shared]
            found += [
                of_codes(how, s, [i.act(i.N, d), indices, routing, w13[how], w2[how], beside, c.swiglu_limit, s, s])
                for s in simulations(how)
            ]
    return found
