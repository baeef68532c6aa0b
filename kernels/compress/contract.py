"""Contract of `gated_pool`."""

import torch

from dsv4.kernels.compress.reference import gated_pool
from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work

SLOTS = {4: 8, 128: 128}  # slots of one window by compression ratio: a ratio of 4 pools two windows


def exact(kv, gate) -> torch.Tensor:
    """C[m, d] = Σ_s exp(gate_s − log Σ_j exp(gate_j)) · kv_s, each channel d by itself, in fp64."""
    gate = gate.double()
    return torch.einsum("msd,msd->md", (gate - torch.logsumexp(gate, 1, keepdim=True)).exp(), kv.double())


def running(kv, gate) -> torch.Tensor:
    """One pass over the slots with a running maximum, in fp32."""
    top, total, out = (torch.full_like(kv[:, 0], v) for v in (float("-inf"), 0.0, 0.0))
    for s in range(kv.shape[1]):
        new = torch.maximum(top, gate[:, s])
        safe = torch.where(new == float("-inf"), 0.0, new)
        keep, p = (top - safe).exp(), (gate[:, s] - safe).exp()
        total, out, top = total * keep + p, out * keep + p * kv[:, s], new
    return out / total


def cases(w, draw):
    """Windows of both ratios and both widths in every family; windows of one slot."""
    for S in SLOTS.values():
        for family in FAMILIES:
            yield _case(family, 5, S, w.head_dim, draw)
        yield _case("random", 1, S, w.index_head_dim, draw)
        yield _case("random", 17, S, w.index_head_dim, draw)
    yield _case("random", 3, 1, w.head_dim, draw)


FAMILIES = (
    "random",
    "absent slots",
    "one slot",
    "gates of ±20 in single channels",
    "large gates",
    "cancellation",
    "coded",
)


def _case(family, M: int, S: int, D: int, draw) -> Case:
    """kv and gates of size 1 unless the family says otherwise."""
    kv, gate = draw.rand(M, S, D), draw.rand(M, S, D)
    slot = torch.arange(S).view(1, S, 1)
    if family == "absent slots":  # the first third of all windows, and all but the last slot of the first window
        gate[:, : S // 3] = float("-inf")
        gate[0, :-1] = float("-inf")
    if family == "one slot":  # another one in every channel
        live = slot == (torch.arange(M).view(M, 1, 1) + torch.arange(D)) % S
        gate = torch.where(live, gate, float("-inf"))
    if family == "gates of ±20 in single channels":
        channel = torch.arange(D)
        gate += torch.where(channel % 7 == slot % 7, torch.where(channel % 2 == 0, 20.0, -20.0), 0.0)
    if family == "large gates":
        gate = 1e4 + 30 * gate
        gate[1::2] -= 2e4
        gate[:, S // 2] = float("-inf")
    if family == "cancellation":  # equal weights; rows of +1024 first, then of −1024
        gate = torch.zeros(M, S, D) + draw.rand(M, 1, D)
        kv = kv + torch.where(slot < S // 2, 1024.0, -1024.0)
    if family == "coded":
        kv = draw.coded(S, D).float().expand(M, S, D).clone()
    return Case(f"{M} windows of {S} slots, {D} channels", family, (kv, gate))


def inputs(w, draw, windows, slots) -> tuple:
    return draw.rand(windows, slots, w.head_dim), draw.rand(windows, slots, w.head_dim)


def work(kv, gate) -> Work:
    """Rows and gates once, results; an exponential, two sums and two products a number."""
    (M, S, D) = kv.shape
    return Work(8 * kv.numel() + 4 * M * D, 5 * kv.numel(), "8·M·S·D + 4·M·D; 5·M·S·D")


GATED_POOL = Contract(
    "gated_pool",
    "One entry of a window of rows: a softmax of the gates over the slots, each channel by itself.",
    (
        Argument("kv", ("windows", "slots", "channels"), "float32", "rows of each window, finite"),
        Argument("gate", ("windows", "slots", "channels"), "float32", "logits; −inf: the slot has no part"),
    ),
    (Output("pooled", ("windows", "channels"), "float32", "softmax and sums in fp32"),),
    exact,
    {"fp32": gated_pool, "running maximum": running},
    cases,
    work,
    ("every channel has at least one slot whose gate is not −inf",),
    {"kv": 0, "gate": 0},
    production=Production(inputs, lambda w: {"compiled": [dict(windows=8, slots=S) for S in SLOTS.values()]}),
    dtypes=(torch.float32,),
)
CONTRACTS = (GATED_POOL,)
