"""nn.Module with faster access to submodules and faster calls, because a decode step makes hundreds; and how the parts
of a layer run: one by one, or together in few launches.

A layer's mathematics is written once, in its modules. Wherever parts of attention can share a launch, they are run
through `step.parts`: `Separate` runs a part when it is asked for, so that hooks and replaced methods of every module
see their own calls; `Together`, of a captured step, collects parts until a result is needed. Modules and caches that
are given to them as `Any` import this module.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.fusions.compositions import IndexHeads, Latents, Windows, finish_entries
from dsv4.kernels.quantize.coded import CodedRows, Rows
from dsv4.loaders.cuts import Cut


class Module(nn.Module):
    """Finds submodules as plain attributes, and calls `forward` directly while no hook is registered.

    Parameters are only in `_parameters`, where offloading exchanges them; code that runs in every sublayer reads them
    there. cuts: parameter → which part of its tensor it is, where this rank holds a part.
    """

    cuts: Mapping[str, Cut] = {}

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls._defined = cls.forward

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # outside of _modules, where nn.Module's look-up would go through __getattr__

    def __call__(self, *args, **kwargs):
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or hooks._global_forward_hooks
            or hooks._global_forward_pre_hooks
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    @property
    def watched(self) -> bool:
        """Whether a hook or a replaced method sees or changes what this module computes."""
        changed = "forward" in self.__dict__ or type(self).forward is not type(self)._defined
        return changed or bool(self._forward_hooks or self._forward_pre_hooks)


def give_memory(module: nn.Module, device: torch.device | str, recurse: bool = True) -> None:
    """As `module.to_empty`, which for tensors of the device `meta` imports torch's symbolic shapes: 0.8 s."""
    module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), recurse=recurse)


def fuses(op, name: str, *replaced: Module) -> bool:
    """Whether composition `name` may run as one: the backend has it, `op` is what the model bound (no operation was
    exchanged), and no module whose call is replaced is watched."""
    return name in op.fused and op is op.bound and not any(module.watched for module in replaced)


def composed(op, name: str) -> Callable:
    """Composition `name`: as one if it may run so, else its definition with the operations `op`."""
    return getattr(op, name) if fuses(op, name) else partial(COMPOSITIONS[name].default, op)


class Map(NamedTuple):
    """A linear map that an input will be given to. exact: as in `Linear.forward`."""

    module: Module
    exact: bool = False


class Mapped:
    """An input x [N, K], perhaps with what it is rounded to. Its linear maps run as one composition, when the first of
    them is asked for.

    norm: a module that x passes through first, or None. A `Linear` takes it in place of a tensor.
    """

    def __init__(self, op, x: Rows, norm: Any, maps: Sequence[Map]):
        self._op, self._x, self._norm, self._maps = op, x, norm, tuple(maps)
        self._found: dict[Map, torch.Tensor] = {}

    def of(self, module: Module, exact: bool) -> torch.Tensor:
        """The result [N, O] of `module`, one of the maps."""
        if not self._found:
            norm, maps = self._norm, self._maps
            found = self._op.linears(
                self._x,
                None if norm is None else norm.weight,
                0.0 if norm is None else norm.eps,
                tuple(m.module.packed() for m in maps),
                tuple(m.module.simulate for m in maps),
                tuple(torch.float32 if m.exact else None for m in maps),
            )
            self._found = dict(zip(maps, found, strict=True))
        return self._found[Map(module, exact)]


Input = torch.Tensor | Mapped  # what the linear maps of a layer are given
Maps = Callable[[Any], Sequence[Map]]  # of a step: only who runs maps together asks which there are


