"""Planted faults of `experts` and `shared_expert`."""

import torch
import torch.nn.functional as F

from dsv4.kernels.quantize import to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import expert
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.weights import NIBBLES, SCALES
from dsv4.probes.kernel_audit.plants.wrappers import changed, common, gates, replaced


def clamped(gate, up, limit, size=None):
    """silu(min(gate, limit)) · clamp(up, ±limit), times the routing weights."""
    h = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return h if size is None else h * size


def _rounded(x, simulate):
    return simulate_fp8_blocks(x, 128).float() if simulate else x.float()


def _routed(activation=clamped, inner=True, after=None):
    """honest → `experts` whose part between the products is activation(gate, up, limit, size). inner: its result is
    rounded to FP8 if simulated. after: multiplies the results of w2 by after(size)."""

    def faulty(x, indices, routing, w13, w2, limit, simulate):
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in indices.unique().tolist():
            token, at = (indices == e).nonzero(as_tuple=True)
            gate, up = F.linear(_rounded(x[token], simulate), to_float(expert(w13, e))).chunk(2, -1)
            size = routing[token, at].unsqueeze(1)
            h = activation(gate, up, limit, size).to(x.dtype)
            y = F.linear(_rounded(h, simulate and inner), to_float(expert(w2, e)))
            out.index_add_(0, token, y if after is None else y * after(size))
        return out

    return lambda honest: faulty


def _shared(activation, inner=True):
    def faulty(x, w1, w3, w2, limit, simulate):
        gate, up = (F.linear(_rounded(x, simulate), to_float(w)) for w in (w1, w3))
        h = activation(gate, up, limit, 1).to(x.dtype)
        return F.linear(_rounded(h, simulate and inner), to_float(w2))

    return lambda honest: faulty


def _without_clamp(gate, up, limit, size):
    return F.silu(gate) * up * size


def _gate_clamp_alone(gate, up, limit, size):
    return F.silu(gate.clamp(max=limit)) * up * size


def _up_from_above(gate, up, limit, size):
    return F.silu(gate.clamp(max=limit)) * up.clamp(max=limit) * size


def _gate_from_both_sides(gate, up, limit, size):
    return clamped(gate.clamp(min=-limit), up, limit, size)


def _gelu(gate, up, limit, size):
    return F.gelu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * size


def _exchanged(gate, up, limit, size):
    return clamped(up, gate, limit, size)


def _interleaved(gate, up, limit, size):
    """Gate and up rows are taken in turn."""
    both = torch.cat((gate, up), -1)
    return clamped(both[..., 0::2], both[..., 1::2], limit, size)


ACTIVATIONS = {
    "no clamp": (40, _without_clamp),
    "the clamp of up is missing": (40, _gate_clamp_alone),
    "up is clamped from above alone": (40, _up_from_above),
    "the gate is clamped from below too": (40, _gate_from_both_sides),
    "GELU instead of SiLU": (40, _gelu),
    "gate and up are exchanged": (53, _exchanged),
}


def _of_listed(change):
    """honest → the honest kernel with (indices, routing) through `change(indices, routing, experts)`."""
    return changed(lambda x, i, r, w13, *rest: (x, *change(i, r, w13.weight.shape[0]), w13, *rest))


def _ranks(indices, routing, E):
    """Weights are found by the number of the expert among those that have work."""
    return torch.searchsorted(indices.unique(), indices), routing


def _beyond(limit):
    """Pairs of an expert from number limit(pairs, experts) on are dropped."""

    def change(indices, routing, E):
        flat, kept = indices.flatten(), routing.flatten().clone()
        for e in flat.unique().tolist():
            kept[(flat == e).nonzero()[:, 0][limit(len(flat), E) :]] = 0
        return indices, kept.view(routing.shape)

    return change


