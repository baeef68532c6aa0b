"""Section 1.4: the compressors."""

from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4.cache import streams as sizes
from dsv4.cache.cache import Cache
from dsv4.cache.layer import CompressorCache
from dsv4.cache.rows import Entries, Linear
from dsv4.model.attention import Compressor
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.configuration import effective

SECTION = "1.4", "Compressor"


def pooled(site: Site, change: Callable) -> None:
    """What both compressors pool fp32 [M, D] is change(compressor, step, pooled)."""
    site.unfused("gated_pool")
    real = site.patch(
        Compressor, "pooled", lambda self, pool, rows, step: change(self, step, real(self, pool, rows, step))
    )


def given(site: Site, change: Callable) -> None:
    """The caches of both compressors are given change(cache, step, raw, ape) → (raw, ape)."""
    site.unfused("gated_pool")
    real = site.patch(
        CompressorCache,
        "completed",
        lambda cache, step, raw, ape: real(cache, step, *change(cache, step, raw, ape)),
    )


def slots(site: Site, change: Callable) -> None:
    """The rows int64 [M, S] that a window pools, −1 for none, are change(cache, step, rows)."""
    site.unfused("gated_pool")
    real = site.patch(CompressorCache, "_window_rows", lambda cache, step: change(cache, step, real(cache, step)))


PARTS = ("compressed entries", "compressor", "indexer keys")


@mutation("1.4", bugs=(49,), parts=PARTS, probes=("rope",))
def rows_of_nan_in_the_pool(site: Site) -> None:
    """The path without known lengths leaves the pool's first entry NaN."""

    def change(compressor, step, found):
        known = min(step.starts) >= compressor.ratio
        return found if known else found.index_fill(0, torch.tensor([0], device=found.device), torch.nan)

    pooled(site, change)


@mutation("1.4", bugs=(49,), parts=PARTS, probes=("rope",))
def rows_of_zeros_in_the_pool(site: Site) -> None:
    """Entries of a step's first window are zeros."""

    pooled(site, lambda compressor, step, found: found.index_fill(0, torch.tensor([0], device=found.device), 0))


@mutation("1.4", bugs=(51,), parts=PARTS, probes=("rope",))
def decode_pools_otherwise_than_prefill(site: Site) -> None:
    """A single token completes its window from the window's own tokens alone, without the overlap."""

    def change(cache, step, rows):
        if step.T == 1 and cache.overlap == 2:
            rows[:, : cache.ratio] = -1
        return rows

    slots(site, change)


@mutation("1.4", bugs=(52,), parts=PARTS, probes=("rope",))
def extended_cache_loses_the_window_before(site: Site) -> None:
    """When a cache is extended by several tokens, its first new window has no predecessor."""

    def change(cache, step, rows):
        if step.T > 1 and min(step.starts) > 0 and cache.overlap == 2:
            rows.view(step.B, -1, rows.shape[1])[:, 0, : cache.ratio] = -1
        return rows

    slots(site, change)


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def no_overlap(site: Site) -> None:
    """CSA entries pool the 4 tokens of their own window instead of 8."""

    def change(cache, step, rows):
        rows[:, : (cache.overlap - 1) * cache.ratio] = -1
        return rows

    slots(site, change)


@mutation("1.4", bugs=(54,), parts=("rewinding",), probes=("rollback",))
def rewinding_keeps_whole_windows_only(site: Site) -> None:
    """What is saved for a rollback are whole windows: the raw rows of the unfinished one are gone after a rewind."""

    def rewind(cache, n):
        real(cache, n)
        for layer in cache.layers:
            for name, tensor in layer.tensors.items():
                if name.endswith("raw rows"):
                    tensor.zero_()

    real = site.patch(Cache, "rewind", rewind)


