"""Faults that were found and blamed on the wrong part, or hid below a threshold that nothing had measured."""

import torch

from dsv4.kernels.quantize import WeightFormat
from dsv4.probes.mutations import Site, mutation


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


@mutation("1.9", bugs=(), parts=("router", "routing weights"), probes=("moe_edges",))
def router_logits_clamped(site: Site) -> None:
    """The router's weights come of logits clamped at ±2: large ones count as 2, small ones as −2."""

    def clamped(real):
        def route(x, weight, *rest):
            experts, _ = real(x, weight, *rest)
            z = (x.float() @ weight.float().T).clamp(-2, 2).gather(1, experts)
            picked = torch.nn.functional.softplus(z).sqrt()
            return experts, picked / picked.sum(-1, keepdim=True) * rest[-1]

        return route

    site.kernel("route_scored", clamped)
    site.kernel("route_hashed", clamped)


@mutation("1.9", bugs=(), parts=("router", "routing weights"), probes=("moe_edges",))
def router_adds_to_the_sum_that_it_divides_by(site: Site) -> None:
    """The sum of a token's scores gets 2e-4 before the division, as an epsilon: every weight is 1e-4 or less too
    small."""

    def guarded(real):
        def route(x, weight, *rest):
            experts, weights = real(x, weight, *rest)
            z = (x.float() @ weight.float().T).gather(1, experts)
            total = torch.nn.functional.softplus(z).sqrt().sum(-1, keepdim=True)
            return experts, weights * total / (total + 2e-4)

        return route

    site.kernel("route_scored", guarded)
    site.kernel("route_hashed", guarded)
