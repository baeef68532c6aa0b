"""Manifold-constrained hyper-connections: how sublayers read and write the residual streams."""

import torch

from dsv4.model.config import ModelConfig
from dsv4.model.linear import parameter
from dsv4.model.module import Module


class HyperConnection(Module):
    """The connection of one sublayer. Parameters fp32: fn [2n + n², n·d], scale [3], base [2n + n²]."""

    def __init__(self, config: ModelConfig, op):
        super().__init__()
        n = config.hc_mult
        self.fn = parameter(2 * n + n * n, n * config.hidden_size)
        self.scale, self.base = parameter(3), parameter(2 * n + n * n)
        self.iters, self.eps, self.norm_eps, self.op = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps, op

    def forward(self, streams: torch.Tensor):
        """streams [N, n, d] → (sublayer input [N, d] before its norm, post [N, n], comb [N, n, n])."""
        return self.op.mhc_pre(streams, *self.arguments())

    def arguments(self) -> tuple:
        """The arguments of `mhc_pre` after the streams."""
        mine = self._parameters
        return mine["fn"], mine["scale"], mine["base"], self.iters, self.eps, self.norm_eps


class HyperHead(Module):
    """The learned collapse of the streams before the final norm. fn [n, n·d], scale [1], base [n]."""

    def __init__(self, config: ModelConfig, op):
        super().__init__()
        n = config.hc_mult
        self.fn = parameter(n, n * config.hidden_size)
        self.scale, self.base = parameter(1), parameter(n)
        self.eps, self.norm_eps, self.op = config.hc_eps, config.rms_norm_eps, op

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [N, n, d] → [N, d]."""
        return self.op.mhc_head(streams, *self.arguments())

    def arguments(self) -> tuple:
        """The arguments of `mhc_head` after the streams."""
        return self.fn, self.scale, self.base, self.eps, self.norm_eps
