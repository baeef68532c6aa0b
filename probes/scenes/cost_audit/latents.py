"""Bytes that one step of a DeepSeek-V4 model reads of its cache, counted by what the operations' outputs depend on."""

from collections import Counter

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.probes.oracle import kinds
from dsv4.probes.scenes.cost_audit.mistakes import Mistakes
from dsv4.probes.scenes.cost_audit.watching import Called, Calls, changed, read_rows, row_bytes, spoiled

OPERATIONS = ("sparse_attention", "hca_attention")


def counted(
    config: ModelConfig, watched: Calls, calls: list[Called], scored: list[tuple[int, tuple]], index_scores
) -> dict[str, int]:
    """Part → bytes of all layers; one layer of each kind is examined, and the others count like it. scored: (layer,
    inputs of its indexer's products); index_scores: the operation that makes them."""
    found, known = Counter(), {}
    for call in calls:
        kind = config.layers[call.layer].kind.value
        if kind not in known:
            known[kind] = _attention(watched.real[call.name], call, kind)
        found.update(known[kind])
    for _, given in scored:
        if "index" not in known:
            known["index"] = _index(index_scores, given)
        found.update(known["index"])
    return dict(found)


def _attention(real, call: Called, kind: str) -> dict[str, int]:
    q, window, window_index, entries, more = call.given[:5]
    run = lambda at: lambda pool: real(*changed(call.given, at, pool))
    near = window_index[window_index >= 0].unique()
    parts = {
        "window": read_rows(window, near, run(1)) * row_bytes(window),
        "queries and outputs": q.nbytes + call.out.nbytes,
    }
    if entries is not None:
        far = _seen(entries, more) if call.name == "hca_attention" else more[more >= 0].unique()
        parts[f"{kind} entries"] = read_rows(entries, far, run(3)) * row_bytes(entries)
    return parts


def _seen(entries: torch.Tensor | PackedRows, visible: torch.Tensor) -> torch.Tensor:
    """Numbers of the rows of [B, n, …] that a query sees, over the pages of all rows of the batch where they are
    packed."""
    each = PAGE * entries.data.shape[1] if isinstance(entries, PackedRows) else entries.shape[1]
    return torch.cat([b * each + torch.arange(int(n)) for b, n in enumerate(visible.amax(1).tolist())])


def _index(index_scores, given: tuple) -> dict[str, int]:
    """The number of keys whose change changes a score that is not masked. Scores are written and read."""
    q, _, keys, _ = given
    right, other = index_scores(*given), index_scores(*changed(given, 2, spoiled(keys)))
    live = right > float("-inf")
    read = int((live & (right != other)).sum())  # NaN differs from everything
    return {
        "index keys": read * row_bytes(keys),
        "index queries": q.nbytes,
        "index scores": 2 * int(live.sum()) * right.element_size(),
    }


def mistakes(c: ModelConfig, numerics: Numerics, batch: int, context: int) -> Mistakes:
    """Of the attention of a step at `context` tokens a row."""
    plain = numerics.cache.itemsize
    row, key = (batch * plain * dims for dims in (c.head_dim, c.index_head_dim))
    csa, hca, every = (c.compress_ratios.count(kinds.CSA), c.compress_ratios.count(kinds.HCA), len(c.compress_ratios))
    seen, W, k = context // kinds.CSA, min(c.sliding_window, context), c.index_topk
    sized = lambda size, causes: {cause: n * size for cause, n in causes.items()}
    return {
        "window": sized(
            row,
            {
                "not counted": 0,
                "the whole context": every * context,
                "a window that is not full": every * c.sliding_window,
                "rows as plain numbers": every * W,
            },
        ),
        "csa entries": sized(
            row,
            {
                "not counted": 0,
                "every entry": csa * seen,
                "windows that are not complete": csa * min(k, -(-context // kinds.CSA)),
                "at HCA's ratio": csa * min(k, context // 128),
                "rows as plain numbers": csa * min(k, seen),
            },
        ),
        "hca entries": sized(
            row,
            {
                "not counted": 0,
                "at CSA's ratio": hca * seen,
                "at CSA's ratio, and of them the best": hca * min(k, seen),
                "windows that are not complete": hca * -(-context // 128),
                "rows as plain numbers": hca * (context // 128),
            },
        ),
        "index keys": sized(
            key,
            {
                "not counted": 0,
                "scored where nothing is to be chosen" if seen <= k else "keys as plain numbers": csa * seen,
                "windows that are not complete": csa * -(-context // kinds.CSA),
            },
        ),
    }
