"""Contracts of `route_scored` and `route_hashed`."""

import math

import torch
import torch.nn.functional as F

from dsv4.kernels.contract import SET, Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.honest import tensor_core_sums
from dsv4.kernels.router import reference
from dsv4.kernels.widths import FLASH, PRO, VOCABULARY

GAP = 2e-3  # between the biased scores of the last expert that is chosen and the first that is not
VOCAB = 37


def exact_scores(x, weight) -> torch.Tensor:
    """fp64 [N, E]: sqrt(log(1 + exp(l))) of the logits, as sqrt(max(l, 0) + log1p(exp(−|l|)))."""
    logits = torch.einsum("nd,ed->ne", x.double(), weight.double())
    return (logits.clamp(min=0) + torch.log1p((-logits.abs()).exp())).sqrt()


def weighed(scores, indices, factor: float) -> torch.Tensor:
    """factor · s_i / Σ_j s_j over a token's experts, in the dtype of the scores."""
    chosen = scores.gather(1, indices)
    return factor / (chosen.unsqueeze(1) / chosen.unsqueeze(2)).sum(2)


def exact_scored(x, weight, bias, topk: int, factor: float):
    """(indices, weights fp64): experts are sorted by score + bias."""
    scores = exact_scores(x, weight)
    indices = torch.sort(scores + bias.double(), dim=1, descending=True, stable=True).indices[:, :topk]
    return indices, weighed(scores, indices, factor)


def exact_hashed(x, weight, table, ids, factor: float):
    """(indices, weights fp64): experts are those of the token's row of the table."""
    indices = torch.stack([table[i] for i in ids.tolist()]) if len(ids) else table[:0]
    return indices, weighed(exact_scores(x, weight), indices, factor)


def wide_scores(x, weight) -> torch.Tensor:
    """Scores in fp64 of logits in fp32."""
    return F.softplus(tensor_core_sums(x, weight).double()).sqrt()


def scored_fp64(x, weight, bias, topk: int, factor: float):
    """An honest kernel: logits in fp32, scores and their sum in fp64."""
    scores = wide_scores(x, weight)
    indices = torch.topk(scores.float() + bias, topk, dim=-1).indices
    return indices, reference.routing_weights(scores, indices, factor)


def hashed_fp64(x, weight, table, ids, factor: float):
    """An honest kernel: logits in fp32, scores and their sum in fp64."""
    indices = table.index_select(0, ids)
    return indices, reference.routing_weights(wide_scores(x, weight), indices, factor)


def narrow_scores(x, weight) -> torch.Tensor:
    """Scores in fp32 throughout: softplus as max(l, 0) + log1p(exp(−|l|))."""
    logits = tensor_core_sums(x, weight)
    return (logits.clamp(min=0) + torch.log1p((-logits.abs()).exp())).sqrt()


def scored_fp32(x, weight, bias, topk: int, factor: float):
    """An honest kernel that keeps scores, their sum and the weights in fp32."""
    scores = narrow_scores(x, weight)
    indices = torch.topk(scores + bias, topk, dim=-1).indices
    chosen = scores.gather(1, indices)
    return indices, chosen / chosen.sum(1, keepdim=True) * factor


def hashed_fp32(x, weight, table, ids, factor: float):
    """An honest kernel that keeps scores, their sum and the weights in fp32."""
    indices = table.index_select(0, ids)
    chosen = narrow_scores(x, weight).gather(1, indices)
    return indices, chosen / chosen.sum(1, keepdim=True) * factor


