"""What each operation returns, as shapes and dtypes that follow from its arguments: what a user's kernel is held to.

No entry reads a number from a device. The references are the definition, and a test compares this table with them.
"""

from collections.abc import Callable

import torch

Form = tuple[tuple[int, ...], torch.dtype]
FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64


def like(x: torch.Tensor) -> Form:
    return tuple(x.shape), x.dtype


def _first(x, *_) -> Form:
    return like(x)


def _nothing(*_) -> None:
    return None


def _in_fp32(x, *_) -> Form:
    return tuple(x.shape), FP32


def _linear(x, w, *_) -> Form:
    return (*x.shape[:-1], w.out_features), x.dtype


def _grouped_linear(x, w) -> Form:
    return (*x.shape[:2], w.out_features // x.shape[1]), x.dtype


def _gated_pool(kv, gate) -> Form:
    return (kv.shape[0], kv.shape[2]), FP32


def _index_scores(q, weights, keys, visible) -> Form:
    return (*q.shape[:2], keys.shape[1] if isinstance(keys, torch.Tensor) else keys.count), FP32


def _topk_entries(scores, k, *_) -> Form:
    return (*scores.shape[:2], min(k, scores.shape[2])), INT64


def _mhc_head(streams, *_) -> Form:
    return (streams.shape[0], streams.shape[2]), streams.dtype


def _mhc_pre(streams, *_) -> list[Form]:
    N, n, _ = streams.shape
    return [_mhc_head(streams), ((N, n), FP32), ((N, n, n), FP32)]


def _mhc_post(out, streams, *_) -> Form:
    return like(streams)


def _route_scored(x, weight, bias, topk, *_) -> list[Form]:
    return [((len(x), topk), INT64), ((len(x), topk), FP32)]


def _route_hashed(x, weight, tid2eid, *_) -> list[Form]:
    return _route_scored(x, weight, None, tid2eid.shape[1])


def _choose_blocks(q, kv_heads, low, high, mean, start, policy, *_) -> Form:
    return (*q.shape[:2], kv_heads, policy.kept), INT32


def _tiles(q, keys) -> list[Form]:
    """Of attention under a rule to stop: the output, and how many tiles were read."""
    return [like(q), ((*q.shape[:2], keys.shape[1]), INT32)]


def _grouped_attention(q, keys, values, start, window, scale, termination) -> Form | list[Form]:
    return like(q) if termination is None else _tiles(q, keys)


def _gather_attention(q, keys, values, blocks, start, window, scale, block, termination) -> Form | list[Form]:
    return like(q) if termination is None else _tiles(q, keys)


def _chunked_prefill(q, keys, values, start, lengths, chunking, *_) -> list[Form]:
    (B, T), KV = q.shape[:2], keys.shape[1]
    kept = (chunking.chunks(T) + 1, B, KV, chunking.memory)
    return [like(q), (kept, INT32), (kept, FP32), ((B, KV, T), FP32), ((B, KV), INT64)]


def _fetch(table, pools, wanted, *_) -> Form:
    return like(wanted)


def _rotary_rows(q, k, v, biases, cis, keys, *_) -> Form:
    B, D = keys.shape[0], keys.shape[3]
    return (B, q.shape[0] // B, q.shape[1] // D, D), q.dtype


# operation → its form by its arguments, the reference's defaults filled in: (shape, dtype) of the tensor, a list of
# such of several, or None for an operation that returns nothing and writes its arguments
RESULTS: dict[str, Callable] = {
    "choose_blocks": _choose_blocks,
    "chunked_prefill": _chunked_prefill,
    "experts": _in_fp32,
    "fetch": _fetch,
    "gated_pool": _gated_pool,
    "gather_attention": _gather_attention,
    "grouped_attention": _grouped_attention,
    "grouped_linear": _grouped_linear,
    "hadamard": _first,
    "hca_attention": _first,
    "index_scores": _index_scores,
    "linear": _linear,
    "mhc_head": _mhc_head,
    "mhc_post": _mhc_post,
    "mhc_pre": _mhc_pre,
    "rms_norm": _first,
    "rotary_rows": _rotary_rows,
    "rotate": _first,
    "route_hashed": _route_hashed,
    "route_scored": _route_scored,
    "shared_expert": _in_fp32,
    "silu_mul": _first,
    "simulate_fp4_blocks": _first,
    "simulate_fp8_blocks": _first,
    "sparse_attention": _first,
    "summarise_blocks": _nothing,
    "topk_entries": _topk_entries,
    "write_back": _nothing,
    "write_rows": _nothing,
}


def flat(value) -> list:
    """What is returned, as a list: of tensors in tuples, the tensors."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in flat(each)]
    return [value]


def described(value) -> str:
    """A result in an error."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value))})"
    return "None" if value is None else f"a {type(value).__name__}"


def wanted(form: Form | list[Form] | None) -> str:
    """An expected result in an error."""
    if form is None:
        return "nothing, since it writes its arguments"
    if isinstance(form, list):
        return f"({', '.join(map(wanted, form))})"
    shape, dtype = form
    return f"{dtype} {list(shape)}".removeprefix("torch.")


def fits(value, form: Form | list[Form] | None) -> bool:
    """Whether a result has the shapes and dtypes of its form."""
    if form is None:
        return value is None
    if not isinstance(form, list):
        return isinstance(value, torch.Tensor) and value.shape == form[0] and value.dtype is form[1]
    found = flat(value) if isinstance(value, (tuple, list)) else []
    return len(found) == len(form) and all(map(fits, found, form))
