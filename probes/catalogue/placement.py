"""P30: a model spread over several places equals the whole model, layer by layer and bit for bit. See placement.md."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dsv4.model.load import load_model
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.step import Step
from dsv4.probes.catalogue.load_ledger import part_of
from dsv4.probes.compare import tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.patching import kept
from dsv4.probes.scenes.simulated_gpus import simulated
from dsv4.probes.subject import Subject

LARGEST = 2 << 30  # bytes of parameters, at effort 1, that are loaded a second time
TOKENS, DECODED = 40, 3
RUNS = "a spread model runs"
EQUAL = "the same file, read by the same loader, and the same operations: equal bits wherever a layer lies"
BESIDE = "a layer computes on one device, so what it is given and its cache must be there"
INPUTS = ("streams", "positions", "caches")


@dataclass(frozen=True)
class Placement(Probe):
    """A map of two places, layers read from the file each time they run and layers that stay where they run; and a map
    of two simulated GPUs.

    readings: what a model is made to read of its cache on the GPUs, one after the other: name → its `attention`; empty
    for models that read it in one way only.
    """

    name: ClassVar[str] = "placement"
    title: ClassVar[str] = "a model spread over places is the whole model"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run", "cache", "kernels"})
    readings: ClassVar[Mapping[str, Any]] = {}

    def run(self, subject: Subject) -> list[Check]:
        model = subject.model
        if model.layer_devices is not None:
            return [vacuous(self.title, "the subject is spread already, and there is no whole one beside it")]
        size = sum(p.nbytes for p in model.parameters())
        if size > LARGEST * self.effort:
            why = f"the model holds {size:,} bytes and would be loaded again; {LARGEST * self.effort:,.0f} are allowed"
            return [vacuous(self.title, why, part="placement")]
        # other backends take no layers that are spread over devices: a whole model of the reference stands for them
        whole = model if model.backend in ("cpu", "reference") else loaded(subject, None)
        checks = []
        for name, first in (("even layers from the file", 0), ("odd layers from the file", 1)):
            make = lambda: compared(subject, whole, placed(subject, first), name, self.seed)
            checks += attempted_all(RUNS, name, "placement", make)
        where = "two simulated GPUs"
        return checks + attempted_all(RUNS, where, "placement", lambda: self._over_gpus(subject, whole, where))

    def _over_gpus(self, subject: Subject, whole, where: str) -> Iterator[Check]:
        """The whole model beside one whose modules lie in turn on two simulated GPUs, whose arithmetic is the host's
        reference, in each reading."""
        if whole.device.type != "cpu" or whole.backend != "reference":
            whole = loaded(subject, None, "cpu")
        with simulated(), kept(whole, "attention"):
            spread = loaded(subject, {name: i % 2 for i, name in enumerate(whole.units)}, "cpu")
            for reading, attention in (self.readings or {"logits": whole.attention}).items():
                whole.attention = spread.attention = attention
                place = f"{where}, {reading}" if self.readings else where
                yield from compared(subject, whole, spread, place, self.seed, reading)


def placed(subject: Subject, first: int):
    """The subject's checkpoint, loaded again: every second layer, from layer `first` on, stays in the file, and with
    odd layers the modules around them too."""
    model = subject.model
    layers = {name: i for i, name in enumerate(layers_of(model))}
    return loaded(subject, {name: "disk" if layers.get(name, 1) % 2 == first else "cpu" for name in model.units})


def loaded(subject: Subject, where: Mapping[str, Any] | None, device: str | None = None, ranks: Ranks = ALONE):
    """The subject's checkpoint, loaded again, with a device map or whole. device: 'cpu': there by the reference; None:
    as the subject, with its kernels. ranks: which of several that hold it together."""
    model, (main, index) = subject.model, subject.caches
    own = device is None
    return load_model(
        subject.files.path,
        numerics=subject.numerics,
        backend=model.backend if own and model.backend in ("cpu", "reference") else "reference",
        device=device or str(model.device),
        mtp=bool(len(model.mtp)),
        device_map=where,
        cache=main,
        index_cache=index,
        kernels=model.replacements if own else None,
        ranks=ranks,
    )


def compared(subject: Subject, model, spread, where: str, seed: int, reading: str = "logits") -> Iterator[Check]:
    """A prompt and a few tokens through the whole model and the spread one; what each layer held and was given while it
    ran, and what its cache holds in the end."""
    ids = tokens(subject, TOKENS + DECODED, seed)
    held: dict[str, dict[str, list[str]]] = {}
    strays: dict[str, dict[str, int]] = {}
    wanted, cache = logits_of(model, ids)
    try:
        with watched(spread, held, strays):
            found, other = logits_of(spread, ids)
    finally:  # of a run that ends in an error too: it may be the reason
        yield from beside(strays, where)
    yield from prints(model, spread, held, where)
    yield from caches(cache, other, where)
    for (what, a), (_, b) in zip(found, wanted):
        yield compare(
            f"logits of {what} are those of the whole model",
            int((a != b).sum()),
            "==",
            0,
            EQUAL,
            b.numel(),
            where=where,
            part=f"placement, {reading}",
        )


def logits_of(model, ids: torch.Tensor) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """(what, logits) of a prompt, of tokens decoded one by one, and of the MTP block after them; the cache."""
    cache = model.new_cache(1, ids.shape[1] + 1)
    out, streams = model.append(ids[:, :TOKENS], cache, return_streams=True, chunk=TOKENS, prompt=True)
    found = [("a prompt", out.cpu())]
    parts = [model.append(ids[:, t : t + 1], cache).cpu() for t in range(TOKENS, ids.shape[1])]
    found.append(("decoded tokens", torch.cat(parts, 1)))
    if len(model.mtp):
        found.append(("the MTP block", model.mtp_logits(streams, ids[:, 1 : TOKENS + 1], cache).cpu()))
    return found, cache


def caches(whole, spread, where: str) -> Iterator[Check]:
    """One check of each kind of stream: how many layers of the spread model have another one in the end."""
    counts: dict[str, list[int]] = {}
    for own, other in zip(whole.layers + whole.mtp_layers, spread.layers + spread.mtp_layers, strict=True):
        for name, tensor in own.tensors.items():
            differs = fingerprint(tensor) != fingerprint(other.tensors[name])
            counts.setdefault(name, []).append(differs)
    for name, found in counts.items():
        yield compare(
            f"layers whose {name} in the cache are not those of the whole model",
            sum(found),
            "==",
            0,
            EQUAL,
            len(found),
            unit="layers",
            where=where,
            part=f"placement, {name} in the cache",
        )


def beside(strays: dict[str, dict[str, int]], where: str) -> Iterator[Check]:
    """One check of each kind of input: how many layers were given some that was on another device."""
    for kind in INPUTS:
        wrong = [name for name, counts in strays.items() if counts[kind]]
        yield compare(
            f"layers whose {kind} are on another device",
            len(wrong),
            "==",
            0,
            BESIDE,
            len(strays),
            unit="layers",
            where=where,
            part=f"placement, {kind}",
            note=f"first {shown(wrong[0])}" if wrong else "",
        )


def layers_of(model) -> dict[str, torch.nn.Module]:
    """Name of each block → the block, in the order of `model.devices`."""
    blocks = [*model.layers, *model.mtp]
    return {name: unit for name, unit in model.units.items() if unit in blocks}


def shown(name: str) -> str:
    """The name of a block, for people."""
    return name.removeprefix("model.").replace("layers.", "layer ").replace("mtp.", "mtp ")


class watched(ExitStack):
    """While it lasts, what each block of a model holds as its attention runs, in held: name → parameter → its
    fingerprints; and what it is given on another device than its own, in strays: name → kind of INPUTS → how often."""

    def __init__(self, model, held: dict[str, dict[str, list[str]]], strays: dict[str, dict[str, int]]):
        super().__init__()
        for (name, block), device in zip(layers_of(model).items(), model.layer_devices, strict=True):

            def see(module, args, name=name, block=block):
                for leaf, value in tensors_of(block).items():
                    held.setdefault(name, {}).setdefault(leaf, []).append(fingerprint(value))

            def look(module, args, name=name, device=device):
                counts = strays.setdefault(name, dict.fromkeys(INPUTS, 0))
                for kind, tensor in inputs_of(args):
                    counts[kind] += tensor.device != device

            attention = next(m for n, m in block.named_children() if n in ("attn", "self_attn"))
            self.callback(attention.register_forward_pre_hook(see).remove)
            self.callback(block.register_forward_pre_hook(look).remove)


def inputs_of(args: tuple) -> Iterator[tuple[str, torch.Tensor]]:
    """(kind of INPUTS, tensor) of what a block is called with."""
    for given in args:
        if isinstance(given, torch.Tensor):
            yield "streams", given
        elif isinstance(given, Step):
            yield from (("positions", t) for t in (given.start, given.pos, *given.frequencies.values()))
        else:
            yield from (("caches", t) for t in getattr(given, "tensors", {}).values())


def tensors_of(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a block by name."""
    return dict(block.named_parameters()) | dict(block.named_buffers())


