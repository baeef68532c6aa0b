"""Operations that go by tiles, on inputs of several tiles and a part of one, and what each is by definition in float64.

Each case sets the limits on scratch memory so low that a tile is as small as the operation allows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4.kernels.attention import cpu as attention_cpu
from dsv4.kernels.attention import reference as attention
from dsv4.kernels.experts import cpu as experts_cpu
from dsv4.kernels.grouped_attention import cpu as grouped_cpu
from dsv4.kernels.grouped_attention import reference as grouped
from dsv4.kernels.indexer import cpu as indexer_cpu
from dsv4.kernels.indexer import reference as indexer
from dsv4.kernels.linear import reference as linear

W = 37  # a window over 16 lanes and no multiple of 16
Limits = dict[tuple[object, str], int]  # (module, name) → value while the case runs
EVERYWHERE: Limits = {  # for a whole model: every tile as small as it may be
    (indexer, "SCRATCH_BYTES"): 1,
    (indexer_cpu, "MAX_DOTS"): 0,
    (attention, "SCRATCH_BYTES"): 1 << 16,
    (attention_cpu, "MAX_KEYS"): 0,
    (linear, "SCRATCH_BYTES"): 1,
    (experts_cpu, "MAX_PAIRS"): 0,
    (grouped, "SCRATCH_BYTES"): 1 << 16,
    (grouped_cpu, "PIECE"): 23,
}


@dataclass(frozen=True)
class TileCase:
    """One call. operation: its name; wanted: of what it is by definition, float64; axis, tile: what its tiles cut, and
    how long they are; what: of the tiles' items."""

    operation: str
    label: str
    arguments: list
    wanted: torch.Tensor
    axis: int
    tile: int
    what: str
    limits: Limits


Rand = Callable[..., torch.Tensor]
