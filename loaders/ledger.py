"""The load ledger: where every tensor of a checkpoint went, and where every parameter came from.

Two-way and strict. Each tensor of the file is consumed exactly once or listed with a reason; each parameter is
written exactly once, everywhere. Parameters are poisoned before loading, and no poison may remain.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from dsv4.loaders.cuts import Cut
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.expected import matrix
from dsv4.loaders.files import DTYPES, some
from dsv4.loaders.layouts import Source

ISLANDS = ("attn_sink", ".ape", "hc_attn_", "hc_ffn_", "hc_head_", "gate.bias")  # fp32 whatever the numerics
WIDENING = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.int32, torch.int64)}
SAME_BYTES = {(torch.int8, torch.uint8)}  # packed FP4 is I8 in official files


@dataclass(frozen=True)
class Piece:
    """A part of a parameter and the tensors it comes from.

    parameter: name in the model. index: which part (`()` for all of it; a slice of the stack for experts).
    names: official tensor name by role: {'raw': …} for a copy; {'weight': …, 'scale': …, 'global': …} where a
    quantised matrix is dequantised into a dense parameter, whose FP8 block is then given. cut: the part of the tensor
    that this rank holds, None for all of it; of a dequantised matrix the part of the matrix. shape: of what it holds.
    """

    parameter: str
    names: Mapping[str, str]
    index: tuple = ()
    shape: tuple[int, ...] = ()
    block: tuple[int, int] = (128, 128)
    cut: Cut | None = None

    def span(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Elements [start, stop) that it fills of a contiguous parameter of `shape`; a slice in `index` comes last."""
        start, stop = 0, math.prod(shape)
        stride = stop
        for extent, where in zip(shape if stop else (), self.index):
            stride //= extent
            first, last, _ = (where if isinstance(where, slice) else slice(where, where + 1)).indices(extent)
            start, stop = start + first * stride, start + last * stride
        return start, stop

    def stored_shapes(self, sources: Mapping[str, Source]) -> dict[str, tuple[int, ...]]:
        """Shape that each of its tensors must have in the file, by official name."""
        whole = self.shape if self.cut is None else self.cut.of(self.shape)
        if "raw" in self.names:
            return {self.names["raw"]: whole}
        name = self.names["weight"]
        form = "NVFP4" if "global" in self.names else "FP8" if sources[name].dtype == "F8_E4M3" else "MXFP4"
        tensors: dict = {}
        matrix(tensors, name.removesuffix(".weight"), whole, form, self.block, "F8_E8M0")
        return {name: tensors[name][1] for name in self.names.values()}


