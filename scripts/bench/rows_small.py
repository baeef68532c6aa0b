"""mHC boundaries, heads, what lies between maps and attention, and pooling at V4-Flash's shapes."""

from collections.abc import Iterator
from functools import partial

import torch

from dsv4.kernels.contracts import contract_of, productions
from dsv4.kernels.fusions import compositions, triton_compress, triton_heads, triton_step_inputs
from dsv4.kernels.fusions import entries_contract as entries
from dsv4.kernels.fusions.step_contract import KINDS
from dsv4.kernels.hyper_connections import triton as mhc
from dsv4.kernels.widths import FLASH
from dsv4.probes.kernel_audit.subject import reference_of
from scripts.bench.inputs import REFERENCE, beside_definition, difference
from scripts.bench.row import Row

D, STREAMS = FLASH.hidden_size, FLASH.hc_mult
HEADS, HEAD, INDEX = FLASH.num_attention_heads, FLASH.head_dim, FLASH.index_head_dim
PRODUCTS = 2 * STREAMS + STREAMS * STREAMS
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
    for sizes in productions()["attention_inputs"].sizes(FLASH)["bench"]:
        yield attention_inputs(sizes, device)
    yield from prefill_entries(device)


def compared(run, definition, tolerance: float):
    """check(): the largest error of any result against the definition's."""

    def check():
        got, want = run(), definition()
        pairs = zip(got, want) if isinstance(got, tuple) else ((got, want),)
        return max(difference(g, w) for g, w in pairs), tolerance

    return check


# Between a layer's linear maps and its attention ----------------------------------------------------------------------


def copied(value):
    """Tensors in tuples, each one anew."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return type(value)(*map(copied, value)) if hasattr(value, "_fields") else tuple(map(copied, value))
    return value


def attention_inputs(sizes: dict, device: str) -> Row:
    """A step of a layer of which each row completes a window (every fourth of CSA, one of 128 of HCA) or none. The goal
    is that of a compressor's step, which is a part of them."""
    production, widths = productions()["attention_inputs"], entries.compressors(FLASH)
    kind, batch, complete = (sizes[name] for name in ("kind", "batch", "complete"))
    compressors = [(widths[name][1], entries.OVERLAP[widths[name][0]], widths[name][0]) for name in KINDS[kind]]
    size = batch * (4 * HEADS * HEAD + 4 * HEAD + (kind == "CSA") * FLASH.index_n_heads * (4 * INDEX + 6))
    for width, overlap, ratio in compressors:
        size += batch * (overlap * ratio * 8 * width * complete + 2 * overlap * width * 12 + 2 * width * complete)

    def make(i: int):
        draw = partial(production.drawn, FLASH, i, device, **sizes)
        # overwrites q: a repeat norms and turns it once more
        run = partial(triton_step_inputs.attention_inputs, *draw())

        def check():
            ours, theirs = draw(), draw()
            got = triton_step_inputs.attention_inputs(*ours)
            want = compositions.attention_inputs(REFERENCE, *theirs)
            for w in () if complete else (*ours[-1], *theirs[-1]):
                w.entries.fill_(1)  # of windows that are not complete: left alone, or anything
            return compared(lambda: got, lambda: want, SIMULATED)()

        return run, check

    shape = f"{kind} B{batch}" + (", none complete" if compressors and not complete else "")
    return Row("attention_inputs", shape, make, size, 0, 3.0 if compressors else None, facts={"batch": batch})


def prefill_entries(device: str) -> Iterator[Row]:
    """All entries of a prompt: every window is complete, and rows are read once for each window they are in."""
    production, definition = contract_of("pool_entries").production, reference_of("pool_entries")
    for sizes in production.sizes(FLASH)["bench"]:
        name, T = sizes["compressor"], sizes["tokens"]
        ratio, width, _ = entries.compressors(FLASH)[name]
        overlap = entries.OVERLAP[ratio]
        make = beside_definition(production, sizes, triton_compress.pool_entries, definition, SIMULATED, device)
        moved = T * 8 * overlap * width + T // ratio * 2 * width
        yield Row("pool_entries", f"{name} T{T}", make, moved, 0, facts={"tokens": T})
