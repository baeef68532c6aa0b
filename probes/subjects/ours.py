"""This project's model, observed from outside: by hooks on its modules and by reading its cache."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND
from dsv4.cache.layer import LayerCache
from dsv4.cache.rows import Tokens
from dsv4.errors import InputError
from dsv4.kernels.cache_rows import PackedRows, read_rows
from dsv4.kernels.errors import BackendUnavailable
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import OPERATIONS
from dsv4.kernels.quantize import PackedWeight, to_float
from dsv4.kernels.replacing import Replacement
from dsv4.loaders.cuts import Cut
from dsv4.loaders.ledger import Piece
from dsv4.model.deepseek_v4 import Model
from dsv4.model.families import pieces_of
from dsv4.model.linear import Matrix
from dsv4.model.load import load_model
from dsv4.model.ranks import Ranks
from dsv4.model.step import Step
from dsv4.model.together import whole_of
from dsv4.probes.subject import POINTS, Capture, Subject
from dsv4.probes.subjects.dump import Timeline, check_points, steps_of
from dsv4.probes.subjects.files import FilesSubject, plain

WITHOUT_RANKS = {  # probes that several ranks leave out → why
    "cost_model": "the cost model counts what a single process reads",
    "fresh_process": "a new process would hold the whole model, which several ranks share",
    "parallel": "the subject is shared by ranks itself, and there is no whole one beside it",
    "placement": "each rank has one device, over which no layers are spread",
}
IN_ATTENTION = tuple(p for p in POINTS if p not in ("ffn_out", "streams"))


class OurSubject(Subject):
    """`dsv4.load_model(path, numerics, backend, device, cache, index_cache)`, run by `Model.append` through its own
    caches.

    Rows of different lengths: ids < 0 are right padding, which is neither run nor captured (NaN; −inf and −1 in scores
    and selection). `model` may be changed by a caller who plants a fault. Captures of index_scores add calls to the
    model's dispatch ledger where the indexer itself had nothing to score.

    kernels: of the user's, in the place of operations. ranks: as `load_model` takes them; every rank makes the same
    calls in the same order. caches: formats of the main cache and of the index keys, as asked for. Raises
    InputError for packed ones in numerics that do not round as they do: what differs from the oracle would be the
    format, not a fault.
    """

    can = frozenset({"files", "run", "layer", "block", "rewind", "batch", "cache", "pages", "drafts", "kernels"})
    tables = OPERATIONS, COMPOSITIONS  # that its model binds

    def __init__(
        self,
        path: str | Path,
        numerics: str = "fp32",
        backend: str = "auto",
        device: str = "cpu",
        cache: str = "auto",
        index_cache: str = "auto",
        kernels: Mapping[str, Replacement] = MappingProxyType({}),
        ranks: Ranks | None = None,
    ):
        self.check_caches(numerics, cache, index_cache)
        stored = FilesSubject(path)
        self.files, self.config, self.numerics, self.caches = (
            stored.files,
            stored.config,
            numerics,
            (cache, index_cache),
        )
        self.model: Model = load_model(
            path,
            numerics=numerics,
            backend=backend,
            device=device,
            cache=cache,
            index_cache=index_cache,
            kernels=kernels,
            ranks=ranks,
        )
        said = [f"{form} {what}" for form, what in ((cache, "cache"), (index_cache, "index cache")) if form != "auto"]
        said += [f"{operation} by {kernel.shown}" for operation, kernel in self.model.replacements.items()]
        said += [words] if (words := self.model.ranks.words) else []
        self.name = ", ".join(("ours", numerics, *said, f"backend {self.model.backend}", device))
        if words:
            self.without = dict(self.without) | WITHOUT_RANKS
        self.provenance = stored.provenance | {
            "backend": self.model.backend,
            "device": device,
            "torch": torch.__version__,
            "cache": cache,
            "index cache": index_cache,
        }
        self._pieces: dict[str, Piece] | None = None

    @staticmethod
    def check_caches(numerics: str, cache: str, index_cache: str) -> None:
        """Raises InputError for packed caches whose rounding the oracle of these numerics does not share."""
        if numerics != "qat" and not {cache, index_cache} <= {"auto", "bf16"}:
            raise InputError(
                "an FP8 or FP4 cache is audited in qat numerics, whose oracle rounds as it does; found "
                f"--numerics {numerics}; pass --numerics qat (or --subject ours:qat)"
            )

    @property
    def operations(self) -> dict:
        """Operation name → what this subject's model runs for it, given and giving tensors of the host: the user's
        kernel, where there is one, or its backend's implementation.

        An operation that the backend lacks is not among them.
        """
        found, mine = {}, self.model.op.replaced
        for name, op in self.tables[0].items():
            try:
                found[name] = there(mine.get(name) or op.resolve(self.model.backend)[0], self.model.device)
            except BackendUnavailable:
                continue
        return found

    @property
    def compositions(self) -> dict:
        """Composition name → what this subject's backend runs as one; those that it runs by parts, or that are taken
        apart for a user's kernel, are not among them."""
        return {
            name: c.implementations[self.model.backend]
            for name, c in self.tables[1].items()
            if self.model.backend in c.implementations and name not in self.model.op.unfused
        }

    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """See `Subject.run`. Each step is one piece of work, however long it is."""
        return self._run(ids, steps_of(ids.shape[1], schedule), check_points(want))

    def stream(self, ids: torch.Tensor, want: Sequence[str], see: Callable[[int, dict], None]) -> torch.Tensor:
        """See `Subject.stream`: the same pass, each layer's points handed over and forgotten when its block is done."""
        return self._run(ids, steps_of(ids.shape[1], ()), check_points(want), see).logits

    def _run(
        self, ids: torch.Tensor, steps: list[tuple[int, int]], want: frozenset[str], see: Callable | None = None
    ) -> Capture:
        """A run of these steps; with `see`, of one step, whose points go there instead of into the capture."""
        (B, T), lengths = ids.shape, _lengths(ids)
        cache = self.model.new_cache(B, T, _rewind_room(steps))
        timeline, logits = Timeline(B, T), torch.full((B, T, self.config.vocab_size), float("nan"))
        with _Taps(timeline, want) as taps:
            for i, block in enumerate(self.model.layers):
                taps.block(i, block)
                taps.attention(i, block.attn, cache.layers[i])
                if see is not None:
                    taps.done(block, partial(_hand_over, see, timeline, i, cache.layers[i], lengths, want))
            for start, n in steps:
                self._step(ids, lengths, start, n, cache, logits)
        for i, layer_cache in enumerate(cache.layers if see is None else ()):
            put_entries(timeline, i, layer_cache, lengths, want)
        return timeline.capture(logits)

    def _step(self, ids: torch.Tensor, lengths: list[int], start: int, n: int, cache, logits: torch.Tensor) -> None:
        counts = [abs(min(length, start + n) - min(length, start)) for length in lengths]
        if n < 0:
            cache.rewind(counts)
        elif any(counts):
            ragged = counts if min(counts) < n else None
            out = self.model.append(ids[:, start : start + n].clamp(min=0), cache, n_new=ragged, chunk=n)
            logits[:, start : start + n] = out.cpu()

    @torch.inference_mode()
    def block(self, layer: int, streams: torch.Tensor, ids: torch.Tensor, want: Sequence[str] = ()) -> Capture:
        """See `Subject.block`: the layer's module with a LayerCache and a Step of its own. Rows of equal lengths
        only."""
        want, (B, T), model, block = check_points(want), ids.shape, self.model, self.model.layers[layer]
        device = model.devices[layer]
        cache, timeline = self._layer_cache(layer, B, T, DEFAULT_MAX_REWIND), Timeline(B, T)
        with _Taps(timeline, want) as taps:
            taps.block(layer, block)
            taps.attention(layer, block.attn, cache)
            step = Step(ids.to(model.device), 0, [0] * B, model.rope_frequencies())
            block(streams.to(device, model.numerics.activation).flatten(0, 1), step.on(device), cache)
        put_entries(timeline, layer, cache, _lengths(ids), want)
        return timeline.capture()

    @torch.inference_mode()
    def attention(
        self,
        layer: int,
        attn_in: torch.Tensor,
        ids: torch.Tensor,
        schedule: Sequence[int] = (),
        want: Sequence[str] = (),
    ) -> Capture:
        """See `Subject.attention`: the layer's module with a LayerCache and Steps of its own. Rows of equal lengths
        only."""
        want, (B, T), lengths = check_points(want, IN_ATTENTION) | {"attn_out"}, ids.shape, _lengths(ids)
        if min(lengths) < T or attn_in.shape[:2] != (B, T):
            raise InputError(f"attn_in {list(attn_in.shape)} and ids {[B, T]} must have as many tokens in every row")
        model, attn, steps = self.model, self.model.layers[layer].attn, steps_of(T, schedule)
        device = model.devices[layer]
        cache, timeline = self._layer_cache(layer, B, T, _rewind_room(steps)), Timeline(B, T)
        with _Taps(timeline, want) as taps:
            taps.attention(layer, attn, cache)
            for start, n in (step for step in steps if step[1] > 0):  # a rewind is nothing but an earlier start
                step = Step(ids[:, start : start + n].to(model.device), 0, [start] * B, model.rope_frequencies())
                x = attn_in[:, start : start + n].to(device, model.numerics.activation).flatten(0, 1)
                attn(x, step.on(device), cache)
        put_entries(timeline, layer, cache, lengths, want)
        return timeline.capture()

    def _layer_cache(self, layer: int, B: int, T: int, max_rewind: int) -> LayerCache:
        """A cache of one layer alone."""
        model, layout = self.model, self.model.cache_layout()
        device = model.devices[layer]
        return layout.layer(layout.plan(B, T, max_rewind)[layer], device)

    def weight(self, name: str) -> torch.Tensor:
        """The parameter as the model holds it, dequantised: its part of a stack (w13, wkv_gate) by its own official
        name.

        Of several ranks, all of the tensor, which every rank has to ask for. Raises InputError for a tensor that the
        model does not hold.
        """
        part, cut = self._held(name)
        value = whole_of(self.model.ranks, part, cut, self.model.device)
        if value is None:
            raise InputError(f"the model holds no parameter for {name!r}")
        return value

    def _held(self, name: str) -> tuple[torch.Tensor | None, Cut | None]:
        """What this rank holds of an official tensor, in fp32 (int64 of integers), and which part of it that is."""
        if self._pieces is None:
            self._pieces = {p.names.get("raw", p.names.get("weight")): p for p in pieces_of(self.model)}
        if name not in self._pieces:
            return None, None
        piece = self._pieces[name]
        owner, leaf = piece.parameter.rpartition(".")[::2]
        module = self.model.get_submodule(owner)
        if isinstance(module, Matrix) and leaf == "weight":
            return plain(_dequantised(module.packed(), piece.index)), module.cut
        return plain(getattr(module, leaf)[piece.index]), piece.cut

    def cache_bytes(self, batch: int, max_context: int) -> dict[tuple[str, str], int]:
        """Sizes of the storages of a cache that is allocated for this, with the default room to rewind."""
        cache = self.model.new_cache(batch, max_context)
        layers = zip(cache.plan, cache.layers + cache.mtp_layers, strict=True)
        return {
            (plan.label, name): t.untyped_storage().nbytes()
            for plan, layer in layers
            for name, t in layer.tensors.items()
        }


