"""P1: every tensor of the file is accounted for, and every parameter holds what the file says. See load_ledger.md."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from dsv4.errors import InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.expected import official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import LoadLedger, poisoned
from dsv4.loaders.load import Inventory
from dsv4.model.families import plan_model
from dsv4.model.numerics import numerics_named
from dsv4.model.official import ELSEWHERE
from dsv4.probes.oracle.names import places
from dsv4.probes.oracle.weights import decode, read_header
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.files import block_of

STRICT = "every tensor has one place and every place one tensor (specification 2.1); there is no tolerance"
EXACT = "FP8, FP4 and BF16 widen to fp32 without rounding (specification 2.2): equal, not near"
NAMES = "specification 2.1 and 2.3: a table of names written out in dsv4.probes.oracle.names, not the loader's rules"
UNIQUE = "trained tensors do not repeat: equal values mean one tensor read under two names"
COMPANIONS = (".scale", ".weight_scale", ".weight_scale_2", ".input_scale")
NAMED = 12  # tensors that get a check of their own; the rest is counted
ALIAS_SIZE = 16  # elements below which equal values may be chance
PARTS = (  # first match gives the part of the model that a tensor belongs to
    # of GQA models
    (r"model\.embed_tokens\..*", "embedding"),
    (r"lm_head\..*", "head"),
    (r"model\.norm\..*", "final norm"),
    (r"model\..*self_attn\.[qkv]_proj\.bias", "QKV bias"),
    (r"model\..*self_attn\.q_proj\..*", "queries"),
    (r"model\..*self_attn\.k_proj\..*", "keys"),
    (r"model\..*self_attn\.v_proj\..*", "values"),
    (r"model\..*self_attn\.o_proj\..*", "output projection"),
    (r"model\..*mlp\..*", "MLP"),
    (r"mtp\..*", "MTP"),
    (r"embed\..*", "embedding"),
    (r"hc_head.*|norm\..*|head\..*", "head"),
    (r".*indexer\.compressor\..*", "indexer keys"),
    (r".*indexer\.wq_b\..*", "indexer queries"),
    (r".*indexer\..*", "indexer weights"),
    (r".*\.compressor\..*", "compressor"),
    (r".*attn_sink", "sink"),
    (r".*\.gate\..*", "router"),
    (r".*\.experts\..*", "experts"),
    (r".*shared_experts\..*", "shared expert"),
    (r".*\.hc_.*", "mHC"),
    (r".*attn\.(wq|q_norm).*", "queries"),
    (r".*attn\.(wkv|kv_norm).*", "window KV"),
    (r".*attn\.wo_.*", "output projection"),
    (r".*norm\..*", "norms"),
)


def part_of(name: str) -> str:
    """The part of the model that an official tensor name belongs to, in the words of the model."""
    return next((part for pattern, part in PARTS if re.fullmatch(pattern, name)), "load")


def headers(files: Inventory) -> dict[str, tuple]:
    """Official name → (dtype, shape, file, first byte), as `dsv4.probes.oracle.weights` reads tensors; offsets are read
    anew."""
    found = {}
    for shard in files.files.shards:
        found |= read_header(files.path / shard.name)

    def place(source) -> tuple:
        dtype, _, file, offset = found[source.tensor.key]
        return dtype, tuple(source.shape), file, offset + source.start

    return {name: place(source) for name, source in files.sources.items()}


def ledger_of(subject: Subject) -> LoadLedger:
    """The ledger that the subject's model was loaded by; else that of a plan from the headers."""
    model = getattr(subject, "model", None)
    held = getattr(model, "ledger", None)
    return (
        held
        if isinstance(held, LoadLedger)
        else plan_model(subject.files, numerics_named("fp32"), "reference", None).ledger
    )


def expected(subject: Subject) -> dict[str, tuple]:
    """See `LoadLedgerProbe._asked`."""
    files, formats = subject.files, subject.files.formats

    def form(base: str) -> str:
        found = formats.get(base)
        if found is None or found is WeightFormat.DENSE:
            return files.sources[f"{base}.weight"].dtype if f"{base}.weight" in files.sources else "BF16"
        return {WeightFormat.FP8: "FP8", WeightFormat.MXFP4: "MXFP4", WeightFormat.NVFP4: "NVFP4"}[found]

    wanted = official_tensors(
        subject.config, files.mtp_blocks > 0, dense=form("layers.0.attn.wkv"), experts=form("layers.0.ffn.experts.0.w1")
    )
    # of products that this model does not make
    return {n: w for n, w in wanted.items() if not n.endswith(".input_scale")}


@dataclass
class Tally:
    """What the reading of all tensors found, by official name."""

    compared: int = 0
    differ: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    nan: list[str] = field(default_factory=list)
    flat: list[str] = field(default_factory=list)
    alike: dict[bytes, list[str]] = field(default_factory=dict)

    @property
    def aliases(self) -> list[list[str]]:
        return [names for names in self.alike.values() if len(names) > 1]


