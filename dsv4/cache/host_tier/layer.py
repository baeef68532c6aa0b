"""A layer of a GQA model whose keys and values are in host memory.

A step reads a layer in one of two ways. A decoding step of a policy that chooses blocks has them staged
(`HostRows.decode`). All others read the layer whole, like the resident cache, through two buffers that layers use in
turn (`DenseStream`): prompts, chunked prefill, the dense policy, and on a host processor steps of several tokens, whose
products sum in another order than those of one. Either way tokens are written through, and every bit is that of the
resident cache. Layers with a sliding window stay on the device: they never read more than that window.
"""

from collections.abc import Callable

import torch

from dsv4.cache.host_tier.grouped import HostRows, staged_blocks
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.cache.streams import LayerStreams
from dsv4.errors import MissingSummaries
from dsv4.kernels.block_choice import Policy
from dsv4.model.gqa.cache import LayerRows
from dsv4.model.step import Step


class HostLayer(LayerRows):
    """One layer. keys, values [batch, KV, S, D] are the mapped pages of the host, `tensors` those on the device.

    several: whether steps of several tokens equal their single steps bit for bit, so that blocks may be staged for them
    one by one.
    """

    def __init__(self, rows: HostRows, several: bool, staged: int | None):
        self.rows, self.several, self.asked = rows, several, staged
        self.keys, self.values = rows.host_keys, rows.host_values
        self.stream: DenseStream | None = None  # of all layers; this one is `number`
        self.number, self.far = 0, (rows,)
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
        return self.stream.layer(self.number, step.rows, None if step.captured else max(step.starts))

    def written(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows.part(step.rows).store(keys, values, step.start, step.T)

    def adopt(self, plan: LayerStreams, policy: Policy) -> None:
        self.rows.stage(policy, staged_blocks(policy, self.rows.shape[2], self.asked))
        self._hold()

    def summarise(self, tokens: int, write: Callable) -> None:
        """Compute summaries of the first `tokens` keys of every row, and unstage everything."""
        if self.rows.table is not None:
            self.rows.table.forget()
        super().summarise(tokens, write)