class Separate:
    """Every part by itself, at once."""

    takes_rounded = False  # whether an input may come with what it is rounded to

    def mapped(self, op, x: torch.Tensor, maps: Maps, step: Any) -> Input:
        """x [N, K] in the form in which it is given to the linear maps maps(step)."""
        return x

    def normed(self, op, x: torch.Tensor, norm: Module, maps: Maps, step: Any) -> Input:
        """norm(x) in that form."""
        return norm(x)

    def query_heads(self, op, q: torch.Tensor, cis: torch.Tensor, eps: float) -> torch.Tensor:
        """The composition `query_heads`: [N, H, D], to be read after `finish`."""
        return composed(op, "query_heads")(q, cis, eps)

    def window(self, attn: Any, x: Input, step: Any, rows: Any) -> torch.Tensor | PackedRows:
        """Write the latent of each token to the window; the pool to be read after `finish`."""
        return rows.extend(step, attn.latent(x, step))

    def entries(self, compressor: Any, raw: torch.Tensor, step: Any, cache: Any) -> None:
        """Store raw rows fp32 [N, 2·c·D]; pool and store the entries of the windows that end here."""
        found = cache.completed(step, raw, compressor.ape)
        if found is None:
            return
        op, norm = compressor.op, compressor.norm
        cis, dtype = step.window_cis(compressor.ratio, compressor.base), compressor.numerics.activation
        if fuses(op, "pool_entries", norm):
            given = compressor.overlap, dtype, norm.weight, norm.eps, cis, compressor.simulation
            entries = op.pool_entries(*found, *given)
        else:
            pooled = compressor.pooled(*found, step).to(dtype)
            entries = finish_entries(op, norm(pooled), cis, compressor.simulation)
        cache.entries.write(step, entries)

    def index_heads(
        self,
        indexer: Any,
        x: Input,
        qr: Input,
        step: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [N, H, D] and scaled head weights fp32 [N, H]. All that was asked for before is then done."""
        return indexer.queries(qr, step), indexer.weights_proj(x).float() * indexer.scale

    def finish(self, op, step: Any) -> None:
        """Do all that was asked for."""

    def project_heads(
        self, op, o: torch.Tensor, cis: torch.Tensor, wo_a: Any, groups: int, wo_b: Any
    ) -> torch.Tensor | CodedRows:
        """o [N, H, D], rotated by cis, through wo_a: [N, G·R], the input of wo_b."""
        return wo_a(op.rotate(o, cis.unsqueeze(1)).view(len(o), groups, -1)).flatten(1)


class Together(Separate):
    """All linear maps of one input in one composition, and all that lies between them and attention in another,
    `attention_inputs`. Modules' own calls do not happen, so hooks do not see them."""

    takes_rounded = True

    def __init__(self):
        self._start()

    def _start(self) -> None:
        """Nothing of the next layer has been asked for."""
        self._heads: tuple[torch.Tensor, torch.Tensor, float] | None = None
        self._latents: Latents | None = None
        self._index: IndexHeads | None = None
        self._windows: list[Windows] = []

    def mapped(self, op, x, maps, step):
        return Mapped(op, x, None, maps(step))

    def normed(self, op, x, norm, maps, step):
        return Mapped(op, x, norm, maps(step))

    def query_heads(self, op, q, cis, eps):
        self._heads = q, cis, eps
        return q

    def window(self, attn, x, step, rows):
        kv, weight = attn.wkv(x), attn.kv_norm.weight
        self._latents = Latents(kv, weight, attn.simulate_kv, rows.flat, rows.slots(step))
        return rows.flat

    def entries(self, compressor, raw, step, cache):
        weight, base, simulation = compressor.norm.weight, compressor.base, compressor.simulation
        self._windows.append(cache.windows(step, raw, compressor.ape, weight, base, simulation))

    def index_heads(self, indexer, x, qr, step):
        q = indexer.wq_b(qr).view(step.N, indexer.H, indexer.D)
        self._index = IndexHeads(q, indexer.weights_proj(x), indexer.scale, indexer.simulate_index)
        _, *found = self._run(indexer.op, step)
        return found[0], found[1]

    def finish(self, op, step):
        if self._heads is not None:
            self._run(op, step)

    def _run(self, op, step: Any) -> tuple[torch.Tensor, ...]:
        """Launch what was collected; returns the results of `attention_inputs`."""
        assert self._heads is not None and self._latents is not None, "queries and latents come before what needs them"
        (q, cis, eps), latents, index, windows = self._heads, self._latents, self._index, tuple(self._windows)
        self._start()
        found = op.attention_inputs(step.B, q, cis, eps, latents, index, windows)
        if found[0] is not q:  # the definition makes new queries, and q is what attention was promised
            q.copy_(found[0])
        return found

    def project_heads(self, op, o, cis, wo_a, groups, wo_b):
        return op.project_heads(o, cis, wo_a.packed(), groups, wo_b.takes_codes)