@dataclass(frozen=True)
class LoadLedgerProbe(Probe):
    """Two-way accounting by names, then every tensor by value: decoded from the file against what the subject holds."""

    name: ClassVar[str] = "load_ledger"
    title: ClassVar[str] = "every tensor loads once, where it belongs"
    needs: ClassVar[frozenset[str]] = frozenset({"files"})

    def run(self, subject: Subject) -> list[Check]:
        ledger = ledger_of(subject)
        return [
            *self._names(subject),
            *self._accounts(subject, ledger),
            *self._expected(subject, ledger),
            *self._values(subject, ledger),
        ]

    def _asked(self, subject: Subject) -> dict[str, tuple]:
        """Official name → (dtype, shape) of what the config asks for, in the formats that the file is in (of a matrix
        that the file must have)."""
        return expected(subject)

    def _places(self, key: str, shape: tuple) -> dict[str, tuple[str, int]]:
        """Official name → (key of the file, first number) of the tensors that a key of the file holds."""
        return places(key, shape)

    def _names(self, subject: Subject) -> Iterator[Check]:
        """Each key of the files stands for the official tensor that the specification says, and the loader knows it as
        that."""
        wanted = {}
        for shard in subject.files.files.shards:
            for key, (_, shape, *_) in read_header(subject.files.path / shard.name).items():
                wanted |= self._places(key, shape)
        found = {n: (s.tensor.key, s.start // DTYPES[s.dtype].itemsize) for n, s in subject.files.sources.items()}
        wrong = [n for n in wanted if found.get(n) != wanted[n]] + [n for n in found if n not in wanted]
        note = "; ".join(
            f"{n}: {wanted.get(n, ('nothing',))[0]} of the file, taken from {found.get(n, ('nothing',))[0]}"
            for n in wrong[:3]
        )
        yield from named("tensor is taken from the key that means it", wrong, len(wanted), NAMES, note)

    def _accounts(self, subject: Subject, ledger: LoadLedger) -> Iterator[Check]:
        sources = subject.files.sources
        homeless = [n for n in sources if n not in ledger.used and n not in ledger.listed]
        both = [n for n in sources if n in ledger.used and n in ledger.listed]
        yield from named("file tensor is consumed once, or listed with a reason", homeless + both, len(sources), STRICT)
        yield compare(
            "problems of the load ledger",
            len(ledger.problems()),
            "==",
            0,
            STRICT,
            len(sources),
            part="load",
            note="; ".join(ledger.problems()[:3]),
        )
        short = [n for n, (_, shape) in ledger.parameters.items() if ledger.written[n] != torch.Size(shape).numel()]
        yield compare(
            "parameters that are not written exactly once everywhere",
            len(short),
            "==",
            0,
            STRICT,
            len(ledger.parameters),
            part=part_of(short[0]) if short else "load",
            found=short[0] if short else "",
        )
        for reason in sorted(set(ledger.listed.values())):
            names = [n for n, r in ledger.listed.items() if r == reason]
            yield Check(
                "tensors of the file that are not loaded",
                Status.WARN if reason == "MTP is off" else Status.PASS,
                names[0],
                part_of(names[0]),
                len(names),
                "tensors",
                source="reported with its reason",
                samples=len(names),
                note=reason,
            )

    def _expected(self, subject: Subject, ledger: LoadLedger) -> Iterator[Check]:
        wanted, sources = self._asked(subject), subject.files.sources
        yield from named(
            "tensor that the config asks for is in the file",
            [n for n in wanted if n not in sources],
            len(wanted),
            STRICT,
        )
        strays = [n for n in sources if n not in wanted and n not in ledger.listed]
        yield from named("tensor of the file is one that the config asks for", strays, len(sources), STRICT)
        same = lambda a, b: a == b or {a, b} <= {(), (1,)}
        wrong = [
            n for n, (_, shape) in wanted.items() if n in sources and not same(tuple(sources[n].shape), tuple(shape))
        ]
        yield from named("shape is what the config asks for", wrong, len(wanted), STRICT)
        if getattr(subject.config, "num_mtp_layers", 0) and not subject.files.mtp_blocks:
            dropped = subject.files.layout.name.startswith("official") and not subject.files.has_dspark
            note = "the file holds DSpark stages instead" if subject.files.has_dspark else "the file holds none"
            note += "" if dropped or subject.files.has_dspark else ", as transformers writes files"
            yield Check(
                "MTP block that the config announces",
                Status.FAIL if dropped else Status.WARN,
                "mtp.0",
                "MTP",
                0,
                "blocks",
                "==",
                subject.config.num_mtp_layers,
                "num_nextn_predict_layers of config.json",
                samples=1,
                note=note,
            )

    def _values(self, subject: Subject, ledger: LoadLedger) -> Iterator[Check]:
        holds = type(subject).weight is not Subject.weight
        without = holds and lacks_mtp(subject)
        names = [n for n in subject.files.sources if n in ledger.used or ledger.listed.get(n) == ELSEWHERE]
        tally = self._read(subject, [n for n in names if not (without and n.startswith("mtp."))], holds)
        n = len(names)
        if holds:
            yield from named("held value is the file's", tally.differ, tally.compared, EXACT)
            if without:
                yield Check(
                    "MTP block is held",
                    Status.WARN,
                    "mtp.0",
                    "MTP",
                    0,
                    "blocks",
                    "==",
                    subject.files.mtp_blocks,
                    STRICT,
                    samples=1,
                    note="the subject has no MTP block at all",
                )
            yield from named("subject holds the tensor", tally.absent, n, STRICT)
        else:
            yield vacuous("held value is the file's", "the subject has no weights that can be read", part="load")
        yield from named(
            "tensor is free of NaN", tally.nan, n, "no file of this format family holds NaN; the loader's poison is NaN"
        )
        yield from self._poison(subject)
        pairs = tally.aliases
        yield from named(
            "tensor has values of its own",
            [names[0] for names in pairs],
            n,
            UNIQUE,
            note="; ".join(" = ".join(names[:3]) for names in pairs[:3]),
        )
        for name in tally.flat[:NAMED]:
            yield Check(
                "tensor is not constant",
                Status.WARN,
                name,
                part_of(name),
                "constant",
                "",
                "==",
                "distinct values",
                "a weight that training never moved, or that was never loaded, is constant",
                samples=1,
            )

    def _read(self, subject: Subject, names: list[str], holds: bool) -> Tally:
        """One tensor at a time: decode, compare, hash."""
        stored, block, tally = headers(subject.files), block_of(subject.config), Tally()
        for name in names:
            if name not in stored:
                continue
            value = torch.from_numpy(decode(stored, name, block))
            value = value.float() if value.is_floating_point() else value
            held = _held(subject, name, tally) if holds else value
            if held is not None and held.numel() != value.numel() and name.endswith(COMPANIONS):
                held = None  # it has multiplied the scale out
            if held is not None and holds:
                tally.compared += 1
                if not _same(held, value, subject.numerics):
                    tally.differ.append(name)
            self._look(name, value if held is None else held, tally)
        return tally

    def _look(self, name: str, value: torch.Tensor, tally: Tally) -> None:
        if value.isnan().any():
            tally.nan.append(name)
        if name.endswith(COMPANIONS):
            return
        if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            tally.flat.append(name)
        elif value.numel() >= ALIAS_SIZE:
            content = value.contiguous().numpy().tobytes() + str(tuple(value.shape)).encode()
            tally.alike.setdefault(hashlib.sha256(content).digest(), []).append(name)

    def _poison(self, subject: Subject) -> Iterator[Check]:
        """Parameters of the model itself, also those that no official name leads to."""
        model = getattr(subject, "model", None)
        if not isinstance(model, torch.nn.Module):
            return
        held = {name: p for name, p in model.named_parameters() if p.device.type != "meta"}
        bad = [name for name, p in held.items() if poisoned(p.detach())]
        yield from named(
            "parameter is free of NaN and poison",
            bad,
            len(held),
            "parameters are poisoned before loading; none may remain",
        )


def named(what: str, bad: list[str], samples: int, source: str, note: str = "") -> Iterator[Check]:
    """One check that counts; and for the first few bad tensors one each that names it and its part."""
    yield compare(
        what + ": exceptions",
        len(bad),
        "==",
        0,
        source,
        samples,
        unit="tensors",
        note=note,
        part=part_of(bad[0]) if bad else "load",
        found=bad[0] if bad else "",
    )
    for name in bad[:NAMED]:
        yield Check(what, Status.FAIL, name, part_of(name), "no", "", "==", "yes", source, samples=1)


def lacks_mtp(subject: Subject) -> bool:
    """Whether the subject has no MTP block at all: none of the tensors that only such a block has."""
    names = [
        n
        for n in subject.files.sources
        if re.fullmatch(r"mtp\.0\.(e_proj|h_proj|enorm|hnorm|norm|attn_norm)\.weight", n)
    ]
    return bool(names) and set(map(partial(_raises, subject), names)) == {True}


def _raises(subject: Subject, name: str) -> bool:
    try:
        subject.weight(name)
    except InputError:
        return True
    return False


def _held(subject: Subject, name: str, tally: Tally) -> torch.Tensor | None:
    """What the subject holds; None for a scale that it has multiplied out, and for what it does not have."""
    try:
        return subject.weight(name)
    except InputError:
        if not name.endswith(COMPANIONS):
            tally.absent.append(name)
        return None
    except CheckpointError:  # it refuses to read it, or knows no such scale
        if not name.endswith(COMPANIONS):
            tally.compared += 1
            tally.differ.append(name)
        return None


def _same(held: torch.Tensor, value: torch.Tensor, numerics: str) -> bool:
    """Equal in value; a subject that says it holds bf16 may have rounded to it."""
    if held.numel() != value.numel():
        return False
    held = held.reshape(value.shape)
    return torch.equal(held, value) or (numerics == "bf16" and torch.equal(held, value.bfloat16().float()))


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(LoadLedgerProbe)
