"""Multi-token prediction: a block that drafts the token after the next one."""

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.layer import LayerCache
from dsv4.model.block import Block, HyperHead
from dsv4.model.causal import CausalLM
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear, RMSNorm
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.spec import LayerSpec
from dsv4.model.step import CapturedStep, Step

# The number of skipped tokens from which the second, shorter step pays: it is some 20 small launches, about as long as
# one token's experts.
APART = 2


class MTPBlock(Block):
    """A window block over e_proj(enorm(embed(token t+1))) + h_proj(hnorm(h_j)) for each stream j.

    h are the main model's streams at t before its head. Embedding and output head are the main
    model's; hc_head and norm are its own. Chained drafting feeds its own streams back.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__(config, spec, numerics, store, op, ranks)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(d, d, store("e_proj"), numerics, op)
        self.h_proj = Linear(d, d, store("h_proj"), numerics, op)
        self.enorm = RMSNorm(d, eps, store("enorm").dtype, op)
        self.hnorm = RMSNorm(d, eps, store("hnorm").dtype, op)
        self.norm = RMSNorm(d, eps, store("norm").dtype, op)
        self.hc_head = HyperHead(config, op)

    def forward(self, streams: torch.Tensor, embedded: torch.Tensor, step: Step, cache: LayerCache):
        """streams [N, n, d], embedded next tokens [N, d] → (features [N, d] for the shared head, streams [N, n, d])."""
        return self._said(super().forward(self._mixed(streams, embedded), step, cache))

    def forward_rows(
        self,
        streams: torch.Tensor,
        embedded: torch.Tensor,
        step: Step,
        cache: LayerCache,
        row: torch.Tensor,
        last: Step,
    ):
        """`forward` with the results of some tokens only: row int64 [M], which of the N tokens, and `last`, the step of
        these alone.

        Other tokens leave only their latents in the cache, and this block can write those from its input, because it is
        the only layer. So the experts, which are most of the block's bytes, run for M tokens only. Returns (features
        [M, d], streams [M, n, d]).
        """
        mixed = self._mixed(streams, embedded)
        _, x, *_ = self._read((mixed,), self.hc_attn, self.attn_norm)
        self.attn.remember(x, step, cache)
        return self._said(super().forward(mixed.index_select(0, row), last, cache))

    def _mixed(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The block's input [N, n, d]."""
        N, n, d = streams.shape
        h = self.h_proj(self.hnorm(streams).view(N * n, d)).view(N, n, d)
        return h + self.e_proj(self.enorm(embedded)).unsqueeze(1)

    def _said(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.hc_head(streams)), streams


def run_block(
    model: CausalLM,
    cache: Cache,
    streams: torch.Tensor,
    ids: torch.Tensor,
    start: torch.Tensor,
    last: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The MTP block as a captured step at start … of each row: streams [B·T, n, d], next tokens ids [B, T] → features
    [B·T, d], streams.

    last int64 [B]: return only the results at that token of each row: features [B, d], streams [B, n, d].
    """
    (B, T), block, place = ids.shape, model.mtp[0], cache.mtp_layers[0]
    step_of = lambda ids, start: CapturedStep(ids, start, cache.max_context, model.rope_frequencies())
    step = step_of(ids, start)
    embedded = model.embed(step.ids).to(model.numerics.activation)
    if last is None:
        return block(streams, embedded, step, place)
    row = torch.arange(B, device=ids.device) * T + last
    if B * (T - 1) < APART:
        return tuple(said.index_select(0, row) for said in block(streams, embedded, step, place))
    return block.forward_rows(
        streams, embedded, step, place, row, step_of(ids.gather(1, last.unsqueeze(1)), start + last)
    )
