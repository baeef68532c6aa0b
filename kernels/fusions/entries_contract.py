"""Contracts of the compressor's compositions, `store_rows` and `pool_entries`, and of `select_entries`."""

import torch

from dsv4.kernels.attention.drawn import unseen
from dsv4.kernels.cache_rows import KEY_FORMATS, PackedRows, RowFormat
from dsv4.kernels.contract import BITS, CODES, SET, Argument, Case, Contract, Output, Production, Work, doubles
from dsv4.kernels.fusions import exact
from dsv4.kernels.fusions.rows_contract import EPS
from dsv4.kernels.indexer.contract import (
    LONGEST,
    RATIO,
    SCORES,
    STEPS_AND_PROMPTS,
    exact_entries,
    exact_scores,
    held_by_fp8,
    kind_of,
    score_inputs,
    score_sizes,
)
from dsv4.kernels.quantize.reference import simulate_fp4_blocks

OVERLAP = {4: 2, 128: 1}  # pieces of a compressor's row, by ratio
GAPS = dict.fromkeys((None, *KEY_FORMATS), 1e-5) | {RowFormat.INDEX_FP8: 2e-4}  # FP8 tensor cores keep 14 bits


# ---- rows into the ring -----------------------------------------------------------------------


def store_cases(w, draw):
    """Both ratios, every phase, into a ring that is not empty; one row, and as many as the ring holds."""
    for ratio, c in OVERLAP.items():
        for family, N in (("random", 7), ("random", 1), ("random", ratio + 5), ("coded", 7), ("sizes", 7)):
            yield _store_case(family, N, ratio, c * w.head_dim, draw)


def _store_case(family, N, ratio, width, draw) -> Case:
    R = ratio + 5
    raw, ape, ring = draw.rand(N, 2 * width), draw.rand(ratio, width), draw.rand(R, 2 * width)
    if family == "coded":
        raw = torch.zeros(N, 2 * width)
        raw[:, :width] = draw.coded(N, width).float()
        ape = (1 + torch.arange(ratio).view(ratio, 1) / 256) * 2.0 ** (torch.arange(width) % 3)
    if family == "sizes":
        raw, ape = raw * 2.0 ** torch.linspace(-20, 20, N).view(N, 1), ape * 1e-3
    phase, slots = draw.shuffled(torch.arange(N) % ratio), draw.shuffled(torch.arange(R))[:N]
    unread = {"ape": torch.ones(ratio, 1, dtype=torch.bool).index_fill(0, phase, False)}
    return Case(f"{N} rows, ratio {ratio}", family, (raw, ape, phase, ring, slots), unread)