def inputs(family: str, N: int, w, draw) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [N, D], weight [E, D]) in the activations' dtype.

    cancellation: logits are small differences of large sums. large logits: up to 1650, where exp overflows fp32. deep
    below zero: logits of −18 to −77, where 1 + exp(l) is 1 in fp32. whole logits: from −14 to 21.
    """
    D, E = w.hidden_size, w.n_routed_experts
    x, weight = draw.rand(N, D), draw.matrix(E, D)
    if family == "cancellation":
        half = D // 2
        weight = weight.abs()
        weight[:, half:] = weight[:, :half]
        size = 64 * (1 + draw.below(3, N, half) / 4)
        x[:, :half] += size
        x[:, half:] -= size
    if family in LOGITS:  # sums of equal terms, exact in fp32
        low, high, step = LOGITS[family]
        logits = step * draw.below(high - low, E) + step * low + 0.25  # that E4M3 does not hold
        used = 1 << int(math.log2(D))
        x = torch.tensor([1.0, 2.0, 3.5])[torch.arange(N) % 3].unsqueeze(1).expand(N, D)
        weight = torch.where(torch.arange(D) < used, logits.unsqueeze(1) / used, 0.0)
    if family == "tokens of zeros":
        x[::2] = 0
    return x.contiguous().to(draw.dtype), weight.to(draw.dtype)


def bias_of(family: str, E: int, draw) -> torch.Tensor:
    """fp32 [E]: of size 1; of the family 'large bias' ±50 for a few experts, of 'no bias' zero."""
    bias = draw.rand(E)
    if family == "large bias":
        bias += torch.where(torch.arange(E) % 4 == 1, 50.0, torch.where(torch.arange(E) % 4 == 2, -50.0, 0.0))
    return torch.zeros(E) if family == "no bias" else bias


LOGITS = {"large logits": (-4, 60, 8), "deep below zero": (-22, -17, 1), "whole logits": (-4, 7, 1)}  # at x = 1
FAMILIES = (
    "random",
    "no bias",
    "large bias",
    "large logits",
    "deep below zero",
    "cancellation",
    "whole logits",
    "tokens of zeros",
)


def scored_cases(w, draw):
    """Tokens whose choice does not depend on roundings, in every family; sizes about tiles; other numbers of
    experts."""
    k, factor = w.num_experts_per_tok, w.routed_scaling_factor
    for family in FAMILIES:
        yield _scored(family, 9, k, factor, w, draw)
    yield _close(3, k, factor, w, draw)
    for N in (1, 2, 17, 65):
        yield _scored("random", N, k, factor, w, draw)
    yield _scored("random", 5, 1, factor, w, draw)
    yield _scored("random", 5, k + 1, 1.0, w, draw)


def _scored(family, N, k, factor, w, draw) -> Case:
    """Draws more tokens than N, and takes those of which the chosen experts are apart from the others by GAP; draws
    again while these are fewer than N."""
    for _ in range(100):
        x, weight = inputs(family, 4 * N + 8, w, draw)
        bias = bias_of(family, w.n_routed_experts, draw)
        best = (exact_scores(x, weight) + bias.double()).sort(1, descending=True).values
        sure = best[:, k - 1] - best[:, k] > GAP * best[:, k - 1].abs().clamp(min=1)
        if sure.sum() >= N:
            break
    x = x[sure][:N]
    label = f"{len(x)} tokens, {k} of {len(bias)} experts"
    return Case(label, family, (x, weight, bias, k, factor), {}, _exempt(family, k))


def _exempt(family: str, k: int) -> dict[str, str]:
    """Why a lower precision may not show."""
    if k == 1:
        return {"lower precision": "the weight of a token's only expert is the factor"}
    return {"lower precision": "it may hold the logits of the chosen experts"} if family in LOGITS else {}


def _close(N, k, factor, w, draw) -> Case:
    """The same token N times, and a bias that makes its biased scores 2.000, 2.001, 2.002, …: no two are equal in fp32,
    and most are in bf16."""
    x, weight = inputs("random", 1, w, draw)
    aim = 2 + 1e-3 * draw.shuffled(torch.arange(len(weight)))
    bias = (aim - exact_scores(x, weight)[0]).float()
    label = f"{N} tokens, {k} of {len(bias)} experts"
    return Case(label, "close biased scores", (x.repeat(N, 1), weight, bias, k, factor))


def hashed_cases(w, draw):
    """Tokens of a small vocabulary, the first and the last id among them; every family; sizes about tiles."""
    k, E, factor = w.num_experts_per_tok, w.n_routed_experts, w.routed_scaling_factor
    table = draw.choose(E, VOCAB, k)
    for family in FAMILIES:
        if "bias" not in family:
            yield _hashed(family, 9, table, factor, w, draw)
    for N in (1, 2, 17, 65):
        yield _hashed("random", N, table, factor, w, draw)
    yield _hashed("random", 5, draw.choose(E, VOCAB, 1), 1.0, w, draw)


def _hashed(family, N, table, factor, w, draw) -> Case:
    x, weight = inputs(family, N, w, draw)
    ids = draw.below(VOCAB, N)
    ids[: min(N, 3)] = torch.tensor([VOCAB - 1, 0, VOCAB - 1])[: min(N, 3)]
    unread = torch.ones(len(weight), 1, dtype=torch.bool)
    unread[table[ids].flatten()] = False
    label = f"{N} tokens, {table.shape[1]} of {len(weight)} experts"
    return Case(label, family, (x, weight, table, ids, factor), {"weight": unread}, _exempt(family, table.shape[1]))


def scored_work(x, weight, bias, topk: int, factor: float) -> Work:
    """The gate's matrix, inputs, bias and results once; 2·N·E·D operations."""
    (N, D), E = x.shape, weight.shape[0]
    moved = weight.nbytes + x.nbytes + bias.nbytes + 8 * N * topk
    return Work(moved, 2 * N * E * D, f"E·D·{weight.element_size()} + N·D·{x.element_size()} + 4·E + 8·N·k; 2·N·E·D")


