"""Keys and values of a GQA model: position-addressed, allocated once.

The row of a slot is a function of the tokens up to that position, and the only state beside the buffers is each row's length. Slots are
as many as tokens, so any rewind is setting the length back.
"""

import enum
from dataclasses import dataclass

import torch

from dsv4.cache import Lengths, Stream, zeros
from dsv4.errors import CapacityError, InputError, RewindError
from dsv4.gqa.config import GQAConfig
from dsv4.numerics import Numerics
from dsv4.step import Step

BLOCK = 128  # tokens of one contiguous tile of a head; slots are a multiple of it


class AttentionKind(enum.Enum):
    """What a layer attends to."""

    FULL = "full"        # every token before
    SLIDING = "sliding"  # the last `window` of them


@dataclass(frozen=True)
class LayerStreams:
    """Both streams of one layer."""

    label: str
    kind: AttentionKind
    streams: tuple[Stream, Stream]


def slots(max_context: int) -> int:
    """Slots of a head: max_context in whole blocks."""
    return -(-max_context // BLOCK) * BLOCK


def cache_streams(config: GQAConfig, batch: int, max_context: int, numerics: Numerics) -> list[LayerStreams]:
    """Streams of every layer: what `GroupedCache` allocates."""
    shape, dtype = (batch, config.num_key_value_heads, slots(max_context), config.head_dim), numerics.cache
    formula = (f"{batch} rows × {config.num_key_value_heads} heads × ⌈{max_context} / {BLOCK}⌉ × {BLOCK} × {config.head_dim} × "
               f"{dtype.itemsize} B")
    streams = tuple(Stream(name, shape, dtype, formula) for name in ("keys", "values"))
    return [LayerStreams(f"layer {i}", AttentionKind.FULL if window is None else AttentionKind.SLIDING, streams)
            for i, window in enumerate(config.windows)]


def token_bytes(config: GQAConfig, numerics: Numerics) -> tuple[int, str]:
    """Bytes of keys and values that one token of one row takes in all layers, and the formula."""
    c, size = config, numerics.cache.itemsize
    return (2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size,
            f"2 × {c.num_hidden_layers} layers × {c.num_key_value_heads} heads × {c.head_dim} × {size} B")


class LayerRows:
    """keys, values [batch, KV, S, D], contiguous: a block of BLOCK tokens of one head is one tile in memory."""

    def __init__(self, plan: LayerStreams, device: torch.device):
        self.keys, self.values = (zeros(stream, device) for stream in plan.streams)
        self.tensors = {"keys": self.keys, "values": self.values}

    def of(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the step's rows, [B, KV, S, D]: contiguous views."""
        return self.keys[step.rows], self.values[step.rows]


class GroupedCache:
    """Caches of all layers for `batch` rows of up to `max_context` tokens. `lengths` are the tokens each row holds."""

    def __init__(self, config: GQAConfig, numerics: Numerics, batch: int, max_context: int, devices: list[torch.device]):
        if batch < 1 or max_context < 1:
            raise InputError(f"a cache needs batch >= 1 and max_context >= 1; got {batch}, {max_context}")
        if max_context > config.max_position_embeddings:
            raise InputError(f"max_context {max_context} exceeds the checkpoint's max_position_embeddings "
                             f"{config.max_position_embeddings}; ask for at most that")
        self.batch, self.max_context, self.max_rewind = batch, max_context, max_context
        self.plan = cache_streams(config, batch, max_context, numerics)
        try:
            self.layers = [LayerRows(p, d) for p, d in zip(self.plan, devices, strict=True)]
        except (RuntimeError, MemoryError) as error:
            wanted = sum(s.nbytes for p in self.plan for s in p.streams)
            raise CapacityError(f"the cache needs {wanted} bytes for batch {batch} and max_context {max_context}, and they "
                                f"could not be allocated ({str(error).splitlines()[0]}); lower one of them") from error
        self._main = Lengths(batch, max_context)

    def make_room(self, rows: slice, tokens: int) -> None:
        """Called before `tokens` tokens are written to each of `rows`. All room was made at once here."""

    @property
    def lengths(self) -> list[int]:
        return list(self._main.now)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, summed over the buffers."""
        return sum(t.untyped_storage().nbytes() for layer in self.layers for t in layer.tensors.values())

    def rewind(self, n: int | list[int]) -> None:
        """Forget the last n tokens of every row (or n[b] of row b). Copies nothing. Raises RewindError, and then changes nothing."""
        counts = [n] * self.batch if isinstance(n, int) else list(n)
        if len(counts) != self.batch:
            raise RewindError(f"rewind got {len(counts)} counts for a batch of {self.batch}")
        self._main.set_back(counts)

    def reset(self) -> None:
        """Forget everything."""
        self._main.set_back(self.lengths)
