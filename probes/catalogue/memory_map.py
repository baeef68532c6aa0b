"""P15: bytes of the cache by formula and as allocated; rows that share no byte; slots beyond 2 GiB. See
memory_map.md."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND
from dsv4.cache.rows import Entries, Linear
from dsv4.cache.streams import Stream, cache_streams, zeros
from dsv4.errors import CapacityError
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.step import Step
from dsv4.probes.compare import tokens, window_of
from dsv4.probes.oracle import kinds
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.scenes.buffers import buffers
from dsv4.probes.scenes.layouts import PAGE, Packed, packed_streams
from dsv4.probes.scenes.packed_rows import bytes_of_rows, far_rows
from dsv4.probes.subject import Subject

MEASURED, FORMULA_ONLY = (8 << 10, 128 << 10), 1 << 20
WIDTH = {"fp32": 4, "qat:fp32": 4, "native": 2, "qat": 2}  # bytes of a cached number by numerics
EXACT = "rows × width × bytes, written out in memory_map.md; buffers are allocated once, without padding"
APART = "rows of a batch share no memory (PocketLLM 241)"
FAR = 1 << 31  # where 32-bit offsets end


@dataclass(frozen=True)
class MemoryMap(Probe):
    """Of this project's model, whose caches can be asked; a formula of its own, not the one that allocates."""

    name: ClassVar[str] = "memory_map"
    title: ClassVar[str] = "cache memory: bytes by stream, and whose they are"
    needs: ClassVar[frozenset[str]] = frozenset({"cache"})

    def run(self, subject: Subject) -> list[Check]:
        if subject.numerics not in WIDTH:
            return [vacuous("bytes of the cache", f"numerics {subject.numerics!r} say nothing of caches", part="cache")]
        limit = subject.config.max_position_embeddings
        checks = []
        for context in sorted({min(c, limit) for c in MEASURED}):
            for batch in (1, 2):
                checks += self._sizes(subject, batch, context)
        checks += self._planning(subject, FORMULA_ONLY)
        if "kernels" in subject.can and hasattr(subject, "model"):
            checks += listed("rows of the cache", "cache", lambda: self._ranges(subject))
            checks += listed("rows of the cache", "cache", lambda: self._rows_apart(subject))
            checks += self._beyond(subject)
        return checks

    def _beyond(self, subject: Subject) -> list[Check]:
        """Packed rows, and rows whose offsets need 64 bits."""
        packed = packed_of(subject)
        return [
            *listed("bytes of packed rows", "packed rows", lambda: bytes_of_rows(subject, self.seed)),
            *listed("rows beyond 2^31", "entries", lambda: [] if "entries" in packed else [self._far(subject)]),
            *listed("rows beyond 2^31", "packed rows", lambda: far_rows(subject, packed)),
        ]

    def _formula(self, subject: Subject, batch: int, context: int, mtp: bool = True) -> dict[tuple[str, str], int]:
        """(layer label, stream) → bytes, with the default room to rewind: written out here, not taken from the
        cache."""
        return formula(subject.config, WIDTH[subject.numerics], batch, context, mtp, packed_of(subject))

    def _per_token(self, subject: Subject) -> float:
        """Bytes that a token adds permanently."""
        return per_token(subject.config, WIDTH[subject.numerics], packed_of(subject))

    def _planned(self, subject: Subject, context: int, numerics: Numerics) -> list:
        """Streams of each layer, as the planner sizes them for one row."""
        return cache_streams(subject.config, 1, context, DEFAULT_MAX_REWIND, numerics, mtp=True)

    def _kind(self, config, label: str) -> str:
        """The kind of a layer, of the MTP block too."""
        which, i = label.split()
        ratio = (config.mtp_compress_ratios if which == "mtp" else config.compress_ratios)[int(i)]
        return ("MTP " if which == "mtp" else "") + kinds.NAMES[ratio]

    def _by_kind(self, config, sizes: dict) -> Counter:
        total: Counter = Counter()
        for (label, stream), size in sizes.items():
            total[self._kind(config, label), stream] += size
        return total

    def _sizes(self, subject: Subject, batch: int, context: int) -> Iterator[Check]:
        """Allocated against the formula: by kind and stream, and which buffer of which layer is off."""
        where = f"batch {batch}, context {context}"
        try:
            found = subject.cache_bytes(batch, context)
        except CapacityError as error:
            yield vacuous("bytes allocated", str(error), where=where, part="cache")
            return
        mtp = any(label.startswith("mtp") for label, _ in found)
        wanted = self._formula(subject, batch, context, mtp)
        for key in sorted(set(wanted) | set(found)):
            if wanted.get(key) != found.get(key):
                yield compare(
                    "bytes of the buffer",
                    found.get(key, 0),
                    "==",
                    wanted.get(key, 0),
                    EXACT,
                    1,
                    unit="B",
                    where=f"{key[0]}, {where}",
                    part=key[1],
                )
        allocated = self._by_kind(subject.config, found)
        for (kind, stream), size in self._by_kind(subject.config, wanted).items():
            count = sum(self._kind(subject.config, label) == kind and name == stream for label, name in wanted)
            yield compare(
                f"bytes of {kind} layers, {stream}",
                allocated.get((kind, stream), 0),
                "==",
                size,
                EXACT,
                count,
                unit="B",
                where=where,
                part=stream,
            )
        yield compare(
            "bytes of the whole cache",
            sum(found.values()),
            "==",
            sum(wanted.values()),
            EXACT,
            len(wanted),
            unit="B",
            where=where,
            part="cache",
        )

    def _planning(self, subject: Subject, context: int) -> Iterator[Check]:
        """What the planner says against the formula here, without allocating; beyond the model's maximum too."""
        numerics = getattr(getattr(subject, "model", None), "numerics", None)
        wanted, fixed = self._formula(subject, 1, context), sum(self._formula(subject, 1, 0).values())
        note = f"{self._per_token(subject):.6g} B a token, and {fixed} B whatever it holds"
        if context > subject.config.max_position_embeddings:
            note += f"; beyond the {subject.config.max_position_embeddings} tokens that the checkpoint allows"
        where = f"batch 1, context {context}"
        if numerics is None:
            yield Check(
                "bytes by formula",
                Status.PASS,
                where,
                "cache",
                sum(wanted.values()),
                "B",
                source="reported",
                samples=len(wanted),
                note=note,
            )
            return
        layers = self._planned(subject, context, numerics)
        planned = {(layer.label, s.name): s.nbytes for layer in layers for s in layer.streams}
        off = [key for key in wanted.keys() | planned.keys() if wanted.get(key) != planned.get(key)]
        first = min(off, default=(where, "cache"))
        yield compare(
            "bytes that the planner says",
            sum(planned.values()),
            "==",
            sum(wanted.values()),
            EXACT,
            len(wanted),
            unit="B",
            where=where,
            found=first[0] if off else "",
            part=first[1],
            note=note,
        )
        yield compare(
            "streams that the planner sizes otherwise",
            len(off),
            "==",
            0,
            EXACT,
            len(wanted),
            unit="streams",
            where=where,
            found=first[0] if off else "",
            part=first[1],
        )

    def _ranges(self, subject: Subject) -> Iterator[Check]:
        """Address ranges of the rows of every buffer: none shares a byte with another, all lie within their
        storages."""
        cache = subject.model.new_cache(2, min(MEASURED[0], subject.config.max_position_embeddings))
        spans, outside, rows = [], [], 0
        for buffer in buffers(subject, cache):
            storage = buffer.tensor.untyped_storage()
            for row in range(2):
                rows += 1
                mine = [(start, stop, f"{buffer.label}, row {row}", buffer.stream) for start, stop in buffer.spans(row)]
                spans += mine
                if min(mine)[0] < storage.data_ptr() or max(s[1] for s in mine) > storage.data_ptr() + storage.nbytes():
                    outside.append((buffer.label, buffer.stream))
        spans.sort()
        shared = [(a, b) for a, b in zip(spans, spans[1:]) if b[0] < a[1]]
        where, part = (shared[0][0][2], shared[0][0][3]) if shared else ("", "cache")
        yield compare(
            "rows that share memory",
            len(shared),
            "==",
            0,
            APART,
            rows,
            unit="pairs",
            where=where,
            part=part,
            note="; ".join(f"{a[2]} {a[3]} and {b[2]} {b[3]}" for a, b in shared[:3]),
        )
        yield compare(
            "rows beyond their storage",
            len(outside),
            "==",
            0,
            "a buffer ends where its storage does",
            rows,
            unit="rows",
            found=outside[0][0] if outside else "",
            part=outside[0][1] if outside else "cache",
        )

    def _rows_apart(self, subject: Subject) -> Iterator[Check]:
        """Tokens for one row, past the end of the ring: every byte of other rows stays unchanged."""
        config, model = subject.config, subject.model
        T = min(window_of(config) + DEFAULT_MAX_REWIND + 5, config.max_position_embeddings)
        ids = tokens(subject, T, self.seed, rows=2)
        for busy in range(2):
            cache = model.new_cache(2, T)
            model.append(ids, cache, n_new=[T if row == busy else 0 for row in range(2)], logits="none")
            touched, idle, seen = [], [], 0
            for buffer in buffers(subject, cache, mtp=False):
                seen += 1
                written = buffer.bytes != 0
                mine = buffer.offsets(busy, torch.arange(buffer.slots, device=written.device)).flatten()
                count = int(written[mine].sum())
                if int(written.sum()) != count:
                    touched.append((buffer.label, buffer.stream))
                if not count and T >= buffer.ratio:
                    idle.append((buffer.label, buffer.stream))
            outcomes = {
                "buffers of the other row that were written": touched,
                "buffers of the row that nothing wrote": idle,
            }
            for what, bad in outcomes.items():
                label, part = bad[0] if bad else ("", "cache")
                yield compare(
                    what,
                    len(bad),
                    "==",
                    0,
                    APART,
                    seen,
                    unit="buffers",
                    where=f"any layer, row {busy}",
                    found=label,
                    part=part,
                )

    def _far(self, subject: Subject) -> Check:
        """An entry whose first element lies at offset 2^31: written and found again, and no other in its place."""
        ratio, D = 4, subject.config.head_dim
        n = -(-FAR // D) + 1  # the last entry begins at or beyond 2^31, whatever D
        about = dict(where=f"entry {n - 1} of {D} dims", part="entries", unit="entries")
        try:
            # pages are taken when written
            buffer = zeros(Stream("entries", (1, n, D), torch.float16, ""), torch.device("cpu"))
        except (RuntimeError, MemoryError) as error:
            return vacuous(
                "entries beyond 2^31 elements",
                f"{2 * n * D} B cannot be reserved: {str(error).splitlines()[0]}",
                **about,
            )
        entries = Entries(Linear(buffer), ratio)
        step = Step(torch.zeros(1, ratio, dtype=torch.int64), 0, [(n - 1) * ratio], {})
        entries.write(step, torch.ones(1, D))
        pool, rows = entries.chosen(step, torch.full((1, ratio, 1), n - 1))
        right = bool((buffer[0, n - 1] == 1).all()) and bool((pool[rows[0, 0]] == 1).all()) and not buffer[0, 0].any()
        return compare(
            "entries beyond 2^31 elements that are written and read in place",
            int(right),
            "==",
            1,
            "offsets are 64 bits wide; int32 ones wrap here (SGLang 40351)",
            3,
            **about,
        )


def packed_of(subject: Subject) -> dict[str, Packed]:
    """Stream → layout, of the streams that the subject holds packed."""
    return packed_streams(subject.config, getattr(subject, "caches", ("auto", "auto")))


def listed(name: str, part: str, make: Callable[[], Iterable[Check]]) -> list[Check]:
    """The checks of `make`. If it raises, that is an ERROR of them, and the other checks of the probe still run."""
    try:
        return list(make())
    except Exception as error:  # an implementation under audit may raise anything
        return [Check(name, Status.ERROR, "", part, note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")]


def formula(
    config: ModelConfig, width: int, batch: int, context: int, mtp: bool, packed: dict[str, Packed]
) -> dict[tuple[str, str], int]:
    """See `MemoryMap._formula`. Rows of packed streams come in pages of 64; those of the window's ring are shared by
    the rows of the batch."""
    pages = lambda stream, rows: -(-rows // PAGE) * packed[stream].page
    layers = [(f"layer {i}", r) for i, r in enumerate(config.compress_ratios)]
    layers += [(f"mtp {i}", r) for i, r in enumerate(config.mtp_compress_ratios)] if mtp else []
    sizes = {}
    for label, ratio in layers:
        # the MTP block's ring also holds what chained drafts leave: 8, and the entry of the last final token
        ring = batch * (config.sliding_window + DEFAULT_MAX_REWIND + 9 * label.startswith("mtp"))
        sizes[label, "window"] = pages("window", ring) if "window" in packed else ring * config.head_dim * width
        parts = [("main", "entries", config.head_dim)] if ratio else []
        parts += [("index", "index keys", config.index_head_dim)] if ratio == kinds.CSA else []
        overlap = kinds.OVERLAP[ratio]
        for which, stream, dims in parts:
            sizes[label, f"{which} raw rows"] = batch * (overlap * ratio + DEFAULT_MAX_REWIND) * 2 * overlap * dims * 4
            rows = -(-context // ratio)
            sizes[label, stream] = batch * (pages(stream, rows) if stream in packed else rows * dims * width)
    return sizes


def per_token(config: ModelConfig, width: int, packed: dict[str, Packed]) -> float:
    """See `MemoryMap._per_token`; for packed rows a 64th of a page."""
    row = lambda stream, dims: packed[stream].page / PAGE if stream in packed else dims * width
    entry, key = row("entries", config.head_dim), row("index keys", config.index_head_dim)
    csa, hca = (config.compress_ratios.count(ratio) / ratio for ratio in (kinds.CSA, kinds.HCA))
    return csa * (entry + key) + hca * entry


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(MemoryMap)
