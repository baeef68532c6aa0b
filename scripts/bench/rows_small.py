"""mHC boundaries, heads, what lies between maps and attention, and pooling at V4-Flash's shapes."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch

from dsv4.kernels.fusions import compositions, triton_compress, triton_heads, triton_step_inputs
from dsv4.kernels.fusions.compositions import IndexHeads, Latents, Windows
from dsv4.kernels.hyper_connections import triton as mhc
from scripts.bench.inputs import REFERENCE, difference, generator, normal
from scripts.bench.row import Row

D, STREAMS, ITERS, EPS = 4096, 4, 20, 1e-6
HEADS, HEAD, ROPE, INDEX = 64, 512, 64, 128
PRODUCTS = 2 * STREAMS + STREAMS * STREAMS
# Name, ratio, pieces, width, simulation.
COMPRESSORS = (("CSA", 4, 2, HEAD, "kv"), ("CSA index", 4, 2, INDEX, "key"), ("HCA", 128, 1, HEAD, "kv"))
FN_BYTES = 4 * PRODUCTS * STREAMS * D
EXACT, SIMULATED = 2e-3, 1e-2  # relative errors: flips of bf16 at ties, and of the grid's values after them


def rows(device: str) -> Iterator[Row]:
    for tokens, goal in ((1, 6.0), (8, 6.0), (64, None), (4096, 150.0)):
        yield boundary(device, tokens, goal)
    for tokens in (1, 4096):
        yield before(device, tokens)
        yield after(device, tokens)
    for tokens in (1, 8, 4096):
        yield from heads(device, tokens)
    for batch in (1, 8):
        yield from attention_inputs(device, batch)
    yield from prefill_entries(device, 4096)


def compared(run, definition, tolerance: float):
    """check(): the largest error of any result against the definition's."""

    def check():
        got, want = run(), definition()
        pairs = zip(got, want) if isinstance(got, tuple) else ((got, want),)
        return max(difference(g, w) for g, w in pairs), tolerance

    return check


# mHC ------------------------------------------------------------------------------------------------------------------


def streams(device: str, tokens: int, i: int) -> SimpleNamespace:
    fp32 = partial(normal, dtype=torch.float32, device=device)
    make, g = partial(normal, device=device), generator(device, 7 * i)
    post = 2 * torch.rand(tokens, STREAMS, device=device, generator=g)
    comb = torch.softmax(fp32(7 * i + 1, tokens, STREAMS, STREAMS), 1)
    return SimpleNamespace(
        mixing=(make(7 * i + 2, tokens, D), make(7 * i + 3, tokens, STREAMS, D), post, comb),
        weights=(
            fp32(7 * i + 4, PRODUCTS, STREAMS * D) * 0.02,
            torch.ones(3, device=device),
            fp32(7 * i + 5, PRODUCTS),
            ITERS,
            EPS,
            EPS,
        ),
        norm=(make(7 * i + 6, D), EPS),
    )


def boundary(device: str, tokens: int, goal: float | None) -> Row:
    def make(i: int):
        s = streams(device, tokens, i)
        run = partial(mhc.mhc_post_pre_norm, *s.mixing, *s.weights, *s.norm)
        return run, compared(
            run, partial(compositions.mhc_post_pre_norm, REFERENCE, *s.mixing, *s.weights, *s.norm), EXACT
        )

    size = tokens * (2 * STREAMS + 2) * D * 2 + FN_BYTES
    flops = 2 * tokens * PRODUCTS * STREAMS * D
    return Row("mhc_post_pre_norm", f"T{tokens}", make, size, flops, goal, facts={"tokens": tokens})


def before(device: str, tokens: int) -> Row:
    def make(i: int):
        s = streams(device, tokens, i)
        run = partial(mhc.mhc_pre_norm, s.mixing[1], *s.weights, *s.norm)
        return run, compared(
            run, partial(compositions.mhc_pre_norm, REFERENCE, s.mixing[1], *s.weights, *s.norm), EXACT
        )

    size = tokens * (STREAMS + 1) * D * 2 + FN_BYTES
    return Row("mhc_pre_norm", f"T{tokens}", make, size, 2 * tokens * PRODUCTS * STREAMS * D, facts={"tokens": tokens})


