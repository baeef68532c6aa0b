"""Main entries of a CSA layer in host memory; the index keys, by which they are chosen, stay on the device."""

from collections.abc import Callable

import torch

from dsv4.cache import DEFAULT_MAX_REWIND, Cache, Entries, Stream
from dsv4.errors import CapacityError
from dsv4.host_tier import HOST_OPERATIONS
from dsv4.host_tier.grouped import Traffic
from dsv4.host_tier.memory import HostBuffer
from dsv4.step import CapturedStep, Step
from kernels.cache_rows import PAGE, PackedRows, write_rows
from kernels.staging import SlotTable, items_of, new_table, paired


class HostEntries(Entries):
    """`Entries` whose rows are mapped pages of host memory. Writes go there. A step of one token a row reads the entries that it
    chooses from staging rows, `slots` of each batch row; a longer one reads them where they are, over the link.

    stream: of the entries, as the plan of the cache has it. topk: entries that a query chooses at most. fetch: the operation, of the
    backend's. Raises CapacityError where slots < topk, PinnedMemoryError where host memory is short.
    """

    def __init__(self, stream: Stream, ratio: int, topk: int, slots: int, device: torch.device, fetch: Callable, write=write_rows):
        if slots < topk:
            raise CapacityError(f"a query reads {topk} entries at once, and staging has {slots} rows; make at least {topk}")
        self.host, self.fetched = HostBuffer(stream.shape, stream.dtype, device), fetch
        there = self.host.device
        if stream.rows is not None:
            format, width, rope = stream.rows
            there = PackedRows(format, there, width, rope, PAGE * stream.shape[-2])
        super().__init__(there, ratio, write)
        B = stream.shape[0]
        if self.packed:
            pages = -(-slots // PAGE)
            here = there._replace(data=torch.zeros(B, pages, stream.shape[-1], dtype=torch.uint8, device=device), count=PAGE * pages)
            self.pools = tuple(paired(getattr(there, part), getattr(here, part)) for part in ("payload", "scales"))
            self.rows = PAGE * pages                             # staging rows of a batch row
            self.staged = here._replace(data=here.data.flatten(0, 1), count=B * self.rows)
        else:
            here = torch.zeros(B, slots, stream.shape[-1], dtype=stream.dtype, device=device)
            self.pools, self.rows, self.staged = (paired(items_of(there, 1), items_of(here, 1)),), slots, here.flatten(0, 1)
        self.table = new_table(B, self.n, self.rows, device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is held on the device."""
        return {"staged entries": self.staged.data if self.packed else self.staged, **self.table._asdict()}

    def traffic(self) -> Traffic:
        """What fetches did so far. Waits for the device."""
        hits, misses = self.table.count.sum(0).tolist()
        return Traffic(hits, misses, misses * sum(pool.item_bytes for pool in self.pools))

    def chosen(self, step: Step, entry: torch.Tensor) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        if step.T > 1:
            self._drop(step)
            return super().chosen(step, entry)
        slot = self._fetch(step, entry)
        base = (torch.arange(step.B, device=slot.device).unsqueeze(1) + step.first) * self.rows
        return self.staged, torch.where(slot < 0, -1, slot + base)

    def chosen_captured(self, entry: torch.Tensor, step: CapturedStep, op) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        if step.T > 1:
            self._drop(step)
            return super().chosen_captured(entry, step, op)
        return self.staged, op.chosen_rows(self._fetch(step, entry).unsqueeze(1), self.rows)

    def _of(self, step: Step) -> SlotTable:
        return SlotTable(*(t[step.rows] for t in self.table))

    def _drop(self, step: Step) -> None:
        """Entries from the step's first window on were just written."""
        self._of(step).forget((step.start // self.ratio).unsqueeze(1))

    def _fetch(self, step: Step, entry: torch.Tensor) -> torch.Tensor:
        """Staging rows int64 [B, K] of entry [B, 1, K]. The step's own window, and those that a rewound row had after it, are stale."""
        pools = tuple(pool._replace(host=pool.host[step.rows], staged=pool.staged[step.rows]) for pool in self.pools)
        return self.fetched(self._of(step), pools, entry[:, 0].int(), step.start // self.ratio, False).long()


def host_cache(model, batch: int = 1, max_context: int | None = None, max_rewind: int = DEFAULT_MAX_REWIND,
               slots: int | None = None) -> Cache:
    """`model.new_cache` of a DeepSeek-V4 model, the main entries of its CSA layers in host memory.

    slots: staging rows of each batch row and layer (default: twice index_topk). Raises as `new_cache` and `HostEntries`.
    """
    config = model.config
    if max_context is None:
        max_context = model.max_context or config.max_position_embeddings
    devices = model.layer_devices or [model.device] * (config.num_hidden_layers + len(model.mtp))
    operation, _ = HOST_OPERATIONS["fetch"].resolve(model.backend)
    write, topk = model.op.write_rows, config.index_topk

    def entries(stream: Stream, ratio: int) -> HostEntries:
        return HostEntries(stream, ratio, topk, 2 * topk if slots is None else slots, torch.device(devices[0]), operation, write)
    return Cache(config, model.numerics, batch, max_context, max_rewind, devices, len(model.mtp) > 0, write, entries)
