"""The whole model and its MTP block (§3), in float64."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from dsv4.probes.oracle.attention import Layer, attention_layer, rms
from dsv4.probes.oracle.blocks import block, collapse
from dsv4.probes.oracle.config import OracleConfig
from dsv4.probes.oracle.weights import Weights, weights_of


@dataclass
class Run:
    """What a run gave: logits [B, T, vocab], streams before the head [B, T, S, d], points[(layer, name)]; all float64.

    Names are those of `dsv4.probes.subject.POINTS` and 'masses.window', '.entries', '.sink' (see `attention`). MTP
    block i counts as layer num_hidden_layers + i.
    """

    logits: torch.Tensor
    streams: torch.Tensor
    points: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)


class Oracle:
    """The model on given weights.

    simulate: the official quantisation simulation (FP8 activations of linears whose weight is FP8 or FP4, FP8 main KV,
    Hadamard and FP4 of index queries and keys). cache: dtype in which window rows, entries and index keys are stored,
    None as computed.
    """

    def __init__(
        self, config: OracleConfig, weights: Weights, simulate: bool = False, cache: torch.dtype | None = None
    ):
        self.config, self.weights, self.simulate, self.cache = config, weights, simulate, cache

    @classmethod
    def open(
        cls, path: str | Path, simulate: bool = False, cache: torch.dtype | None = None, independent: bool = True
    ) -> "Oracle":
        """Of a checkpoint directory; see `weights_of` for `independent`."""
        weights = weights_of(path, independent)
        return cls(OracleConfig.read(path), weights, simulate, cache)

    def layer(self, i: int) -> Layer:
        """Layer i, MTP blocks after those of the backbone."""
        c, L = self.config, self.config.num_hidden_layers
        prefix, ratio = (
            (f"layers.{i}.", c.compress_ratios[i]) if i < L else (f"mtp.{i - L}.", c.mtp_compress_ratios[i - L])
        )
        return Layer(c, self.weights, prefix, ratio, i < L and c.hashed[i], self.simulate, self.cache)

    def attention_layer(self, i: int, attn_in: torch.Tensor) -> dict[str, torch.Tensor]:
        """attn_in [B, T, d] → every attention point of layer i."""
        return attention_layer(self.layer(i), attn_in.double())

    def block(self, i: int, streams: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """streams [B, T, S, d], ids int64 [B, T] → every point of layer i."""
        return block(self.layer(i), streams.double(), ids)

    def head(self, streams: torch.Tensor, prefix: str = "") -> torch.Tensor:
        """streams [B, T, S, d] → logits [B, T, vocab] (§3, Head); an MTP block has its own hc_head and norm."""
        fn, base, scale = (self.weights(f"{prefix}hc_head_{leaf}") for leaf in ("fn", "base", "scale"))
        y = rms(
            collapse(self.config, streams, fn, base, scale),
            self.weights(f"{prefix}norm.weight"),
            self.config.rms_norm_eps,
        )
        return y @ self.weights(self.config.output_weight).T

    def model(self, ids: torch.Tensor) -> Run:
        """ids int64 [B, T], from an empty context (§3)."""
        streams = self.weights("embed.weight")[ids].unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        points = {}
        for i in range(self.config.num_hidden_layers):
            found = self.block(i, streams, ids)
            points |= {(i, name): value for name, value in found.items()}
            streams = found["streams"]
        return Run(self.head(streams), streams, points)

    def mtp(self, streams: torch.Tensor, next_ids: torch.Tensor, i: int = 0) -> Run:
        """streams [B, T, S, d] before the head, next_ids int64 [B, T]: the token at t + 1 → drafting logits (§3,
        MTP)."""
        layer, eps = self.layer(self.config.num_hidden_layers + i), self.config.rms_norm_eps
        embedded = layer.linear("e_proj", rms(self.weights("embed.weight")[next_ids], layer.w("enorm.weight"), eps))
        x = embedded.unsqueeze(2) + layer.linear("h_proj", rms(streams.double(), layer.w("hnorm.weight"), eps))
        found = block(layer, x, next_ids)
        points = {(self.config.num_hidden_layers + i, name): value for name, value in found.items()}
        return Run(self.head(found["streams"], layer.prefix), found["streams"], points)
