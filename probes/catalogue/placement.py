"""P30: a model spread over several places equals the whole model, layer by layer and bit for bit. See placement.md."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.model.load import load_model
from dsv4.probes.catalogue.load_ledger import part_of
from dsv4.probes.compare import tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.subject import Subject

LARGEST = 2 << 30  # bytes of parameters, at effort 1, that are loaded a second time
TOKENS, DECODED = 40, 3
RUNS = "a spread model runs"
EQUAL = "the same file, read by the same loader, and the same operations: equal bits wherever a layer lies"


@dataclass(frozen=True)
class Placement(Probe):
    """A map of two places: layers read from the file each time they run, and layers that stay where they run."""

    name: ClassVar[str] = "placement"
    title: ClassVar[str] = "a model spread over places is the whole model"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run", "cache", "kernels"})

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
        return checks


def placed(subject: Subject, first: int):
    """The subject's checkpoint, loaded again: every second layer, from layer `first` on, stays in the file."""
    model = subject.model
    where = dict.fromkeys(("embed", "hc_head", "norm", "head"), "cpu")
    names = [f"layers.{i}" for i in range(len(model.layers))] + [f"mtp.{i}" for i in range(len(model.mtp))]
    where |= {name: "disk" if i % 2 == first else "cpu" for i, name in enumerate(names)}
    return loaded(subject, where)


def loaded(subject: Subject, where: Mapping[str, str] | None):
    """The subject's checkpoint, loaded again, with a device map or whole."""
    model, (main, index) = subject.model, subject.caches
    return load_model(
        subject.files.path,
        numerics=subject.numerics,
        backend=model.backend if model.backend in ("cpu", "reference") else "reference",
        device=str(model.device),
        mtp=bool(len(model.mtp)),
        device_map=where,
        cache=main,
        index_cache=index,
        kernels=model.replacements,
    )


def compared(subject: Subject, model, spread, where: str, seed: int) -> Iterator[Check]:
    """A prompt and a few tokens through the whole model and the spread one; what each layer held while it ran."""
    ids = tokens(subject, TOKENS + DECODED, seed)
    held: dict[str, dict[str, list[str]]] = {}
    wanted = logits_of(model, ids)
    with watched(spread, held):
        found = logits_of(spread, ids)
    yield from prints(model, spread, held, where)
    for (what, a), (_, b) in zip(found, wanted):
        yield compare(
            f"logits of {what} are those of the whole model",
            int((a != b).sum()),
            "==",
            0,
            EQUAL,
            b.numel(),
            where=where,
            part="placement, logits",
        )


def logits_of(model, ids: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(what, logits) of a prompt, of tokens decoded one by one, and of the MTP block after them."""
    cache = model.new_cache(1, ids.shape[1] + 1)
    out, streams = model.append(ids[:, :TOKENS], cache, return_streams=True)
    found = [("a prompt", out.cpu())]
    parts = [model.append(ids[:, t : t + 1], cache).cpu() for t in range(TOKENS, ids.shape[1])]
    found.append(("decoded tokens", torch.cat(parts, 1)))
    if len(model.mtp):
        found.append(("the MTP block", model.mtp_logits(streams, ids[:, 1 : TOKENS + 1], cache).cpu()))
    return found


def layers_of(model) -> dict[str, torch.nn.Module]:
    """Name of each block → the block."""
    return {f"{kind}.{i}": block for kind in ("layers", "mtp") for i, block in enumerate(getattr(model, kind))}


class watched(ExitStack):
    """While it lasts, what each block of a model holds as its attention runs: name → parameter → its fingerprints."""

    def __init__(self, model, held: dict[str, dict[str, list[str]]]):
        super().__init__()
        for name, block in layers_of(model).items():

            def see(module, args, name=name, block=block):
                for leaf, value in tensors_of(block).items():
                    held.setdefault(name, {}).setdefault(leaf, []).append(fingerprint(value))

            self.callback(block.attn.register_forward_pre_hook(see).remove)


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
            where=f"{where}, {name.replace('layers.', 'layer ').replace('mtp.', 'mtp ')}",
            part=part,
            note=note,
        )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Placement)
