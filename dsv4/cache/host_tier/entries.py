"""Main entries of a CSA layer in host memory; the index keys, by which they are chosen, stay on the device."""

from collections.abc import Callable

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import Traffic
from dsv4.cache.host_tier.layer import pinned_bytes
from dsv4.cache.host_tier.memory import HostBuffer, PinnedMemoryError, check_limit
from dsv4.cache.host_tier.planning import brought_entries, check_entries, entries_plan, staged_entries
from dsv4.cache.linear import DEFAULT_MAX_REWIND, Cache
from dsv4.cache.rows import Entries
from dsv4.cache.streams import LayerStreams, Stream, zeros
from dsv4.errors import InputError
from dsv4.kernels.cache_rows import PAGE, PackedRows, write_rows
from dsv4.kernels.dispatch import bind
from dsv4.kernels.operations import GQA_OPERATIONS
from dsv4.kernels.staging import Pool, SlotTable, items_of, new_table, paired
from dsv4.model.step import CapturedStep, Step


class HostEntries(Entries):
    """`Entries` whose rows are mapped pages of host memory, which take the writes. A step of one token a row reads its
    chosen entries from staging rows, `slots` of each batch row. A longer step reads them in host memory, over the link.
    If it chooses more entries than there are, all entries are copied to `brought` first.

    stream: of the entries, as the plan of the cache has it. topk: entries that a query chooses at most. fetch: the
    backend's operation. brought: a buffer on the device of the stream's shape, which layers share (None: there is
    none). Raises CapacityError if slots < topk, PinnedMemoryError if host memory is short.
    """

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
        there = self.host.device
        if stream.rows is not None:
            format, width, rope = stream.rows
            there = PackedRows(format, there, width, rope, PAGE * stream.shape[-2])
        super().__init__(there, ratio, write)
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

    def traffic(self) -> Traffic:
        """Counts of all fetches so far. Waits for the device."""
        hits, misses = self.table.count.sum(0).tolist()
        return Traffic(hits, misses, misses * sum(pool.item_bytes for pool in self.pools))

    def chosen(self, step: Step, entry: torch.Tensor) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        if step.T == 1:
            return self._fetch(step, entry)
        self._drop(step)
        pool, rows = super().chosen(step, entry)
        visible = step.max_visible(self.ratio)
        if self.brought is not None and step.T * entry.shape[-1] >= visible:
            pool = self._bring(step.rows, visible)
        return pool, rows

    def chosen_captured(
        self, entry: torch.Tensor, step: CapturedStep, op
    ) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        if step.T == 1:
            return self._fetch(step, entry)
        self._drop(step)
        return super().chosen_captured(entry, step, op)

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


class HostEntryCache(Cache):
    """`Cache` with the main entries of CSA layers in host memory. make(stream, ratio): makes their `HostEntries`, which
    share the buffer for whole copies. Raises as `Cache` and `HostEntries`, and InputError for a model without a CSA
    layer."""

    def __init__(
        self,
        topk: int,
        staged: int | None,
        make: Callable,
        config,
        numerics,
        batch,
        max_context,
        max_rewind,
        devices,
        mtp,
        write,
    ):
        self.topk, self.asked, self.make, self.device = topk, staged, make, devices[0]
        super().__init__(config, numerics, batch, max_context, max_rewind, devices, mtp, write)

    def _planned(self, streams: list[LayerStreams]) -> list[LayerStreams]:
        check_entries(streams)
        plan = entries_plan(streams, self.topk, self.asked)
        check_limit(pinned_bytes(plan))
        self.far, self.brought = [], zeros(brought_entries(streams), self.device)
        return plan

    def _entries(self, stream: Stream, ratio: int) -> HostEntries:
        try:
            self.far.append(self.make(stream, ratio, self.brought))
        except PinnedMemoryError as error:
            raise PinnedMemoryError(
                f"the cache keeps {pinned_bytes(self.plan)} bytes in pinned host memory, of which {self.host_bytes} "
                f"were had: {error}"
            ) from error
        return self.far[-1]

    @property
    def nbytes(self) -> int:
        """Bytes really allocated on the device."""
        return super().nbytes + self.brought.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(entries.host.nbytes for entries in self.far)

    def traffic(self, guessed: bool = False) -> Traffic:
        """Counts of all fetches so far, over all layers; nothing is guessed. Waits for the device."""
        if guessed:
            return Traffic(0, 0, 0)
        return Traffic(*map(sum, zip(*(entries.traffic() for entries in self.far))))


def host_cache(
    model,
    batch: int = 1,
    max_context: int | None = None,
    max_rewind: int = DEFAULT_MAX_REWIND,
    choice: HostMemory = HostMemory(),
) -> HostEntryCache:
    """`new_cache` of a DeepSeek-V4 model, the main entries of its CSA layers in host memory. Raises as
    `HostEntryCache`."""
    config = model.config
    if max_context is None:
        max_context = model.max_context or config.max_position_embeddings
    if model.layer_devices is not None:
        raise InputError(
            "entries in host memory were asked for with layers spread over devices; leave out --device-map or "
            "--kv-memory host"
        )
    devices = [model.device] * (config.num_hidden_layers + len(model.mtp))
    operation = bind({"fetch": GQA_OPERATIONS["fetch"]}, model.backend, model.dispatch).fetch
    write, topk = model.op.write_rows, config.index_topk

    def make(stream: Stream, ratio: int, brought: torch.Tensor) -> HostEntries:
        return HostEntries(stream, ratio, topk, choice.staged, model.device, operation, write, brought)

    return HostEntryCache(
        topk,
        choice.staged,
        make,
        config,
        model.numerics,
        batch,
        max_context,
        max_rewind,
        devices,
        len(model.mtp) > 0,
        write,
    )
