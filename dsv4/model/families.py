"""The families of models that this runs, and what is asked of whichever it is."""

from collections.abc import Mapping
from typing import Any

from dsv4.loaders.ledger import Piece
from dsv4.loaders.load import Inventory
from dsv4.model import official
from dsv4.model.causal import CausalLM
from dsv4.model.family import Family
from dsv4.model.gqa import load as gqa
from dsv4.model.numerics import Numerics

FAMILIES = {family.name: family for family in (official.DeepSeekV4(), gqa.GQA())}


def of(known) -> Family:
    """The family of a config, or of an inventory (`dsv4.loaders.load.Inventory`)."""
    return FAMILIES[known.family]


def plan_model(
    inventory: Inventory, numerics: Numerics, backend: str, mtp: bool | None, kernels: Mapping[str, Any] | None = None
) -> CausalLM:
    """The model on the meta device, its ledger held against the checkpoint's headers (not yet checked)."""
    return of(inventory).plan(inventory, numerics, backend, mtp, kernels)


def pieces_of(model: CausalLM, within: str = "") -> list[Piece]:
    """Pieces of every parameter, or of those within the module of that name."""
    return of(model.config).pieces(model, within)
