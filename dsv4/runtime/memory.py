"""How many bytes a checkpoint and its caches take, and what a device has."""

import os
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from dsv4.cache.streams import cache_streams
from dsv4.loaders.files import DTYPES
from dsv4.loaders.write import tensor_bytes
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.units import UNITS as UNITS  # old places of these names, until 0.4
from dsv4.units import count_named as count_named
from dsv4.units import format_bytes as format_bytes
from dsv4.units import parse_count as parse_count

EMBEDDING = r"(model\.embed_tokens|embed)\..*"
PARTS = (  # first match names the part of the model a tensor belongs to
    (r"mtp\..*", "MTP"),
    (EMBEDDING, "embedding"),
    (r"(lm_)?head\..*", "output head"),
    (r".*ffn\.experts\..*", "routed experts"),
    (r".*ffn\.shared_experts\..*", "shared experts"),
    (r".*ffn\.gate\..*", "router"),
    (r".*attn\.indexer\..*", "indexer"),
    (r".*attn\.compressor\..*", "compressor"),
    (r".*hc_.*", "mHC"),
    (r".*\.(self_)?attn\..*", "attention"),
    (r".*\.mlp\..*", "MLP"),
    (r".*", "norms"),
)


@dataclass(frozen=True)
class Row:
    """One line of a plan: a name, its bytes, and the formula of the bytes."""

    # 'weights', 'cache', or of what is in host memory 'pinned' and 'staging' (see `dsv4.cache.streams.Stream.place`)
    group: str
    name: str
    nbytes: int
    formula: str


@dataclass(frozen=True)
class Plan:
    rows: tuple[Row, ...]

    def total(self, group: str | None = None) -> int:
        return sum(r.nbytes for r in self.rows if group in (None, r.group))


def labels(names: Iterable[str], table: tuple) -> Iterator:
    """Of each name the label of the first pattern in `table` that matches the whole of it. One expert of a layer is
    looked up for all of them, which are most names of a model."""
    known: dict[str | tuple[str, str], object] = {}
    for name in names:
        layer, experts, rest = name.partition(".experts.")
        alike = (layer, rest.partition(".")[2]) if experts else name
        if alike not in known:
            known[alike] = next(label for pattern, label in table if re.fullmatch(pattern, name))
        yield known[alike]


def weight_rows(tensors: dict[str, tuple[str, tuple[int, ...]]], embedding_memory: str = "device") -> list[Row]:
    """Bytes of the stored tensors by part of the model. tensors: official name → (dtype, shape). embedding_memory:
    'host' makes the embedding's row one of pinned memory."""
    if embedding_memory == "host":
        kept = {name: t for name, t in tensors.items() if not re.fullmatch(EMBEDDING, name)}
        return [*weight_rows(kept), *(pinned_embedding(*t) for name, t in tensors.items() if name not in kept)]
    sizes: Counter = Counter()
    counts: Counter = Counter()
    for part, (dtype, shape) in zip(labels(tensors, PARTS), tensors.values()):
        sizes[part, dtype] += tensor_bytes(dtype, shape)
        counts[part, dtype] += 1
    parts = sorted({part for part, _ in sizes}, key=lambda p: -sum(v for (q, _), v in sizes.items() if q == p))
    rows = []
    for part in parts:
        detail = [(dtype, sizes[part, dtype], counts[part, dtype]) for q, dtype in sorted(sizes) if q == part]
        rows.append(
            Row(
                "weights",
                part,
                sum(n for _, n, _ in detail),
                " + ".join(f"{n} B in {c} {dtype} tensors" for dtype, n, c in detail),
            )
        )
    return rows


def pinned_embedding(dtype: str, shape: tuple[int, ...]) -> Row:
    """The row of a token embedding [vocab, d] in host memory, or of a rank's part of it."""
    vocab, d = shape
    return Row("pinned", "embedding", tensor_bytes(dtype, shape), f"{vocab} tokens × {d} × {DTYPES[dtype].itemsize} B")


def cache_rows(
    config: ModelConfig, batch: int, max_context: int, max_rewind: int, numerics: Numerics, mtp: bool
) -> list[Row]:
    """Bytes of each cache stream by layer kind: exactly what `Cache` allocates."""
    return stream_rows(cache_streams(config, batch, max_context, max_rewind, numerics, mtp))


def stream_rows(layers) -> list[Row]:
    """Bytes of each stream by layer kind, for layers as `cache_streams` of either model kind returns them."""
    grouped: dict[tuple, list] = {}
    for layer in layers:
        kind = ("MTP " if layer.label.startswith("mtp") else "") + layer.kind.value
        for stream in layer.streams:
            grouped.setdefault((stream.place, kind, stream.name, stream.formula), []).append(stream.nbytes)
    return [
        Row(place, f"{kind} layers: {name}", sum(sizes), f"{len(sizes)} layers × {formula}")
        for (place, kind, name, formula), sizes in grouped.items()
    ]


def free_bytes(device: torch.device) -> int:
    """Free memory of a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: torch.device) -> int:
    """Most memory in use so far: of the process on a CPU, of torch's allocator on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # not getrusage: on Linux that also remembers the process this one was forked from
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
