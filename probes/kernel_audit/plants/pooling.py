"""Planted faults of `gated_pool` and `silu_mul`."""

import torch
import torch.nn.functional as F

from dsv4.probes.kernel_audit.plants.wrappers import changed, common, gates, replaced


def _pool(weigh):
    """honest → Σ over the slots of weigh(gate) · kv."""
    return lambda honest: lambda kv, gate: (weigh(gate) * kv).sum(1)


def _narrow_sums(kv, gate):
    total = torch.zeros_like(kv[:, 0]).bfloat16()
    for weight, row in zip(gate.softmax(1).unbind(1), kv.unbind(1)):
        total = (total.float() + weight * row).bfloat16()
    return total.float()


def _finite_mask(gate):
    return gate.masked_fill(gate == float("-inf"), -1e4)


def _absent_as_zero(gate):
    return gate.masked_fill(gate == float("-inf"), 0.0)


def _no_maximum(gate):
    weights = gate.exp()
    return weights / weights.sum(1, keepdim=True)


def _by_row(gate):
    """One weight a row, by the mean of its gates."""
    live = gate.masked_fill(gate == float("-inf"), -1e30)
    return live.mean(-1, keepdim=True).softmax(1)


def _without(part: slice):
    def change(kv, gate):
        return kv[:, part], gate[:, part]

    return lambda honest: lambda kv, gate: honest(*change(kv, gate)) if kv.shape[1] > 1 else honest(kv, gate)


def _last_half(honest):
    """The last half of the slots alone: the other window of an overlapping pair is left out."""
    return lambda kv, gate: honest(kv[:, kv.shape[1] // 2 :], gate[:, kv.shape[1] // 2 :])


POOL = {
    "a softmax of rows instead of channels": (87, _pool(_by_row)),
    "a softmax over the channels": (87, _pool(lambda gate: gate.softmax(-1))),
    "a mean over the slots": (87, _pool(lambda gate: torch.full_like(gate, 1 / gate.shape[1]))),
    "sigmoid gates": (87, _pool(lambda gate: gate.sigmoid())),
    "no maximum is taken off": (47, _pool(_no_maximum)),
    "absent slots have −1e4": (22, replaced(1, _finite_mask)),
    "absent slots have a gate of zero": (25, replaced(1, _absent_as_zero)),
    "the last slot is skipped": (26, _without(slice(None, -1))),
    "the first slot is skipped": (26, _without(slice(1, None))),
    "the last half of the slots alone": (86, _last_half),
    "slots from the second half on come first in kv": (86, replaced(0, lambda kv: kv.roll(kv.shape[1] // 2, 1))),
    "gates of the window before": (73, replaced(1, lambda gate: gate.roll(1, 0))),
    "gates in bf16": (14, replaced(1, lambda gate: gate.bfloat16().float())),
    "weights in bf16": (14, _pool(lambda gate: gate.softmax(1).bfloat16().float())),
    "sums in bf16": (50, lambda honest: _narrow_sums),
}


def _fast(gate, up, biases):
    """exp(g) / (1 + exp(g)), which overflows."""
    g, u = gate.float(), up.float()
    if biases is not None:
        g, u = g + biases[0], u + biases[1]
    return (g * (g.exp() / (1 + g.exp())) * u).to(gate.dtype)


def _of(activation):
    def faulty(gate, up, biases):
        g, u = gate.float(), up.float()
        if biases is not None:
            g, u = g + biases[0], u + biases[1]
        return (activation(g) * u).to(gate.dtype)

    return lambda honest: faulty


SILU = {
    "gate and up are exchanged": (53, changed(lambda gate, up, biases: (up, gate, biases))),
    "biases are ignored": (39, replaced(2, lambda biases: None)),
    "biases are exchanged": (53, replaced(2, lambda biases: None if biases is None else biases[::-1])),
    "exp overflows": (47, lambda honest: _fast),
    "GELU instead of SiLU": (40, _of(F.gelu)),
    "sigmoid without the gate": (40, _of(torch.sigmoid)),
    "gates are clamped to ±10": (40, _of(lambda g: F.silu(g.clamp(-10, 10)))),
    "the last column is skipped": (26, replaced(0, lambda x: torch.cat((x[:, :-1], 0 * x[:, -1:]), 1))),
    "up of the row before": (73, replaced(1, lambda up: up.roll(1, 0))),
}
PLANTS = (
    *gates("gated_pool", POOL),
    *common("gated_pool", lower=(0, 1)),
    *gates("silu_mul", SILU),
    *common("silu_mul", lower=(0, 1)),
)
