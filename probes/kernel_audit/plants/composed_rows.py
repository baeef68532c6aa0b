"""Planted faults of compositions that make rows: query heads, latents, index queries, compressor rows and entries."""

import math
from dataclasses import replace
from functools import partial

import torch

from dsv4.kernels.fusions import compositions
from dsv4.kernels.fusions.exact import DEFINED
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.wrappers import common, gates, in_place, replaced


def part(name: str, **operations):
    """honest → composition `name` by its definition, of operations of which some are replaced."""

    class Bound:
        def __getattr__(self, operation):
            return operations.get(operation) or getattr(DEFINED, operation)

    return lambda honest: partial(getattr(compositions, name), Bound())


def halves(x, cis):
    """Columns i and i + pairs are turned instead of 2i and 2i + 1."""
    pairs = cis.shape[-1]
    a, b = x[..., -2 * pairs :].float().chunk(2, -1)
    turned = torch.cat((a * cis.real - b * cis.imag, a * cis.imag + b * cis.real), -1)
    return torch.cat((x[..., : -2 * pairs], turned.to(x.dtype)), -1)


def inverse(x, cis):
    return DEFINED.rotate(x, cis.conj().resolve_conj())


def same(x, *rest):
    """No change."""
    return x


def norm_of_all(x, weight, eps):
    """One mean square for all heads of a token."""
    y = x.float() * (x.float().square().mean((-1, -2), keepdim=True) + eps).rsqrt()
    return y.to(x.dtype)


def without_eps(x, weight, eps):
    return DEFINED.rms_norm(x, weight, 1e-30)


def without_weight(x, weight, eps):
    return DEFINED.rms_norm(x, None, eps)


