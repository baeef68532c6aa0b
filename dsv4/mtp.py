"""Multi-token prediction: a block that drafts the token after the next one."""

import torch

from dsv4.block import Block
from dsv4.cache import LayerCache
from dsv4.config import ModelConfig
from dsv4.hyper_connections import HyperHead
from dsv4.linear import Linear
from dsv4.norms import RMSNorm
from dsv4.numerics import Numerics
from dsv4.step import Step


class MTPBlock(Block):
    """A window block over e_proj(enorm(embed(token t+1))) + h_proj(hnorm(h_j)) for each stream j.

    h are the main model's streams at t before its head. Embedding and output head are the main
    model's; hc_head and norm are its own. Chained drafting feeds its own streams back.
    """

    def __init__(self, config: ModelConfig, ratio: int, numerics: Numerics, store, op):
        super().__init__(config, ratio, False, numerics, store, op)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(d, d, store("e_proj"), numerics, op)
        self.h_proj = Linear(d, d, store("h_proj"), numerics, op)
        self.enorm = RMSNorm(d, eps, store("enorm").dtype, op)
        self.hnorm = RMSNorm(d, eps, store("hnorm").dtype, op)
        self.norm = RMSNorm(d, eps, store("norm").dtype, op)
        self.hc_head = HyperHead(config, op)

    def forward(self, streams: torch.Tensor, embedded: torch.Tensor, step: Step, cache: LayerCache):
        """streams [N, n, d], embedded next tokens [N, d] → (features [N, d] for the shared head, streams [N, n, d])."""
        N, n, d = streams.shape
        h = self.h_proj(self.hnorm(streams).view(N * n, d)).view(N, n, d)
        streams = super().forward(h + self.e_proj(self.enorm(embedded)).unsqueeze(1), step, cache)
        return self.norm(self.hc_head(streams)), streams
