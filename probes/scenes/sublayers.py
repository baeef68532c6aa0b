"""A run taken apart: each layer's hyper-connections and experts by the oracle, on what the subject itself gave before
them.

So a fault shows in its own layer and sublayer, neither in those that follow nor in those that it reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.probes.compare import oracle_of, tokens
from dsv4.probes.oracle import Oracle
from dsv4.probes.oracle.attention import Layer, rms
from dsv4.probes.oracle.blocks import hyper_post, hyper_pre
from dsv4.probes.result import Check, vacuous
from dsv4.probes.subject import Capture, Subject

WANT = ("attn_in", "attn_out", "ffn_out", "streams")
TOKENS = 300  # more than kernels take in one piece (256)


@dataclass(frozen=True)
class Sublayers:
    """Layer i in float64. seen: the subject's points of it; before, between, after: streams, `between` and `after` by
    the oracle from the subject's attn_out and ffn_out; post and comb: [of attention, of the experts]."""

    layer: Layer
    i: int
    ids: torch.Tensor
    seen: dict[str, torch.Tensor]
    before: torch.Tensor
    between: torch.Tensor
    after: torch.Tensor
    attn_in: torch.Tensor
    ffn_in: torch.Tensor
    post: tuple[torch.Tensor, torch.Tensor]
    comb: tuple[torch.Tensor, torch.Tensor]

    @property
    def where(self) -> str:
        return f"layer {self.i}"


def run_all(subject: Subject, seed: int) -> tuple[Oracle, Capture, torch.Tensor, torch.Tensor]:
    """(oracle, capture, ids, streams that enter layer 0) of random tokens in one step."""
    oracle = oracle_of(subject)
    ids = tokens(subject, max(3 * subject.config.sliding_window + 40, TOKENS), seed)
    first = oracle.weights("embed.weight")[ids].unsqueeze(2).repeat(1, 1, subject.config.hc_mult, 1)
    return oracle, subject.run(ids, want=WANT), ids, first


def taken_apart(
    subject: Subject, oracle: Oracle, capture: Capture, ids: torch.Tensor, first: torch.Tensor
) -> Iterator[Sublayers]:
    """Every layer of which the subject shows all of WANT."""
    before = first
    for i in range(subject.config.num_hidden_layers):
        seen = {name: capture.points[i, name].double() for name in WANT if (i, name) in capture.points}
        if len(seen) == len(WANT):
            yield of_layer(oracle.layer(i), i, ids, seen, before)
        if "streams" not in seen:
            return
        before = seen["streams"]


def of_layer(layer: Layer, i: int, ids: torch.Tensor, seen: dict[str, torch.Tensor], before: torch.Tensor) -> Sublayers:
    eps = layer.config.rms_norm_eps
    y, post, comb = hyper_pre(layer, before, "hc_attn")
    between = hyper_post(seen["attn_out"], before, post, comb)
    z, post2, comb2 = hyper_pre(layer, between, "hc_ffn")
    after = hyper_post(seen["ffn_out"], between, post2, comb2)
    return Sublayers(
        layer,
        i,
        ids,
        seen,
        before,
        between,
        after,
        rms(y, layer.w("attn_norm.weight"), eps),
        rms(z, layer.w("ffn_norm.weight"), eps),
        (post, post2),
        (comb, comb2),
    )


def missing(subject: Subject, parts: list[Sublayers], name: str, part: str) -> list[Check]:
    """VACUOUS for the layers that the subject does not show."""
    shown = {s.i for s in parts}
    return [
        vacuous(name, f"the subject does not give all of {', '.join(WANT)}", where=f"layer {i}", part=part)
        for i in range(subject.config.num_hidden_layers)
        if i not in shown
    ]
