"""Keys and values of a GQA model: position-addressed, allocated once.

The row of a slot is a function of the tokens up to that position, and the only state beside the buffers is each row's
length. There are as many slots as tokens, so every rewind only sets the length back. Summaries of blocks are computed
from the keys of the cache, again for each block that a step writes to; beyond a row's length they are never read before
that. The memory of chunked prefill is a function of the tokens so far too, but of whole chunks, so a rewind drops it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.streams import LayerStreams, Stream, zeros
from dsv4.errors import MissingSummaries
from dsv4.kernels.block_choice import Observed, Policy
from dsv4.kernels.chunked_prefill import Chunking, Memory
from dsv4.model.arguments import check_sizes, rewind_counts
from dsv4.model.gqa.config import AttentionKind, GQAConfig
from dsv4.model.gqa.heads import Heads
from dsv4.model.gqa.selection import Selection, selection_streams
from dsv4.model.numerics import Numerics
from dsv4.model.step import Step

BLOCK = 128  # tokens of one contiguous tile of a head; slots are a multiple of it


class Summaries(NamedTuple):
    """Summaries of blocks of `block` tokens, [B, KV, S/block, D], which a policy searches; None for kinds that are not
    kept."""

    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    block: int = BLOCK

    def serve(self, policy: Policy) -> bool:
        """Whether these are the summaries that the policy's selector reads."""
        return self.block == policy.block and all(getattr(self, name) is not None for name in SEARCHED[policy.selector])


# the summaries that each selector reads, by names of `Summaries`
SEARCHED = {None: (), "bound": ("low", "high"), "mean": ("mean",)}


