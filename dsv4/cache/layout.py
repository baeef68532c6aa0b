"""How the caches of one model lie: the streams that its family declares, how each is addressed, what pages hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsv4.cache.layer import CompressorCache, LayerCache, linked
from dsv4.cache.page_tables import Paged, PageTable, page_groups, paged_streams, stream_groups
from dsv4.cache.paging import PageGroup
from dsv4.cache.rows import Entries, Linear, Ring, Rows, Tokens
from dsv4.cache.streams import LayerStreams, Stream, cache_streams, zeros
from dsv4.kernels.cache_rows import PAGE, PackedRows, write_rows
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerSpec

# part of a layer's cache → the streams of its raw rows and of its entries
COMPRESSED = {"main": ("main raw rows", "entries"), "index": ("index raw rows", "index keys")}


class Layout(ABC):
    """config, numerics, mtp: of the model, and whether its MTP block has a part. backbone: the number of layers of the
    main model, which come before those of the MTP block in plans. positions: the largest that the model knows. groups:
    every group of pages that its layers need, by name. heads: a `dsv4.model.gqa.heads.Heads` where ranks share the
    heads of caches, None where every rank holds all.
    """

    config: Any
    numerics: Numerics
    mtp: bool
    backbone: int
    positions: int
    groups: dict[str, PageGroup]
    heads: Any = None

    @abstractmethod
    def plan(self, batch: int, max_context: int, max_rewind: int) -> list[LayerStreams]:
        """The streams of every layer, allocated at once."""

    @abstractmethod
    def allocate(self, plan: Sequence[LayerStreams], devices: Sequence[torch.device]) -> tuple[list, tuple]:
        """The cache of each layer of the plan, and the buffers that layers share."""

    @abstractmethod
    def paged_plan(self, pages: Mapping[str, int]) -> list[LayerStreams]:
        """The streams of every layer in pages: `pages` pages of each group beside page 0."""

    @abstractmethod
    def paged(self, plan: LayerStreams, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor]) -> Any:
        """The cache of one layer of a `paged_plan`, found through `tables`."""


class LatentLayout(Layout):
    """The caches of a DeepSeek-V4 model. write: the operation that writes rows."""

    def __init__(self, config: ModelConfig, numerics: Numerics, mtp: bool, write=write_rows):
        self.config, self.numerics, self.mtp, self.write = config, numerics, mtp, write
        self.groups = page_groups(config, mtp)
        self.backbone, self.positions = config.num_hidden_layers, config.max_position_embeddings

    def plan(self, batch: int, max_context: int, max_rewind: int) -> list[LayerStreams]:
        return cache_streams(self.config, batch, max_context, max_rewind, self.numerics, self.mtp)

    def allocate(self, plan: Sequence[LayerStreams], devices: Sequence[torch.device]) -> tuple[list, tuple]:
        return linked([self.layer(p, d) for p, d in zip(plan, devices, strict=True)]), ()

    def layer(
        self, plan: LayerStreams, device: torch.device, far: Callable[[Stream], Rows] | None = None
    ) -> LayerCache:
        """One layer: rings for what is needed for a bounded time, linear buffers for entries and index keys. far: makes
        the rows of a stream that the plan has in host memory."""
        tensors: dict[str, torch.Tensor] = {}
        rows: dict[str, Rows] = {}
        reach, raw = plan.spec.overlap * plan.ratio - 1, {names[0] for names in COMPRESSED.values()}
        for s in plan.streams:
            if s.place == "pinned":
                assert far is not None, f"{s.name} lies in host memory, and nothing was given that makes its rows"
                rows[s.name] = far(s)
                tensors |= rows[s.name].tensors
            elif s.place == "cache":
                tensors[s.name] = zeros(s, device)
                held = as_rows(s, tensors[s.name])
                if s.name == "window":
                    rows[s.name] = self.window_rows(plan, held)
                else:
                    rows[s.name] = Ring(held, reach) if s.name in raw else Linear(held, self.write)
        return layer_cache(plan.spec, rows, tensors)

    def window_rows(self, plan: LayerStreams, held: torch.Tensor | PackedRows) -> Ring:
        """The ring of a layer's window."""
        return Ring(held, self.config.sliding_window - 1, plan.window_rows, self.write)

    def paged_plan(self, pages: Mapping[str, int]) -> list[LayerStreams]:
        rows = self.plan(1, 1, 0)  # of one token, for widths and formats
        return [paged_streams(layer, self.groups, pages) for layer in rows]

    def paged(
        self, plan: LayerStreams, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor]
    ) -> LayerCache:
        groups = stream_groups(plan.spec)
        rows = {s.name: Paged(as_rows(s, tensors[s.name]), tables[groups[s.name]], self.write) for s in plan.streams}
        return layer_cache(plan.spec, rows, tensors, groups)


def layer_cache(
    spec: LayerSpec, rows: Mapping[str, Rows], tensors: dict[str, torch.Tensor], groups: dict[str, str] | None = None
) -> LayerCache:
    """One layer whose streams lie in `rows`, by name."""
    made = {
        part: CompressorCache(Tokens(rows[raw]), Entries(rows[entries], spec.ratio), spec.overlap)
        for part, (raw, entries) in COMPRESSED.items()
        if entries in rows
    }
    return LayerCache(spec, Tokens(rows["window"]), made.get("main"), made.get("index"), tensors, groups)


def as_rows(stream: Stream, tensor: torch.Tensor) -> torch.Tensor | PackedRows:
    """The buffer of a stream in its format."""
    if stream.rows is None:
        return tensor
    format, width, rope = stream.rows
    return PackedRows(format, tensor, width, rope, PAGE * stream.shape[-2])
