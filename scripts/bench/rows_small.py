"""mHC boundaries, heads, what lies between maps and attention, and pooling at V4-Flash's shapes."""

from collections.abc import Iterator
from functools import partial

import torch

from dsv4.kernels.contracts import contract_of
from dsv4.kernels.fusions import compositions, triton_compress, triton_heads, triton_step_inputs
from dsv4.kernels.fusions import entries_contract as entries
from dsv4.kernels.fusions.compositions import IndexHeads, Latents, Windows
from dsv4.kernels.hyper_connections import triton as mhc
from dsv4.kernels.widths import FLASH
from dsv4.probes.kernel_audit.subject import reference_of
from scripts.bench.inputs import REFERENCE, beside_definition, difference, normal
from scripts.bench.row import Row

D, STREAMS, EPS = FLASH.hidden_size, FLASH.hc_mult, FLASH.rms_norm_eps
HEADS, HEAD, ROPE, INDEX = FLASH.num_attention_heads, FLASH.head_dim, FLASH.qk_rope_head_dim, FLASH.index_head_dim
PRODUCTS = 2 * STREAMS + STREAMS * STREAMS
# name, ratio, pieces, width, simulation
COMPRESSORS = tuple(
    (n, ratio, entries.OVERLAP[ratio], *rest) for n, (ratio, *rest) in entries.compressors(FLASH).items()
)
FN_BYTES = 4 * PRODUCTS * STREAMS * D
EXACT, SIMULATED = 2e-3, 1e-2  # relative errors: flips of bf16 at ties, and of the grid's values after them
MIX = 2 * PRODUCTS * STREAMS * D
# operation: ours, bytes of a token, other bytes, products of a token, tolerance
ROWS = {
    "mhc_post_pre_norm": (mhc.mhc_post_pre_norm, (2 * STREAMS + 2) * D * 2, FN_BYTES, MIX, EXACT),
    "mhc_pre_norm": (mhc.mhc_pre_norm, (STREAMS + 1) * D * 2, FN_BYTES, MIX, EXACT),
    "mhc_post": (mhc.mhc_post, (2 * STREAMS + 1) * D * 2, 0, 2 * STREAMS * (STREAMS + 1) * D, EXACT),
    "query_heads": (triton_heads.query_heads, HEADS * HEAD * 4, 0, 0, EXACT),
    "latent": (triton_heads.latent, HEAD * 4, 0, 0, SIMULATED),
    "index_queries": (triton_heads.index_queries, FLASH.index_n_heads * INDEX * 4, 0, 0, SIMULATED),
}
GOALS = {("mhc_post_pre_norm", 1): 6.0, ("mhc_post_pre_norm", 8): 6.0, ("mhc_post_pre_norm", 4096): 150.0}


def rows(device: str) -> Iterator[Row]:
    for op, (ours, each, more, products, tolerance) in ROWS.items():
        contract, definition = contract_of(op), reference_of(op)
        scratch = any(argument.scratch for argument in contract.arguments)
        for sizes in contract.production.sizes(FLASH)["bench"]:
            T = sizes["tokens"]
            make = beside_definition(contract.production, sizes, ours, definition, tolerance, device, scratch)
            yield Row(op, f"T{T}", make, T * each + more, T * products, GOALS.get((op, T)), facts={"tokens": T})
    for batch in (1, 8):
        yield from attention_inputs(device, batch)
    yield from prefill_entries(device)


def compared(run, definition, tolerance: float):
    """check(): the largest error of any result against the definition's."""

    def check():
        got, want = run(), definition()
        pairs = zip(got, want) if isinstance(got, tuple) else ((got, want),)
        return max(difference(g, w) for g, w in pairs), tolerance

    return check


# Between a layer's linear maps and its attention ----------------------------------------------------------------------


