"""Section 1.14, GQA models: rows of the cache after rewinds, in batches, beyond their end; captured steps."""

import torch

from dsv4.kernels.rope import rotation
from dsv4.model.gqa import cache as caches
from dsv4.model.gqa.cache import GroupedCache, LayerRows
from dsv4.model.gqa.model import GQAModel
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.gqa_attention import attention, rotating


@mutation("1.14", bugs=(), parts=("rewinding",), probes=("rollback",), profile="qwen2")
def rewind_forgets_one_too_few(site: Site) -> None:
    """After a rewind a row stands one position too late: the last rejected token stays."""

    def rewind(cache, n):
        counts = [n] * cache.batch if isinstance(n, int) else n
        real(cache, [max(0, count - 1) for count in counts])

    real = site.patch(GroupedCache, "rewind", rewind)


@mutation("1.14", bugs=(), parts=("rewinding",), probes=("rollback",), profile="llama3")
def rotation_off_by_one_after_a_rewind(site: Site) -> None:
    """Positions of the rotation follow the longest that a row ever was, minus what was forgotten, counted from 1."""

    def rewind(cache, n):
        real(cache, n)
        cache.late = cache.batch * [1]

    real = site.patch(GroupedCache, "rewind", rewind)

    def run(model, step, cache):
        if getattr(cache, "late", None):
            pos = step.pos + 1
            step._cis["main"] = rotation(pos.flatten(), step.frequencies["main"])
        return real_run(model, step, cache)

    real_run = site.patch(GQAModel, "run", run)


@mutation("1.14", bugs=(), parts=("rewinding",), probes=("rollback",), profile="mistral")
def rows_written_once_stay(site: Site) -> None:
    """A slot that holds something is not written again: after a rewind the rejected tokens' rows are read."""

    def change(real, q, k, v, biases, cis, keys, values, start):
        held = [(t, t.clone()) for t in (keys, values)]
        out = real(q, k, v, biases, cis, keys, values, start)
        for now, before in held:
            torch.where((before != 0).any(-1, keepdim=True), before, now, out=now)
        return out

    rotating(site, change)


@mutation("1.14", bugs=(), parts=("keys", "caches"), probes=("decoder",), profile="qwen2")
def rows_beyond_a_block_written_to_the_first(site: Site) -> None:
    """Slots are counted within a block of 128: later tokens overwrite the first ones."""

    def change(real, q, k, v, biases, cis, keys, values, start):
        return real(
            q, k, v, biases, cis, keys, values, torch.where(start + q.shape[0] // len(start) > 128, start % 64, start)
        )

    rotating(site, change)


@mutation("1.14", bugs=(), parts=("batching", "keys"), probes=("isolation",), profile="qwen2")
def rows_of_a_batch_read_the_first_rows(site: Site) -> None:
    """Steps of some rows of a batch use the caches of as many rows from the first on."""
    site.patch(LayerRows, "of", lambda rows, step: (rows.keys[: step.B], rows.values[: step.B]))


@mutation("1.14", bugs=(), parts=("batching",), probes=("isolation",), profile="llama3")
def attention_reads_the_cache_of_row_0(site: Site) -> None:
    """The stride of a batch row is left out of the addresses of keys: every row reads those of the first."""
    attention(site, lambda real, q, keys, values, *rest: real(q, keys[:1].expand_as(keys).contiguous(), values, *rest))


@mutation("1.14", bugs=(), parts=("keys", "cache"), probes=("dtype_ledger",), numerics="native", profile="qwen2")
def keys_held_in_half_precision(site: Site) -> None:
    """Keys and values of a bf16 model are held in fp16, whose range ends at 65504."""
    real = site.patch(caches, "zeros", lambda stream, device: real(stream, device).half())


@mutation("1.14", bugs=(), parts=("keys",), probes=("memory_map",), profile="mistral")
def cache_of_a_block_too_many(site: Site) -> None:
    """Every head gets a block of slots more than its context needs."""
    real = site.patch(caches, "slots", lambda context: real(context) + 128)


@mutation("1.14", bugs=(), parts=("captured step",), probes=("captured",), profile="mistral")
def window_forgotten_in_captured_steps(site: Site) -> None:
    """A captured decode step attends to all tokens; steps that are not captured have the window."""

    def captured(model, step, cache):
        windows = [layer.self_attn.window for layer in model.layers]
        for layer in model.layers:
            layer.self_attn.window = None
        try:
            return real(model, step, cache)
        finally:
            for layer, window in zip(model.layers, windows):
                layer.self_attn.window = window

    real = site.patch(GQAModel, "captured", captured)


@mutation("1.14", bugs=(), parts=("unwritten slots",), probes=("poison",), profile="llama3")
def masked_rows_are_weighed_with_zero(site: Site) -> None:
    """Slots beyond a row's end get weight 0 instead of being left out: whatever was there, NaN too, is multiplied."""

    def change(real, q, keys, values, start, *rest):
        beyond = values.float().sum() * 0
        return real(q, keys, values, start, *rest) + beyond.to(q.dtype)

    attention(site, change)
