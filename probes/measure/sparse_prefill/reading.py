"""One row of text read by a model, densely or in chunks and a memory, with what the memory held."""

import dataclasses
from dataclasses import dataclass

import torch

from dsv4.errors import Dsv4Error
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.causal import CausalLM
from dsv4.model.gqa.cache import GroupedCache
from dsv4.probes.scenes.patching import replaced

SLICE = 1024  # positions whose logits exist at once


class WrongCount(Dsv4Error):
    """The memory was not chosen anew as often as chunks ended: figures would be of something else than they say."""


@dataclass(frozen=True)
class Reading:
    """streams [B, T, d] before the head; the cache that holds the rows; positions: layer → `Memory.positions` [n + 1,
    B, KV, M]."""

    streams: torch.Tensor
    cache: GroupedCache
    positions: dict[int, torch.Tensor]
    memory_bytes: int = 0

    def logits(self, model: CausalLM, row: int, places: slice) -> torch.Tensor:
        """fp32 [n, vocab] at these positions of a row."""
        with torch.inference_mode():
            return model.head(model.features(self.streams[row, places]))


def cut_by(model: CausalLM, cut: Chunking | None):
    """Context manager: the model reads prompts in chunks (None: densely), and decodes as it did."""
    return replaced([model], "attention", dataclasses.replace(model.attention, prefill=cut))


def read(
    model: CausalLM, ids: torch.Tensor, cut: Chunking | None, chunk: int, room: int = 0, counts: list[int] | None = None
) -> Reading:
    """Rows ids int64 [B, T] (counts[b] tokens of row b) from an empty cache with `room` tokens to spare; chunk: tokens
    a step if dense.

    A sparse reading is one call of each layer. Raises WrongCount unless every KV head of every layer chose its memory
    chunks − 1 times.
    """
    (B, T), counts = ids.shape, counts or [ids.shape[1]] * len(ids)
    with cut_by(model, cut):
        cache = model.new_cache(B, T + room)
        piece = chunk if cut is None else cut.chunks(T) * cut.chunk
        _, streams = model.append(ids, cache, counts, logits="none", return_streams=True, chunk=piece, prompt=True)
    if cut is None:
        return Reading(streams, cache, {})
    memories = {i: layer.last_memory for i, layer in enumerate(cache.layers) if layer.last_memory is not None}
    for i, memory in memories.items():
        check_updates(i, memory.updates, counts, cut, T)
    return Reading(
        streams,
        cache,
        {i: m.positions for i, m in memories.items()},
        sum(t.nbytes for m in memories.values() for t in m),
    )


def check_updates(layer: int, updates: torch.Tensor, counts: list[int], cut: Chunking, tokens: int) -> None:
    """updates int64 [B, KV] of one layer. A row as long as the piece that ends with a chunk may go on: its next chunk
    counts as begun."""
    for b, n in enumerate(counts):
        wanted = cut.chunks(n + (n == tokens and n % cut.chunk == 0)) - 1
        if (updates[b] != wanted).any():
            raise WrongCount(
                f"layer {layer}, row {b}: the memory was chosen {updates[b].tolist()} times in {wanted + 1} chunks of "
                f"{cut.chunk}; expected {wanted} each: audit chunked_prefill of this backend before anything else"
            )