def there(function: Callable, device: torch.device) -> Callable:
    """The function on another device: its tensors are taken there, what it returns comes back. On the host, itself."""
    if device.type == "cpu":
        return function
    return lambda *args: moved(function(*(moved(a, device) for a in args)), torch.device("cpu"))


def moved(value, device: torch.device):
    """A tensor, or tensors in tuples (weights and packed rows are such) and lists, on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [moved(v, device) for v in value] if isinstance(value, list) else value


class _Taps:
    """Hooks on modules while the `with` block lasts; what they see goes to a timeline. What each rank sees of its own
    heads is put together.

    attn_in, attn_out, ffn_out, streams: what the modules are given and return. q_after_rope: what `attn.queries`
    returns.
    kv_window: read from the pool that the step's kernel is handed, and from the ring after it is written. index_scores:
    what `indexer.scores` returns, computed for the capture where every visible entry is selected unscored. selection:
    what the indexer returns.
    """

    def __init__(self, timeline: Timeline, want: frozenset[str]):
        self.timeline, self.want, self._undo = timeline, want, ExitStack()
        self._step: Step | None = None  # of the block that is running
        self._scored: dict[int, Step] = {}  # step whose scores were seen last, by layer

    def __enter__(self) -> "_Taps":
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def block(self, i: int, block) -> None:
        """streams and ffn_out of a block."""
        self._before(block, lambda args: setattr(self, "_step", args[1]))
        self._after(block, lambda args, out: self._flat(i, "streams", out, args[1]))
        self._after(block.ffn, lambda args, out: self._flat(i, "ffn_out", out, self._step))

    def done(self, block, then: Callable[[], None]) -> None:
        """Call `then` after the block, and after what watches it."""
        self._after(block, lambda args, out: then())

    def attention(self, i: int, attn, cache: LayerCache) -> None:
        """Every point within a layer's attention."""
        self._before(attn, lambda args: self._flat(i, "attn_in", args[0], args[1]))
        self._after(attn, lambda args, out: self._flat(i, "attn_out", out, args[1]))
        self._around(attn, "queries", lambda args, out: self._queries(i, attn.ranks, out[1], args[1]))
        if "kv_window" in self.want:
            self._around(cache.window, "extend", lambda args, pool: self._window(i, cache.window, args[0], pool))
        if hasattr(attn, "indexer"):
            self._around(attn.indexer, "scores", lambda args, out: self._scores(i, out, args[2]))
            self._after(attn.indexer, lambda args, out: self._indexer(i, attn.indexer, args, out))

    def _queries(self, i: int, ranks: Ranks, q: torch.Tensor, step: Step) -> None:
        """q [B·T, H, D] of this rank's heads."""
        if "q_after_rope" in self.want:
            self._flat(i, "q_after_rope", ranks.of_all_heads(q), step)

    def _flat(self, i: int, point: str, values: torch.Tensor, step: Step) -> None:
        """values [B·T, ...] of a step."""
        self._put(i, point, values.unflatten(0, (step.B, step.T)), step)

    def _put(self, i: int, point: str, values: torch.Tensor, step: Step) -> None:
        """values [B, T, ...] of a step."""
        if point in self.want:
            self.timeline.put(i, point, values, step.starts, step.first)

    def _window(self, i: int, window: Tokens, step: Step, pool: torch.Tensor) -> None:
        """Every position that the step can read, from its pool; then those that the ring still holds, from the ring."""
        ring = window.rows
        positions = step.start.unsqueeze(1) + torch.arange(-ring.keep, step.T, device=step.device)
        rows = ring.index(step, positions).flatten()
        read = lambda rows: read_rows(pool, rows) if isinstance(pool, PackedRows) else pool.index_select(0, rows)
        seen = read(rows).view(step.B, ring.keep + step.T, -1)
        self.timeline.put(i, "kv_window", seen, [start - ring.keep for start in step.starts], step.first)
        held = min(step.T, ring.R)
        kept = ring.fetch(ring.place(step, step.pos[:, -held:]).flatten(), seen.dtype).view(step.B, held, -1)
        self.timeline.put(i, "kv_window", kept, [start + step.T - held for start in step.starts], step.first)

    def _scores(self, i: int, scores: torch.Tensor, step: Step) -> None:
        self._scored[i] = step
        self._put(i, "index_scores", scores, step)

    def _indexer(self, i: int, indexer, args: tuple, selection: torch.Tensor) -> None:
        step = args[2]
        self._put(i, "selection", selection, step)
        if "index_scores" not in self.want or self._scored.get(i) is step:
            return
        if step.max_visible(indexer.ratio):
            indexer.scores(*args)
        else:
            self._put(i, "index_scores", torch.empty(step.B, step.T, 0), step)

    def _before(self, module, see) -> None:
        self._undo.callback(module.register_forward_pre_hook(lambda _, args: see(args)).remove)

    def _after(self, module, see) -> None:
        self._undo.callback(module.register_forward_hook(lambda _, args, out: see(args, out)).remove)

    def _around(self, owner, method: str, see) -> None:
        """Replace a method of one object by itself, watched."""
        self._undo.callback(_restore, owner, method, vars(owner).get(method))
        setattr(owner, method, partial(_watched, getattr(owner, method), see))


