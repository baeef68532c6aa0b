"""The load ledger: where every tensor of a checkpoint went, and where every parameter came from.

Two-way and strict. Each tensor of the file is consumed exactly once or listed with a reason; each parameter is
written exactly once, everywhere. Parameters are poisoned before loading, and no poison may remain.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from loaders.errors import CheckpointError
from loaders.files import some
from loaders.layouts import Source

ISLANDS = ("attn_sink", ".ape", "hc_attn_", "hc_ffn_", "hc_head_", "gate.bias")  # fp32 whatever the numerics


@dataclass(frozen=True)
class Piece:
    """A part of a parameter and the tensors it comes from.

    parameter: name in the model. index: which part (`()` for all of it; a slice of the stack for experts).
    names: official tensor name by role: {'raw': …} for a copy; {'weight': …, 'scale': …, 'global': …} where a
    quantised matrix is dequantised into a dense parameter, whose FP8 block is then given.
    """

    parameter: str
    names: Mapping[str, str]
    index: tuple = ()
    shape: tuple[int, ...] = ()
    block: tuple[int, int] = (128, 128)


@dataclass
class LoadLedger:
    """Accounts of one load. `problems()` lists what is wrong; empty means every byte is accounted for."""

    used: dict[str, str] = field(default_factory=dict)        # official name → parameter
    listed: dict[str, str] = field(default_factory=dict)      # official name → reason it is not loaded
    written: Counter = field(default_factory=Counter)         # parameter → elements written
    notes: list[str] = field(default_factory=list)            # casts and other things a reader should know
    faults: list[str] = field(default_factory=list)
    sources: Mapping[str, Source] = field(default_factory=dict)
    parameters: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # name → (dtype, shape)

    def account(self, pieces: Iterable[Piece], sources: Mapping[str, Source], parameters: Mapping[str, torch.Tensor],
                reason_for) -> None:
        """Hold pieces, tensors and parameters against each other, from headers alone.

        reason_for(official name) → why a tensor may stay unused, or None.
        """
        self.sources = sources
        self.parameters = {n: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in parameters.items()}
        seen: set[tuple] = set()
        for piece in pieces:
            if (piece.parameter, str(piece.index)) in seen:
                self.faults.append(f"parameter {piece.parameter} is written twice")
            seen.add((piece.parameter, str(piece.index)))
            self._account_piece(piece, parameters[piece.parameter])
        for name in sources:
            if name not in self.used:
                reason = reason_for(name)
                if reason is None:
                    self.faults.append(f"tensor {sources[name].tensor.key} ({name}) is in the file and nothing takes it")
                else:
                    self.listed[name] = reason
        for name, parameter in parameters.items():
            if self.written[name] != parameter.numel():
                self.faults.append(f"parameter {name} gets {self.written[name]} of its {parameter.numel()} elements")

    def _account_piece(self, piece: Piece, parameter: torch.Tensor) -> None:
        count = 1
        for extent in piece.shape:
            count *= extent
        for role, name in piece.names.items():
            source = self.sources.get(name)
            if source is None:
                self.faults.append(f"tensor {name} is not in the file; the config asks for it (parameter {piece.parameter})")
                return
            if name in self.used:
                self.faults.append(f"tensor {name} is taken by both {self.used[name]} and {piece.parameter}")
            self.used[name] = piece.parameter
            if role == "raw" and source.shape != piece.shape and not (source.shape in ((), (1,)) and count == 1):
                self.faults.append(f"tensor {name} has shape {list(source.shape)}; the config asks for {list(piece.shape)}")
                return
            if any(island in name for island in ISLANDS) and (source.dtype != "F32" or parameter.dtype is not torch.float32):
                self.notes.append(f"{name} is {source.dtype} in the file and {parameter.dtype} in memory; it belongs in fp32")
        self.written[piece.parameter] += count

    def problems(self) -> list[str]:
        return list(self.faults)

    def check(self) -> None:
        """Raise CheckpointError if anything is unaccounted for, naming the first few."""
        if self.faults:
            raise CheckpointError(f"{len(self.faults)} problem(s) between the checkpoint and its config: {some(self.faults)}")

    def to_json(self) -> dict:
        """The whole ledger, one row a file tensor and one a parameter."""
        by_key: dict[str, dict] = {}
        for name, source in self.sources.items():
            row = by_key.setdefault(source.tensor.key, {
                "tensor": source.tensor.key, "dtype": source.dtype, "shape": list(source.tensor.shape),
                "bytes": source.tensor.nbytes, "file": source.tensor.file.name, "official": [], "parameters": [], "reasons": []})
            row["official"].append(name)
            for kind, value in (("parameters", self.used.get(name)), ("reasons", self.listed.get(name))):
                if value is not None and value not in row[kind]:
                    row[kind].append(value)
        return {
            "tensors": list(by_key.values()),
            "parameters": [{"parameter": n, "dtype": d, "shape": list(s), "elements_written": self.written[n]}
                           for n, (d, s) in self.parameters.items()],
            "totals": self.totals(), "notes": self.notes, "problems": self.faults,
        }

    def totals(self) -> dict:
        """Counts and bytes: consumed by dtype, listed by reason."""
        consumed, listed = Counter(), Counter()
        for name, source in self.sources.items():
            if name in self.used:
                consumed[source.dtype] += source.nbytes
            elif name in self.listed:
                listed[self.listed[name]] += source.nbytes
        keys = {s.tensor.key for s in self.sources.values()}
        return {"file_tensors": len(keys), "consumed": len(self.used), "listed": len(self.listed),
                "parameters": len(self.parameters), "consumed_bytes_by_dtype": dict(consumed), "listed_bytes_by_reason": dict(listed)}


def poison(tensor: torch.Tensor) -> None:
    """Fill with a value no file may hold: NaN, its FP8 and E8M0 codes, −1 for indices; 0xA5 for packed FP4."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        tensor.view(torch.uint8).fill_(0x7F if tensor.dtype is torch.float8_e4m3fn else 0xFF)
    elif tensor.dtype is torch.uint8:
        tensor.fill_(0xA5)  # every byte is two legal codes: here only the count of elements written speaks
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def poisoned(tensor: torch.Tensor) -> int:
    """Elements that still hold poison (or NaN); packed FP4 cannot show any."""
    match tensor.dtype:
        case torch.float8_e4m3fn:
            return int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())
        case torch.float8_e8m0fnu:
            return int((tensor.view(torch.uint8) == 0xFF).sum())
        case torch.uint8 | torch.int8:
            return 0
        case torch.int64 | torch.int32:
            return int((tensor < 0).sum())
        case _:
            return int(tensor.isnan().sum())
