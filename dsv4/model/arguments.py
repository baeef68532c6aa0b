"""Checks of what callers pass to models and caches, before anything has run or changed.

Every check raises InputError with one line: what was found, what was expected. `rewind_counts` raises RewindError,
which is an InputError too.
"""

from collections.abc import Sequence
from numbers import Integral

import torch

from dsv4.errors import ContextOverrun, InputError, RewindError, brief


def kind(value: object) -> str:
    """A description of `value` for an error: dtype and shape of a tensor, else its type and the beginning of it."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {brief(' '.join(repr(value).split()))}"


def is_whole(value: object, least: int | None = None) -> bool:
    """Whether `value` is an integer (of Python or numpy; no bool, no tensor), and at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and (least is None or value >= least)


def check_whole(name: str, value: object, least: int) -> int:
    """`value` as an int. Raises InputError unless it is an integer of at least `least`."""
    if not is_whole(value, least):
        raise InputError(f"{name} is {kind(value)}; expected a whole number of at least {least}")
    return int(value)


def check_sizes(**sizes: object) -> list[int]:
    """The sizes of a cache as ints, in the order given: `max_rewind` is at least 0, all others at least 1."""
    return [check_whole(f"{name} of a cache", value, int(name != "max_rewind")) for name, value in sizes.items()]


def check_chunk(chunk: object) -> None:
    """Raises InputError unless chunk, tokens of a row in one step, is None or an integer of at least 1."""
    if chunk is not None and not is_whole(chunk, 1):
        raise InputError(f"chunk is {kind(chunk)}; expected None or a whole number of at least 1 token")


def check_logits(logits: object) -> None:
    """Raises InputError unless logits is 'all', 'last' or 'none'."""
    if not isinstance(logits, str) or logits not in ("all", "last", "none"):
        raise InputError(f"logits is {brief(' '.join(repr(logits).split()))}; expected 'all', 'last' or 'none'")


def check_tokens(name: str, ids: object) -> None:
    """Raises InputError unless ids is a tensor int64 [batch, tokens]."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        raise InputError(f"{name} are {kind(ids)}; expected a tensor int64 [batch, tokens]")


def check_streams(streams: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises InputError unless streams is a tensor of that shape [B, T, *stream_shape] and dtype."""
    if not isinstance(streams, torch.Tensor) or tuple(streams.shape) != shape or streams.dtype != dtype:
        raise InputError(
            f"streams are {kind(streams)}; expected {dtype} {shape}: those of the model before its head, one for each "
            "token of next_ids"
        )


def new_counts(n_new: Sequence[int] | None, ids: torch.Tensor) -> list[int]:
    """New tokens of each row of ids [B, T]. Raises InputError for counts that do not fit it."""
    B, T = ids.shape
    counts = [T] * B if n_new is None else _listed(n_new)
    if counts is None or len(counts) != B or not all(is_whole(n, 0) and n <= T for n in counts):
        raise InputError(
            f"n_new is {brief(counts) if counts is not None else kind(n_new)} for ids {tuple(ids.shape)}; "
            f"expected {B} counts of 0 … {T}"
        )
    return [int(n) for n in counts]


def rewind_counts(n: int | Sequence[int], batch: int) -> list[int]:
    """Tokens that each of `batch` rows is to forget, of one count for all or one each.

    Raises RewindError unless they are integers of at least 0, as many as there are rows.
    """
    if isinstance(n, Integral):
        counts = [n] * batch
    elif (counts := _listed(n)) is None:
        raise RewindError(f"rewind got {kind(n)}; expected a count of tokens, or a list of {batch} of them")
    if len(counts) != batch:
        raise RewindError(f"rewind got {len(counts)} counts for a batch of {batch}")
    for b, count in enumerate(counts):
        if not is_whole(count, 0):
            raise RewindError(f"rewind got {kind(count)} for row {b}; expected a whole number of tokens, at least 0")
    return [int(count) for count in counts]


def _listed(values: object) -> list | None:
    """`values` as a list; None if it is not a list, a tuple or an array of one dimension."""
    if isinstance(values, torch.Tensor) or isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return None
    return list(values) if hasattr(values, "__len__") else None


def check_ids(ids: torch.Tensor, counts: list[int], vocab_size: int) -> None:
    """Raises InputError where one of the first counts[b] ids of row b is outside the vocabulary.

    Ids on a device are not read, because the host would wait for it; the model itself made them.
    """
    if ids.device.type != "cpu" or not any(counts):
        return
    real = ids.flatten() if min(counts) == ids.shape[1] else torch.cat([row[:n] for row, n in zip(ids, counts)])
    values = real.tolist() if real.numel() <= 64 else [int(real.min()), int(real.max())]
    low, high = min(values), max(values)
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}; is this the checkpoint's "
            "own tokenizer?"
        )


def check_room(lengths: list[int], counts: list[int], max_context: int) -> None:
    """Raises ContextOverrun where a row of lengths[b] tokens would get more than max_context by counts[b] new ones."""
    for b, (have, new) in enumerate(zip(lengths, counts)):
        if have + new > max_context:
            raise ContextOverrun(
                f"row {b} holds {have} tokens and would get {new} more, over the cache's max_context of "
                f"{max_context}; ask for a larger --max-context or fewer tokens"
            )


def check_cache(model, cache: object, rows: int | None = None) -> None:
    """Raises InputError unless `cache` has the layers, widths, formats and devices that `model` writes, and as many
    rows as `rows` says.

    model: a `dsv4.model.causal.CausalLM`. Two models of one config and numerics may use each other's caches.
    """
    made = getattr(cache, "made_for", None)
    if made is None:
        raise InputError(f"the cache is {type(cache).__name__}; expected what the model's new_cache gives")
    if made != (wanted := model.cache_form):
        differs = next(name for name, a, b in zip(made._fields, made, wanted) if a != b)
        raise InputError(
            f"the cache was made for another model: its {differs} is {_short(getattr(made, differs))}, and this "
            f"model's is {_short(getattr(wanted, differs))}; make the cache with this model's new_cache"
        )
    if rows is not None and rows != cache.batch:
        raise InputError(f"ids have {rows} rows, the cache {cache.batch}; they must agree")


def _short(value: object) -> str:
    return brief(" ".join(str(value).split()), 60)
