"""The common part of all models: the one way to run them (`append`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND, Cache, Form, form
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError
from dsv4.kernels.dispatch import DispatchLedger
from dsv4.kernels.replacing import replacements_of
from dsv4.model.arguments import check_cache, check_chunk, check_ids, check_logits, check_room, check_tokens, new_counts
from dsv4.model.cut_values import Logits, cut
from dsv4.model.module import Module
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.step import CapturedStep, Step
from dsv4.model.vocabulary import Embedding as Embedding  # old places of these names, until 0.4
from dsv4.model.vocabulary import Head as Head

CHUNK, GPU_CHUNK = 256, 2048  # tokens of a row in one step: prefill memory grows with it, not with the prompt
DECODED = 16  # the most tokens of an append that count as decoding by default


class CausalLM(Module):
    """A model that continues token ids. Subclasses define the layers; this class runs them over ragged batches, in
    uniform pieces.

    They set `embed`, `head`, `layers`, `mtp` (empty where there is none) and `frequencies`, and define `closing`,
    `cache_layout`, `run`, `captured`, `features`, `layer_paths` and `stream_shape`.
    """

    frequencies: dict[str, torch.Tensor]
    layers: Any
    mtp: Any
    cache_class: type[Cache] = Cache
    heads: Any = None  # as in `dsv4.cache.layout.Layout`

    def __init__(
        self,
        config,
        numerics: Numerics,
        backend: str,
        replacements: Mapping[str, Any] | None = None,
        ranks: Ranks = ALONE,
    ):
        super().__init__()
        self.config, self.numerics, self.backend, self.ranks = config, numerics, backend, ranks
        self.replacements = replacements_of(replacements)  # kernels of the user's, by operation
        self.dispatch = DispatchLedger()
        self.device = torch.device("cpu")
        self.max_context: int | None = None  # default of new_cache
        self.layer_devices: list[torch.device] | None = None  # set when layers are spread over devices
        self.placement: dict[str, str] = {}  # module → device, when they are spread
        self.inventory: Any = None  # dsv4.loaders.load.Inventory of the checkpoint that it was loaded from
        self.ledger: Any = None  # its dsv4.loaders.ledger.LoadLedger
        # `new_cache` keeps the growing part there: `dsv4.cache.host_tier.choice.HostMemory` (None: on the device)
        self.kv_memory: Any = None
        # of a model with routed experts in host memory: `dsv4.model.host_experts.ExpertTier`
        self.expert_tier: Any = None
        # what is read of the cache, for models with a choice: `dsv4.model.gqa.choice.Attention`
        self.attention: Any = None
        # tiles of each layer that the last step read before its attention terminated
        self.tiles: list[torch.Tensor | None] | None = None
        self.replayed: int | None = None  # tokens of the longest row after the last step, if that was a replay

    # ---- what a model gives --------------------------------------------------------------

    @property
    def stream_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual stream(s) before the head."""
        raise NotImplementedError

    @property
    def closing(self) -> tuple[Module, ...]:
        """The modules after the layers that have parameters of their own, in the order they run."""
        raise NotImplementedError

    def cache_layout(self, memory: Any = None):
        """How its caches lie: a `dsv4.cache.layout.Layout`. Raises InputError for caches in host memory with layers
        spread over devices."""
        raise NotImplementedError

    def page_layout(self):
        """`cache_layout` for a `PagedCache`."""
        return self.cache_layout()

    def run(self, step: Step, cache: Cache) -> torch.Tensor:
        """Streams [N, *stream_shape] after all layers; writes the step to the cache."""
        raise NotImplementedError

    def captured(self, step: CapturedStep, cache: Cache) -> tuple[torch.Tensor, Logits]:
        """A captured step: streams before the head [N, *stream_shape], and logits fp32 [N, vocab], of several ranks
        each its own."""
        raise NotImplementedError

    def features(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [N, *stream_shape] → normalised head input [N, d]."""
        raise NotImplementedError

    def layer_paths(self) -> list[dict]:
        """What each layer really read in the last step: `layer`, `kind`, `experts` and `path` as text, and sizes."""
        raise NotImplementedError

    # ---- where it runs -------------------------------------------------------------------

    @property
    def units(self) -> dict[str, Module]:
        """The modules that are placed whole, by name, in the order they run. Each parameter belongs to exactly one."""
        names = {module: name for name, module in self.named_modules()}
        return {names[unit]: unit for unit in (self.embed, *self.layers, *self.mtp, *self.closing)}

    @property
    def devices(self) -> list[torch.device]:
        """The device of each layer and its cache; the blocks of MTP come after the layers."""
        return self.layer_devices or [self.device] * (len(self.layers) + len(self.mtp))

    def entering(self, i: int, step: Step, *streams: torch.Tensor) -> tuple[Any, ...]:
        """The step and the streams on the device of layer i, as `devices` counts."""
        if self.layer_devices is None:
            return step, *streams
        device = self.layer_devices[i]
        return step.on(device), *(t.to(device) for t in streams)

    def host_memory(self, memory: Any) -> Any:
        """The `memory` that `new_cache` was given, or else the model's own. Raises InputError if there is one and
        layers are spread over devices."""
        memory = memory or self.kv_memory
        if memory is not None and self.layer_devices is not None:
            raise InputError(
                "a cache in host memory was asked for with layers spread over devices; leave out --device-map or "
                "--kv-memory host"
            )
        return memory

    # ---- running -------------------------------------------------------------------------

    def new_cache(
        self,
        batch: int = 1,
        max_context: int | None = None,
        max_rewind: int = DEFAULT_MAX_REWIND,
        memory: Any = None,
    ) -> Cache:
        """A preallocated cache for `batch` rows of up to `max_context` tokens, which may be rewound by `max_rewind` at
        least.

        Default max_context: what the model was loaded with, else the checkpoint's max_position_embeddings. memory: the
        `dsv4.cache.host_tier.choice.HostMemory` that keeps the growing part; None: what the model was loaded with.
        Raises InputError beyond the checkpoint's context, CapacityError with the bytes when it does not fit; for a
        cache in host memory also InputError if it would keep nothing there, PinnedMemoryError if pinned memory is
        short; with experts in host memory CapacityError if a step of so many rows may choose more than have slots.
        """
        if self.expert_tier is not None:
            self.expert_tier.check(batch)
        if max_context is None:
            max_context = self.max_context or self.config.max_position_embeddings
        return self.cache_class(self.cache_layout(memory), batch, max_context, max_rewind, self.devices)

    @torch.inference_mode()
    def append(
        self,
        ids: torch.Tensor,
        cache: Cache,
        n_new: list[int] | None = None,
        logits: str = "all",
        return_streams: bool = False,
        chunk: int | None = None,
        prompt: bool | None = None,
        whole: bool = True,
    ):
        """Append tokens to every row and return their logits: prefill, decode and verification alike.

        ids int64 [B, T], right-padded when `n_new` gives each row's count of new tokens (pads are neither read nor
        run). Returns fp32 [B, T, vocab]; with logits="last" only those of each row's last new token, [B, 1, vocab];
        with "none", None. Positions that were not run hold NaN. With return_streams, also the streams before the head
        [B, T, *stream_shape]. prompt: whether the tokens are (part of) a prompt; for a prompt GQA models read the whole
        cache, even if decoding has a policy. None: if a row has more than 16. whole: False leaves logits of several
        ranks cut (`dsv4.model.cut_values.CutValues`), for those who only choose tokens.

        Raises InputError for ids outside the vocabulary, ContextOverrun when a row would exceed
        max_context, and InputError for arguments of other types or shapes and a cache that was made for another
        model; the cache is then unchanged.
        """
        counts, chunk = self._check(ids, cache, n_new, logits, chunk), chunk or self.chunk_beside(cache)
        out = Collector(self, ids, counts, logits, return_streams, whole)
        self.replayed = None
        self._run_pieces(ids, cache, counts, chunk, out, max(counts) > DECODED if prompt is None else prompt)
        return out.result()

    def _run_pieces(
        self, ids: torch.Tensor, cache: Cache, counts: list[int], chunk: int, out: "Collector", prompt: bool
    ) -> None:
        starts = cache._main.now
        begin = list(starts)
        for rows, tokens in uniform_pieces(counts, chunk):
            cache.make_room(rows, tokens)
            done = [starts[b] - begin[b] for b in range(rows.start, rows.stop)]
            piece = ids[rows, done[0] : done[0] + tokens]  # all rows of a piece have run equally many tokens
            step = Step(piece.to(self.device), rows.start, starts[rows], self.rope_frequencies())
            step.prompt = prompt
            out.add(rows, done[0], tokens, self.run(step, cache))
            cache._main.advance(rows, tokens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [B, T, vocab] of ids int64 [B, T] from an empty context."""
        return self.append(ids, self.new_cache(ids.shape[0], max(1, ids.shape[1]), 0))

    @property
    def chunk(self) -> int:
        """Tokens of a row in one step, unless `append` is told otherwise or the cache leaves room for more."""
        return CHUNK if self.device.type == "cpu" else GPU_CHUNK

    def chunk_beside(self, cache: Cache) -> int:
        """Tokens of a row in one step beside this cache, unless `append` is told otherwise."""
        return self.chunk

    def gpu_chunk(self, batch: int, context: int) -> int:
        """`chunk_beside` a cache of so many rows and tokens in GPU memory."""
        return GPU_CHUNK

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as held in memory."""
        return sum(p.nbytes for p in self.parameters())

    # ---- inside --------------------------------------------------------------------------

    def rope_frequencies(self) -> dict[str, torch.Tensor]:
        if self.frequencies["main"].device != self.device:
            self.frequencies = {k: f.to(self.device) for k, f in self.frequencies.items()}
        return self.frequencies

    @property
    def cache_form(self) -> Form:
        """The form that a cache must have so that this model can write it."""
        return form(self.config, self.numerics, len(self.mtp) > 0, self.devices, self.heads)

    def _check(self, ids, cache: Cache, n_new, logits: str, chunk: int | None) -> list[int]:
        check_logits(logits)
        check_chunk(chunk)
        check_tokens("ids", ids)
        check_cache(self, cache, len(ids))
        counts = new_counts(n_new, ids)
        if not any(counts):
            raise InputError("there is no token to append; the prompt is empty")
        check_ids(ids, counts, self.config.vocab_size)
        check_room(cache._main.now, counts, cache.max_context)
        return counts


class Collector:
    """Collects the results of the steps of one append in tensors that are allocated once. whole: as for `append`."""

    def __init__(
        self, model: CausalLM, ids: torch.Tensor, counts: list[int], logits: str, want_streams: bool, whole: bool
    ):
        B, T = ids.shape
        self.model, self.counts, self.mode = model, counts, logits
        self.cut = not whole and model.ranks.size > 1
        vocab = model.config.vocab_size
        width = model.ranks.slots(vocab).size if self.cut else vocab
        kept = {"all": T, "last": 1, "none": 0}[logits]
        fresh = torch.empty if all(n == T for n in counts) else partial(torch.full, fill_value=float("nan"))
        self.logits: Any = fresh((B, kept, width), device=model.device) if kept else None
        self.streams: Any = (
            fresh((B, T, *model.stream_shape), dtype=model.numerics.activation, device=model.device)
            if want_streams
            else None
        )

    def add(
        self, rows: slice, done: int, tokens: int, streams: torch.Tensor, features: torch.Tensor | None = None
    ) -> None:
        """streams [N, *stream_shape] of a piece; features [N, d]: their head inputs, if something other than the
        model's own head makes them."""
        streams = streams.view(rows.stop - rows.start, tokens, *streams.shape[1:])
        if self.streams is not None:
            self.streams[rows, done : done + tokens] = streams
        if self.mode == "all":
            features = self.model.features(streams.flatten(0, 1)) if features is None else features
            self.logits[rows, done : done + tokens] = self._head(features).unflatten(0, streams.shape[:2])
        elif self.mode == "last":
            ending = [b for b in range(rows.start, rows.stop) if self.counts[b] == done + tokens]
            if ending:
                ends = slice(ending[0] - rows.start, ending[-1] - rows.start + 1)
                fresh = self._head(
                    self.model.features(streams[ends, -1])
                    if features is None
                    else features.view(*streams.shape[:2], -1)[ends, -1]
                )
                for b in ending:
                    self.logits[b, 0] = fresh[b - ending[0]]

    def _head(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.head.own(features).own if self.cut else self.model.head(features)

    def result(self):
        logits = self.logits
        if self.cut and logits is not None:
            logits = cut(logits, self.model.ranks, self.model.config.vocab_size)
        return logits if self.streams is None else (logits, self.streams)


def uniform_pieces(counts: list[int], chunk: int):
    """Cut ragged work into uniform pieces: (rows, tokens), contiguous rows that run equally many tokens.

    Each token belongs to exactly one piece; all rows that still have tokens advance together, by the least number of
    tokens that any of them (or the chunk) has left.
    """
    left = list(counts)
    while any(left):
        tokens = min(chunk, min(n for n in left if n))
        first = 0
        while first < len(left):
            if not left[first]:
                first += 1
                continue
            stop = first
            while stop < len(left) and left[stop]:
                left[stop] -= tokens
                stop += 1
            yield slice(first, stop), tokens
            first = stop


def captures(model: CausalLM) -> bool:
    """Whether steps of this model become CUDA graphs: on a GPU, and not on the reference backend, which waits for the
    device to learn how many tokens each expert has. Nor with a user's kernel: it may wait for the device too, and a
    replay would not count its calls."""
    return model.device.type == "cuda" and model.backend == "triton" and not model.replacements


def capacity(model: CausalLM, limit: int) -> int:
    """Tokens that the cache of a context of `limit` tokens is made for. Kernels of a captured step split their sums by
    it. So generation with drafts, which writes beyond the limit before it is cut, and generation without get caches of
    one size. Rows of a batch that are done still run, one token after their last."""
    return captured_capacity(model, limit) if captures(model) else limit


def captured_capacity(model: CausalLM, limit: int) -> int:
    """`capacity` of a model whose steps are captured."""
    return max(limit, min(limit + MAX_DRAFTS + 1, model.config.max_position_embeddings))
