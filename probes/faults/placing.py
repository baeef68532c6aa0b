"""Sections 1.7, 1.9 and 1.11: layers that are brought from another place than the one where they run."""

import torch

from dsv4.model.offload import CheckpointWeights
from dsv4.probes.faults import Site, mutation


def brought(site: Site, ending: str, change) -> None:
    """What is brought of parameters whose names end so is change(read, name, all such names) instead, where read(name)
    reads one."""

    def get(weights, name):
        if name.endswith(ending):
            alike = [other for other in weights if other.endswith(ending)]
            return change(lambda other: real(weights, other), name, alike)
        return real(weights, name)

    real = site.patch(CheckpointWeights, "__getitem__", get)


@mutation("1.7", bugs=(103,), parts=("placement, sink",), probes=("placement",))
def every_placed_layer_gets_the_first_sinks(site: Site) -> None:
    """The sinks of the first layer that is brought are given to every layer that is: ranks ≥ 1 with rank 0's sinks."""
    brought(site, "attn.attn_sink", lambda read, name, alike: read(alike[0]))


@mutation("1.11", bugs=(145,), parts=("placement, experts",), probes=("placement",))
def experts_of_another_placed_layer(site: Site) -> None:
    """The stack of experts that is brought is the one of the layer that was brought before."""
    brought(site, ".ffn.experts.w2.weight", lambda read, name, alike: read(alike[alike.index(name) - 1]))


@mutation("1.9", bugs=(6,), parts=("placement, router",), probes=("placement",))
def a_placed_layers_bias_is_not_moved(site: Site) -> None:
    """The router's bias stays behind where a layer is brought: the layer runs with zeros."""
    brought(site, "gate.bias", lambda read, name, alike: torch.zeros_like(read(name)))