def _watched(real, see, *args):
    out = real(*args)
    see(args, out)
    return out


def _restore(owner, method: str, before) -> None:
    if before is None:
        delattr(owner, method)
    else:
        setattr(owner, method, before)


def _hand_over(
    see: Callable, timeline: Timeline, i: int, cache: LayerCache, lengths: list[int], want: frozenset[str]
) -> None:
    put_entries(timeline, i, cache, lengths, want)
    see(i, timeline.take(i))


def put_entries(timeline: Timeline, i: int, cache: LayerCache, lengths: list[int], want: frozenset[str]) -> None:
    """compressed_kv and index_keys as the entries buffers hold them at the end; NaN beyond a row's own entries."""
    for point, compressor in (("compressed_kv", cache.main), ("index_keys", cache.index)):
        if compressor is None or point not in want:
            continue
        counts = torch.tensor([n // compressor.ratio for n in lengths])
        n = timeline.tokens // compressor.ratio
        held = compressor.entries.held()[:, :n].float().cpu()
        beyond = torch.arange(n) >= counts.unsqueeze(1)
        timeline.whole(i, point, held.masked_fill(beyond.unsqueeze(-1), float("nan")))


def _lengths(ids: torch.Tensor) -> list[int]:
    """Tokens of each row of right-padded ids. Raises InputError when a pad stands before a token."""
    real = ids >= 0
    lengths = real.sum(1).tolist()
    if any(not bool(row[:n].all()) for row, n in zip(real, lengths)) or not all(lengths):
        raise InputError("ids < 0 are padding, at the right of a row of at least one token; a pad stands elsewhere")
    return lengths


def _rewind_room(steps: list[tuple[int, int]]) -> int:
    """How far behind the furthest position the steps go back; at least what caches have by default."""
    room, high = DEFAULT_MAX_REWIND, 0
    for start, n in steps:
        high = max(high, start + n) if start + n else 0  # an empty cache has nothing to keep
        room = max(room, high - start - n)
    return room


def _dequantised(packed: PackedWeight, index: tuple) -> torch.Tensor:
    """Part of a matrix or stack: `index` is the place in the stack, then the rows."""
    lead = tuple(i for i in index if isinstance(i, int))
    rows = next((i for i in index if isinstance(i, slice)), slice(None))
    of = lambda t: None if t is None else t[lead]
    part = PackedWeight(packed.format, packed.weight[lead], of(packed.scale), of(packed.global_scale), packed.block)
    return to_float(part, rows)
