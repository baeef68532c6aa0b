"""The buffers of a cache: shapes, dtypes, bytes and the formula of each size. Allocation and planning use the same
table."""

import enum
import math
from dataclasses import dataclass

import numpy as np
import torch

from dsv4.kernels.cache_rows import PAGE, RowFormat, pack_layout
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerSpec

MAX_DRAFTS = 8  # drafted tokens a pass; a trace says for each position how many of this number would be accepted
# MTP entries that chained drafts may leave beyond the main model's tokens: those of the longest pass, and the entry of
# the last final token. The block's rings have room for them, so that a rewind by max_rewind works after drafts too.
CHAINED = MAX_DRAFTS + 1


@dataclass(frozen=True)
class Stream:
    """One buffer of the cache of one layer, with the formula of its size. place: 'cache' (the device), 'pinned' (host
    memory), or 'staging' (the device's copy of some of it, and the tables to find them)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    formula: str
    # format, width, rotated columns of packed rows; shape is then (…, pages, page bytes)
    rows: tuple[RowFormat, int, int] | None = None
    place: str = "cache"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class LayerStreams:
    """All streams of one layer. window_rows: of the window's ring, a batch row, where there is one."""

    spec: LayerSpec
    streams: tuple[Stream, ...]
    window_rows: int = 0

    @property
    def label(self) -> str:
        return self.spec.label

    @property
    def kind(self) -> enum.Enum:
        return self.spec.kind

    @property
    def ratio(self) -> int:
        return self.spec.ratio


def layer_streams(
    config: ModelConfig, spec: LayerSpec, batch: int, max_context: int, max_rewind: int, numerics: Numerics
) -> LayerStreams:
    """Streams that one layer owns: entries and index keys of another layer are not among them."""
    d, W, ratio, overlap = config.head_dim, config.sliding_window, spec.ratio, spec.overlap
    main, index = (numerics.kv_rows, d, config.qk_rope_head_dim), (numerics.index_rows, config.index_head_dim, 0)
    streams = [_ring_stream("window", batch, W, max_rewind, main, numerics.cache)]
    pooled = [("main raw rows", "entries", main)] if spec.compresses else []
    pooled += [("index raw rows", "index keys", index)] if spec.selects else []
    for raw, entries, rows in pooled:
        shape = (batch, overlap * ratio + max_rewind, 2 * overlap * rows[1])
        how = (
            f"{batch} rows × ({overlap * ratio} window{'s' if overlap > 1 else ''} + {max_rewind} rewind) "
            f"× 2 × {overlap * rows[1]} × 4 B"
        )
        streams.append(Stream(raw, shape, torch.float32, how))
        streams.append(_entry_stream(entries, batch, max_context, ratio, rows, numerics.cache))
    return LayerStreams(spec, tuple(streams), W + max_rewind)


def _ring_stream(name: str, batch: int, window: int, max_rewind: int, rows, dtype: torch.dtype) -> Stream:
    format, width, rope = rows
    if format is None:
        return Stream(
            name,
            (batch, window + max_rewind, width),
            dtype,
            f"{batch} rows × ({window} window + {max_rewind} rewind) × {width} × {dtype.itemsize} B",
        )
    layout, pages = pack_layout(format, width, rope), -(-batch * (window + max_rewind) // PAGE)
    return Stream(
        name,
        (pages, layout.page),
        torch.uint8,
        f"⌈{batch} rows × ({window} window + {max_rewind} rewind) / {PAGE}⌉ pages × {_page_formula(layout)}",
        rows,
    )


def _entry_stream(name: str, batch: int, max_context: int, ratio: int, rows, dtype: torch.dtype) -> Stream:
    format, width, rope = rows
    n = -(-max_context // ratio)
    if format is None:
        return Stream(
            name, (batch, n, width), dtype, f"{batch} rows × ⌈{max_context} / {ratio}⌉ × {width} × {dtype.itemsize} B"
        )
    layout, pages = pack_layout(format, width, rope), -(-n // PAGE)
    return Stream(
        name,
        (batch, pages, layout.page),
        torch.uint8,
        f"{batch} rows × ⌈⌈{max_context} / {ratio}⌉ / {PAGE}⌉ pages × {_page_formula(layout)}",
        rows,
    )


def _page_formula(layout) -> str:
    padding = layout.page - PAGE * layout.row
    return f"({PAGE} × {layout.row}{f' + {padding} padding' if padding else ''}) B"


def cache_streams(
    config: ModelConfig, batch: int, max_context: int, max_rewind: int, numerics: Numerics, mtp: bool
) -> list[LayerStreams]:
    """Streams of every layer, backbone first, then the MTP blocks: what `Cache` allocates."""
    layers = [(spec, max_rewind) for spec in config.layers]
    if mtp:
        layers += [(spec, max_rewind + CHAINED) for spec in config.mtp_layers]
    return [layer_streams(config, spec, batch, max_context, back, numerics) for spec, back in layers]


def zeros(stream: Stream, device: torch.device) -> torch.Tensor:
    """The buffer of a stream. In host memory it comes from calloc: pages that no token has reached take no memory
    yet."""
    if device.type != "cpu":
        return torch.zeros(stream.shape, dtype=stream.dtype, device=device)
    return torch.from_numpy(np.zeros(stream.nbytes, np.uint8)).view(stream.dtype).view(stream.shape)
