"""What the next steps of a row may read, by layer and stream, as bytes: of a plain cache and of one in pages.

Where a row lies is worked out here from positions, tables and page sizes; neither kind of cache is asked for it.
"""

from collections.abc import Iterator

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache, Snapshot
from dsv4.probes import families
from dsv4.probes.compare import agreeing
from dsv4.probes.families.cache_rows import Held, Rows
from dsv4.probes.result import Check, compare
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


def visible(subject: Subject, cache: Cache, b: int, length: int, mtp_length: int = 0) -> Rows:
    """What batch row b of `length` tokens and `mtp_length` entries of the MTP block may read from its next token on.

    Rows that no page holds are bytes of 255.
    """
    if isinstance(cache, PagedCache):
        pages = {name: dict(enumerate(table.physical[b].tolist())) for name, table in cache.tables.items()}
        return families.of(subject).of_pages(subject, cache, pages, length, mtp_length)
    return families.of(subject).visible(subject, cache, b, length, mtp_length)


def of_snapshot(subject: Subject, cache: PagedCache, snapshot: Snapshot) -> Rows:
    """The prefix that a snapshot holds."""
    return families.of(subject).of_pages(subject, cache, snapshot.pages, snapshot.length, snapshot.mtp_length)


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
        if layer and families.of(subject).made_of_input(subject.config, layer) <= set(streams):
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