def store_work(raw, ape, phase, ring, slots) -> Work:
    """Rows in and out, the bias of each phase once."""
    return Work(8 * raw.numel() + 4 * ape.numel(), raw.numel() // 2, "8·N·2w + 4·ratio·w; one sum a gate")


RAW = ("num_tokens", "raw_dims")
STORE_ROWS = Contract(
    "store_rows",
    "Compressor rows (kv ‖ gate) into their ring, with the position bias of their phase added to the gate.",
    (
        Argument("raw", RAW, "float32", "kv ‖ gate; may be overwritten", scratch=True),
        Argument("ape", ("ratio", "gate_dims"), "float32", "position bias of each phase"),
        Argument("phase", ("num_tokens",), "int64", "position mod ratio"),
        Argument("ring", ("ring_rows", "raw_dims"), "float32", "written at slots; other rows stay as they are"),
        Argument("slots", ("num_tokens",), "int64", "all different"),
    ),
    (Output("ring", ("ring_rows", "raw_dims"), "float32", "one fp32 sum a gate", rule=BITS, argument=3),),
    exact.store_rows,
    {"fp32": exact.DEFINED.store_rows},
    store_cases,
    store_work,
    ("rows of the ring that are not in slots keep their bits",),
)


# ---- windows of rows into entries -------------------------------------------------------------

POOLS = ("random", "sharp", "one column", "integers", "large gates", "sizes", "overlap")


def pool_cases(w, draw):
    """Every family of both ratios, plain and simulated; entries of the main cache and index keys."""
    main, index = (4, w.head_dim, "kv"), (4, w.index_head_dim, "key")
    for ratio, D, form in (main, (128, w.head_dim, "kv"), index):
        for simulate in (None, form):
            for family in POOLS if ratio == 4 else POOLS[:3]:
                yield _pool_case(family, ratio, D, simulate, w, draw)


def _pool_case(family, ratio, D, simulate, w, draw) -> Case:
    """Windows with all slots, the beginning of a text, one slot alone, none, and none of the later half."""
    c = OVERLAP[ratio]
    M, S, R = 5, c * ratio, c * ratio + 40
    slots = 1 + torch.stack([draw.choose(R - 1, 1, S)[0] for _ in range(M)])
    slots[1, : S // 2], slots[2, :-1], slots[3] = -1, -1, -1
    slots[4, torch.arange(S) % 3 == 1] = -1
    kv, gate = draw.rand(R, c, D), draw.rand(R, c, D)
    match family:
        case "sharp":  # a gate of ±20 in single columns: a softmax of the whole row is another
            gate = torch.where(draw.rand(R, c, D) > 1, 20.0, -20.0) + draw.rand(R, c, D)
        case "one column":
            gate, kv = torch.zeros(R, c, D), torch.zeros(R, c, D)
            gate[..., :: max(1, D // 8)] = 3 * draw.rand(R, c, len(range(0, D, max(1, D // 8))))
            kv[..., :: max(1, D // 16)] = draw.rand(R, c, len(range(0, D, max(1, D // 16))))
        case "integers":
            kv, gate = draw.integers(-3, 3, R, c, D).float(), 4 * draw.integers(-2, 2, R, c, D).float()
        case "large gates":  # without the largest subtracted, exp overflows
            gate = 100 + 30 * gate
        case "sizes":
            kv = kv * 2.0 ** (torch.arange(R) % 9 * 2 - 8).view(R, 1, 1)
        case "overlap":  # the pieces of a row are of other signs
            kv = kv.abs() * (1 - 2 * (torch.arange(c) % 2)).view(1, c, 1)
    rows = torch.cat((kv.flatten(1), gate.flatten(1)), 1)
    cis, norm = draw.angles(w.qk_rope_head_dim // 2, M), draw.act(D)
    unread = {"pool": torch.ones(R, 1, dtype=torch.bool).index_fill(0, slots[slots >= 0], False)}
    exempt = {"lower precision": "its result is in FP8 or FP4 itself"} if simulate else {}
    if family == "integers":
        exempt = {"lower precision": "every number is exact in bf16"}
    if draw.dtype is torch.bfloat16 and family != "large gates":
        exempt |= {"lower precision": "a pool in bf16 is as exact as the result"}
    label = ", ".join(filter(None, (f"ratio {ratio}", f"{D} dims", simulate and f"simulated {simulate}")))
    arguments = rows, slots, c, draw.dtype, norm, w.rms_norm_eps, cis, simulate
    kept = w.qk_rope_head_dim if simulate == "kv" else 0
    return Case(label, family, arguments, unread, exempt, {"entries": CODES} if simulate else {}, kept)


def pool_work(pool, slots, overlap, dtype, weight, eps, cis, simulate) -> Work:
    """The pieces of the rows of each window, entries out."""
    D, live = pool.shape[1] // (2 * overlap), int((slots >= 0).sum())
    moved = 8 * live * D + len(slots) * D * weight.element_size() + 8 * (cis.numel() + slots.numel())
    return Work(moved, 4 * live * D, "8·slots·D + M·D·b + 8·(rotations + slots); 4·slots·D")


def pool_inputs(w, draw, compressor, tokens) -> tuple:
    """All windows of a prompt: those of the first entry begin before it."""
    ratio, width, simulate = compressors(w)[compressor]
    M, c = tokens // ratio, OVERLAP[ratio]
    offsets = torch.arange(-(c - 1) * ratio, ratio, device=draw.device)
    slots = (torch.arange(M, device=draw.device).unsqueeze(1) * ratio + offsets).clamp(min=-1)
    pool, cis = draw.rand(tokens, 2 * c * width), draw.angles(w.qk_rope_head_dim // 2, M)
    return pool, slots, c, draw.dtype, draw.act(width), w.rms_norm_eps, cis, simulate


def compressors(w) -> dict[str, tuple[int, int, str]]:
    """Name → (ratio, columns of an entry, format) of a V4 model's compressors."""
    return {"CSA": (4, w.head_dim, "kv"), "CSA index": (4, w.index_head_dim, "key"), "HCA": (128, w.head_dim, "kv")}


POOL_ENTRIES = Contract(
    "pool_entries",
    "Windows of compressor rows into entries: a softmax over the slots of each column's gates, the sum of kv by it, "
    "norm, rotation, and the cache's format if simulated.",
    (
        Argument("pool", ("ring_rows", "row_dims"), "float32", "kv ‖ gate, each of `overlap` pieces of D columns"),
        Argument("slots", ("num_entries", "window"), "int64", "rows of each window, −1 anywhere is absent"),
        Argument("overlap", None, "int64", "2: the first half of slots gives piece 0, the second half piece 1"),
        Argument("dtype", None, "dtype", "of the entries"),
        Argument("weight", ("entry_dims",), "activation", "of the norm"),
        EPS,
        Argument("cis", ("num_entries", "pairs"), "complex64", "rotation of the last 2·pairs columns"),
        Argument("simulate", None, "string", "None, 'kv' (FP8 in blocks of 64) or 'key' (Hadamard, FP4 of 32)"),
    ),
    (
        Output(
            *("entries", ("num_entries", "entry_dims"), "activation", "pooled in fp32"),
            liberty="the pooled row and the norm may be rounded to the activations' dtype",
        ),
    ),
    exact.pool_entries,
    {"rounded-between": exact.DEFINED.pool_entries},
    pool_cases,
    pool_work,
    ("a window without rows gives zeros", "a slot of −1 has no part, whatever row 0 holds", "one row passes unchanged"),
    {"slots": 0, "cis": 0},
    production=Production(pool_inputs, lambda w: {"bench": [dict(compressor=c, tokens=4096) for c in compressors(w)]}),
)


# ---- scores and selection ---------------------------------------------------------------------


def exact_selection(q, weights, keys, visible, k: int, rounded: bool = False) -> torch.Tensor:
    """The k best by fp64 scores."""
    return exact_entries(exact_scores(q, weights, keys, visible), k)


def select_cases(w, draw):
    """Lengths about k and page ends; drafts that each see another number; no two scores about the kth are close."""
    k = w.index_topk
    for form in (None, *(form for form in KEY_FORMATS if form.fits(w.index_head_dim))):
        for family in ("random", "negative weights", "pointed"):
            yield _select_case(family, form, 3, 2, 8 * k, w, draw)
    for T in (1, 3, 8):
        yield _select_case("random", RowFormat.INDEX_FP8, 2, T, 4 * k + 3, w, draw)
    yield _select_case("random", None, 2, 1, k - 1, w, draw)


def _select_case(family, form, B, T, n, w, draw) -> Case:
    H, D, k = w.index_n_heads, w.index_head_dim, w.index_topk
    last = torch.tensor([n, min(n, k // 2), min(n, k + 1)])[:B]
    visible = (last.unsqueeze(1) - torch.arange(T - 1, -1, -1)).clamp(min=0)
    values = draw.rand(B, n, D)
    keys = values.to(draw.dtype) if form is None else draw.packed(form, values)
    held = doubles(keys).float()
    weights = draw.rand(B, T, H) * H**-0.5
    q = draw.rand(B, T, H, D)
    if family == "negative weights":  # most products are positive, and ReLU after the weights keeps little
        weights = torch.where(torch.arange(H) % 4 == 0, 1.0, -1.0) * weights.abs()
    if family == "pointed":  # at the last entry that is visible, and at the first that is not
        weights = weights.abs() + 0.1
        for at in (visible - 1, visible):
            q += held.gather(1, at.clamp(0, n - 1).unsqueeze(-1).expand(-1, -1, D)).unsqueeze(2)
    kept = held_by_fp8 if form is RowFormat.INDEX_FP8 else lambda q: q
    q = kept(q.to(draw.dtype))
    for _ in range(20):  # queries of which fp32 sums could not tell the kth from the next are changed
        q[:, :, 1] = -q[:, :, 0]  # so that no score is 0, and zeros do not tie
        close = _close(exact_scores(q, weights, keys, visible), k, GAPS[form])
        if not close.any():
            break
        q[close] = kept(q[close] + draw.act(int(close.sum()), H, D) / 4)
    kind = kind_of(form)
    exempt = {"lower precision": "the same entries may still be the best"}
    label = f"{B} rows of {T} tokens, {n} entries, {kind}"
    return Case(label, family, (q, weights, keys, visible, k, False), {"keys": unseen(keys, visible.amax(1))}, exempt)


def _close(scores, k: int, gap: float) -> torch.Tensor:
    """bool [B, T]: whether the kth score and the next differ by less than `gap` of the largest."""
    if scores.shape[-1] <= k:
        return torch.zeros(scores.shape[:2], dtype=torch.bool)
    best = scores.topk(k + 1, -1).values
    size = scores.masked_fill(scores.isinf(), 0).abs().amax(-1)
    return (best[..., -2] - best[..., -1] < gap * size) & best[..., -1].isfinite()


def select_work(q, weights, keys, visible, k, rounded) -> Work:
    """As the scores, which need not leave the kernel, and k indices a query."""
    B, T, H, D = q.shape
    row = keys.layout.row if isinstance(keys, PackedRows) else D * keys.element_size()
    seen = int(visible.amax(1).sum()) if visible.numel() else 0
    moved = seen * row + q.numel() * q.element_size() + 4 * weights.numel() + 4 * B * T * k
    return Work(
        moved, int(visible.sum()) * H * (2 * D + 2), "keys·row + q·b + 4·weights + 4·B·T·k; H·(2·D + 2) a score"
    )


def select_inputs(w, draw, k, **sizes) -> tuple:
    """As of the scores; queries of prompts with FP4 keys are rounded as the keys."""
    q, *others = score_inputs(w, draw, **sizes)
    rounded = sizes["keys"] == "fp4" and sizes.get("prompt", False)
    if rounded:  # a part at a time, whose temporary tensors are small
        q = torch.cat([simulate_fp4_blocks(part) for part in q.split(4096, 1)], 1)
    return q, *others, k, rounded


def select_sizes(w) -> dict:
    """Decode steps and prompts with FP4 keys."""
    steps = [sizes for sizes in score_sizes(w)["bench"] if sizes["keys"] == "fp4"]
    prompts = [dict(keys="fp4", entries=T // RATIO, prompt=True) for T in (8192, 131072)]
    long = [each | dict(entries=LONGEST) for each in STEPS_AND_PROMPTS if not each.get("prompt")]
    compiled = [*STEPS_AND_PROMPTS, *long, dict(keys="fp4", entries=400)]
    each = {"bench": steps + prompts, "compiled": compiled}
    return {consumer: [sizes | dict(k=w.index_topk) for sizes in made] for consumer, made in each.items()}


SELECT = Contract(
    "select_entries",
    "The k best entries of each query by index score.",
    (
        *SCORES.arguments,
        Argument("k", None, "int64", "entries to select"),
        Argument("rounded", None, "bool", "queries and plain keys are rounded to FP4 in blocks of 32", hint=True),
    ),
    (
        Output(
            *("entries", ("batch", "tokens", "topk"), "int64", "entry numbers, −1 where there are fewer"),
            rule=SET,
            liberty="any order",
        ),
    ),
    exact_selection,
    {"fp32": exact.DEFINED.select_entries},
    select_cases,
    select_work,
    ("fewer visible entries than k: the rest is −1", "of fewer than k entries in all the result has as many columns"),
    {"q": 0, "weights": 0, "keys": 0, "visible": 0},
    production=Production(select_inputs, select_sizes),
)
CONTRACTS = (STORE_ROWS, POOL_ENTRIES, SELECT)
