"""Inputs of what `backend_matrix` compares with the reference on DeepSeek-V4 models: operations and compositions that
have no contract, and attention that reads strided rows, which is not in its contract."""

from collections.abc import Callable

import torch

from dsv4.kernels.attention.contract import hca_cases
from dsv4.kernels.experts.drawn import FORMS, Stacks, matrices
from dsv4.kernels.fusions.compositions import IndexHeads, Kept, Latents, Windows
from dsv4.kernels.fusions.entries_contract import OVERLAP
from dsv4.kernels.linear import drawn
from dsv4.kernels.widths import Widths
from dsv4.probes.scenes.backend_cases import TOKENS, Inputs

PLAIN_AND_SIMULATED = ("", False, "sums"), ("simulated", True, "codes")


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
                    [i.N, q, i.turns(), c.rms_norm_eps, latents, asked if kind == "csa" else None, windows],
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
        i.turns(),
        simulate,
        i.act(3 * i.N, D),
        torch.arange(i.N) * 3 + 1,
    )


def _hca_attention(i: Inputs):
    """Entries in rows of longer buffers, as caches have them: the contract's own are contiguous. Once, since it has
    numbers of tokens of its own."""
    if i.N != TOKENS[0]:
        return []
    q, window, near, entries, *rest = next(iter(hca_cases(Widths.of(i.config), i))).arguments
    held = i.act(entries.shape[0], 2 * entries.shape[1], entries.shape[2])
    held[:, : entries.shape[1]] = entries
    return [("rows of longer buffers", [q, window, near, held[:, : entries.shape[1]], *rest])]


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
    """Experts in every format that the columns allow; the shared one is in FP8 where they are narrower."""
    w = Widths.of(i.config)
    d, I, stacks = w.hidden_size, w.moe_intermediate_size, Stacks(w, i)
    indices, routing = i.choose(stacks.E, i.N, w.num_experts_per_tok), i.uniform(0, 1, i.N, w.num_experts_per_tok)
    for form in drawn.allowed(FORMS, w, d, I):
        wide = "dense" if form == "dense" else "fp8"
        shared = tuple(drawn.weight(wide, m, i) for m in matrices("random", I, d, i))
        for s in (False,) if form == "dense" else (False, True):  # dense ones meet activations as they are
            arguments = [i.act(i.N, d), indices, routing, *stacks(form, "random", False), shared, w.swiglu_limit, s, s]
            yield (f"{form}, simulated", arguments, (), "of codes") if s else (form, arguments)


CASES: dict[str, Callable] = {
    "attention_inputs": _attention_inputs,
    "chosen_rows": _chosen_rows,
    "embed_streams": _embed_streams,
    "hca_attention": _hca_attention,
    "moe": _moe,
    "place": _place,
}
