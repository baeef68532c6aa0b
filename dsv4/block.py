"""One transformer block: attention and MoE, each wrapped in a hyper-connection."""

import torch

from dsv4.attention import ATTENTION
from dsv4.cache import LayerCache
from dsv4.config import KIND_OF_RATIO, ModelConfig
from dsv4.hyper_connections import HyperConnection
from dsv4.module import Module
from dsv4.moe import MoE
from dsv4.norms import RMSNorm
from dsv4.numerics import Numerics
from dsv4.step import Step


class Block(Module):
    """streams → streams. `hashed`: experts by token id instead of by score."""

    def __init__(self, config: ModelConfig, ratio: int, hashed: bool, numerics: Numerics, store, op):
        super().__init__()
        self.kind = KIND_OF_RATIO[ratio]
        self.hashed = hashed
        self.hc_attn, self.hc_ffn = HyperConnection(config, op), HyperConnection(config, op)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("attn_norm").dtype, op)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("ffn_norm").dtype, op)
        self.attn = ATTENTION[self.kind](config, ratio, numerics, lambda leaf: store(f"attn.{leaf}"), op)
        self.ffn = MoE(config, hashed, numerics, lambda leaf: store(f"ffn.{leaf}"), op)
        self.op = op

    def captured(self, pending: tuple, step: Step, cache: LayerCache) -> tuple:
        """The block of a captured step. pending: (streams,), or (out, streams, post, comb) of the sublayer before, whose output
        is still to be merged. Returns such a tuple of its own last sublayer."""
        attn_in = (*self.hc_attn.arguments(), self.attn_norm.weight, self.attn_norm.eps)
        if len(pending) == 1:
            streams, (x, post, comb) = *pending, self.op.mhc_pre_norm(*pending, *attn_in)
        else:
            streams, x, post, comb = self.op.mhc_post_pre_norm(*pending, *attn_in)
        ffn_in = (*self.hc_ffn.arguments(), self.ffn_norm.weight, self.ffn_norm.eps)
        streams, x, post, comb = self.op.mhc_post_pre_norm(self.attn.captured(x, step, cache), streams, post, comb, *ffn_in)
        return self.ffn.captured(x, step.ids), streams, post, comb

    def forward(self, streams: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """streams [N, n, d] → [N, n, d]; writes the step to the layer's cache."""
        x, post, comb = self.hc_attn(streams)
        streams = self.op.mhc_post(self.attn(self.attn_norm(x), step, cache), streams, post, comb)
        x, post, comb = self.hc_ffn(streams)
        return self.op.mhc_post(self.ffn(self.ffn_norm(x), step.ids), streams, post, comb)
