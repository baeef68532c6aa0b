"""How the caches of a GQA model lie: at once, in pages, or with keys and values in host memory."""

from collections.abc import Callable, Mapping, Sequence

import torch

from dsv4.cache.host_tier.ahead import Ahead
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import HostRows
from dsv4.cache.host_tier.layer import HostLayer
from dsv4.cache.host_tier.memory import PinnedMemoryError, check_limit
from dsv4.cache.host_tier.planning import check_grouped, grouped_plan, pinned_bytes
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.cache.layout import Layout
from dsv4.cache.page_tables import PageTable
from dsv4.cache.paging import PageGroup
from dsv4.cache.streams import LayerStreams, Stream
from dsv4.kernels.block_choice import Observed, Policy, dense
from dsv4.model.gqa.cache import BLOCK, LayerRows, cache_streams
from dsv4.model.gqa.config import AttentionKind, GQAConfig
from dsv4.model.gqa.heads import Heads
from dsv4.model.gqa.paged import GROUPS, PagedRows
from dsv4.model.gqa.selection import Selection
from dsv4.model.numerics import Numerics


class GroupedLayout(Layout):
    """heads: of this rank; policy: its summaries are kept beside the keys, if it searches; summarise: the operation
    that writes them.

    Layers that attend to everything share one group of pages. Those with a window share another, which frees the pages
    before the window.
    """

    mtp = False

    def __init__(self, config: GQAConfig, heads: Heads, numerics: Numerics, policy: Policy | None, summarise: Callable):
        self.config, self.heads, self.numerics, self.policy, self.summarise = config, heads, numerics, policy, summarise
        self.backbone, self.positions = config.num_hidden_layers, config.max_position_embeddings
        self.searched = policy if policy is not None and (policy.selector is not None or policy.once) else None
        windows = set(config.windows) - {None}
        groups = [PageGroup(GROUPS[AttentionKind.FULL], BLOCK)] if None in config.windows else []
        groups += [PageGroup(GROUPS[AttentionKind.SLIDING], BLOCK, back=max(windows) - 1)] if windows else []
        self.groups = {group.name: group for group in groups}

    @property
    def block(self) -> int:
        """Tokens of a block that has a summary."""
        return self.searched.block if self.searched else BLOCK

    def of_policy(self, policy: Policy) -> "GroupedLayout":
        """This layout for another policy."""
        return GroupedLayout(self.config, self.heads, self.numerics, policy, self.summarise)

    def plan(self, batch: int, max_context: int, max_rewind: int) -> list[LayerStreams]:
        return cache_streams(self.config, self.heads, batch, max_context, self.numerics, self.searched)

    def allocate(self, plan: Sequence[LayerStreams], devices: Sequence[torch.device]) -> tuple[list, tuple]:
        layers = [LayerRows(p, d, self.block) for p, d in zip(plan, devices, strict=True)]
        self.select(layers)
        return layers, ()

    def select(self, layers: Sequence[LayerRows]) -> None:
        """Give the layers without a window a `Selection` if the policy chooses once, none otherwise."""
        full = [layer for layer, window in zip(layers, self.config.windows, strict=True) if window is None]
        for i, layer in enumerate(full):
            layer.selection = (
                Selection(layer.tensors, self.policy, i, len(full)) if isinstance(self.policy, Observed) else None
            )

    def paged_plan(self, pages: Mapping[str, int]) -> list[LayerStreams]:
        """Streams as at once for one tile, with as many pages as the layer's group has, and page 0."""
        return [
            LayerStreams(layer.spec, tuple(_in_pages(s, pages[GROUPS[layer.kind]] + 1) for s in layer.streams))
            for layer in self.plan(1, BLOCK, 0)
        ]

    def paged(self, plan: LayerStreams, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor]) -> PagedRows:
        return PagedRows(plan, tables, tensors, self.block)


def _in_pages(stream: Stream, count: int) -> Stream:
    _, heads, rows, width = stream.shape
    formula = f"{count} pages × {heads} heads × {rows} rows × {width} × {stream.dtype.itemsize} B"
    return Stream(stream.name, (count, heads, rows, width), stream.dtype, formula)


class StagedGroupedLayout(GroupedLayout):
    """Keys and values of layers without a window in host memory; the policy decides what is staged.

    several: see `HostLayer`. Raises InputError for what `check_grouped` refuses. `plan` raises CapacityError if fewer
    blocks are to be staged than a step chooses, `allocate` PinnedMemoryError if host memory is short.
    """

    def __init__(
        self,
        config: GQAConfig,
        heads: Heads,
        numerics: Numerics,
        policy: Policy | None,
        summarise: Callable,
        choice: HostMemory,
        several: bool,
    ):
        check_grouped(config, policy, choice)
        super().__init__(config, heads, numerics, policy, summarise)
        self.choice, self.several = choice, several

    def of_policy(self, policy: Policy) -> "StagedGroupedLayout":
        given = self.config, self.heads, self.numerics, policy, self.summarise
        return StagedGroupedLayout(*given, self.choice, self.several)

    def plan(self, batch: int, max_context: int, max_rewind: int) -> list[LayerStreams]:
        sizes = self.config, self.heads, batch, max_context, self.numerics
        return grouped_plan(*sizes, self.policy, self.choice.staged)

    def allocate(self, plan: Sequence[LayerStreams], devices: Sequence[torch.device]) -> tuple[list, tuple]:
        layers, far, wanted = [], [], pinned_bytes(plan)
        check_limit(wanted)
        for p, device in zip(plan, devices, strict=True):
            if p.kind is AttentionKind.SLIDING:
                layers.append(LayerRows(p, device))
                continue
            try:
                layers.append(HostLayer(self._rows(p, device), self.several, self.choice.staged))
            except PinnedMemoryError as error:
                had = sum(layer.rows.host_bytes for layer in far)
                raise PinnedMemoryError(
                    f"the cache keeps {wanted} bytes in pinned host memory, of which {had} were had: {error}"
                ) from error
            far.append(layers[-1])
        stream = DenseStream([layer.rows for layer in far])
        ahead = Ahead(devices[0]) if self.choice.ahead else None
        for i, layer in enumerate(far):
            layer.stream, layer.number, layer.ahead = stream, i, ahead
        return layers, tuple(t for pair in stream.held for t in pair)

    def _rows(self, plan: LayerStreams, device: torch.device) -> HostRows:
        B, KV, S, D = plan.streams[0].shape
        return HostRows(B, KV, S, D, self.numerics.cache, device, self.policy or dense(), self.choice.staged)
