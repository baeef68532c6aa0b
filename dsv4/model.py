"""The whole model: embedding, blocks, head, MTP, and the one way to run it (`append`)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from dsv4.block import Block
from dsv4.cache import DEFAULT_MAX_REWIND, Cache
from dsv4.config import ModelConfig
from dsv4.errors import ContextOverrun, InputError
from dsv4.hyper_connections import HyperHead
from dsv4.linear import Linear, parameter
from dsv4.module import Module
from dsv4.mtp import MTPBlock
from dsv4.norms import RMSNorm
from dsv4.numerics import Numerics
from dsv4.rope import frequencies
from dsv4.step import CapturedStep, Step
from kernels.dispatch import DispatchLedger, bind
from kernels.fusions import COMPOSITIONS
from kernels.operations import OPERATIONS

CHUNK, GPU_CHUNK = 256, 2048  # tokens of a row in one step: prefill memory grows with it, not with the prompt


class Embedding(Module):
    """Token embedding [vocab, d]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter(config.vocab_size, config.hidden_size, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Head(Linear):
    """Output projection: logits = W·y in fp32."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """y [N, d] → fp32 [N, vocab]."""
        return super().forward(y, exact=True)


class Model(Module):
    """A DeepSeek-V4-style model. Build it with `dsv4.load_model`.

    store(name) → dsv4.linear.Storage says how the matrix or norm with that official name is held.
    Parameter names are the official tensor names, except that hyper-connections are modules
    (`layers.0.hc_attn.fn` for `layers.0.hc_attn_fn`) and experts are stacked.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, backend: str, store, mtp: bool):
        super().__init__()
        self.config, self.numerics, self.backend = config, numerics, backend
        self.dispatch = DispatchLedger()
        op = self.op = bind(OPERATIONS, backend, self.dispatch, COMPOSITIONS)
        op.bound = op  # see dsv4.module.fuses
        self.embed = Embedding(config, store("embed").dtype)
        self.layers = nn.ModuleList(
            Block(config, config.compress_ratios[i], i < config.num_hash_layers, numerics,
                  lambda leaf, i=i: store(f"layers.{i}.{leaf}"), op)
            for i in range(config.num_hidden_layers))
        self.mtp = nn.ModuleList(
            MTPBlock(config, config.mtp_compress_ratios[i], numerics, lambda leaf, i=i: store(f"mtp.{i}.{leaf}"), op)
            for i in range(config.num_mtp_layers if mtp else 0))
        self.hc_head = HyperHead(config, op)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("norm").dtype, op)
        self.head = Head(config.vocab_size, config.hidden_size, store("head"), numerics, op)
        self.frequencies = frequencies(config)
        self.device = torch.device("cpu")
        self.max_context: int | None = None  # default of new_cache
        self.layer_devices: list[torch.device] | None = None  # set when layers are spread over devices
        self.placement: dict[str, str] = {}  # module → device, when they are spread
        self.inventory = self.ledger = None  # of the checkpoint that it was loaded from
        self.replayed: int | None = None  # tokens that the longest row held after the last step, if that was a replay

    # ---- running -------------------------------------------------------------------------

    def new_cache(self, batch: int = 1, max_context: int | None = None, max_rewind: int = DEFAULT_MAX_REWIND) -> Cache:
        """A preallocated cache for `batch` rows of up to `max_context` tokens.

        Default max_context: what the model was loaded with, else the checkpoint's max_position_embeddings.
        Raises InputError beyond the latter, CapacityError with the bytes when it does not fit.
        """
        n = self.config.num_hidden_layers + len(self.mtp)
        devices = self.layer_devices or [self.device] * n
        if max_context is None:
            max_context = self.max_context or self.config.max_position_embeddings
        return Cache(self.config, self.numerics, batch, max_context, max_rewind, devices, len(self.mtp) > 0, self.op.write_rows)

    @torch.inference_mode()
    def append(self, ids: torch.Tensor, cache: Cache, n_new: list[int] | None = None, logits: str = "all",
               return_streams: bool = False, chunk: int | None = None):
        """Append tokens to every row and return their logits: prefill, decode and verification alike.

        ids int64 [B, T], right-padded when `n_new` gives each row's count of new tokens (pads are
        neither read nor run). Returns fp32 [B, T, vocab]; with logits="last" only those of each
        row's last new token, [B, 1, vocab]; with "none", None. Positions that were not run hold
        NaN. With return_streams, also the streams before the head [B, T, n, d].

        Raises InputError for ids outside the vocabulary, ContextOverrun when a row would exceed
        max_context; the cache is then unchanged.
        """
        counts, chunk = self._check(ids, cache, n_new, logits), chunk or self.chunk
        out = _Collector(self, ids, counts, logits, return_streams)
        self.replayed, starts = None, cache._main.now
        begin = list(starts)
        for rows, tokens in _uniform_pieces(counts, chunk):
            cache.make_room(rows, tokens)
            done = [starts[b] - begin[b] for b in range(rows.start, rows.stop)]
            piece = ids[rows, done[0]:done[0] + tokens]  # all rows of a piece have run equally many tokens
            step = Step(piece.to(self.device), rows.start, starts[rows], self.rope_frequencies())
            out.add(rows, done[0], tokens, self.run(step, cache))
            cache._main.advance(rows, tokens)
        return out.result()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [B, T, vocab] of ids int64 [B, T] from an empty context."""
        return self.append(ids, self.new_cache(ids.shape[0], max(1, ids.shape[1]), 0))

    @torch.inference_mode()
    def mtp_logits(self, streams: torch.Tensor, next_ids: torch.Tensor, cache: Cache | None = None, block: int = 0,
                   return_streams: bool = False, chunk: int | None = None, n_new: list[int] | None = None, logits: str = "all"):
        """Drafting logits fp32 [B, T, vocab]: entry t predicts the token after next_ids[t].

        streams [B, T, n, d]: the main model's streams before the head (or the block's own, when
        drafts are chained); next_ids int64 [B, T]: the token at t + 1. With a cache the tokens
        follow `cache.mtp_lengths`; without one they start at position 0. With return_streams, also
        the block's streams [B, T, n, d]. n_new and logits as in `append`, and 0 tokens are no error.
        Raises InputError if the model was loaded without MTP.
        """
        if block >= len(self.mtp):
            raise InputError(f"MTP block {block} was asked for; this model was loaded with {len(self.mtp)}")
        B, T = next_ids.shape
        if streams.shape[:2] != (B, T):
            raise InputError(f"streams are for {tuple(streams.shape[:2])} tokens, next_ids for {(B, T)}; they must agree")
        cache = self.new_cache(B, max(1, T), 0) if cache is None else cache
        self._check_ids(next_ids)
        counts = _counts(n_new, next_ids)
        lengths = cache._mtp
        _check_room(lengths.now, counts, cache.max_context)
        out, begin = _Collector(self, next_ids, counts, logits, return_streams), list(lengths.now)
        for rows, tokens in _uniform_pieces(counts, chunk or self.chunk):
            done = lengths.now[rows.start] - begin[rows.start]  # all rows of a piece have run equally many tokens
            piece = slice(done, done + tokens)
            cache.make_room(rows, tokens, mtp=True)
            step = Step(next_ids[rows, piece].to(self.device), rows.start, lengths.now[rows], self.rope_frequencies())
            device = self.layer_devices[len(self.layers) + block] if self.layer_devices else self.device
            embedded = self.embed(step.ids).to(device, self.numerics.activation)
            features, after = self.mtp[block](streams[rows, piece].flatten(0, 1).to(device), embedded, step.on(device),
                                              cache.mtp_layers[block])
            out.add(rows, done, tokens, after, features.to(self.device))
            lengths.advance(rows, tokens)
        return out.result()

    def layer_paths(self) -> list[dict]:
        """What each layer really read in the last step: its kind and the sizes its attention was given."""
        rows = [(f"layer {i}", block) for i, block in enumerate(self.layers)]
        rows += [(f"mtp {i}", block) for i, block in enumerate(self.mtp)]
        found = []
        for label, block in rows:
            path = block.attn.path
            if path and self.replayed is not None:  # a replay runs no Python: what its kernels read follows from the length
                path = block.attn.path_at(self.replayed)
            found.append({"layer": label, "kind": block.kind.value, "experts": "hash" if block.hashed else "scored", **path,
                          "path": _describe(block.kind.value, path)})
        return found

    @property
    def chunk(self) -> int:
        """Tokens of a row in one step, unless `append` is told otherwise."""
        return CHUNK if self.device.type == "cpu" else GPU_CHUNK

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as held in memory."""
        return sum(p.nbytes for p in self.parameters())

    # ---- inside --------------------------------------------------------------------------

    def run(self, step: Step, cache: Cache) -> torch.Tensor:
        h = self.embed(step.ids).to(self.numerics.activation)
        streams = h.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        if self.layer_devices is None:
            for block, layer_cache in zip(self.layers, cache.layers):
                streams = block(streams, step, layer_cache)
            return streams
        for block, layer_cache, device in zip(self.layers, cache.layers, self.layer_devices):
            streams = block(streams.to(device), step.on(device), layer_cache)
        return streams.to(self.device)

    def captured(self, step: CapturedStep, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """A captured step in few kernels: streams before the head [N, n, d], and logits fp32 [N, vocab]."""
        cache.place(step, self.op)
        pending = (self.op.embed_streams(step.ids, self.embed.weight, self.config.hc_mult, self.numerics.activation),)
        for block, layer_cache in zip(self.layers, cache.layers):
            pending = block.sublayers(pending, step, layer_cache)
        streams, y = self.op.mhc_post_head_norm(*pending, *self.hc_head.arguments(), self.norm.weight, self.norm.eps)
        return streams, self.head(y)

    def features(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [N, n, d] → normalised head input [N, d]."""
        return self.norm(self.hc_head(streams))

    def rope_frequencies(self) -> dict[str, torch.Tensor]:
        if self.frequencies["main"].device != self.device:
            self.frequencies = {k: f.to(self.device) for k, f in self.frequencies.items()}
        return self.frequencies

    def _check(self, ids, cache: Cache, n_new, logits: str) -> list[int]:
        if logits not in ("all", "last", "none"):
            raise InputError(f"logits is {logits!r}; expected 'all', 'last' or 'none'")
        if ids.dim() != 2 or ids.dtype != torch.int64:
            raise InputError(f"ids are {ids.dtype} {tuple(ids.shape)}; expected int64 [batch, tokens]")
        B = ids.shape[0]
        if B != cache.batch:
            raise InputError(f"ids have {B} rows, the cache {cache.batch}; they must agree")
        counts = _counts(n_new, ids)
        if not any(counts):
            raise InputError("there is no token to append; the prompt is empty")
        self._check_ids(ids if n_new is None else torch.cat([row[:n] for row, n in zip(ids, counts)]))
        _check_room(cache._main.now, counts, cache.max_context)
        return counts

    def _check_ids(self, ids: torch.Tensor) -> None:
        if ids.device.type == "cpu":  # ids made on the device come from this model's own vocabulary
            values = ids.flatten().tolist() if ids.numel() <= 64 else [int(ids.min()), int(ids.max())]
            low, high = min(values), max(values)
            if low < 0 or high >= self.config.vocab_size:
                raise InputError(f"token id {low if low < 0 else high} is outside the vocabulary of "
                                 f"{self.config.vocab_size}; is this the checkpoint's own tokenizer?")


class _Collector:
    """Gathers what the steps of one append return into tensors allocated once."""

    def __init__(self, model: Model, ids: torch.Tensor, counts: list[int], logits: str, want_streams: bool):
        B, T = ids.shape
        self.model, self.counts, self.mode = model, counts, logits
        kept = {"all": T, "last": 1, "none": 0}[logits]
        fresh = torch.empty if all(n == T for n in counts) else partial(torch.full, fill_value=float("nan"))
        self.logits = fresh((B, kept, model.config.vocab_size), device=model.device) if kept else None
        n, d = model.config.hc_mult, model.config.hidden_size
        self.streams = fresh((B, T, n, d), dtype=model.numerics.activation, device=model.device) if want_streams else None

    def add(self, rows: slice, done: int, tokens: int, streams: torch.Tensor, features: torch.Tensor | None = None) -> None:
        """streams [N, n, d] of a piece; features [N, d]: their head inputs, where the model's own head is not what makes them."""
        streams = streams.view(rows.stop - rows.start, tokens, *streams.shape[1:])
        if self.streams is not None:
            self.streams[rows, done:done + tokens] = streams
        if self.mode == "all":
            features = self.model.features(streams.flatten(0, 1)) if features is None else features
            self.logits[rows, done:done + tokens] = self.model.head(features).view(*streams.shape[:2], -1)
        elif self.mode == "last":
            ending = [b for b in range(rows.start, rows.stop) if self.counts[b] == done + tokens]
            if ending:
                ends = slice(ending[0] - rows.start, ending[-1] - rows.start + 1)
                own = features is None
                fresh = self.model.head(self.model.features(streams[ends, -1]) if own else features.view(*streams.shape[:2], -1)[ends, -1])
                for b in ending:
                    self.logits[b, 0] = fresh[b - ending[0]]

    def result(self):
        return self.logits if self.streams is None else (self.logits, self.streams)


def _counts(n_new: list[int] | None, ids: torch.Tensor) -> list[int]:
    """New tokens of each row of ids [B, T]. Raises InputError for counts that do not fit it."""
    B, T = ids.shape
    counts = [T] * B if n_new is None else [int(n) for n in n_new]
    if len(counts) != B or any(n < 0 or n > T for n in counts):
        raise InputError(f"n_new is {counts} for ids {tuple(ids.shape)}; expected {B} counts of 0 … {T}")
    return counts


def _uniform_pieces(counts: list[int], chunk: int):
    """Cut ragged work into uniform pieces: (rows, tokens), contiguous rows that run equally many tokens.

    Each token belongs to exactly one piece; all rows that still have tokens advance together by
    the least that any of them (or the chunk) has left.
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


def _check_room(lengths: list[int], counts: list[int], max_context: int) -> None:
    for b, (have, new) in enumerate(zip(lengths, counts)):
        if have + new > max_context:
            raise ContextOverrun(f"row {b} holds {have} tokens and would get {new} more, over the cache's max_context of "
                                 f"{max_context}; ask for a larger --max-context or fewer tokens")


def _describe(kind: str, path: dict) -> str:
    if not path:
        return "not run yet"
    window = f"window of {path['window']}"
    if kind == "window":
        return window
    if kind == "hca":
        return f"{window} + all {path['visible']} visible entries"
    return f"{window} + {path['selected']} of {path['visible']} visible entries"