@mutation("1.4", bugs=(52, 54), parts=PARTS, probes=("rope",))
def unfinished_window_lost_at_a_cut(site: Site) -> None:
    """A step starts with an empty compressor state: the tokens of the unfinished window before it are not pooled."""

    def change(cache, step, rows):
        cut = step.start.view(-1, 1, 1)
        offset = torch.arange(-(cache.overlap - 1) * cache.ratio, cache.ratio, device=step.device)
        tokens = (step.new_windows(cache.ratio) * cache.ratio).unsqueeze(-1) + offset
        lost = (tokens < cut) & (tokens >= cut - cut % cache.ratio)
        return rows.masked_fill(lost.flatten(0, 1), -1)

    slots(site, change)


@mutation(
    "1.4", bugs=(55,), parts=("selection", "compressed entries", "indexer scores"), probes=("index_oracle", "influence")
)
def no_entry_before_128_tokens(site: Site) -> None:
    """Liveness is counted from the end of a padded cache: no entry is visible to queries before position 128."""
    real = site.patch(Step, "visible", lambda step, ratio: torch.where(step.pos < 128, 0, real(step, ratio)))


@mutation(
    "1.4",
    bugs=(58,),
    parts=("selection", "causality", "indexer scores", "compressed entries"),
    probes=("index_oracle",),
)
def raw_length_for_the_compressed_one(site: Site) -> None:
    """Visible entries are counted in raw tokens: every entry that the step knows is visible to all its queries."""
    site.patch(Step, "visible", lambda step, ratio: step.pos + 1)