def half_scale(x, block, keep=0):
    """The scale of a block from the first half of its columns."""
    coded, kept = x[..., : x.shape[-1] - keep].float(), x[..., x.shape[-1] - keep :]
    y = coded.unflatten(-1, (-1, block))
    amax = y[..., : block // 2].abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2((amax / 448).log2().ceil())
    y = ((y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return torch.cat((y.to(x.dtype), kept), -1)


def all_columns(x, block, keep=0):
    return DEFINED.simulate_fp8_blocks(x, block)


def nearest_scale(x, block, keep=0):
    """The scale's exponent is rounded to the nearest, so that large numbers saturate."""
    coded, kept = x[..., : x.shape[-1] - keep].float(), x[..., x.shape[-1] - keep :]
    y = coded.unflatten(-1, (-1, block))
    scale = torch.exp2((y.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().round())
    y = ((y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return torch.cat((y.to(x.dtype), kept), -1)


def truncated_fp4(x, block):
    """Codes are rounded towards zero."""
    y = x.float().unflatten(-1, (-1, block))
    scale = torch.exp2((y.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6).log2().ceil())
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=x.device)
    size = (y / scale).abs()
    code = torch.searchsorted(grid, size, right=True) - 1
    return (grid[code.clamp(max=7)].copysign(y) * scale).flatten(-2).to(x.dtype)


def one_scale_fp4(x, block):
    """One scale for the whole row."""
    return DEFINED.simulate_fp4_blocks(x, x.shape[-1])


def unscaled_hadamard(x):
    return (DEFINED.hadamard(x).float() * x.shape[-1] ** 0.5).to(x.dtype)


def eaten(name: str):
    """`simulate` is ignored."""
    return {
        "latent": replaced(4, lambda simulate: False),
        "index_queries": replaced(2, lambda simulate: False),
        "pool_entries": replaced(7, lambda simulate: None),
    }[name]


def _before(name: str):
    """The rotation comes before the norm."""
    return lambda honest: (
        lambda kv, weight, eps, cis, simulate: _simulated(
            DEFINED.rms_norm(DEFINED.rotate(kv.clone(), cis), weight, eps), cis, simulate
        )
    )


def _simulated(rows, cis, simulate):
    return DEFINED.simulate_fp8_blocks(rows, 64, 2 * cis.shape[-1]) if simulate else rows


HEADS = {
    "one norm for all heads": (53, part("query_heads", rms_norm=norm_of_all)),
    "no norm": (91, part("query_heads", rms_norm=same)),
    "no eps": (89, part("query_heads", rms_norm=without_eps)),
    "pairs of columns i and i + pairs": (91, part("query_heads", rotate=halves)),
    "the other direction": (91, part("query_heads", rotate=inverse)),
    "no rotation": (91, part("query_heads", rotate=same)),
    "the position of the token before": (91, replaced(1, lambda cis: cis.roll(1, 0))),
}
LATENT = {
    "no weight of the norm": (89, part("latent", rms_norm=without_weight)),
    "the rotation before the norm": (91, _before("latent")),
    "no eps": (89, part("latent", rms_norm=without_eps)),
    "pairs of columns i and i + pairs": (91, part("latent", rotate=halves)),
    "the other direction": (91, part("latent", rotate=inverse)),
    "the position of the token before": (91, replaced(3, lambda cis: cis.roll(1, 0))),
    "simulate is ignored": (95, eaten("latent")),
    "FP8 of the rotated columns too": (49, part("latent", simulate_fp8_blocks=all_columns)),
    "scales of half a block": (53, part("latent", simulate_fp8_blocks=half_scale)),
    "scales rounded to the nearest power of two": (96, part("latent", simulate_fp8_blocks=nearest_scale)),
}
INDEX = {
    "no Hadamard transform": (92, part("index_queries", hadamard=same)),
    "the transform without its factor": (92, part("index_queries", hadamard=unscaled_hadamard)),
    "no rotation": (91, part("index_queries", rotate=same)),
    "the other direction": (91, part("index_queries", rotate=inverse)),
    "simulate is ignored": (95, eaten("index_queries")),
    "FP4 codes rounded towards zero": (55, part("index_queries", simulate_fp4_blocks=truncated_fp4)),
    "one FP4 scale for the row": (53, part("index_queries", simulate_fp4_blocks=one_scale_fp4)),
}


def _stored(change):
    """honest → `store_rows` with change(raw, ape, phase) → what is stored."""

    def make(honest):
        def faulty(raw, ape, phase, ring, slots):
            ring.index_copy_(0, slots, change(raw.clone(), ape, phase))

        return faulty

    return make


def _biased(raw, bias):
    raw[:, bias.shape[1] :] += bias
    return raw


def _on_kv(raw, ape, phase):
    raw[:, : ape.shape[1]] += ape[phase]
    return raw


def _row_before_touched(honest):
    """The row before each slot is cleared, where no other token stores it."""

    def faulty(raw, ape, phase, ring, slots):
        ring[(slots - 1) % len(ring)] = 0
        honest(raw, ape, phase, ring, slots)

    return faulty


STORE = {
    "no position bias": (87, _stored(lambda raw, ape, phase: raw)),
    "the bias of the phase before": (87, _stored(lambda raw, ape, phase: _biased(raw, ape[(phase - 1) % len(ape)]))),
    "the bias in bf16": (87, _stored(lambda raw, ape, phase: _biased(raw, ape[phase].bfloat16().float()))),
    "the bias is added to kv": (87, _stored(_on_kv)),
    "kv and gate are swapped": (86, _stored(lambda raw, ape, phase: _biased(raw, ape[phase]).roll(ape.shape[1], 1))),
    "rows one slot further": (94, replaced(4, lambda slots: (slots + 1) % (slots.max() + 1))),
    "the row before is cleared": (94, _row_before_touched),
}


def _pool(gates_of=lambda kv, gate, absent: gate, mask=-math.inf, pieces=None):
    """honest → `pool_entries` with the softmax changed: gates_of(kv, gate, absent), the mask, the pieces of slots."""

    def make(honest):
        def faulty(pool, slots, overlap, dtype, weight, eps, cis, simulate):
            (M, S), D = slots.shape, pool.shape[1] // (2 * overlap)
            absent = (slots < 0).unsqueeze(-1)
            piece = torch.arange(S, device=pool.device) // (S // overlap)
            piece = pieces(piece, overlap) if pieces else piece
            rows = slots.clamp(min=0) * (2 * overlap) + piece
            kv, gate = pool.view(-1, D)[rows], pool.view(-1, D)[rows + overlap]
            gate = gates_of(kv, gate, absent).masked_fill(absent, mask)
            pooled = (torch.softmax(gate, 1) * kv.masked_fill(absent, 0)).sum(1).masked_fill(absent.all(1), 0)
            entries = DEFINED.rotate(DEFINED.rms_norm(pooled.to(dtype), weight, eps), cis)
            if simulate == "kv":
                return DEFINED.simulate_fp8_blocks(entries, 64, 2 * cis.shape[-1])
            return DEFINED.simulate_fp4_blocks(DEFINED.hadamard(entries), 32) if simulate else entries

        return faulty

    return make


def _present(slots):
    return slots.clamp(min=0)


def _later_half(honest):
    """Of two overlapping windows only the newer one."""

    def faulty(pool, slots, overlap, *rest):
        first = torch.arange(slots.shape[1], device=slots.device) < slots.shape[1] // 2
        return honest(pool, torch.where(first, -1, slots) if overlap == 2 else slots, overlap, *rest)

    return faulty


def _until_hole(slots):
    return torch.where((slots < 0).cumsum(1) > 0, -1, slots)


def _no_zeros(honest):
    """A window without rows gives row 0."""

    def faulty(pool, slots, *rest):
        empty = (slots < 0).all(1, keepdim=True)
        return honest(pool, torch.where(empty, 0, slots), *rest)

    return faulty


POOL = {
    "a softmax of each row's mean gate": (87, _pool(lambda kv, gate, absent: gate.mean(-1, keepdim=True))),
    "a plain mean of the rows": (87, _pool(lambda kv, gate, absent: 0 * gate)),
    "gates in log2 units": (87, _pool(lambda kv, gate, absent: gate * math.log(2))),
    "gates in bf16": (14, _pool(lambda kv, gate, absent: gate.bfloat16().float())),
    "absent slots have the gate 0": (22, _pool(mask=0.0)),
    "a slot of −1 is row 0": (23, replaced(1, _present)),
    "the window ends at its first −1": (24, replaced(1, _until_hole)),
    "a window without rows gives row 0": (25, _no_zeros),
    "the pieces of an overlap are swapped": (86, _pool(pieces=lambda piece, overlap: overlap - 1 - piece)),
    "piece 0 of every slot": (86, _pool(pieces=lambda piece, overlap: 0 * piece)),
    "the older half of an overlap is left out": (86, _later_half),
    "the last slot is skipped": (26, replaced(1, lambda s: torch.cat((s[:, :-1], torch.full_like(s[:, -1:], -1)), 1))),
    "the weight of the norm is left out": (89, part("pool_entries", rms_norm=without_weight)),
    "the position of the entry before": (91, replaced(6, lambda cis: cis.roll(1, 0))),
    "simulate is ignored": (95, eaten("pool_entries")),
    "scales rounded to the nearest power of two": (96, part("pool_entries", simulate_fp8_blocks=nearest_scale)),
    "no Hadamard transform": (92, part("pool_entries", hadamard=same)),
}


def _leak(honest):
    """Rows that no window names are read and multiplied by 0: 0 · NaN is NaN."""

    def faulty(pool, slots, *rest):
        unread = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
        unread[slots[slots >= 0]] = False
        return honest(pool, slots, *rest) + (0 * pool[unread].sum()).to(rest[1])

    return faulty


PLANTS = (
    *gates("query_heads", HEADS),
    *common("query_heads", kept=1),
    *gates("latent", LATENT),
    *common("latent"),
    *gates("index_queries", INDEX),
    *common("index_queries", kept=1),
    *gates("store_rows", STORE),
    *in_place("store_rows", (3,), lower=1),
    *gates("pool_entries", POOL),
    # its first argument is the ring of all rows, whose unlisted ones only poison makes visible
    *(replace(p, clause="poison") if p.clause == "batch" else p for p in common("pool_entries")),
    Plant("rows of no window are multiplied by 0", "pool_entries", "poison", 21, _leak),
)
