"""A model that several ranks share, taken apart: each of its computations on what the whole model's was given.

So a fault shows in the computation that has it, and in none that follows; rounding does not add up over layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.model.ranks import Ranks
from dsv4.parallel.threads import together
from dsv4.probes.catalogue.placement import layers_of, shown
from dsv4.probes.scenes.patching import replaced, wrapped

SUM, SAME = "sum", "same"  # what the results of ranks are to each other, unless they are joined along an axis
AFTER_SUM = {"attention": ("output projection",), "MoE": ("routed experts", "shared expert")}  # what is summed before


@dataclass(frozen=True)
class Stage:
    """A computation of a block. path: its module in the block. given: of each tensor that it is called with, the axis
    along which a rank gets its part, None where it gets all. results: SUM, SAME, or the axis along which they are
    joined."""

    name: str
    path: str
    given: tuple[int | None, ...]
    results: int | str
    method: str = "forward"


ENTRIES = 128  # more than any prompt of these scenes has

STAGES = (
    Stage("queries", "attn.wq_b", (None,), 1),
    Stage("selection", "attn.indexer", (None, None), SAME),
    Stage("heads and sinks", "attn", (1,), 1, "attend"),
    Stage("groups", "attn.wo_a", (1,), 1),
    Stage("output projection", "attn.wo_b", (1,), SUM),
    Stage("attention", "attn", (None,), SAME),
    Stage("router", "ffn.gate", (None, None), SAME),
    Stage("routed experts", "ffn.experts", (None, None, None), SUM),
    Stage("shared expert", "ffn.shared_experts", (None,), SUM),
    Stage("MoE", "ffn", (None, None), SAME),
)
AROUND = (Stage("embedding", "embed", (None,), SAME), Stage("head", "head", (None,), SAME))


@dataclass
class Seen:
    """Calls of one computation: the tensors it was given, and its results."""

    given: list[list[torch.Tensor]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)

    @property
    def result(self) -> torch.Tensor:
        """Of all calls, [N, ...]."""
        return torch.cat(self.results)


Key = tuple[str, str]  # place, stage
Log = dict[Key, Seen]


def places(model) -> Iterator[tuple[str, Stage, Any]]:
    """(place, stage, module) of every computation that ranks share, in the order of the model."""
    yield "embedding", AROUND[0], model.embed
    for name, block in layers_of(model).items():
        indexed = hasattr(block.attn, "indexer")
        stages = [stage for stage in STAGES if indexed or stage.name != "selection"]
        yield from ((shown(name), stage, block.get_submodule(stage.path)) for stage in stages)
    yield "head", AROUND[1], model.head


@contextmanager
def choosing(models: Sequence, topk: int) -> Iterator[None]:
    """While it lasts, indexers select at most `topk` entries, and several ranks share every prompt's scores."""
    indexers = [block.attn.indexer for m in models for block in layers_of(m).values() if hasattr(block.attn, "indexer")]
    with replaced(indexers, "topk", topk), replaced(indexers, "worth", 0):
        yield


@contextmanager
def watched(model, log: Log, whole: Log | None = None) -> Iterator[None]:
    """While it lasts, `log` gets what every computation is given and gives. whole: a log of the whole model, from which
    this rank's calls are given their part, in their order."""

    def around(place: str, stage: Stage, module) -> Callable:
        seen = log.setdefault((place, stage.name), Seen())
        real = getattr(module, stage.method)

        def call(*args, **kwargs):
            if whole is not None:
                fed = whole[place, stage.name].given[len(seen.results)]
                cut = [part_of(t, axis, model.ranks) for t, axis in zip(fed, stage.given)]
                args = *cut, *args[len(cut) :]
            seen.given.append([t.clone() for t in args[: len(stage.given)]])
            found = real(*args, **kwargs)
            seen.results.append(result_of(found).clone())
            return found

        return call

    with ExitStack() as stack:
        for place, stage, module in places(model):
            held = wrapped([(0, module)], stage.method, lambda i, m, real, p=place, s=stage: around(p, s, m))
            stack.enter_context(held)
        yield


def result_of(found) -> torch.Tensor:
    """[N, ...]; of the router [N, 2·k]: experts and their weights; of the indexer [N, ENTRIES]: 1 for an entry that is
    selected."""
    if not isinstance(found, torch.Tensor):
        return torch.cat([found[0].float(), found[1]], -1)
    if found.dtype is not torch.int64:
        return found
    chosen = torch.zeros(found.shape[:-1].numel(), ENTRIES + 1)
    return chosen.scatter_(1, found.flatten(0, -2) + 1, 1.0)[:, 1:]  # −1 is no entry


def part_of(t: torch.Tensor, axis: int | None, ranks: Ranks) -> torch.Tensor:
    """A rank's part of what is shared equally along an axis."""
    if axis is None:
        return t
    n = t.shape[axis] // ranks.size
    return t.narrow(axis, ranks.rank * n, n).contiguous()


def on_ranks(models: Sequence, run: Callable[[Any], Any]) -> list:
    """run(model) of every rank at the same time; each model's modules exchange by the group of this run."""

    def one(ranks: Ranks):
        model = models[ranks.rank]
        with replaced([m for m in model.modules() if hasattr(m, "ranks")], "ranks", ranks):
            return run(model)

    return together(len(models), one)


def combined(stage: Stage, logs: Sequence[Log], key: Key) -> torch.Tensor:
    """The results of all ranks as one, [N, ...]: what the whole model's should be."""
    parts = [log[key].result for log in logs]
    if stage.results == SAME:
        return parts[0]
    return sum_of(parts) if stage.results == SUM else torch.cat(parts, stage.results)


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In fp32, or wider."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack([part.to(wide) for part in parts]).sum(0)


def summed_before(stage: Stage, logs: Sequence[Log], place: str) -> torch.Tensor | None:
    """The sum over ranks of what a rank adds up in a stage that ends in an exchange; None of other stages."""
    names = AFTER_SUM.get(stage.name, ())
    parts = [log[place, name].result for name in names for log in logs]
    return sum_of(parts) if parts else None
