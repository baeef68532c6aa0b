"""Compositions in fp64: formulas of their operations one after another, without roundings between them."""

import torch

from dsv4.kernels.contract import doubles
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.hadamard.contract import exact as hadamard
from dsv4.kernels.hyper_connections import exact as mhc
from dsv4.kernels.operations import OPERATIONS
from dsv4.kernels.rms_norm.contract import exact as rms_norm
from dsv4.kernels.rope.contract import exact as rotate

# Definitions of compositions by name, of reference operations: honest kernels that round where operations end.
DEFINED = bind(OPERATIONS, "reference", DispatchLedger(), COMPOSITIONS)

E4M3 = torch.tensor(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1],
    dtype=torch.float64,
)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nearest(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The nearest of ±grid fp64 [n], which begins with 0; a half goes to the even code, beyond the last to the last."""
    size = x.abs().clamp(max=float(grid[-1]))
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    low, high = size - grid[below], grid[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up, grid[above], grid[below]).copysign(x)


def blocks(x: torch.Tensor, block: int, grid: torch.Tensor, floor: float) -> torch.Tensor:
    """x fp64 [..., K] to the grid and back, in blocks of columns of one scale: the least power of two that brings the
    largest number, at least `floor`, into the grid."""
    parts = []
    for part in x.split(block, -1):
        amax = part.abs().amax(-1, keepdim=True).clamp(min=floor)
        mantissa, exponent = torch.frexp(amax / grid[-1])
        scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
        parts.append(nearest(part / scale, grid) * scale)
    return torch.cat(parts, -1)


def fp8(x: torch.Tensor, block: int, keep: int = 0) -> torch.Tensor:
    """E4M3 in blocks of columns, all but the last `keep` of them."""
    coded, kept = x.split((x.shape[-1] - keep, keep), -1)
    return torch.cat((blocks(coded, block, E4M3, 1e-4), kept), -1)


def fp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in blocks of 32 columns."""
    return blocks(x, 32, E2M1, 6 * 2.0**-126)


def query_heads(q, cis, eps: float) -> torch.Tensor:
    return rotate(rms_norm(q, None, eps), cis.unsqueeze(1))


def latent(kv, weight, eps: float, cis, simulate: bool) -> torch.Tensor:
    rows = rotate(rms_norm(kv, weight, eps), cis)
    return fp8(rows, 64, 2 * cis.shape[-1]) if simulate else rows


def index_queries(q, cis, simulate: bool) -> torch.Tensor:
    q = rotate(q, cis.unsqueeze(1))
    return fp4(hadamard(q)) if simulate else q


def store_rows(raw, ape, phase, ring, slots) -> torch.Tensor:
    """The ring after the rows were stored, one after another."""
    ring, w = ring.double().clone(), ape.shape[1]
    for row, at, slot in zip(raw.double(), phase.tolist(), slots.tolist(), strict=True):
        ring[slot, :w], ring[slot, w:] = row[:w], row[w:] + ape[at].double()
    return ring


def pool_entries(pool, slots, overlap: int, dtype, weight, eps: float, cis, simulate) -> torch.Tensor:
    """Entries window by window: of each column Σ p_j · kv_j with p the softmax of that column's gates."""
    D, S = pool.shape[1] // (2 * overlap), slots.shape[1]
    pooled = torch.zeros(len(slots), D, dtype=torch.float64)
    for m, window in enumerate(slots.tolist()):
        places = [(slot, D * (i * overlap // S)) for i, slot in enumerate(window) if slot >= 0]
        if places:
            kv = torch.stack([pool[slot, at : at + D] for slot, at in places]).double()
            gate = torch.stack([pool[slot, overlap * D + at :][:D] for slot, at in places]).double()
            e = (gate - gate.amax(0)).exp()
            pooled[m] = (e * kv).sum(0) / e.sum(0)
    entries = rotate(rms_norm(pooled, weight, eps), cis)
    if simulate == "kv":
        return fp8(entries, 64, 2 * cis.shape[-1])
    return fp4(hadamard(entries)) if simulate == "key" else entries


def project_heads(o, cis, w, groups: int) -> torch.Tensor:
    """Group by group: its heads, side by side, times its rows of the weight."""
    heads = rotate(o, cis.unsqueeze(1)).flatten(1).unflatten(1, (groups, -1))
    rows = doubles(w).view(groups, -1, heads.shape[-1])
    return torch.cat([heads[:, g] @ rows[g].T for g in range(groups)], 1)


def linears(x, norm, eps: float, weights, simulate, dtypes) -> tuple[torch.Tensor, ...]:
    """Products map by map. A norm that is quantised is rounded to x's dtype first: FP8 is made from that."""
    plain = x.double() if norm is None else rms_norm(x, norm, eps)
    coded = fp8(plain.to(x.dtype).double(), 128) if any(simulate) else None
    return tuple((coded if sim else plain) @ doubles(w).T for w, sim in zip(weights, simulate, strict=True))


def mhc_pre_norm(streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps):
    y, post, comb = mhc.mhc_pre(streams, fn, scale, base, iters, eps, norm_eps)
    return rms_norm(y, weight, rms_eps), post, comb


def mhc_post_pre_norm(out, streams, post, comb, *rest):
    new = mhc.mhc_post(out, streams, post, comb)
    return new, *mhc_pre_norm(new, *rest)


def mhc_post_head_norm(out, streams, post, comb, fn, scale, base, eps, norm_eps, weight, rms_eps):
    new = mhc.mhc_post(out, streams, post, comb)
    return new, rms_norm(mhc.mhc_head(new, fn, scale, base, eps, norm_eps), weight, rms_eps)
