"""The whole model of DeepSeek-V4: blocks between embedding and head, and MTP. `dsv4.model.causal` runs it."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from dsv4.cache.cache import Cache
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.entries import StagedLayout
from dsv4.cache.layout import LatentLayout
from dsv4.errors import InputError
from dsv4.kernels.collectives.unsummed import sum_now
from dsv4.kernels.dispatch import bind
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import OPERATIONS, TIER_OPERATIONS
from dsv4.model.arguments import (
    check_cache,
    check_chunk,
    check_ids,
    check_logits,
    check_room,
    check_streams,
    check_tokens,
    is_whole,
    kind,
    new_counts,
)
from dsv4.model.block import Block, HyperHead, merged
from dsv4.model.causal import GPU_CHUNK, CausalLM, Collector, uniform_pieces
from dsv4.model.config import ModelConfig
from dsv4.model.cut_values import Logits
from dsv4.model.linear import RMSNorm
from dsv4.model.module import Module, fuses
from dsv4.model.mtp import MTPBlock
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.rope import frequencies
from dsv4.model.step import CapturedStep, Step
from dsv4.model.vocabulary import Embedding, Head

# The host takes longer to launch a layer of a prompt than the device to run 2,048 tokens of it: 8K tokens of 8 layers
# took 164 ms in chunks of 2,048 and 89 in chunks of 4,096 (H200). Beside caches of more tokens memory may have no room:
# two cards of 80 GB hold Flash and 1M tokens only with the smaller chunks.
LARGE_CHUNK, LARGE_CHUNK_BESIDE = 4096, 512 << 10


class Model(CausalLM):
    """A DeepSeek-V4-style model. Build it with `dsv4.load_model`.

    store(name) → dsv4.model.linear.Storage says how the matrix or norm with that official name is held.
    Parameter names are the official tensor names, except that hyper-connections are modules
    (`layers.0.hc_attn.fn` for `layers.0.hc_attn_fn`) and experts are stacked.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        backend: str,
        store,
        mtp: bool,
        replacements=None,
        ranks: Ranks = ALONE,
    ):
        super().__init__(config, numerics, backend, replacements, ranks)
        op = self.op = bind(OPERATIONS, backend, self.dispatch, COMPOSITIONS, self.replacements)
        op.bound = op  # see dsv4.model.module.fuses
        self.embed = Embedding(config, store("embed").dtype, ranks)
        self.layers = nn.ModuleList(
            Block(config, spec, numerics, partial(_within, store, spec.prefix), op, ranks) for spec in config.layers
        )
        self.mtp = nn.ModuleList(
            MTPBlock(config, spec, numerics, partial(_within, store, spec.prefix), op, ranks)
            for spec in (config.mtp_layers if mtp else ())
        )
        self.hc_head = HyperHead(config, op)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("norm").dtype, op)
        self.head = Head(config, store("head"), numerics, op, ranks)
        self.frequencies = frequencies(config)

    @property
    def stream_shape(self) -> tuple[int, ...]:
        """(n, d): residual streams and their width."""
        return self.config.hc_mult, self.config.hidden_size

    @property
    def closing(self) -> tuple[Module, ...]:
        return self.hc_head, self.norm, self.head

    # ---- running -------------------------------------------------------------------------

    def chunk_beside(self, cache: Cache) -> int:
        whole = type(cache) is Cache and type(cache.layout) is LatentLayout
        return self.gpu_chunk(cache.batch, cache.max_context) if whole and self.device.type != "cpu" else self.chunk

    def gpu_chunk(self, batch: int, context: int) -> int:
        if batch > 1 or context > LARGE_CHUNK_BESIDE:
            return GPU_CHUNK
        # A host launches the kernels of a chunk in one time, and several ranks have less to compute in it.
        return LARGE_CHUNK * min(2, self.ranks.size)

    def cache_layout(self, memory: HostMemory | None = None) -> LatentLayout:
        given = self.config, self.numerics, len(self.mtp) > 0, self.op.write_rows
        memory = self.host_memory(memory)
        if memory is None:
            return LatentLayout(*given)
        return StagedLayout(*given, memory, bind(TIER_OPERATIONS, self.backend, self.dispatch).fetch)

    @torch.inference_mode()
    def mtp_logits(
        self,
        streams: torch.Tensor,
        next_ids: torch.Tensor,
        cache: Cache | None = None,
        block: int = 0,
        return_streams: bool = False,
        chunk: int | None = None,
        n_new: list[int] | None = None,
        logits: str = "all",
        whole: bool = True,
    ):
        """Drafting logits fp32 [B, T, vocab]: entry t predicts the token after next_ids[t].

        streams [B, T, n, d]: the main model's streams before the head (or the block's own, when
        drafts are chained); next_ids int64 [B, T]: the token at t + 1. With a cache the tokens
        follow `cache.mtp_lengths`; without one they start at position 0. With return_streams, also
        the block's streams [B, T, n, d]. n_new, logits and whole as in `append`, and 0 tokens are no error.
        Raises as `append`, and InputError for streams of another shape or dtype than the model's own, a block that the
        model was not loaded with, and a model without MTP; the cache is then unchanged.
        """
        cache, counts = self._check_mtp(streams, next_ids, cache, block, chunk, n_new, logits)
        lengths = cache._mtp
        out, begin = Collector(self, next_ids, counts, logits, return_streams, whole), list(lengths.now)
        for rows, tokens in uniform_pieces(counts, chunk or self.chunk_beside(cache)):
            done = lengths.now[rows.start] - begin[rows.start]  # all rows of a piece have run equally many tokens
            piece = slice(done, done + tokens)
            cache.make_room(rows, tokens, mtp=True)
            step = Step(next_ids[rows, piece].to(self.device), rows.start, lengths.now[rows], self.rope_frequencies())
            embedded = self.embed(step.ids).to(self.numerics.activation)
            given = streams[rows, piece].flatten(0, 1).to(self.device)
            here, given, embedded = self.entering(len(self.layers) + block, step, given, embedded)
            features, after = self.mtp[block](given, embedded, here, cache.mtp_layers[block])
            out.add(rows, done, tokens, after, features.to(self.device))
            lengths.advance(rows, tokens)
        return out.result()

    def _check_mtp(self, streams, next_ids, cache, block, chunk, n_new, logits) -> tuple[Cache, list[int]]:
        """The cache to write, a new one if none was given, and the number of new entries of each row."""
        if not is_whole(block, 0) or block >= len(self.mtp):
            raise InputError(f"MTP block {kind(block)} was asked for; this model was loaded with {len(self.mtp)}")
        check_logits(logits)
        check_chunk(chunk)
        check_tokens("next_ids", next_ids)
        B, T = next_ids.shape
        check_streams(streams, (B, T, *self.stream_shape), self.numerics.activation)
        counts = new_counts(n_new, next_ids)
        check_ids(next_ids, counts, self.config.vocab_size)
        if cache is None:
            cache = self.new_cache(B, max(1, T), 0)
        check_cache(self, cache, B)
        check_room(cache._mtp.now, counts, cache.max_context)
        return cache, counts

    def layer_paths(self) -> list[dict]:
        """What each layer really read in the last step: its kind and the sizes of its attention's inputs."""
        rows = [(f"layer {i}", block) for i, block in enumerate(self.layers)]
        rows += [(f"mtp {i}", block) for i, block in enumerate(self.mtp)]
        found = []
        for label, block in rows:
            path = block.attn.path
            # a replay runs no Python: what its kernels read follows from the length
            if path and self.replayed is not None:
                path = block.attn.path_at(self.replayed)
            found.append(
                {
                    "layer": label,
                    "kind": block.spec.kind.value,
                    "experts": "hash" if block.spec.hashed else "scored",
                    **path,
                    "path": _describe(block.spec.kind.value, path),
                }
            )
        return found

    # ---- inside --------------------------------------------------------------------------

    def run(self, step: Step, cache: Cache) -> torch.Tensor:
        return merged(self.op, self._layers(step, cache)).to(self.device)

    def captured(self, step: CapturedStep, cache: Cache) -> tuple[torch.Tensor, Logits]:
        """A captured step in few kernels: streams before the head [N, n, d], and logits fp32 [N, vocab], of several
        ranks each its own."""
        cache.place(step, self.op)
        pending = self._layers(step, cache)
        if len(pending) == 1:
            return pending[0], self.head.own(self.features(pending[0]))
        if not fuses(self.op, "mhc_post_head_norm"):
            pending = sum_now(pending[0]), *pending[1:]
        streams, y = self.op.mhc_post_head_norm(*pending, *self.hc_head.arguments(), self.norm.weight, self.norm.eps)
        return streams, self.head.own(y)

    def _layers(self, step: Step, cache: Cache) -> Sequence[torch.Tensor]:
        """Every layer up to its last write to the streams, in the form of `Block.sublayers`."""
        if self.ranks.size == 1 and fuses(self.op, "embed_streams", self.embed):
            table, dtype = self.embed.table, self.numerics.activation
            streams = self.op.embed_streams(step.ids, table, self.config.hc_mult, dtype)
        else:
            h = self.embed(step.ids).to(self.numerics.activation)
            streams = h.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        pending: Sequence[torch.Tensor] = (streams,)
        for i, (block, layer_cache) in enumerate(zip(self.layers, cache.layers)):
            here, *pending = self.entering(i, step, *pending)
            if block.watched:  # a hook sees whole streams
                pending = (block(merged(self.op, pending), here, layer_cache),)
            else:
                pending = block.sublayers(pending, here, layer_cache)
        return pending

    def features(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [N, n, d] → normalised head input [N, d]."""
        return self.norm(self.hc_head(streams))


def _describe(kind: str, path: dict) -> str:
    if not path:
        return "not run yet"
    window = f"window of {path['window']}"
    if kind == "window":
        return window
    if kind == "hca":
        return f"{window} + all {path['visible']} visible entries"
    return f"{window} + {path['selected']} of {path['visible']} visible entries"


def _within(store, prefix: str, leaf: str):
    """The storage of a tensor of the module of that name."""
    return store(f"{prefix}.{leaf}")