def fingerprint(value: torch.Tensor) -> str:
    """Fingerprint of the bytes, the dtype and the shape of a tensor; for a tensor without memory a word that says
    so."""
    if value.device.type == "meta":
        return "nothing"
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else value.new_empty(0)
    return f"{value.dtype} {list(value.shape)} {hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()}"


def prints(model, spread, held: dict, where: str) -> Iterator[Check]:
    """One check of each layer: which of its tensors, in any of its runs, are not those of the whole model."""
    whole = {name: {k: fingerprint(v) for k, v in tensors_of(b).items()} for name, b in layers_of(model).items()}
    origin = {text: f"{name}.{leaf}" for name, leaves in whole.items() for leaf, text in leaves.items()}
    for name, leaves in whole.items():
        seen = held.get(name, {})
        wrong = [leaf for leaf, text in leaves.items() if not seen.get(leaf) or set(seen[leaf]) != {text}]
        wrong += [leaf for leaf in seen if leaf not in leaves]
        part, note = "placement", ""
        if wrong:
            got = (seen.get(wrong[0]) or ["nothing"])[-1]
            part = f"placement, {part_of(f'{name}.{wrong[0]}')}"
            note = f"{wrong[0]} is {origin.get(got, got)}" + (f"; {len(wrong)} tensors in all" if wrong[1:] else "")
        yield compare(
            "tensors of a layer that are not its own while it runs",
            len(wrong),
            "==",
            0,
            EQUAL,
            sum(map(len, seen.values())),
            unit="tensors",
            where=f"{where}, {shown(name)}",
            part=part,
            note=note,
        )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Placement)
