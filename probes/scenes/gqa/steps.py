"""Steps of a GQA model, looked at while they run; and comparisons that are counted until a check is made of them."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dsv4.kernels.chunked_prefill import Memory
from dsv4.model.gqa.cache import GroupedCache
from dsv4.model.gqa.model import GQAModel
from dsv4.probes.compare import agreeing, at_share, limit_of, token_errors
from dsv4.probes.result import Check, compare
from dsv4.probes.subject import Subject
from dsv4.runtime.graph import DecodeGraph


@dataclass(frozen=True)
class Call:
    """One call of an operation by one layer."""

    layer: int
    given: tuple
    out: Any


class Watched:
    """Calls of the named operations by layers without a window while the `with` block lasts, and what each layer then
    gives to its output projection.

    Tensors are those that were given, not copies (but for memories of chunked prefill, which later calls overwrite):
    look at them before the next step.
    """

    def __init__(self, model: GQAModel, *names: str):
        self.model, self._undo = model, ExitStack()
        self._layer, self._calls = -1, {name: [] for name in names}
        self.real = {name: getattr(model.op, name) for name in names}  # for calls that are not to be seen
        self.attended: dict[int, torch.Tensor] = {}  # [N, H·D] of each layer in the last step

    def __enter__(self) -> "Watched":
        for i, layer in enumerate(self.model.layers):
            attn = layer.self_attn
            self._undo.callback(attn.register_forward_pre_hook(lambda _, args, i=i: setattr(self, "_layer", i)).remove)
            self._undo.callback(
                attn.o_proj.register_forward_pre_hook(lambda _, args, i=i: self.attended.__setitem__(i, args[0])).remove
            )
        for name, real in self.real.items():
            self._undo.callback(setattr, self.model.op, name, real)
            setattr(self.model.op, name, partial(self._call, name, real))
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def _call(self, name: str, real: Callable, *given):
        kept = tuple(Memory(*(t.clone() for t in one)) if isinstance(one, Memory) else one for one in given)
        out = real(*given)
        if self.model.layers[self._layer].self_attn.window is None:
            self._calls[name].append(Call(self._layer, kept, out))
        return out

    def taken(self, name: str) -> list[Call]:
        """Calls since this was last asked."""
        found, self._calls[name] = self._calls[name], []
        return found


def full_layers(model: GQAModel) -> list[int]:
    """Layers that see every token before: those with a window read just that, whatever was chosen."""
    return [i for i, layer in enumerate(model.layers) if layer.self_attn.window is None]


def poisoned(model: GQAModel, batch: int, room: int) -> GroupedCache:
    """A cache whose rows hold NaN wherever nothing was written yet."""
    cache = model.new_cache(batch, room)
    for layer in cache.layers:
        for tensor in layer.tensors.values():
            if tensor.is_floating_point():  # lists of positions are whole from the beginning
                tensor.fill_(float("nan"))
    return cache


def out_of_reach(model: GQAModel, tokens: int = 0) -> str:
    """Why no layer of the model reads a text of so many tokens whole; '' if one does."""
    most = model.config.max_position_embeddings
    if not full_layers(model):
        return "every layer has a window, and reads just that"
    return "" if tokens <= most else f"{tokens} tokens are needed, the checkpoint allows {most}"


def captured(subject: Subject, cache: GroupedCache, ids: torch.Tensor, where: str, part: str) -> Check:
    """A captured step, replayed for ids [B, n] one token after the other, against `append`; the tokens are forgotten
    again."""
    model, n = subject.model, ids.shape[1]
    wanted = torch.cat([model.append(ids[:, t : t + 1], cache, prompt=False) for t in range(n)], 1).cpu()
    cache.rewind(n)
    graph = DecodeGraph(model, cache)
    found = torch.cat([graph.step(ids[:, t : t + 1]).cpu().clone() for t in range(n)], 1)
    cache.rewind(n)
    value, source, limit = agreeing(token_errors(found, wanted), subject.numerics)
    return compare(
        "captured steps give what append gives",
        value,
        "<=",
        limit,
        source,
        wanted[..., 0].numel(),
        where=where,
        part=part,
    )


@dataclass
class Tally:
    """Comparisons of one kind. wrong of samples failed, the first of them at `first`; errors: of those that have a
    size; causes: what would explain those that failed; chance: how many a random answer would fail."""

    samples: int = 0
    wrong: int = 0
    first: str = ""
    chance: float = 0.0
    errors: list[torch.Tensor] = field(default_factory=list)
    causes: Counter = field(default_factory=Counter)

    def see(self, wrong: int, samples: int, where: str, causes: tuple[str, ...] = (), chance: float = 0.0) -> None:
        self.first = self.first or (where if wrong else "")
        self.wrong, self.samples, self.chance = self.wrong + wrong, self.samples + samples, self.chance + chance
        self.causes.update(causes)

    @classmethod
    def joined(cls, tallies: "list[Tally]") -> "Tally":
        """One of all comparisons, without their errors."""
        found = cls()
        for one in tallies:
            found.see(one.wrong, one.samples, one.first)
            found.causes += one.causes
        return found

    def far(self, found: torch.Tensor, wanted: torch.Tensor, where: str, limit: float) -> torch.Tensor:
        """Relative errors of vectors [..., D], infinite where NaN: returned too."""
        a, b = found.double().cpu(), wanted.double().cpu()
        errors = torch.nan_to_num((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12), nan=float("inf")).flatten()
        self.errors.append(errors)
        self.see(int((errors > limit).sum()), len(errors), where)
        return errors

    @property
    def cause(self) -> str:
        """What explains nine in ten of those that failed; '' for nothing."""
        name, count = next(iter(self.causes.most_common(1)), ("", 0))
        return name if self.wrong and count >= 0.9 * self.wrong else ""

    def counted(
        self, name: str, part: str, source: str, where: str, unit: str = "", chance: float | None = None
    ) -> Check:
        """None may be wrong."""
        return compare(
            name, self.wrong, "==", 0, source, self.samples, unit=unit, chance=chance, **self._about(part, where)
        )

    def near(self, name: str, part: str, subject: Subject, where: str) -> Check:
        """Errors within what the numerics explain."""
        limit, share, source = limit_of(subject)
        errors = torch.cat(self.errors) if self.errors else torch.empty(0)
        return compare(
            name,
            at_share(errors, share) if len(errors) else None,
            "<=",
            limit,
            source,
            len(errors),
            **self._about(part, where),
        )

    def _about(self, part: str, where: str) -> dict[str, str]:
        """Where the first of them failed (`found`), and what would explain it."""
        cause = self.cause
        return {
            "where": where,
            "found": self.first,
            "part": f"{part}, {cause}" if cause else part,
            "note": f"as if: {cause}" if cause else "",
        }
