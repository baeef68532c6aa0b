"""Writing a model's parameters: every one once, each poisoned before."""

import torch

from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import Progress
from dsv4.loaders.ledger import Piece, poison, poisoned
from dsv4.loaders.load import fill
from dsv4.model.causal import CausalLM


@torch.no_grad()
def write_parameters(model: CausalLM, pieces: list[Piece], progress: Progress | None = None) -> None:
    """Poison every parameter that has memory (is not on the meta device), fill it, and check that no poison is left.

    Raises CheckpointError when `pieces` do not cover exactly these parameters.
    """
    mine = {name: parameter for name, parameter in model.named_parameters() if parameter.device.type != "meta"}
    strays = set(mine) ^ {piece.parameter for piece in pieces}
    if strays:
        raise CheckpointError(
            f"{len(strays)} parameters are not covered by what is loaded, first {min(strays)}; this is a bug of dsv4"
        )
    for parameter in mine.values():
        poison(parameter)
    fill(pieces, model.inventory, mine, progress)
    left = [name for name, parameter in mine.items() if poisoned(parameter)]
    if left:
        raise CheckpointError(
            f"{len(left)} parameters still hold poison after loading, first {left[0]}; the loader did not fill them"
        )
    _check_tables(model, mine)


def _check_tables(model: CausalLM, parameters) -> None:
    for name, parameter in parameters.items():
        if name.endswith("tid2eid") and int(parameter.max()) >= (E := model.config.n_routed_experts):
            raise CheckpointError(f"tensor {name} names expert {int(parameter.max())}; the config has {E} experts")
