"""Faults that were found and blamed on the wrong part, or hid below a threshold that nothing had measured."""

from collections.abc import Callable

import torch

from dsv4.kernels.quantize import WeightFormat
from dsv4.probes.faults import Site, mutation


@mutation("1.2", bugs=(), parts=("output projection",), probes=("influence",))
def wo_a_without_its_scales(site: Site) -> None:
    """The codes of wo_a are multiplied as they are: the scale of every block is taken for 1."""

    def change(subject):
        for i, block in enumerate(subject.model.layers):
            held, name = block.attn.wo_a.weight, f"layers.{i}.attn.wo_a"
            if subject.files.formats[name] is WeightFormat.FP8:
                with torch.no_grad():
                    held.copy_(subject.files.read(f"{name}.weight").float())

    site.after_load(change)


@mutation("1.6", bugs=(), parts=("indexer scores",), probes=("index_oracle",))
def index_scores_averaged_over_heads(site: Site) -> None:
    """Scores are the mean over the indexer's heads, as where pooling was meant, not their weighted sum."""

    def mean(real):
        return lambda q, weights, keys, visible: real(q, torch.ones_like(weights) / weights.shape[-1], keys, visible)

    site.kernel("index_scores", mean)


def of_gate(site: Site, change: Callable) -> None:
    """Every router gives the weights change(logits of the chosen experts, factor); its operations stay sound."""

    def wrapped(gate, real):
        def forward(x, ids):
            experts, _ = real(x, ids)
            return experts, change((x.float() @ gate.weight.float().T).gather(1, experts), gate.factor)

        return forward

    def changed(subject):
        for block in subject.model.layers:
            block.ffn.gate.forward = wrapped(block.ffn.gate, block.ffn.gate.forward)

    site.after_load(changed)


@mutation("1.9", bugs=(), parts=("routing weights",), probes=("moe_edges",))
def router_logits_clamped(site: Site) -> None:
    """The router's weights come of logits clamped at ±2: large ones count as 2, small ones as −2."""

    def clamped(z, factor):
        picked = torch.nn.functional.softplus(z.clamp(-2, 2)).sqrt()
        return picked / picked.sum(-1, keepdim=True) * factor

    of_gate(site, clamped)


@mutation("1.9", bugs=(), parts=("routing weights",), probes=("moe_edges",))
def router_adds_to_the_sum_that_it_divides_by(site: Site) -> None:
    """The sum of a token's scores gets 2e-4 before the division, as an epsilon: weights are some 1e-4 too small."""

    def guarded(z, factor):
        picked = torch.nn.functional.softplus(z).sqrt()
        return picked / (picked.sum(-1, keepdim=True) + 2e-4) * factor

    of_gate(site, guarded)