def after(device: str, tokens: int) -> Row:
    def make(i: int):
        s = streams(device, tokens, i)
        run = partial(mhc.mhc_post, *s.mixing)
        return run, compared(run, partial(REFERENCE.mhc_post, *s.mixing), EXACT)

    return Row(
        "mhc_post",
        f"T{tokens}",
        make,
        tokens * (2 * STREAMS + 1) * D * 2,
        2 * tokens * STREAMS * (STREAMS + 1) * D,
        facts={"tokens": tokens},
    )


# Heads ----------------------------------------------------------------------------------------------------------------


def rotation(device: str, i: int, tokens: int) -> torch.Tensor:
    angle = normal(9 * i + 8, tokens, ROPE // 2, dtype=torch.float32, device=device) * 3
    return torch.complex(angle.cos(), angle.sin())


def heads(device: str, tokens: int) -> Iterator[Row]:
    def queries(i: int):
        q, cis = normal(9 * i, tokens, HEADS, HEAD, device=device), rotation(device, i, tokens)
        run = partial(triton_heads.query_heads, q, cis, EPS)  # overwrites q: a repeat norms and turns it once more

        def check():
            fresh = q.clone()
            return compared(
                partial(triton_heads.query_heads, fresh.clone(), cis, EPS),
                partial(compositions.query_heads, REFERENCE, fresh.clone(), cis, EPS),
                EXACT,
            )()

        return run, check

    def latents(i: int):
        kv, weight = normal(9 * i + 1, tokens, HEAD, device=device), normal(9 * i + 2, HEAD, device=device)
        args = kv, weight, EPS, rotation(device, i, tokens), True
        run = partial(triton_heads.latent, *args)
        return run, compared(run, partial(compositions.latent, REFERENCE, *args), SIMULATED)

    def index(i: int):
        q, cis = normal(9 * i + 3, tokens, HEADS, INDEX, device=device), rotation(device, i, tokens)
        run = partial(triton_heads.index_queries, q, cis, True)

        def check():
            fresh = normal(9 * i + 3, tokens, HEADS, INDEX, device=device)
            return compared(
                partial(triton_heads.index_queries, fresh.clone(), cis, True),
                partial(compositions.index_queries, REFERENCE, fresh.clone(), cis, True),
                SIMULATED,
            )()

        return run, check

    yield Row("query_heads", f"T{tokens}", queries, tokens * HEADS * HEAD * 4, 0, facts={"tokens": tokens})
    yield Row("latent", f"T{tokens}", latents, tokens * HEAD * 4, 0, facts={"tokens": tokens})
    yield Row("index_queries", f"T{tokens}", index, tokens * HEADS * INDEX * 4, 0, facts={"tokens": tokens})


# Between a layer's linear maps and its attention ----------------------------------------------------------------------


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


def prefill_entries(device: str, tokens: int) -> Iterator[Row]:
    """All entries of a prompt: every window is complete, and rows are read once for each window they are in."""
    for name, ratio, overlap, width, simulate in COMPRESSORS:

        def make(i: int, ratio=ratio, overlap=overlap, width=width, simulate=simulate):
            M, pool = tokens // ratio, normal(11 * i, tokens, 2 * overlap * width, dtype=torch.float32, device=device)
            offsets = torch.arange(-(overlap - 1) * ratio, ratio, device=device)
            slots = (torch.arange(M, device=device).unsqueeze(1) * ratio + offsets).clamp(min=-1)
            weight = normal(11 * i + 3, width, device=device)
            args = slots, overlap, torch.bfloat16, weight, EPS, rotation(device, i, M), simulate
            run = partial(triton_compress.pool_entries, pool, *args)
            return run, compared(run, partial(compositions.pool_entries, REFERENCE, pool, *args), SIMULATED)

        yield Row(
            "pool_entries",
            f"{name} T{tokens}",
            make,
            tokens * 8 * overlap * width + tokens // ratio * 2 * width,
            0,
            facts={"tokens": tokens},
        )