def _last_pairs(indices, routing, E):
    """Pairs behind the last whole tile of 16 of all pairs are dropped, if there is a whole one."""
    kept = routing.flatten().clone()
    if len(kept) > 16:
        kept[len(kept) // 16 * 16 :] = 0
    return indices, kept.view(routing.shape)


def _last_listed(indices, routing, E):
    return indices, torch.cat((routing[:, :-1], torch.zeros_like(routing[:, -1:])), 1)


def _all_experts(honest):
    """Every expert is computed for every token, and those that it does not list are weighted with 0."""

    def faulty(x, indices, routing, w13, w2, limit, simulate):
        N, E = len(x), w13.weight.shape[0]
        every = torch.arange(E, device=x.device).expand(N, E)
        sizes = torch.zeros(N, E, device=x.device).scatter_add(1, indices, routing)
        return honest(x, every, sizes, w13, w2, limit, simulate)

    return faulty


def _sorted_in_place(honest):
    """A token's list is sorted where it lies, its weights with it."""

    def faulty(x, indices, routing, *rest):
        order = indices.argsort(1)
        indices.copy_(indices.gather(1, order)), routing.copy_(routing.gather(1, order))
        return honest(x, indices, routing, *rest)

    return faulty


def _lists_of_the_first_call(honest):
    """Inside a graph the lists are those of the first call of a shape."""
    kept = {}

    def faulty(x, indices, *rest):
        old = kept.setdefault(tuple(indices.shape), indices.clone())
        return honest(x, old if torch.cuda.is_current_stream_capturing() else indices, *rest)

    return faulty


LISTS = {
    "empty experts are skipped when weights are found": (36, _of_listed(_ranks)),
    "an expert takes twice its share of tokens, no more": (35, _of_listed(_beyond(lambda n, E: max(1, 2 * n // E)))),
    "an expert takes 16 tokens, no more": (35, _of_listed(_beyond(lambda n, E: 16))),
    "pairs behind the last 16 are dropped": (26, _of_listed(_last_pairs)),
    "the last expert of a list is skipped": (26, _of_listed(_last_listed)),
    "weights of the expert before": (53, _of_listed(lambda i, r, E: ((i - 1) % E, r))),
    "routing weights in the order of expert numbers": (38, _of_listed(lambda i, r, E: (i.sort(1).values, r))),
}
ROUTING = {
    "routing weights are ignored": (38, replaced(2, torch.ones_like)),
    "routing weights multiply twice": (38, _routed(after=lambda size: size)),
    "routing weights are normalised again": (38, replaced(2, lambda r: r / r.sum(1, keepdim=True))),
    "routing weights multiply before the activation": (
        38,
        _routed(lambda gate, up, limit, size: clamped(gate * size, up * size, limit)),
    ),
    "routing weights multiply up before its clamp": (
        38,
        _routed(lambda gate, up, limit, size: clamped(gate, up * size, limit)),
    ),
}


EXPERT_FAULTS = (
    SCALES
    | {name: NIBBLES[name] for name in ("the high nibble first", "0.5 of E2M1 counts as zero")}
    | {name: (entry, _routed(activation)) for name, (entry, activation) in ACTIVATIONS.items()}
    | {"gate and up rows in turn": (53, _routed(_interleaved))}
    | LISTS
    | ROUTING
    | {
        "activations are not rounded to FP8": (95, replaced(6, lambda simulate: False)),
        "inputs of w2 are not rounded to FP8": (95, _routed(inner=False)),
        "inputs of the token before": (73, replaced(0, lambda x: x.roll(1, 0))),
    }
)
SHARED_FAULTS = (
    {name: NIBBLES[name] for name in ("the high nibble first", "0.5 of E2M1 counts as zero")}
    | {name: (entry, _shared(activation)) for name, (entry, activation) in ACTIVATIONS.items()}
    | {
        "activations are not rounded to FP8": (95, replaced(5, lambda simulate: False)),
        "inputs of w2 are not rounded to FP8": (95, _shared(clamped, inner=False)),
        "scales of the block of columns before": SCALES["scales of the block of columns before"],
        "inputs of the token before": (73, replaced(0, lambda x: x.roll(1, 0))),
    }
)
PLANTS = (
    *gates("experts", EXPERT_FAULTS),
    *common("experts"),
    Plant("experts without tokens are computed and weighted with 0", "experts", "poison", 21, _all_experts),
    Plant("lists are sorted in place", "experts", "inputs", 65, _sorted_in_place),
    Plant("lists of the first call in a graph", "experts", "capture", 78, _lists_of_the_first_call, "cuda"),
    *gates("shared_expert", SHARED_FAULTS),
    *common("shared_expert"),
)