@mutation("1.4", bugs=(55, 58), parts=("selection", "indexer scores", "causality"), probes=("index_oracle",))
def last_token_does_not_see_its_window(site: Site) -> None:
    """⌊t / ratio⌋ entries are visible instead of ⌊(t + 1) / ratio⌋: a window's last token does not see its entry."""
    site.patch(Step, "visible", lambda step, ratio: step.pos // ratio)


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def position_bias_ignored(site: Site) -> None:
    """ape is loaded and not added to the gate."""
    given(site, lambda cache, step, raw, ape: (raw, torch.zeros_like(ape)))


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def position_bias_transposed(site: Site) -> None:
    """ape is laid out as [c·D, ratio] and read as [ratio, c·D]."""
    given(site, lambda cache, step, raw, ape: (raw, ape.t().reshape(ape.shape)))


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def position_bias_of_the_next_token(site: Site) -> None:
    """ape is indexed by (position + 1) mod ratio."""
    given(site, lambda cache, step, raw, ape: (raw, ape.roll(-1, 0)))


@mutation("1.4", bugs=(51,), parts=PARTS, probes=("rope",))
def gate_and_kv_exchanged(site: Site) -> None:
    """The stacked projection is split the wrong way round: the gate is pooled by a softmax of the values."""
    given(site, lambda cache, step, raw, ape: (torch.cat(raw.chunk(2, -1)[::-1], -1), ape))


@mutation("1.4", bugs=(51,), parts=PARTS, probes=("rope",))
def pool_softmax_over_channels(site: Site) -> None:
    """The softmax of the gate runs over channels instead of slots."""

    def change(real):
        return lambda kv, gate: (torch.softmax(gate, -1).nan_to_num(0) * kv).sum(1)

    site.kernel("gated_pool", change)


@mutation("1.4", bugs=(51,), parts=PARTS, probes=("rope",))
def mean_pool(site: Site) -> None:
    """Entries are means of their slots: the gate is not used."""
    site.kernel("gated_pool", lambda real: lambda kv, gate: real(kv, torch.where(gate.isinf(), gate, 0)))


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def columns_of_the_two_windows_exchanged(site: Site) -> None:
    """The previous window gives columns [D:] and the own window [:D]."""

    def change(cache, step, rows):
        return rows.roll(cache.ratio, 1) if cache.overlap == 2 else rows

    slots(site, change)


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def missing_predecessor_of_zeros(site: Site) -> None:
    """The first window's missing predecessor counts as four slots of zeros with gate 0 instead of none."""
    site.kernel("gated_pool", lambda real: lambda kv, gate: real(kv, torch.where(gate.isinf(), 0, gate)))


@mutation("1.4", bugs=(51,), parts=PARTS, probes=("rope",))
def entries_not_normed(site: Site) -> None:
    """The norm of the compressor is not applied."""

    def change(subject):
        for block in subject.model.layers:
            if hasattr(block.attn, "compressor"):
                block.attn.compressor.norm.forward = lambda x: x

    site.after_load(change)


@mutation("1.4", bugs=(51,), parts=("indexer keys",), probes=("index_oracle",))
def index_keys_not_normed(site: Site) -> None:
    """The norm of the indexer's compressor is not applied."""

    def change(subject):
        for block in subject.model.layers:
            if hasattr(block.attn, "indexer"):
                block.attn.indexer.compressor.norm.forward = lambda x: x

    site.after_load(change)


@mutation("1.4", bugs=(53,), parts=PARTS, probes=("rope",))
def windows_begin_one_token_late(site: Site) -> None:
    """Windows are cut at 1, 5, 9 …: every entry pools the tokens one later, and its last one not at all."""

    def change(cache, step, rows):
        return torch.cat((rows[:, 1:], rows[:, -1:]), 1)

    slots(site, change)


@mutation("1.4", bugs=(49,), parts=PARTS, probes=("rope",))
def entries_stored_one_slot_late(site: Site) -> None:
    """Entries and index keys are written to the slot after their own."""

    def write(entries, step, values):
        late = Entries(Linear(entries.rows.buffer), entries.ratio)
        late.rows.flat = entries.flat.roll(-1, 0)
        real(late, step, values)
        entries.flat.copy_(late.flat.roll(1, 0))

    real = site.patch(Entries, "write", write)


@mutation("1.4", bugs=(25, 51), parts=PARTS, probes=("rope",))
def pooling_in_bf16(site: Site) -> None:
    """Values and gates are rounded to bf16 before pooling, which belongs in fp32."""
    site.kernel("gated_pool", lambda real: lambda kv, gate: real(kv.bfloat16().float(), gate.bfloat16().float()))


@mutation("1.4", bugs=(61,), parts=("entries", "index keys"), probes=("memory_map",))
def compressed_buffers_of_the_raw_length(site: Site) -> None:
    """Buffers of entries and index keys are sized by raw tokens: `ratio` times what is needed."""

    def layer_streams(config, spec, *rest):
        plan = real(config, spec, *rest)
        wide = lambda s: replace(s, shape=(s.shape[0], s.shape[1] * spec.ratio, s.shape[2]))
        return replace(plan, streams=tuple(wide(s) if s.name in ("entries", "index keys") else s for s in plan.streams))

    real = site.patch(sizes, "layer_streams", layer_streams)


@mutation("1.4", bugs=(59,), parts=("raw rows",), probes=("memory_map",))
def compressor_state_of_one_window(site: Site) -> None:
    """The state of an overlapping compressor has room for one window beside what may be rewound, not two."""

    def layer_streams(config, spec, *rest):
        plan = real(config, spec, *rest)
        short = lambda s: replace(s, shape=(s.shape[0], s.shape[1] - spec.ratio, s.shape[2]))
        streams = tuple(short(s) if s.name.endswith("raw rows") else s for s in plan.streams)
        return replace(plan, streams=streams) if spec.overlap > 1 else plan

    real = site.patch(sizes, "layer_streams", layer_streams)


@mutation("1.4", bugs=(58,), parts=("layer kind", "compressor", "compress_ratio"), probes=("config_ledger",))
def ratio_zero_taken_for_one(site: Site) -> None:
    """A ratio of 0, window only, is clamped to the smallest that a kernel knows: the layer asks for a compressor."""
    effective(site, compress_ratios=lambda stated: tuple(ratio or 4 for ratio in stated))