def rotation(device: str, i: int, tokens: int) -> torch.Tensor:
    angle = normal(9 * i + 8, tokens, ROPE // 2, dtype=torch.float32, device=device) * 3
    return torch.complex(angle.cos(), angle.sin())


def windows(
    device: str, i: int, batch: int, ratio: int, overlap: int, width: int, simulate: str, complete: bool
) -> Windows:
    """One token of each row, and the window that ends there, if one does."""
    S, fp32 = overlap * ratio, partial(normal, dtype=torch.float32, device=device)
    rows = torch.arange(batch * S, device=device).view(batch, S)
    phase = torch.full((batch,), ratio - 1 if complete else 0, device=device)
    return Windows(
        fp32(11 * i + 1, batch, 2 * overlap * width),
        fp32(11 * i + 2, ratio, overlap * width),
        phase,
        fp32(11 * i, batch * S, 2 * overlap * width),
        rows[:, -1].contiguous(),
        rows if complete else torch.full_like(rows, -1),
        torch.full((batch,), complete, device=device),
        overlap,
        normal(11 * i + 3, width, device=device),
        rotation(device, i, batch),
        simulate,
        normal(11 * i + 4, batch, width, device=device),
        torch.arange(batch, device=device),
    )


def inputs(device: str, i: int, batch: int, compressors: tuple, indexed: bool, complete: bool) -> tuple:
    """Arguments of `attention_inputs`, of one token a row; caches in bf16."""
    make, each = partial(normal, device=device), torch.arange(batch, device=device)
    latents = Latents(
        make(9 * i + 1, batch, HEAD), make(9 * i + 2, HEAD), True, make(9 * i + 3, 129 * batch, HEAD), each * 129
    )
    asked = (
        IndexHeads(make(9 * i + 4, batch, HEADS, INDEX), make(9 * i + 5, batch, HEADS), 0.011, True)
        if indexed
        else None
    )
    parts = tuple(windows(device, 3 * i + j, batch, *c, complete) for j, c in enumerate(compressors))
    return batch, make(9 * i, batch, HEADS, HEAD), rotation(device, i, batch), EPS, latents, asked, parts


def copied(value):
    """Tensors in tuples, each one anew."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return type(value)(*map(copied, value)) if hasattr(value, "_fields") else tuple(map(copied, value))
    return value


def attention_inputs(device: str, batch: int) -> Iterator[Row]:
    """Steps that complete a window (every fourth of CSA, one of 128 of HCA) and those that do not. The goal is that of
    a compressor's step, which is a part of them."""
    of = {"window": (), "CSA": COMPRESSORS[:2], "HCA": COMPRESSORS[2:]}
    for kind, compressors in of.items():
        for complete in (True, False) if compressors else (False,):
            indexed = kind == "CSA"
            size = batch * (4 * HEADS * HEAD + 4 * HEAD + indexed * HEADS * (4 * INDEX + 6))
            for _, ratio, overlap, width, _ in compressors:
                size += batch * (
                    overlap * ratio * 8 * width * complete + 2 * overlap * width * 12 + 2 * width * complete
                )

            def make(i: int, compressors=compressors, indexed=indexed, complete=complete):
                args = inputs(device, i, batch, tuple(c[1:] for c in compressors), indexed, complete)
                # overwrites q: a repeat norms and turns it once more
                run = partial(triton_step_inputs.attention_inputs, *args)

                def check():
                    fresh = inputs(device, i, batch, tuple(c[1:] for c in compressors), indexed, complete)
                    ours, theirs = copied(fresh), copied(fresh)
                    got = triton_step_inputs.attention_inputs(*ours)
                    want = compositions.attention_inputs(REFERENCE, *theirs)
                    for w in () if complete else (*ours[-1], *theirs[-1]):
                        w.entries.fill_(1)  # of windows that are not complete: left alone, or anything
                    return compared(lambda: got, lambda: want, SIMULATED)()

                return run, check

            shape = f"{kind} B{batch}" + (", none complete" if compressors and not complete else "")
            yield Row("attention_inputs", shape, make, size, 0, 3.0 if compressors else None, facts={"batch": batch})


def prefill_entries(device: str) -> Iterator[Row]:
    """All entries of a prompt: every window is complete, and rows are read once for each window they are in."""
    production, definition = contract_of("pool_entries").production, reference_of("pool_entries")
    widths = {name: (ratio, overlap, width) for name, ratio, overlap, width, _ in COMPRESSORS}
    for sizes in production.sizes(FLASH)["bench"]:
        name, T, (ratio, overlap, width) = sizes["compressor"], sizes["tokens"], widths[sizes["compressor"]]
        make = beside_definition(production, sizes, triton_compress.pool_entries, definition, SIMULATED, device)
        moved = T * 8 * overlap * width + T // ratio * 2 * width
        yield Row("pool_entries", f"{name} T{T}", make, moved, 0, facts={"tokens": T})