def hashed_work(x, weight, table, ids, factor: float) -> Work:
    """Rows of the gate's matrix that a token needs once, inputs, rows of the table, results; 2·N·k·D operations."""
    (N, D), k = x.shape, table.shape[1]
    live = len(table[ids].unique())
    moved = live * D * weight.element_size() + x.nbytes + 4 * N * k + 4 * N + 8 * N * k
    return Work(moved, 2 * N * k * D, f"experts·D·{weight.element_size()} + N·D·{x.element_size()} + 12·N·k; 2·N·k·D")


def gate_inputs(w, draw, tokens, experts, gate=torch.bfloat16) -> tuple:
    """(x, weight): a gate in its own dtype."""
    return draw.act(tokens, w.hidden_size), draw.matrix(experts, w.hidden_size).to(gate)


def scored_inputs(w, draw, tokens, experts, gate=torch.bfloat16) -> tuple:
    bias = draw.uniform(0, 0.1, experts)
    return *gate_inputs(w, draw, tokens, experts, gate), bias, w.num_experts_per_tok, w.routed_scaling_factor


def scored_sizes(w) -> dict:
    """Decode steps and a prompt; compiled for both dtypes of gates and the experts of both models."""
    E, gates = w.n_routed_experts, (torch.bfloat16, torch.float32)
    each = [
        dict(tokens=N, experts=E, gate=gate)
        for N in (1, 16, 100)
        for gate in gates
        for E in (FLASH.n_routed_experts, PRO.n_routed_experts)
    ]
    return {"bench": [dict(tokens=N, experts=E) for N in (1, 8, 64, 4096)], "compiled": each}


def hashed_inputs(w, draw, tokens, vocabulary) -> tuple:
    E, ids = w.n_routed_experts, torch.arange(tokens, device=draw.device) * 13
    table = draw.chosen(E, vocabulary, w.num_experts_per_tok)
    return *gate_inputs(w, draw, tokens, E), table, ids, w.routed_scaling_factor


def hashed_sizes(w) -> dict:
    return {
        "bench": [dict(tokens=N, vocabulary=1000) for N in (1, 8)],
        "compiled": [dict(tokens=1, vocabulary=VOCABULARY)],
    }


X = Argument("x", ("num_tokens", "hidden"), "activation", "inputs")
GATE = Argument("weight", ("experts", "hidden"), "activation", "the gate's matrix")
FACTOR = Argument("routed_scaling_factor", None, "float32", "what the weights of a token sum to")
OUTPUTS = (
    Output(
        *("indices", ("num_tokens", "topk"), "int64", "experts of each token"),
        rule=SET,
        liberty="any order; weights follow their experts",
    ),
    Output("weights", ("num_tokens", "topk"), "float32", "score over the sum of the chosen scores, times the factor"),
)
EDGES = (
    "the bias selects and does not weigh",
    "logits down to −80 and up to several hundred have weights: softplus neither vanishes nor overflows",
)
SCORED = Contract(
    "route_scored",
    "The experts of each token by score + bias, score = sqrt(softplus(weight · x)), and their weights.",
    (
        X,
        GATE,
        Argument("bias", ("experts",), "float32", "added to the scores for the choice alone"),
        Argument("topk", None, "int64", "experts of a token"),
        FACTOR,
    ),
    OUTPUTS,
    exact_scored,
    {"scores-fp64": scored_fp64, "scores-fp32": scored_fp32},
    scored_cases,
    scored_work,
    (*EDGES, "which of several equal biased scores is chosen is not defined"),
    {"x": 0},
    production=Production(scored_inputs, scored_sizes),
)
HASHED = Contract(
    "route_hashed",
    "The experts of each token by its id, with weights by their scores.",
    (
        X,
        GATE,
        Argument("tid2eid", ("vocabulary", "topk"), "int64", "experts of each id, all different"),
        Argument("ids", ("num_tokens",), "int64", "ids of the tokens"),
        FACTOR,
    ),
    OUTPUTS,
    exact_hashed,
    {"scores-fp64": hashed_fp64, "scores-fp32": hashed_fp32},
    hashed_cases,
    hashed_work,
    (EDGES[1], "scores of experts that no token has change nothing"),
    {"x": 0, "ids": 0},
    production=Production(hashed_inputs, hashed_sizes),
)
CONTRACTS = (SCORED, HASHED)