@dataclass
class LoadLedger:
    """Accounts of one load. `problems()` lists what is wrong; empty means every byte is accounted for."""

    used: dict[str, str] = field(default_factory=dict)  # official name → parameter
    listed: dict[str, str] = field(default_factory=dict)  # official name → reason it is not loaded
    written: Counter = field(default_factory=Counter)  # parameter → elements written
    casts: Counter = field(default_factory=Counter)  # 'dtype in the file → dtype in memory' → tensors
    notes: list[str] = field(default_factory=list)  # what a reader should know
    faults: list[str] = field(default_factory=list)
    sources: Mapping[str, Source] = field(default_factory=dict)
    parameters: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # name → (dtype, shape)
    held: dict[str, Cut | None] = field(default_factory=dict)  # official name → the part that this rank holds

    def account(
        self, pieces: Iterable[Piece], sources: Mapping[str, Source], parameters: Mapping[str, torch.Tensor], reason_for
    ) -> None:
        """Hold pieces, tensors and parameters against each other, from headers alone.

        reason_for(official name) → why a tensor may stay unused, or None.
        """
        self.sources = sources
        self.parameters = {n: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in parameters.items()}
        spans: dict[str, list[tuple[int, int]]] = {}
        for piece in pieces:
            self._account_piece(piece, parameters[piece.parameter])
            spans.setdefault(piece.parameter, []).append(piece.span(self.parameters[piece.parameter][1]))
        for name, parts in spans.items():
            parts.sort()
            if any(start < stop for (_, stop), (start, _) in zip(parts, parts[1:])):
                self.faults.append(f"parameter {name} is written twice, at least in part")
        for name in sources:
            if name not in self.used:
                reason = reason_for(name)
                if reason is None:
                    self.faults.append(
                        f"tensor {sources[name].tensor.key} ({name}) is in the file and nothing takes it"
                    )
                else:
                    self.listed[name] = reason
        for name, parameter in parameters.items():
            if self.written[name] != parameter.numel():
                self.faults.append(f"parameter {name} gets {self.written[name]} of its {parameter.numel()} elements")

    def _account_piece(self, piece: Piece, parameter: torch.Tensor) -> None:
        absent = [name for name in piece.names.values() if name not in self.sources]
        if absent:
            self.faults.append(
                f"tensor {absent[0]} is not in the file; the config asks for it (parameter {piece.parameter})"
            )
            return
        fits = True
        for name, shape in piece.stored_shapes(self.sources).items():
            source, stored = self.sources[name], DTYPES[self.sources[name].dtype]
            if name in self.used:
                self.faults.append(f"tensor {name} is taken by both {self.used[name]} and {piece.parameter}")
            self.used[name], self.held[name] = piece.parameter, piece.cut
            if source.shape != shape and not {source.shape, shape} <= {(), (1,)}:
                self.faults.append(f"tensor {name} has shape {list(source.shape)}; the config asks for {list(shape)}")
                fits = False
            if "raw" in piece.names and not keeps_value(stored, parameter.dtype):
                self.faults.append(
                    f"tensor {name} is {source.dtype} in the file and would have to become {parameter.dtype}; that "
                    "would lose bits"
                )
            elif stored is not parameter.dtype:
                self.casts[f"{source.dtype} → {self.parameters[piece.parameter][0]}"] += 1
            if any(island in name for island in ISLANDS) and (
                source.dtype != "F32" or parameter.dtype is not torch.float32
            ):
                self.notes.append(
                    f"{name} is {source.dtype} in the file and {parameter.dtype} in memory; it belongs in fp32"
                )
        if fits:
            start, stop = piece.span(self.parameters[piece.parameter][1])
            self.written[piece.parameter] += stop - start

    def problems(self) -> list[str]:
        return list(self.faults)

    def check(self) -> None:
        """Raise CheckpointError if anything is unaccounted for, naming the first few."""
        if self.faults:
            raise CheckpointError(
                f"{len(self.faults)} problem(s) between the checkpoint and its config: {some(self.faults)}"
            )

    def to_json(self) -> dict:
        """The whole ledger, one row a file tensor and one a parameter."""
        by_key: dict[str, dict] = {}
        for name, source in self.sources.items():
            row = by_key.setdefault(
                source.tensor.key,
                {
                    "tensor": source.tensor.key,
                    "dtype": source.dtype,
                    "shape": list(source.tensor.shape),
                    "bytes": source.tensor.nbytes,
                    "file": source.tensor.file.name,
                    "official": [],
                    "parameters": [],
                    "reasons": [],
                },
            )
            row["official"].append(name)
            for kind, value in (("parameters", self.used.get(name)), ("reasons", self.listed.get(name))):
                if value is not None and value not in row[kind]:
                    row[kind].append(value)
        return {
            "tensors": list(by_key.values()),
            "parameters": [
                {"parameter": n, "dtype": d, "shape": list(s), "elements_written": self.written[n]}
                for n, (d, s) in self.parameters.items()
            ],
            "totals": self.totals(),
            "notes": self.notes,
            "problems": self.faults,
        }

    def totals(self) -> dict:
        """Counts and bytes: consumed by dtype, listed by reason."""
        consumed: Counter[str] = Counter()
        listed: Counter[str] = Counter()
        places = set()
        for name, source in self.sources.items():
            if name in self.used:
                place = source.tensor.key, source.start
                consumed[source.dtype] += source.nbytes if place not in places else 0  # a tied head is the embedding
                places.add(place)
            elif name in self.listed:
                listed[self.listed[name]] += source.nbytes
        keys = {s.tensor.key for s in self.sources.values()}
        return {
            "file_tensors": len(keys),
            "consumed": len(self.used),
            "listed": len(self.listed),
            "parameters": len(self.parameters),
            "consumed_bytes_by_dtype": dict(consumed),
            "listed_bytes_by_reason": dict(listed),
            "casts": dict(self.casts),
        }


def keeps_value(stored: torch.dtype, held: torch.dtype) -> bool:
    """Whether a stored tensor may be held in this dtype: the same, the same bytes, or wider."""
    return stored is held or (stored, held) in SAME_BYTES or (stored, held) in WIDENING


def poison(tensor: torch.Tensor) -> None:
    """Fill with a value no file may hold: NaN, its FP8 and E8M0 codes, −1 for indices; 0xA5 for packed FP4."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        tensor.view(torch.uint8).fill_(0x7F if tensor.dtype is torch.float8_e4m3fn else 0xFF)
    elif tensor.dtype is torch.uint8:
        tensor.fill_(0xA5)  # every byte is two legal codes: here only the count of elements written speaks
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def poisoned(tensor: torch.Tensor) -> int:
    """Elements that still hold poison (or NaN); packed FP4 cannot show any. Looks at a few megabytes at a time."""
    if tensor.dtype in (torch.uint8, torch.int8):
        return 0
    return sum(int(torch.count_nonzero(_is_poison(part))) for part in tensor.reshape(-1).split(1 << 20))


def _is_poison(part: torch.Tensor) -> torch.Tensor:
    match part.dtype:
        case torch.float8_e4m3fn:
            return (part.view(torch.uint8) & 0x7F) == 0x7F
        case torch.float8_e8m0fnu:
            return part.view(torch.uint8) == 0xFF
        case torch.int64 | torch.int32:
            return part < 0
    return part.isnan()
