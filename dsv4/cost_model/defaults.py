"""Default assumptions of a map about a model: layers whose caches share the capacity, and bytes of weights that a step
reads."""

from dataclasses import dataclass

from dsv4.cost_model.step import weights_read
from dsv4.loaders.expected import official_tensors, preset
from dsv4.model.config import ModelConfig
from dsv4.model.spec import LayerKind


@dataclass(frozen=True)
class Assumed:
    """layers, weights in bytes, and a sentence about what they leave out (empty if nothing)."""

    layers: int
    weights: int
    note: str = ""


def assumed(kind: str) -> Assumed:
    """For 'gqa' a dense 7B model in bf16, for 'csa' V4-Flash as published."""
    return Assumed(28, 14 << 30) if kind == "gqa" else flash()


def flash() -> Assumed:
    """CSA layers of V4-Flash, and the weights that a step of one row reads: of routed experts those of one token."""
    config = ModelConfig.from_official(preset("flash"))
    kinds = [layer.kind for layer in config.layers]
    weights = sum(weights_read(official_tensors(config), config).values())
    return Assumed(
        kinds.count(LayerKind.CSA),
        weights,
        f"Layers are the CSA layers of V4-Flash ({kinds.count(LayerKind.CSA)} of {len(kinds)}); weights are what a "
        f"step of one row reads, {config.num_experts_per_tok} of {config.n_routed_experts} routed experts a layer. "
        "More rows read more and other layers take time too, so that whole-step factors are upper bounds; the "
        "capacity is taken to hold no other experts.",
    )
