"""P4: fp32 on disk stays fp32, protected tensors are not quantised, caches fit the numerics. See dtype_ledger.md."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.kernels.errors import Dsv4Error
from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import keeps_value
from dsv4.model.families import pieces_of
from dsv4.model.numerics import NUMERICS, Numerics
from dsv4.probes.catalogue.load_ledger import headers, named
from dsv4.probes.oracle.weights import decode
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.scenes.buffers import buffers
from dsv4.probes.subject import Subject

ISLAND = re.compile(r".*(hc_(attn|ffn|head)_(fn|base|scale)|attn_sink|\.ape|gate\.bias)")
NEVER_QUANTISED = re.compile(
    r".*(ffn\.gate\.weight|compressor\.(wkv|wgate|norm)\.weight|weights_proj\.weight|norm\.weight)|"
    r"(embed|head|norm)\.weight"
)
DISK = "specification 2.1: hc_*, attn_sink, ape and gate.bias are F32 in every release"
MEMORY = "what is F32 on disk is F32 in memory: a blanket cast to bf16 flips picks and merges (Automodel 2216)"
UNQUANTISED = "specification 2.1: BF16 without scales; a router requantised to 4 bits flips picks (Atlas 186)"
CACHE = {"fp32": torch.float32, "native": torch.bfloat16, "qat": torch.bfloat16, "qat:fp32": torch.float32}
FLOATS = ("BF16", "F32", "F16")


def of_model(model, asked: Numerics | None, choice: str, rope: str) -> Iterator[Check]:
    """The numerics that a loaded model runs in, and its rotary frequencies. choice, rope: sources of the bounds."""
    yield compare(
        "numerics in effect", str(model.numerics), "==", str(asked), choice, 1, where="model", part="numerics"
    )
    for base, f in model.frequencies.items():
        where = f"base {base}"
        name, wanted = "rotary frequencies are fp32", str(torch.float32)
        yield compare(name, str(f.dtype), "==", wanted, rope, f.numel(), where=where, part="RoPE")


@dataclass(frozen=True)
class DtypeLedger(Probe):
    """On disk by the headers; in memory by value for any subject with weights, and by dtype for this project's
    model."""

    name: ClassVar[str] = "dtype_ledger"
    title: ClassVar[str] = "dtypes on disk, in memory and in caches"
    needs: ClassVar[frozenset[str]] = frozenset({"files"})

    def run(self, subject: Subject) -> list[Check]:
        checks = [*self._disk(subject)]
        if "run" not in subject.can:
            return checks
        checks += self._values(subject)
        if "kernels" in subject.can and hasattr(subject, "model"):
            checks += [*self._memory(subject), *self._caches(subject)]
        return checks

    def _disk(self, subject: Subject) -> Iterator[Check]:
        stored = {name: source.dtype for name, source in subject.files.sources.items()}
        islands = [n for n in stored if ISLAND.fullmatch(n)]
        yield from named("fp32 island is F32 on disk", [n for n in islands if stored[n] != "F32"], len(islands), DISK)
        plain = [n for n in stored if NEVER_QUANTISED.fullmatch(n)]
        scaled = [n for n in plain if stored[n] not in FLOATS or f"{n.removesuffix('.weight')}.scale" in stored]
        yield from named(
            "router, compressors, weights_proj and norms are not quantised on disk", scaled, len(plain), UNQUANTISED
        )
        tables = [n for n in stored if n.endswith("tid2eid")]
        if not tables:
            yield vacuous("tid2eid is an integer table on disk", "the model has no hash layers", part="router")
            return
        yield from named(
            "tid2eid is an integer table on disk",
            [n for n in tables if stored[n] not in ("I64", "I32")],
            len(tables),
            "specification 2.1: I64; an int32 table widens without loss (llama.cpp 25754 took one for weights)",
        )
        narrow = [n for n in tables if stored[n] == "I32"]
        if narrow:
            yield Check(
                "tid2eid is I64 on disk",
                Status.WARN,
                narrow[0],
                "router",
                "I32",
                "",
                "==",
                "I64",
                "specification 2.1",
                samples=len(tables),
                note="widened when loaded",
            )

    def _values(self, subject: Subject) -> Iterator[Check]:
        """An island that was cast through bf16 has lost bits, whatever its dtype is now."""
        stored, block = headers(subject.files), tuple(subject.config.weight_block_size)
        rounded, seen = [], 0
        for name in (n for n in stored if ISLAND.fullmatch(n) or n.endswith("tid2eid")):
            try:
                held = subject.weight(name)
            except (Dsv4Error, NotImplementedError):
                continue  # load_ledger checks whether it is held at all
            wanted, seen = torch.from_numpy(decode(stored, name, block)), seen + 1
            if held.numel() != wanted.numel() or not torch.equal(held.double().flatten(), wanted.double().flatten()):
                rounded.append(name)
        yield from named("fp32 island keeps every bit of the file in memory", rounded, seen, MEMORY)

    def _memory(self, subject: Subject) -> Iterator[Check]:
        held = self._held(subject)
        wrong = lambda pattern, dtype: [n for n, (d, _) in held.items() if re.fullmatch(pattern, n) and d is not dtype]
        islands = sum(bool(ISLAND.fullmatch(n)) for n in held)
        yield from named("fp32 island is fp32 in memory", wrong(ISLAND, torch.float32), islands, MEMORY)
        tables = sum(n.endswith("tid2eid") for n in held)
        yield from named(
            "tid2eid is int64 in memory",
            wrong(r".*tid2eid", torch.int64),
            tables,
            "token ids and expert numbers index; int64 as on disk (specification 2.1)",
        )
        plain = {n: h for n, h in held.items() if NEVER_QUANTISED.fullmatch(n)}
        narrowed = [n for n, (d, _) in plain.items() if not keeps_value(DTYPES[subject.files.sources[n].dtype], d)]
        yield from named(
            "router, compressors, weights_proj and norms are not quantised or narrowed in memory",
            narrowed,
            len(plain),
            UNQUANTISED,
        )
        quantises = lambda module: getattr(module, "simulate", False) or getattr(module, "quantised", False)
        simulated = [n for n, (_, module) in plain.items() if quantises(module)]
        yield from named(
            "their inputs are not quantised",
            simulated,
            len(plain),
            "the official simulation quantises inputs of FP8 and FP4 weights only (specification 3)",
        )
        yield from self._inputs(subject, held)
        asked = NUMERICS.get(subject.numerics)
        asked = asked and asked.with_caches(*subject.caches)
        yield from of_model(
            subject.model, asked, "the numerics and cache formats asked for at load", "specification 3: RoPE in fp32"
        )

    def _inputs(self, subject: Subject, held: dict) -> Iterator[Check]:
        """Inputs of quantised matrices: through FP8 in simulated numerics, as they are in others; those of wo_a
        never."""
        matrices = {n: module for n, (_, module) in held.items() if hasattr(module, "simulate")}
        matrices |= {
            f"{n}.w1.weight": module for n, module in subject.model.named_modules() if n.endswith("ffn.experts")
        }
        packed = {n: m for n, m in matrices.items() if getattr(getattr(m, "w13", m), "quantised", False)}
        simulated = subject.numerics.startswith("qat")
        wrong = [n for n, module in packed.items() if module.simulate != (simulated and ".wo_a." not in n)]
        if packed:
            yield from named(
                "inputs of FP8 and FP4 matrices are quantised in simulated numerics only, those of wo_a never",
                wrong,
                len(packed),
                "specification 3: activation quantisation in linears",
            )

    def _held(self, subject: Subject) -> dict:
        """Official name → (dtype in memory, module) of everything that is copied or dequantised into a parameter."""
        found, parameters = {}, dict(subject.model.named_parameters())
        for piece in pieces_of(subject.model):
            owner = subject.model.get_submodule(piece.parameter.rpartition(".")[0])
            name = piece.names.get("raw", piece.names.get("weight"))
            if name in subject.files.sources:
                found[name] = parameters[piece.parameter].dtype, owner
        return found

    def _caches(self, subject: Subject) -> Iterator[Check]:
        """A small cache, as really allocated."""
        if subject.numerics not in CACHE:
            yield vacuous("dtype of caches", f"numerics {subject.numerics!r} say nothing of caches", part="cache")
            return
        cache = subject.model.new_cache(1, min(256, subject.config.max_position_embeddings))
        wrong, seen = [], 0
        for buffer in buffers(subject, cache):
            seen += 1
            found = str(buffer.tensor.dtype)
            wanted = str(torch.float32 if buffer.stream.endswith("raw rows") else CACHE[subject.numerics])
            if buffer.packed is not None:
                found += f" in pages of {buffer.tensor.shape[-1]} B"
                wanted = f"torch.uint8 in pages of {buffer.packed.page} B ({buffer.packed.kind})"
            if not wanted.startswith(found):
                wrong.append((buffer.label, buffer.stream, found, wanted))
        first = wrong[0] if wrong else ("", "cache", None, None)
        yield compare(
            "streams of another dtype than the numerics say",
            len(wrong),
            "==",
            0,
            "dsv4.model.numerics: raw rows of compressors fp32, packed streams bytes in pages of their format, "
            "else the cache dtype of the numerics",
            seen,
            unit="streams",
            found=first[0],
            part=first[1],
            note="; ".join(f"{label} {stream}: {d}, expected {w}" for label, stream, d, w in wrong[:3]),
        )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(DtypeLedger)
