"""Routed experts in pinned host memory, and slots on the device for those that steps choose.

A step first fetches the experts that its tokens chose and no slot holds; they take the slots that were wanted least
recently, and never one that this step wants. Then expert numbers become slot numbers, and the experts' kernels run on
the pool of slots as on any stack. A token's experts are added in the order of its list, whatever their numbers, and
kernels choose tiles by the number of all experts, so the bits are those of a model with all experts on the device.

A step that may choose more experts than there are slots (a prompt's chunk) gets all that it chose in one buffer, which
layers share: from their slots, and the others over the link. Of those the most used then take the slots.

The device decides all of this, with lists of fixed sizes: a step can be captured and waits for nothing.
"""

import time
from typing import Any, NamedTuple

import torch
from torch import nn

from dsv4.cache.cache import Traffic
from dsv4.cache.host_tier.memory import HostBuffer, PinnedMemoryError, check_limit
from dsv4.errors import CapacityError
from dsv4.kernels.dispatch import bind
from dsv4.kernels.operations import TIER_OPERATIONS
from dsv4.kernels.quantize import PackedWeight
from dsv4.kernels.staging import Pool, new_table, paired
from dsv4.model.expert_memory import ExpertSizes, check_step
from dsv4.model.linear import Matrix
from dsv4.model.moe import Experts

LINK_BYTES, LINK_RUNS = 1 << 28, 4  # copied at most to measure the link, and how often

Stacks = tuple[torch.Tensor, PackedWeight, PackedWeight]


