"""Bytes of caches in host memory: pinned on the host, and held on the device. The caches are made from these plans."""

from dataclasses import replace

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import staged_blocks
from dsv4.cache.streams import LayerStreams, Stream
from dsv4.errors import CapacityError, InputError
from dsv4.kernels.block_choice import Policy, dense
from dsv4.kernels.cache_rows import PAGE
from dsv4.model.gqa import cache as gqa
from dsv4.model.gqa.config import AttentionKind, GQAConfig
from dsv4.model.gqa.heads import Heads
from dsv4.model.numerics import Numerics


def check_grouped(config: GQAConfig, policy: Policy | None, choice: HostMemory) -> None:
    """Raise InputError if keys and values in host memory make no sense: for a model whose layers all have a sliding
    window, for a policy that keeps single tokens, and for staged blocks with a policy that chooses none."""
    if all(window is not None for window in config.windows):
        raise InputError(
            "a cache in host memory was asked for, and every layer of this model has a sliding window, which stays "
            "on the device: nothing would move; leave out --kv-memory host"
        )
    if (policy or dense()).once:
        raise InputError(
            f"a cache in host memory was asked for with policy {policy.name}, which keeps single tokens; whole blocks "
            "are staged: leave out --kv-memory host, or choose --attention block-bound"
        )
    if (policy or dense()).dense and choice.staged is not None:
        raise InputError(
            f"--staged-blocks {choice.staged} was given, and dense attention chooses no blocks: every layer is "
            "brought whole; add --attention block-bound, or leave it out"
        )


def check_entries(layers: list[LayerStreams]) -> None:
    """Raise InputError for a DeepSeek-V4 model without a CSA layer."""
    if not any(_is_csa(layer) for layer in layers):
        raise InputError(
            "entries in host memory were asked for, and this model has no CSA layer, whose entries those would be: "
            "nothing would move; leave out --kv-memory host"
        )


def grouped_plan(
    config: GQAConfig,
    heads: Heads,
    batch: int,
    max_context: int,
    numerics: Numerics,
    policy: Policy | None = None,
    staged: int | None = None,
) -> list[LayerStreams]:
    """Streams of every layer of a GQA model that `StagedGroupedLayout` has, in addition to `brought_layers`.

    Layers with a sliding window stay on the device. staged: blocks a row and KV head. Raises CapacityError for fewer
    than the policy chooses.
    """
    policy = policy or dense()
    resident = gqa.cache_streams(config, heads, batch, max_context, numerics, policy)
    slots, block, room = staged_blocks(policy, gqa.slots(max_context), staged), policy.block, gqa.slots(max_context)
    shape = (batch, heads.KV, (slots + 1) * block, heads.width)
    formula = (
        f"{batch} rows × {shape[1]} heads × ({slots} + 1) blocks × {block} × {shape[3]} × {numerics.cache.itemsize} B"
    )
    staging = (
        [Stream(f"staged {name}", shape, numerics.cache, formula, place="staging") for name in ("keys", "values")]
        if slots
        else []
    )
    table = [_table(batch * shape[1], f"{batch} rows × {shape[1]} heads", room // block, slots, 16)] if slots else []

    def away(layer: LayerStreams) -> LayerStreams:
        if layer.kind is AttentionKind.SLIDING:
            return layer
        far = [replace(s, place="pinned") if s.name in ("keys", "values") else s for s in layer.streams]
        return replace(layer, streams=(*far, *staging, *table))

    return [away(layer) for layer in resident]


def brought_layers(config: GQAConfig, heads: Heads, batch: int, max_context: int, numerics: Numerics) -> Stream:
    """The two buffers for whole layers, which layers use in turn: for prompts, and for dense attention."""
    count = min(2, sum(window is None for window in config.windows))
    shape = (count, 2, batch, heads.KV, gqa.slots(max_context), heads.width)
    formula = (
        f"{count} layers × (keys, values) × {batch} rows × {shape[3]} heads × ⌈{max_context} / {gqa.BLOCK}⌉ × "
        f"{gqa.BLOCK} × {heads.width} × {numerics.cache.itemsize} B"
    )
    return Stream("whole layers on their way", shape, numerics.cache, formula, place="staging")


def staged_entries(topk: int, asked: int | None = None) -> int:
    """Entries staged a batch row; by default twice what a query chooses. Raises CapacityError for fewer than that."""
    if asked is not None and asked < topk:
        raise CapacityError(f"a query reads {topk} entries at once, and staging has {asked} rows; make at least {topk}")
    return 2 * topk if asked is None else asked


def entries_plan(layers: list[LayerStreams], topk: int, staged: int | None = None) -> list[LayerStreams]:
    """`cache_streams` of a DeepSeek-V4 model with the main entries of CSA layers in host memory: as `StagedLayout` has
    them, in addition to `brought_entries`. Raises CapacityError for fewer staged entries than a query chooses."""
    wanted = staged_entries(topk, staged)

    def away(layer: LayerStreams) -> LayerStreams:
        if not _is_csa(layer):
            return layer
        entries = next(s for s in layer.streams if s.name == "entries")
        batch = entries.shape[0]
        if entries.rows is None:
            slots, held = wanted, entries.shape[1]
            formula = f"{batch} rows × {slots} × {entries.shape[2]} × {entries.dtype.itemsize} B"
            shape = (batch, slots, entries.shape[2])
        else:
            pages = -(-wanted // PAGE)
            slots, held, shape = PAGE * pages, PAGE * entries.shape[1], (batch, pages, entries.shape[2])
            formula = f"{batch} rows × ⌈{wanted} / {PAGE}⌉ pages × {entries.shape[2]} B"
        here = Stream("staged entries", shape, entries.dtype, formula, entries.rows, "staging")
        streams = [replace(s, place="pinned") if s is entries else s for s in layer.streams]
        return replace(layer, streams=(*streams, here, _table(batch, f"{batch} rows", held, slots, 0)))

    return [away(layer) for layer in layers]


def brought_entries(layers: list[LayerStreams]) -> Stream:
    """The buffer for the entries of one whole layer, for prompts."""
    found = [s for layer in layers if _is_csa(layer) for s in layer.streams if s.name == "entries"]
    return replace(
        found[0], name="a layer's entries on their way", formula=f"1 layer × {found[0].formula}", place="staging"
    )


def pinned_bytes(plan) -> int:
    """Bytes of host memory in a plan of either model kind."""
    return sum(s.nbytes for layer in plan for s in layer.streams if s.place == "pinned")


def _is_csa(layer: LayerStreams) -> bool:
    return any(s.name == "index keys" for s in layer.streams)


def _table(groups: int, of: str, items: int, slots: int, more: int) -> Stream:
    """The bytes of a `SlotTable`: 16 a slot, 4 an item, 28 in addition (`more`: of counters of guesses)."""
    each = 16 * slots + 4 * items + 28 + more
    return Stream(
        "slot table",
        (groups * each,),
        torch.uint8,
        f"{of} × ({slots} slots × 16 + {items} items × 4 + {28 + more}) B",
        place="staging",
    )