def slots(max_context: int) -> int:
    """Slots of a head: max_context in whole blocks."""
    return -(-max_context // BLOCK) * BLOCK


def cache_streams(
    config: GQAConfig, heads: Heads, batch: int, max_context: int, numerics: Numerics, policy: Policy | None = None
) -> list[LayerStreams]:
    """Streams of every layer: what `GroupedCache` of a rank with `heads` allocates. Layers without a window have
    summaries if `policy` searches, and lists if it chooses once."""
    shape, dtype = (batch, heads.KV, slots(max_context), heads.width), numerics.cache
    formula = (
        f"{batch} rows × {heads.KV} heads × ⌈{max_context} / {BLOCK}⌉ × {BLOCK} × {heads.width} × {dtype.itemsize} B"
    )
    streams = tuple(Stream(name, shape, dtype, formula) for name in ("keys", "values"))
    more: tuple[Stream, ...] = ()
    if isinstance(policy, Observed):
        more = selection_streams(heads, batch, slots(max_context), numerics, policy)
    elif policy is not None:
        more = summary_streams(heads, batch, max_context, numerics, policy)
    return [
        LayerStreams(spec, streams + more if spec.kind is AttentionKind.FULL else streams) for spec in config.layers
    ]


def summary_streams(
    heads: Heads, batch: int, max_context: int, numerics: Numerics, policy: Policy
) -> tuple[Stream, ...]:
    """What the policy searches in one layer: one vector a block and KV head for means, two for bounds."""
    blocks, dtype = slots(max_context) // policy.block, numerics.cache
    formula = (
        f"{batch} rows × {heads.KV} heads × ⌈{max_context} / {BLOCK}⌉ × {BLOCK} / {policy.block} blocks "
        f"× {heads.width} × {dtype.itemsize} B"
    )
    shape = batch, heads.KV, blocks, heads.width
    return tuple(Stream(name, shape, dtype, formula) for name in SEARCHED[policy.selector])


def token_bytes(config: GQAConfig, heads: Heads, numerics: Numerics) -> tuple[int, str]:
    """Bytes of keys and values that one token of one row takes in all layers, and the formula."""
    layers, size = config.num_hidden_layers, numerics.cache.itemsize
    return (
        2 * layers * heads.KV * heads.width * size,
        f"2 × {layers} layers × {heads.KV} heads × {heads.width} × {size} B",
    )


class LayerRows:
    """keys, values [batch, KV, S, D], contiguous: a block of BLOCK tokens of one head is one tile in memory. Summaries,
    if any, are of blocks of `block` tokens."""

    def __init__(self, plan: LayerStreams, device: torch.device, block: int = BLOCK):
        self.tensors = {stream.name: zeros(stream, device) for stream in plan.streams}
        self.keys, self.values, self.block = self.tensors["keys"], self.tensors["values"], block

    @property
    def batch(self) -> int:
        """Rows of the cache."""
        return len(self.keys)

    far = ()  # rows in host memory
    ahead: Any = None  # guesses fetches for this layer: `dsv4.cache.host_tier.ahead.Ahead`
    memory: Memory | None = None  # of chunked prefill, for every row: positions and scores [1, batch, R, M]
    last_memory: Memory | None = None  # the whole result of its last call
    selection: Selection | None = None  # under a policy that chooses once

    def staged(self, step: Step, policy: Policy):
        """What a step reads instead of `of` if its rows are elsewhere (`dsv4.cache.host_tier`); None here, where they
        are on the device."""
        return None

    def of(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the step's rows, [B, KV, S, D]: contiguous views."""
        return self.keys[step.rows], self.values[step.rows]

    def written(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's tokens are written in the tensors of `of`: those are the cache itself here."""

    def summaries(self, step: Step) -> Summaries | None:
        """Summaries of the step's rows: contiguous views; None if none are kept."""
        return self._summaries(step.rows)

    def summarised(self, step: Step, summaries: Summaries) -> None:
        """The summaries of the step's blocks are written in the tensors of `summaries`: those are the cache itself
        here."""

    def _summaries(self, rows: slice) -> Summaries | None:
        kept = [self.tensors[name][rows] if name in self.tensors else None for name in Summaries._fields[:3]]
        return None if all(t is None for t in kept) else Summaries(*kept, self.block)

    def adopt(self, plan: LayerStreams, policy: Policy) -> None:
        """Replace the summaries by those of `plan`, which hold nothing yet."""
        for name in set(self.tensors) - {"keys", "values"}:
            del self.tensors[name]
        self.tensors |= {stream.name: zeros(stream, self.keys.device) for stream in plan.streams[2:]}
        self.block = policy.block

    def summarise(self, tokens: int, write: Callable) -> None:
        """Compute summaries of the first `tokens` keys of every row."""
        found = self._summaries(slice(None))
        if tokens and found is not None:
            start = torch.zeros(len(self.keys), dtype=torch.int64, device=self.keys.device)
            write(self.keys, start, tokens, found.low, found.high, found.mean, self.block)

    def memory_of(self, step: Step) -> Memory:
        """The memory of chunked prefill of the step's rows."""
        m, rows = self.memory, step.rows
        return Memory(m.positions[:, rows], m.scores[:, rows], m.mass[rows], m.updates[rows])

    def remember(self, step: Step, memory: Memory) -> None:
        """Keep the end of a call's result for the step's rows."""
        self.last_memory, batch = memory, self.batch
        ends = memory.positions[-1:], memory.scores[-1:], memory.updates
        if self.memory is None or self.memory.positions.shape[2:] != memory.positions.shape[2:]:
            positions, scores = (t.new_zeros(1, batch, *t.shape[2:]) for t in ends[:2])
            self.memory = Memory(
                positions,
                scores,
                scores.new_zeros(batch, scores.shape[2], 0),
                ends[2].new_zeros(batch, scores.shape[2]),
            )
        for held, fresh in zip(
            (self.memory.positions[:, step.rows], self.memory.scores[:, step.rows], self.memory.updates[step.rows]),
            ends,
        ):
            held.copy_(fresh)


class GroupedCache(Cache):
    """`Cache` of a GQA model: there are as many slots as tokens, so rows may be rewound to any length.

    layout: a `dsv4.model.gqa.layout.GroupedLayout`; its policy's summaries are kept beside the keys.
    """

    def __init__(self, layout, batch: int, max_context: int, max_rewind: int, devices: Sequence[torch.device]):
        check_sizes(max_rewind=max_rewind)
        super().__init__(layout, batch, max_context, max_context, devices)
        # the position of a row's memory of chunked prefill, and its chunking
        self.remembered: list[tuple[int, Chunking] | None] = [None] * self.batch

    def guess(self, layers, i: int, step: Step) -> Callable[[torch.Tensor], None] | None:
        """For a decoding token: fetch blocks of layer i + 1 while layer i multiplies."""
        if i + 1 == len(layers) or self.layers[i + 1].ahead is None or step.T > 1 or step.prompt:
            return None
        layer, rows = layers[i + 1], self.layers[i + 1]
        policy = layer.self_attn.reading.policy
        if policy.dense:
            return None
        return lambda x: rows.guess(layer.self_attn, layer.input_layernorm, x, step, policy)

    @property
    def stream(self):
        """The `dsv4.cache.host_tier.stream.DenseStream` of the layers in host memory; None without such."""
        return next((layer.stream for layer in self.layers if layer.far), None)

    def adopt(self, policy: Policy) -> None:
        """Keep what `policy` searches from now on, instead of earlier summaries: they are computed from the keys in the
        cache. Steps that were captured before must be captured again. Copies no keys. Raises MissingSummaries for a
        policy that chooses by the queries of a prompt which is in the cache already."""
        if policy.once and any(self.lengths):
            raise MissingSummaries(
                f"policy {policy.name} chooses by the queries of a prompt's last tokens, and this cache holds "
                f"{max(self.lengths)} tokens whose queries are gone: reset it, or make a new one, and append the "
                "prompt after model.attention is set"
            )
        self.layout = self.layout.of_policy(policy)
        self.plan = self.layout.plan(self.batch, self.max_context, self.max_rewind)
        with self._room():
            for layer, plan in zip(self.layers, self.plan):
                layer.adopt(plan, policy)
            self.layout.select(self.layers)
        self.summarise_again()

    @property
    def widths(self) -> tuple[int, ...]:
        """Entries of the lists that a captured step reads by, of each layer that chose after the prompt."""
        return tuple(layer.selection.width for layer in self.layers if layer.selection is not None)

    def summarise_again(self) -> None:
        """Compute all summaries from the keys, after something other than steps wrote keys."""
        for layer in self.layers:
            layer.summarise(max(self.lengths), self.layout.summarise)

    def rewind(self, n: int | list[int]) -> None:
        """Forget the last n tokens of every row (or n[b] of row b). Copies nothing. Raises RewindError, and then
        changes nothing."""
        super().rewind(n)
        self._forget_memories(rewind_counts(n, self.batch))
        self._forget_selections()

    def reset(self) -> None:
        self._forget_memories(self.lengths)
        super().reset()
        self._forget_selections()

    def _forget_selections(self) -> None:
        for layer in self.layers:
            if layer.selection is not None:
                layer.selection.rewound(self.lengths)

    def _forget_memories(self, counts: list[int]) -> None:
        self.remembered = [held if count == 0 else None for held, count in zip(self.remembered, counts)]