class HostExperts:
    """The experts of one layer. Its matrices' parameters become tensors in host memory, which a loader fills; `start`
    then fills the slots.

    whole: buffers for all experts of a layer, by shape and dtype, which layers share; None if there are as many slots
    as experts. op: `fetch` and `bring`. Raises PinnedMemoryError, and CapacityError for a device that is full.
    """

    def __init__(self, experts: Experts, slots: int, home: torch.device, op: Any, whole: dict | None):
        self.matrices, self.experts = (experts.w13, experts.w2), experts.part.size
        self.slots, self.home, self.op = slots, home, op
        self.buffers: list[HostBuffer] = []
        pools: list[Pool] = []
        places: list[torch.Tensor] = []
        stacks: list[dict[str, torch.Tensor]] = []
        try:
            for matrix in self.matrices:
                held = dict(matrix.named_parameters(recurse=False))
                buffers = {name: self._buffer(matrix, name, p) for name, p in held.items()}
                near = {name: _new(b, slots, home) for name, b in buffers.items()}
                far = {} if whole is None else {name: _shared(whole, b, home) for name, b in buffers.items()}
                stacks += [near, far]
                pools += [paired(_items(b.device), _items(near[name])) for name, b in buffers.items()]
                places += [_items(t) for t in far.values()]
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{slots} of {self.experts} experts a layer do not fit {home} ({str(error).splitlines()[0]}); ask for "
                "fewer --resident-experts"
            ) from error
        self.pools = tuple(pools)
        # places hold the words that the pools are copied in
        self.places = tuple(p.view(pool.host.dtype) for p, pool in zip(places, self.pools))
        self.near = tuple(map(self._packed, self.matrices, stacks[::2]))
        self.whole = None if whole is None else tuple(map(self._packed, self.matrices, stacks[1::2]))
        numbers = lambda *shape: torch.zeros(*shape, dtype=torch.int64, device=home)
        self.table, self.uses, self.wholes = new_table(1, self.experts, slots, home), numbers(self.experts), numbers(1)
        self._ignored, self._end = numbers(1, 2), torch.full((1,), self.experts, device=home)  # nothing goes stale

    def _buffer(self, matrix: Matrix, name: str, p: nn.Parameter) -> HostBuffer:
        self.buffers.append(HostBuffer(tuple(p.shape), p.dtype, self.home))
        setattr(matrix, name, nn.Parameter(self.buffers[-1].host, requires_grad=False))
        return self.buffers[-1]

    def _packed(self, matrix: Matrix, t: dict[str, torch.Tensor]) -> PackedWeight:
        held = t["weight"], t.get("scale"), t.get("global_scale")
        return PackedWeight(matrix.storage.format, *held, matrix.storage.block, self.experts)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this layer alone has on the device."""
        stacks = [t for packed in self.near for t in packed[1:4] if t is not None]
        return [*stacks, *self.table, self.uses, self.wholes, self._ignored, self._end]

    @property
    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def expert_bytes(self) -> int:
        return sum(pool.item_bytes for pool in self.pools)

    @torch.no_grad()
    def start(self) -> None:
        """Fill the slots: with the experts used most so far, of equally many uses the first. Counts begin at 0."""
        hottest = self.uses.argsort(dim=0, descending=True, stable=True)[: self.slots].unsqueeze(0)
        self.table.forget()
        self._fetch(hottest, count=False)
        self.reset()

    def reset(self) -> None:
        """Counts of hits and misses, and of use, begin at 0."""
        for t in (self.table.count, self.uses, self.wholes):
            t.zero_()

    def stacks(self, indices: torch.Tensor) -> Stacks:
        """indices int64 [N, k], of experts → (numbers int64 [N, k], w13, w2): matrices, and the number of each pair's
        among them. They are valid until the next call, of any layer."""
        flat = indices.flatten()
        self.uses.scatter_add_(0, flat, torch.ones_like(flat))
        wanted = distinct(flat, self.experts)
        if wanted.shape[1] <= self.slots:
            slots = self._fetch(wanted)
            return self._numbers(wanted, slots)[indices], *self.near
        self._bring(wanted)
        return indices, *self.whole

    def _fetch(self, wanted: torch.Tensor, pools: tuple[Pool, ...] | None = None, count: bool = True) -> torch.Tensor:
        table = self.table if count else self.table._replace(count=self._ignored)
        return self.op.fetch(table, pools or self.pools, wanted, self._end, 1, False, 0)

    def _numbers(self, wanted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 [E + 1]: the slot of each expert of a list [1, n]; what is not in it has no meaning."""
        found = torch.zeros(self.experts + 1, dtype=torch.int64, device=wanted.device)
        return found.scatter_(0, torch.where(wanted < 0, self.experts, wanted)[0], slots[0])

    def _bring(self, wanted: torch.Tensor) -> None:
        """All chosen experts to the shared buffer; of those the most used ones to the slots, from there."""
        staged = (self.table.held.unsqueeze(1) == wanted.unsqueeze(2)).any(2) & (wanted >= 0)
        hits, chosen = staged.sum(1, keepdim=True), (wanted >= 0).sum(1, keepdim=True)
        self.table.count.add_(torch.cat((hits, chosen - hits), 1))
        self.wholes.add_(1)
        self.op.bring(self.table, self.pools, self.places, wanted)
        uses = torch.where(wanted >= 0, self.uses[wanted.clamp(min=0)], -1)
        hottest = wanted.gather(1, uses.argsort(dim=1, descending=True, stable=True)[:, : self.slots])
        brought = tuple(Pool(place, pool.staged) for place, pool in zip(self.places, self.pools))
        self._fetch(hottest, brought, count=False)


def distinct(flat: torch.Tensor, experts: int) -> torch.Tensor:
    """Numbers int64 [P] below `experts` → int64 [1, min(P, experts)]: each once, in rising order, −1 between them."""
    if len(flat) < experts:
        ordered = flat.sort().values
        again = torch.cat((ordered[:1] < 0, ordered[1:] == ordered[:-1]))
        return ordered.masked_fill(again, -1).unsqueeze(0)
    every = torch.arange(experts, device=flat.device)
    chosen = torch.zeros_like(every).scatter_(0, flat, 1)
    return torch.where(chosen > 0, every, -1).unsqueeze(0)


class Counts(NamedTuple):
    """Experts found in slots and fetched, bytes fetched, and steps of layers that chose more than their slots, until
    now."""

    hits: int
    misses: int
    nbytes: int
    wholes: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before)))

    @property
    def hit_rate(self) -> float:
        return Traffic(self.hits, self.misses, self.nbytes).hit_rate


