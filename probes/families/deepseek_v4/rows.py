"""Rows of a DeepSeek-V4 model's cache: those of every buffer, and those that the next steps of a row may read.

Position p of batch row b sits in slot p mod R of its ring, ring b being rows b·R … of one pool; entry w of row b sits
in row w of the b-th run. The design promises this; the probes find out where the model really writes.
"""

from collections.abc import Iterator

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache
from dsv4.probes.families.cache_rows import UNWRITTEN, Buffer, Rows, held
from dsv4.probes.oracle import kinds
from dsv4.probes.scenes.layouts import PAGE, packed_streams
from dsv4.probes.subject import Subject


def buffers(subject: Subject, cache: Cache, mtp: bool = True) -> Iterator[Buffer]:
    """See `ProbedFamily.buffers`."""
    packed = packed_streams(subject.config, subject.caches)
    layers = cache.layers + cache.mtp_layers if mtp else cache.layers
    for plan, layer in zip(cache.plan, layers, strict=mtp):
        overlap = kinds.OVERLAP[plan.ratio]
        for stream, tensor in layer.tensors.items():
            form, ring = packed.get(stream), stream == "window" or stream.endswith("raw rows")
            keep = subject.config.sliding_window - 1 if stream == "window" else overlap * plan.ratio - 1
            slots = plan.window_rows if stream == "window" else tensor.shape[1] * (64 if form else 1)
            yield Buffer(
                plan.label, stream, tensor, cache.batch, slots, form, 0 if ring else plan.ratio, keep if ring else 0
            )


def visible(subject: Subject, cache: Cache, b: int, length: int, mtp_length: int) -> Rows:
    """See `ProbedFamily.visible`."""
    found = {}
    for buffer in buffers(subject, cache):
        at = positions(subject, buffer.label, buffer.stream, ratio_of(cache, buffer.label), length, mtp_length)
        if at is not None:
            raw = buffer.rows(b, (at if buffer.ratio else at % buffer.slots).to(buffer.tensor.device))
            found[key(buffer.label, buffer.stream)] = held(raw, buffer.tensor.dtype, buffer.packed)
    return found


def of_pages(
    subject: Subject, cache: PagedCache, pages: dict[str, dict[int, int]], length: int, mtp_length: int
) -> Rows:
    """See `ProbedFamily.of_pages`."""
    packed, found = packed_streams(subject.config, subject.caches), {}
    for plan, layer in zip(cache.plan, cache.layers + cache.mtp_layers, strict=True):
        for stream, tensor in layer.tensors.items():
            at, group = (
                positions(subject, plan.label, stream, plan.ratio, length, mtp_length),
                cache.groups[layer.groups[stream]],
            )
            if at is None:
                continue
            page = torch.tensor([pages[group.name].get(p // group.rows, 0) for p in at.tolist()], dtype=torch.int64)
            form = packed.get(stream)
            buffer = Buffer(plan.label, stream, tensor, 1, group.rows, form)  # a pool is one run of rows
            rows = page * (PAGE if form else group.rows) + at % group.rows
            raw = buffer.rows(0, rows.to(tensor.device)).clone()
            raw[page.to(raw.device) == 0] = UNWRITTEN
            found[key(plan.label, stream)] = held(raw, tensor.dtype, form)
    return found


def positions(
    subject: Subject, label: str, stream: str, ratio: int, length: int, mtp_length: int
) -> torch.Tensor | None:
    """int64: tokens, or entries, whose rows may be read; None for blocks that nothing runs (beyond the first MTP
    block)."""
    if label.startswith("mtp"):
        if label != "mtp 0":
            return None
        length = mtp_length
    if stream == "window":
        return torch.arange(max(0, length - subject.config.sliding_window + 1), length)
    if stream.endswith("raw rows"):
        overlap = (kinds.OVERLAP[ratio] - 1) * ratio
        return torch.arange(max(0, length // ratio * ratio - overlap), length)
    return torch.arange(length // ratio)


def ratio_of(cache: Cache, label: str) -> int:
    return next(plan.ratio for plan in cache.plan if plan.label == label)


def key(label: str, stream: str) -> tuple[str, str]:
    return label, f"mtp {stream}" if label.startswith("mtp") else stream
