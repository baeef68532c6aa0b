"""One transformer block: attention and MoE, each wrapped in a manifold-constrained hyper-connection, which says how a
sublayer reads and writes the residual streams."""

import torch

from dsv4.cache.layer import LayerCache
from dsv4.kernels.collectives.unsummed import Unsummed, sum_now
from dsv4.kernels.quantize.coded import Rows, plain
from dsv4.model.attention import ATTENTION, WindowAttention
from dsv4.model.config import ModelConfig
from dsv4.model.linear import RMSNorm, parameter
from dsv4.model.module import Module, fuses
from dsv4.model.moe import MoE
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.spec import LayerSpec
from dsv4.model.step import Step


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


class Block(Module):
    """streams → streams, as the layer's spec says."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__()
        self.spec = spec
        self.hc_attn, self.hc_ffn = HyperConnection(config, op), HyperConnection(config, op)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("attn_norm").dtype, op)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("ffn_norm").dtype, op)
        self.attn = ATTENTION[spec.kind](config, spec, numerics, lambda leaf: store(f"attn.{leaf}"), op, ranks)
        self.ffn = MoE(config, spec.hashed, numerics, lambda leaf: store(f"ffn.{leaf}"), op, ranks)
        self.op = op

    def forward(self, streams: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """streams [N, n, d] → [N, n, d]; writes the step to the layer's cache."""
        return merged(self.op, self.sublayers((streams,), step, cache))

    def sublayers(self, pending: tuple, step: Step, cache: LayerCache) -> tuple:
        """The block up to its last write to the streams. pending: (streams,), or (out, streams, post, comb) of the
        sublayer before, whose output is still to be merged, and of ranks maybe to be summed. Returns such a tuple of
        its own last sublayer."""
        streams, x, post, comb = self._read(pending, self.hc_attn, self.attn_norm, *self.attn.takes_rounded(step))
        pending = result(self.attn, x, step, cache), streams, post, comb
        streams, x, post, comb = self._read(pending, self.hc_ffn, self.ffn_norm)
        return result(self.ffn, x, step.ids), streams, post, comb

    def _read(self, pending: tuple, connection: HyperConnection, norm: RMSNorm, coded=False, rounded=False) -> tuple:
        """(streams, normalised input [N, d], post, comb) of the sublayer that follows `pending`. coded, rounded: the
        input may be `CodedRows`, or `RoundedRows`."""
        given = norm.weight, norm.eps, coded, rounded
        if len(pending) == 4 and fuses(self.op, "mhc_post_pre_norm", connection, norm):
            return self.op.mhc_post_pre_norm(*pending, *connection.arguments(), *given)
        streams = merged(self.op, pending)
        if fuses(self.op, "mhc_pre_norm", connection, norm):
            return streams, *self.op.mhc_pre_norm(streams, *connection.arguments(), *given)
        x, post, comb = connection(streams)
        return streams, norm(x), post, comb


def result(sublayer: WindowAttention | MoE, x: Rows, *given) -> torch.Tensor | Unsummed:
    """What a sublayer adds to the streams: [N, d]. Where a kernel can sum it over ranks or experts while it merges it,
    and no hook is to see the sum, it is left to that kernel."""
    if sublayer.watched or not sublayer.defers(plain(x)):
        return sublayer(x, *given)
    return sublayer.deferred(x, *given)


def merged(op, pending: tuple) -> torch.Tensor:
    """The streams [N, n, d] of `pending` in the form of `Block.sublayers`."""
    if len(pending) == 1:
        return pending[0]
    out, *others = pending
    return op.mhc_post(sum_now(out), *others)
