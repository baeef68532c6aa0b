"""The cache of a GQA model whose keys and values are in host memory.

A step reads a layer in one of two ways. A decoding step of a policy that chooses blocks has them staged
(`HostRows.decode`). All others read the layer whole, like the resident cache, through two buffers that layers use in
turn (`DenseStream`): prompts, chunked prefill, the dense policy, and on a host processor steps of several tokens, whose
products sum in another order than those of one. Either way tokens are written through, and every bit is that of the
resident cache. Layers with a sliding window stay on the device: they never read more than that window.
"""

from collections.abc import Callable

import torch

from dsv4.cache.host_tier.ahead import Ahead
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import HostRows, Traffic, staged_blocks
from dsv4.cache.host_tier.memory import PinnedMemoryError, check_limit
from dsv4.cache.host_tier.planning import check_grouped, grouped_plan
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.errors import MissingSummaries
from dsv4.kernels.block_choice import Policy, dense
from dsv4.model.gqa.cache import AttentionKind, GroupedCache, LayerRows, LayerStreams
from dsv4.model.step import Step


class HostLayer(LayerRows):
    """One layer. keys, values [batch, KV, S, D] are the mapped pages of the host, `tensors` those on the device.

    several: whether steps of several tokens equal their single steps bit for bit, so that blocks may be staged for them
    one by one.
    """

    def __init__(self, rows: HostRows, several: bool, staged: int | None):
        self.rows, self.several, self.asked = rows, several, staged
        self.keys, self.values = rows.host_keys, rows.host_values
        self.stream: DenseStream | None = None  # of all layers; this one is number `index`
        self.index, self.ahead = 0, None
        self._hold()

    def _hold(self) -> None:
        self.tensors, self.block = self.rows.tensors(), self.rows.block

    def staged(self, step: Step, policy: Policy) -> HostRows | None:
        """The object that the step decodes with: some rows of `self.rows`; None if it reads the layer whole (`of`). A
        running guess has ended then. Raises MissingSummaries if the staged blocks are of another policy."""
        rows = self._staged(step, policy)
        if rows is not None and self.ahead is not None:
            self.ahead.join()
        return rows

    def _staged(self, step: Step, policy: Policy) -> HostRows | None:
        if step.prompt or policy.dense or step.T > 1 and not self.several:
            return None
        rows, found = self.rows, self._summaries(step.rows)
        searched = policy.selector is None or found is not None and found.serve(policy)
        if rows.policy.dense or policy.block != rows.block or policy.kept > rows.slots or not searched:
            raise MissingSummaries(
                f"policy {policy.name} reads {policy.kept} blocks of {policy.block} tokens, and this cache in host "
                f"memory stages {rows.slots} blocks of {rows.block} for {rows.policy.name}: make it after "
                "model.attention is set, or call cache.adopt(model.attention.policy)"
            )
        return rows.part(step.rows)

    def guess(self, attention, norm, x: torch.Tensor, step: Step, policy: Policy) -> None:
        """Fetch on the branch what the stream x is guessed to choose in this layer, whose modules these are."""
        rows = self._staged(step, policy)
        self.ahead.start(lambda: attention.guess(x, norm, step, rows), x)

    def of(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the step's rows [B, KV, S, D] before the step, copied to the device; `written` writes the
        step's own back. Layers must be requested in order."""
        return self.stream.layer(self.index, step.rows, None if step.captured else max(step.starts))

    def written(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows.part(step.rows).store(keys, values, step.start, step.T)

    def adopt(self, plan: LayerStreams, policy: Policy) -> None:
        self.rows.stage(policy, staged_blocks(policy, self.rows.shape[2], self.asked))
        self._hold()


class HostCache(GroupedCache):
    """`GroupedCache` with keys and values in host memory. policy: decides what is staged, and which summaries the
    device keeps.

    Raises InputError for what `check_grouped` refuses, CapacityError if fewer blocks are to be staged than a step
    chooses or if the device is short of memory, PinnedMemoryError if host memory is short.
    """

    def __init__(
        self,
        config,
        numerics,
        batch: int,
        max_context: int,
        devices: list[torch.device],
        policy: Policy,
        summarise: Callable,
        choice: HostMemory,
        several: bool,
    ):
        check_grouped(config, policy, choice)
        self.choice, self.several = choice, several
        super().__init__(config, numerics, batch, max_context, devices, policy, summarise)

    def _planned(self, policy: Policy | None) -> list[LayerStreams]:
        return grouped_plan(self.config, self.batch, self.max_context, self.numerics, policy, self.choice.staged)

    def _made(self, devices: list[torch.device], policy: Policy | None) -> list[LayerRows]:
        layers, self.far, total = [], [], pinned_bytes(self.plan)
        check_limit(total)
        for plan, device in zip(self.plan, devices, strict=True):
            if plan.kind is AttentionKind.SLIDING:
                layers.append(LayerRows(plan, device))
                continue
            try:
                layers.append(HostLayer(self._rows(plan, device, policy or dense()), self.several, self.choice.staged))
            except PinnedMemoryError as error:
                raise PinnedMemoryError(
                    f"the cache keeps {total} bytes in pinned host memory, of which {self.host_bytes} were had: {error}"
                ) from error
            self.far.append(layers[-1])
        self.stream = DenseStream([layer.rows for layer in self.far])
        self.ahead = Ahead(devices[0]) if self.choice.ahead else None
        for i, layer in enumerate(self.far):
            layer.stream, layer.index, layer.ahead = self.stream, i, self.ahead
        return layers

    def _rows(self, plan: LayerStreams, device: torch.device, policy: Policy) -> HostRows:
        B, KV, _, D = plan.streams[0].shape
        return HostRows(B, KV, plan.streams[0].shape[2], D, self.numerics.cache, device, policy, self.choice.staged)

    def guess(self, layers, i: int, step: Step) -> Callable[[torch.Tensor], None] | None:
        """For a decoding token: fetch blocks of layer i + 1 while layer i multiplies."""
        if self.ahead is None or step.T > 1 or i + 1 == len(layers):
            return None
        layer, rows = layers[i + 1], self.layers[i + 1]
        policy = layer.self_attn.reading.policy
        if not isinstance(rows, HostLayer) or step.prompt or policy.dense:
            return None
        return lambda x: rows.guess(layer.self_attn, layer.input_layernorm, x, step, policy)

    def summarise_again(self) -> None:
        """Compute all summaries from the keys, and unstage everything."""
        for layer in self.far:
            if layer.rows.table is not None:
                layer.rows.table.forget()
        super().summarise_again()

    @property
    def nbytes(self) -> int:
        """Bytes really allocated on the device."""
        return super().nbytes + self.stream.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(layer.rows.host_bytes for layer in self.far)

    def traffic(self, guessed: bool = False) -> Traffic:
        """Counts of the fetches of choices (or of guesses) so far, over all layers. Waits for the device."""
        return Traffic(*map(sum, zip(*(layer.rows.traffic(guessed) for layer in self.far))))


def pinned_bytes(plan) -> int:
    """Bytes of host memory in a plan of either model kind."""
    return sum(s.nbytes for layer in plan for s in layer.streams if s.place == "pinned")
