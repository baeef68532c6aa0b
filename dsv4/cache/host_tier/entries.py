"""Main entries of a CSA layer in host memory; the index keys, by which they are chosen, stay on the device."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dsv4.cache.cache import Traffic
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.memory import HostBuffer, PinnedMemoryError, check_limit
from dsv4.cache.host_tier.planning import (
    brought_entries,
    check_entries,
    entries_plan,
    pinned_bytes,
    staged_entries,
)
from dsv4.cache.layer import linked
from dsv4.cache.layout import LatentLayout, as_rows
from dsv4.cache.rows import Linear
from dsv4.cache.streams import LayerStreams, Stream, zeros
from dsv4.kernels.cache_rows import PAGE, PackedRows, write_rows
from dsv4.kernels.staging import Pool, SlotTable, items_of, new_table, paired
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.step import Step


class Staged(Linear):
    """`Linear` rows in mapped pages of host memory, which take the writes. A step of one token a row reads its
    chosen entries from staging rows, `slots` of each batch row. A longer step reads them in host memory, over the link.
    If it chooses more entries than there are, all entries are copied to `brought` first.

    stream: of the entries, as the plan of the cache has it. topk: entries that a query chooses at most. fetch: the
    backend's operation. brought: a buffer on the device of the stream's shape, which layers share (None: there is
    none). Raises CapacityError if slots < topk, PinnedMemoryError if host memory is short.
    """

    far = True

    def __init__(
        self,
        stream: Stream,
        ratio: int,
        topk: int,
        slots: int | None,
        device: torch.device,
        fetch: Callable,
        write=write_rows,
        brought: torch.Tensor | None = None,
    ):
        slots, B = staged_entries(topk, slots), stream.shape[0]
        self.host, self.fetched, self.brought = HostBuffer(stream.shape, stream.dtype, device), fetch, brought
        there, self.ratio = as_rows(stream, self.host.device), ratio
        super().__init__(there, write)
        if self.packed:
            pages = -(-slots // PAGE)
            self.here = there._replace(
                data=torch.zeros(B, pages, stream.shape[-1], dtype=torch.uint8, device=device), count=PAGE * pages
            )
            self.pools = tuple(paired(getattr(there, part), getattr(self.here, part)) for part in ("payload", "scales"))
            self.rows = PAGE * pages  # staging rows of a batch row
        else:
            self.here = torch.zeros(B, slots, stream.shape[-1], dtype=stream.dtype, device=device)
            self.pools, self.rows = (paired(items_of(there, 1), items_of(self.here, 1)),), slots
        self.table = new_table(B, self.n, self.rows, device)

    @property
    def staged(self) -> torch.Tensor | PackedRows:
        """The staging rows of all batch rows as one pool."""
        return self._pool(self.here.data if self.packed else self.here)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors on the device."""
        return {"staged entries": self.here.data if self.packed else self.here, **self.table._asdict()}

    @property
    def host_bytes(self) -> int:
        return self.host.nbytes

    def traffic(self, guessed: bool = False) -> Traffic:
        """Counts of all fetches so far; nothing is guessed. Waits for the device."""
        if guessed:
            return Traffic(0, 0, 0)
        hits, misses = self.table.count.sum(0).tolist()
        return Traffic(hits, misses, misses * sum(pool.item_bytes for pool in self.pools))

    def run(self, step: Step) -> None:
        return None

    def chosen(self, step: Step, numbers: torch.Tensor, op) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        if step.T == 1:
            return self._fetch(step, numbers)
        self._drop(step)
        pool, rows = super().chosen(step, numbers, op)
        visible = step.max_visible(self.ratio)
        if self.brought is not None and not step.captured and step.T * numbers.shape[-1] >= visible:
            pool = self._bring(step.rows, visible)
        return pool, rows

    def _of(self, step: Step) -> SlotTable:
        return self.table if self._all(step) else SlotTable(*(t[step.rows] for t in self.table))

    def _all(self, step: Step) -> bool:
        return step.first == 0 and step.B == len(self.table.clock)

    def _drop(self, step: Step) -> None:
        """Unstage entries from the step's first window on, which were just written."""
        self._of(step).forget((step.start // self.ratio).unsqueeze(1))

    def _fetch(self, step: Step, entry: torch.Tensor) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        """Staging rows as a pool, and the rows of entry [B, 1, K] in it: [B, K]. Entries of the step's own window are
        stale, and those that a rewound row had after it."""
        pools, here = self.pools, self.here.data if self.packed else self.here
        if not self._all(step):
            pools = tuple(Pool(pool.host[step.rows], pool.staged[step.rows]) for pool in pools)
            here = here[step.rows]
        return self._pool(here), self.fetched(
            self._of(step), pools, entry[:, 0], step.start, self.ratio, False, self.rows
        )

    def _pool(self, here: torch.Tensor) -> torch.Tensor | PackedRows:
        flat = here.flatten(0, 1)
        return self.here._replace(data=flat, count=len(flat) * PAGE) if self.packed else flat

    def _bring(self, rows: slice, visible: int) -> torch.Tensor | PackedRows:
        """Copy the first `visible` entries of some batch rows to the device, into the rows of the pool that they have
        in host memory."""
        count = -(-visible // PAGE) if self.packed else visible
        for here, there in zip(self.brought[rows], self.host.host[rows]):
            here[:count].copy_(there[:count], non_blocking=True)
        flat = self.brought.flatten(0, 1)
        return self.flat._replace(data=flat) if self.packed else flat


class StagedLayout(LatentLayout):
    """`LatentLayout` with the main entries of CSA layers in host memory. topk: entries that a query chooses at most;
    fetch: the backend's operation; a buffer for whole copies is shared by all layers.

    `plan` raises as `check_entries`, `allocate` as `Staged`.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, mtp: bool, write, choice: HostMemory, fetch: Callable):
        super().__init__(config, numerics, mtp, write)
        self.choice, self.fetch, self.topk = choice, fetch, config.index_topk

    def plan(self, batch: int, max_context: int, max_rewind: int) -> list[LayerStreams]:
        streams = super().plan(batch, max_context, max_rewind)
        check_entries(streams)
        return entries_plan(streams, self.topk, self.choice.staged)

    def allocate(self, plan: Sequence[LayerStreams], devices: Sequence[torch.device]) -> tuple[list, tuple]:
        wanted = pinned_bytes(plan)
        check_limit(wanted)
        home, made, brought = devices[0], [], zeros(brought_entries(plan), devices[0])

        def far(stream: Stream, ratio: int) -> Staged:
            staged = self.choice.staged
            made.append(Staged(stream, ratio, self.topk, staged, home, self.fetch, self.write, brought))
            return made[-1]

        try:
            layers = [self.layer(p, d, partial(far, ratio=p.ratio)) for p, d in zip(plan, devices, strict=True)]
        except PinnedMemoryError as error:
            had = sum(rows.host_bytes for rows in made)
            raise PinnedMemoryError(
                f"the cache keeps {wanted} bytes in pinned host memory, of which {had} were had: {error}"
            ) from error
        return linked(layers), (brought,)
