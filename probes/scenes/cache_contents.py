"""What the next steps of a row may read, by layer and stream, as bytes: of a plain cache and of one in pages.

Where a row lies is worked out here from positions, tables and page sizes; neither kind of cache is asked for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache, Snapshot
from dsv4.model.gqa.cache import BLOCK, GroupedCache
from dsv4.probes.compare import agreeing
from dsv4.probes.oracle import kinds
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.buffers import UNWRITTEN, Buffer, buffers, head_buffers, made_of_input
from dsv4.probes.scenes.layouts import PAGE, Packed, packed_streams
from dsv4.probes.subject import Subject

PARTS = {
    "window": "window rows",
    "main raw rows": "compressor rows",
    "index raw rows": "the indexer's compressor rows",
    "entries": "entries",
    "index keys": "index keys",
    "mtp window": "MTP window",
    "keys": "keys",
    "values": "values",
    "low": "lows of blocks",
    "high": "highs of blocks",
    "mean": "means of blocks",
}
SAME = "the same operations on the same numbers in the same order: equal bytes, whatever the numerics"


@dataclass(frozen=True)
class Held:
    """Rows of one stream of one layer: raw uint8 [n, bytes] without what pads scales; of numbers of `dtype`, or
    packed."""

    raw: torch.Tensor
    dtype: torch.dtype
    packed: Packed | None = None

    @property
    def values(self) -> torch.Tensor:
        """float64 [n, width]."""
        return self.raw.contiguous().view(self.dtype).double() if self.packed is None else self.packed.decode(self.raw)


Rows = dict[tuple[str, str], Held]  # (layer label, stream as in PARTS) → rows, in order of layers


def visible(subject: Subject, cache: Cache, b: int, length: int, mtp_length: int = 0) -> Rows:
    """What batch row b of `length` tokens and `mtp_length` entries of the MTP block may read from its next token on.

    Rows that no page holds are bytes of 255.
    """
    if isinstance(cache, PagedCache):
        pages = {name: dict(enumerate(table.physical[b].tolist())) for name, table in cache.tables.items()}
        return of_pages(subject, cache, pages, length, mtp_length)
    if isinstance(cache, GroupedCache):
        return {
            (buffer.label, buffer.stream): held(
                buffer.rows(b, tokens_read(subject, buffer.label, buffer.each, length)), buffer.tensor.dtype, None
            )
            for buffer in head_buffers(cache)
        }
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
    """What a row or a snapshot that holds `pages` may read from its next token on. pages: group → logical page →
    physical page, 0 for none."""
    if subject.family == "gqa":
        return of_head_pages(subject, cache, pages, length)
    packed, found = packed_streams(subject.config, subject.caches), {}
    for plan, layer in zip(cache.plan, cache.layers + cache.mtp_layers, strict=True):
        for stream, tensor in layer.tensors.items():
            at, group = (
                positions(subject, plan.label, stream, plan.ratio, length, mtp_length),
                cache.groups[layer.groups[stream]],
            )
            if at is None:
                continue
            page = torch.tensor([pages[group.name].get(int(p) // group.rows, 0) for p in at], dtype=torch.int64)
            form = packed.get(stream)
            buffer = Buffer(plan.label, stream, tensor, 1, group.rows, form)  # a pool is one run of rows
            rows = page * (PAGE if form else group.rows) + at % group.rows
            raw = buffer.rows(0, rows.to(tensor.device)).clone()
            raw[page.to(raw.device) == 0] = UNWRITTEN
            found[key(plan.label, stream)] = held(raw, tensor.dtype, form)
    return found


def of_head_pages(subject: Subject, cache: PagedCache, pages: dict[str, dict[int, int]], length: int) -> Rows:
    """`of_pages` of a GQA model: a page holds tokens, or blocks of them, of every KV head."""
    found = {}
    for plan, layer in zip(cache.plan, cache.layers, strict=True):
        for stream, pool in layer.tensors.items():
            rows, table = pool.shape[2], pages[layer.groups[stream]]
            at = tokens_read(subject, plan.label, BLOCK // rows, length)
            page = torch.tensor([table.get(int(p) // rows, 0) for p in at], dtype=torch.int64)
            raw = (
                pool[page.to(pool.device), :, (at % rows).to(pool.device)]
                .contiguous()
                .view(torch.uint8)
                .flatten(1)
                .clone()
            )
            raw[page.to(raw.device) == 0] = UNWRITTEN
            found[plan.label, stream] = held(raw, pool.dtype, None)
    return found


def tokens_read(subject: Subject, label: str, each: int, length: int) -> torch.Tensor:
    """int64: of a layer of a GQA model, the tokens that its next step may read, or whole blocks of `each` tokens: one
    that is not whole is summarised again before it is read."""
    window = subject.model.config.windows[int(label.rpartition(" ")[2])]
    return torch.arange(0 if window is None else max(0, length - window + 1) // each, length // each)


def of_snapshot(subject: Subject, cache: PagedCache, snapshot: Snapshot) -> Rows:
    """The prefix that a snapshot holds."""
    return of_pages(subject, cache, snapshot.pages, snapshot.length, snapshot.mtp_length)


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


def held(raw: torch.Tensor, dtype: torch.dtype, packed: Packed | None) -> Held:
    raw = raw.cpu()
    return Held(raw if packed is None else raw[:, : packed.payload + packed.used], dtype, packed)


# ---- comparing ----------------------------------------------------------------------------


def off(found: Held, wanted: Held) -> torch.Tensor:
    """bool [n]: rows whose bytes differ; all of them where there are not as many."""
    if found.raw.shape != wanted.raw.shape:
        return torch.ones(max(len(found.raw), len(wanted.raw)), dtype=torch.bool)
    return (found.raw != wanted.raw).any(1)


def errors_of(found: Held, wanted: Held) -> torch.Tensor:
    """‖found − wanted‖ / ‖wanted‖ of rows [n]; infinite where NaN, or where there are not as many rows."""
    if found.raw.shape != wanted.raw.shape:
        return torch.full((max(len(found.raw), len(wanted.raw)),), float("inf"), dtype=torch.float64)
    a, b = found.values, wanted.values
    return torch.nan_to_num((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12), nan=float("inf"))


def differing(found: Rows, wanted: Rows, limit: float | None = None) -> dict[tuple[str, str], int]:
    """(label, stream) → how many rows differ, in order of layers: in any bit, or by more than `limit` of their norm."""
    bad = {
        at: int((off(found[at], wanted[at]) if limit is None else errors_of(found[at], wanted[at]) > limit).sum())
        for at in wanted
    }
    return {at: n for at, n in bad.items() if n}


def first_of(subject: Subject, bad: dict[tuple[str, str], int]) -> tuple[str, str]:
    """(where, part) of what differs first. Where all that is made of a layer's input differs, the layer before is at
    fault."""
    if not bad:
        return "", ""
    label = next(iter(bad))[0]
    streams = [stream for at, stream in bad if at == label]
    if not label.startswith("mtp"):
        layer = int(label.rpartition(" ")[2])
        if layer and made_of_input(subject, layer) <= set(streams):
            return f"layer {layer - 1}", "layer output"
    return label, PARTS[next(stream for stream in PARTS if stream in streams)]


def rows_checks(
    name: str, where: str, part: str, subject: Subject, pairs: list[tuple[str, Rows, Rows]], exact: bool
) -> Iterator[Check]:
    """One check of all that is visible in pairs (when, found, wanted); its part says which stream of which layer
    differs first, in the first pair that differs."""
    _, _, limit = agreeing(torch.zeros(1), subject.numerics)
    at, what, why, wrong, errors, count = "", "", "", 0, [], 0
    for when, found, wanted in pairs:
        bad = differing(found, wanted, None if exact else limit)
        if bad and not what:
            (at, what), why = first_of(subject, bad), f"{when}: {summary(bad)}"
        wrong, count = wrong + sum(bad.values()), count + sum(len(h.raw) for h in wanted.values())
        errors += [] if exact else [errors_of(found[k], wanted[k]) for k in wanted]
    about = dict(where=where, found=at, part=", ".join(filter(None, (part, what))), note=why)
    if exact:
        yield compare(name, wrong, "==", 0, SAME, count, unit="rows", **about)
        return
    value, source, limit = agreeing(torch.cat(errors), subject.numerics)
    yield compare(name, value, "<=", limit, source, count, **about)


def summary(bad: dict[tuple[str, str], int]) -> str:
    """'3 of the index keys of layer 1, …' of the first two streams."""
    said = [
        f"{n} of the {PARTS[stream].removeprefix('the ')} of {label}" for (label, stream), n in list(bad.items())[:2]
    ]
    return ", ".join(said) + (", …" if len(bad) > 2 else "")


def bits(name: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], where: str, part: str) -> Check:
    """Pairs of logits [n, vocab]; NaN differs from everything."""
    wrong = sum(int((a != b).sum()) if a.shape == b.shape else b.numel() for a, b in pairs)
    return compare(name, wrong, "==", 0, SAME, sum(b.numel() for _, b in pairs), where=where, part=part)


def of_output(prefix: str, subject: Subject, rows: list[tuple[str, Rows, Rows]], other: str = "next logits") -> str:
    """The part of logits that differ: the rows that differ first, else `other`."""
    first = next((first_of(subject, bad)[1] for _, found, wanted in rows if (bad := differing(found, wanted))), other)
    return f"{prefix}, {first}"