class ExpertTier:
    """The experts of all layers. slots: of each layer."""

    def __init__(self, layers: list[HostExperts], slots: int, sizes: ExpertSizes, whole: dict):
        self.layers, self.slots, self.sizes, self._whole = layers, slots, sizes, whole

    @property
    def host_bytes(self) -> int:
        return sum(layer.host_bytes for layer in self.layers)

    @property
    def device_bytes(self) -> int:
        """Of slots, tables and the shared buffer."""
        return sum(t.nbytes for t in (*(t for layer in self.layers for t in layer.tensors), *self._whole.values()))

    def start(self) -> None:
        for layer in self.layers:
            layer.start()

    def check(self, tokens: int) -> None:
        """Raises as `check_step` for decode steps of so many tokens."""
        check_step(tokens, self.slots, self.sizes)

    def counts(self) -> Counts:
        """Over all layers. Waits for the device."""
        held = torch.stack([torch.cat((x.table.count[0], x.wholes)) for x in self.layers]).tolist()
        nbytes = sum(misses * layer.expert_bytes for (_, misses, _), layer in zip(held, self.layers))
        return Counts(sum(row[0] for row in held), sum(row[1] for row in held), nbytes, sum(row[2] for row in held))

    def link(self) -> float | None:
        """Bytes a second that the copy engine brings from pinned host memory: the best of a few copies. None on a host
        processor, which has no link, and where the device has no room to measure."""
        if self.layers[0].home.type != "cuda":
            return None
        source = max((b.host for layer in self.layers for b in layer.buffers), key=lambda t: t.nbytes)
        source, best = source.view(torch.uint8).flatten()[:LINK_BYTES], float("inf")
        try:
            target = torch.empty_like(source, device=self.layers[0].home)
        except torch.OutOfMemoryError:
            return None
        for _ in range(LINK_RUNS):
            torch.cuda.synchronize(target.device)
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(target.device)
            best = min(best, time.perf_counter() - begun)
        return source.nbytes / best


def _items(t: torch.Tensor) -> torch.Tensor:
    """A stack [n, …] as items of bytes: [1, n, 1, width]."""
    return t.view(torch.uint8).view(1, len(t), 1, -1)


def _new(buffer: HostBuffer, count: int, home: torch.device) -> torch.Tensor:
    """Room for so many of a buffer's experts."""
    return torch.empty(count, *buffer.host.shape[1:], dtype=buffer.host.dtype, device=home)


def _shared(whole: dict, buffer: HostBuffer, home: torch.device) -> torch.Tensor:
    """Room for all of a buffer's experts, shared with other layers' buffers of that form."""
    key = tuple(buffer.host.shape), buffer.host.dtype
    if key not in whole:
        whole[key] = _new(buffer, len(buffer.host), home)
    return whole[key]


def sizes_of(model: nn.Module, topk: int) -> ExpertSizes:
    """Sizes of a model's experts."""
    found = [m for m in model.modules() if isinstance(m, Experts)]
    each = tuple(sum(p.nbytes for p in m.parameters()) // m.part.size for m in found)
    return ExpertSizes(each, found[0].part.size if found else 0, topk)


def new_tier(model: Any, home: torch.device, slots: int, sizes: ExpertSizes) -> ExpertTier:
    """Host memory for the routed experts of a model on the meta device, and `slots` slots of each layer on `home`; fill
    the parameters, then `start` it. Raises PinnedMemoryError with all bytes if host memory is short."""
    check_limit(sizes.host_bytes)
    op = bind(TIER_OPERATIONS, model.backend, model.dispatch)
    whole: dict[tuple, torch.Tensor] = {}
    shared = None if slots == sizes.experts else whole
    layers: list[HostExperts] = []
    for module in [m for m in model.modules() if isinstance(m, Experts)]:
        try:
            layers.append(HostExperts(module, slots, home, op, shared))
        except PinnedMemoryError as error:
            had = sum(layer.host_bytes for layer in layers)
            raise PinnedMemoryError(
                f"routed experts take {sizes.host_bytes} bytes of pinned host memory, of which {had} were had: {error}"
            ) from error
        module.host = layers[-1]
    return ExpertTier(layers, slots, sizes, whole)
