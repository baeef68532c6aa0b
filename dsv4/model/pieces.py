"""Which part of which tensor of the file each parameter is, and writing them: every parameter once."""

import re
from collections.abc import Iterator

import torch

from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import Progress
from dsv4.loaders.ledger import Piece, poison, poisoned
from dsv4.loaders.load import fill, matrix_names
from dsv4.model.causal import CausalLM
from dsv4.model.deepseek_v4 import Model
from dsv4.model.gqa import load as gqa
from dsv4.model.gqa.model import GQAModel
from dsv4.model.linear import Matrix


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


def official_name(parameter: str) -> str:
    """Official tensor name of a parameter that is stored as one tensor."""
    return re.sub(r"hc_(attn|ffn|head)\.(fn|base|scale)$", r"hc_\1_\2", parameter)


def pieces_of(model: CausalLM, within: str = "") -> list[Piece]:
    """Pieces of every parameter, or of those within the module of that name."""
    if isinstance(model, GQAModel):
        return [piece for piece in gqa.pieces_of(model) if piece.parameter.startswith(f"{within}." if within else "")]
    pieces: list[Piece] = []
    for name, module in model.named_modules():
        if within and name != within and not name.startswith(f"{within}."):
            continue
        if isinstance(module, Matrix):
            pieces += (
                _stack_pieces(model, name, module) if module.stacked else _matrix_pieces(model, name, module, name, ())
            )
        else:
            pieces += [
                Piece(f"{name}.{leaf}", {"raw": official_name(f"{name}.{leaf}")}, (), tuple(p.shape))
                for leaf, p in module.named_parameters(recurse=False)
            ]
    return pieces


def _stack_pieces(model: Model, name: str, module: Matrix) -> Iterator[Piece]:
    """Several matrices of the file in one parameter, in equal parts of its rows; for experts a stack of those."""
    base, parts = name.rpartition(".")[0], len(module.stacked)
    places = (
        [((e,), f"{base}.{e}") for e in range(model.config.n_routed_experts)]
        if base.endswith(".experts")
        else [((), base)]
    )
    for index, official in places:
        for part, leaf in enumerate(module.stacked):
            yield from _matrix_pieces(model, name, module, f"{official}.{leaf}", index, part, parts)


def _matrix_pieces(model: Model, name: str, module: Matrix, official: str, index: tuple, part: int = 0, parts: int = 1):
    stored = model.inventory.formats.get(official, module.storage.format)
    rows = lambda t: slice(part * t.shape[len(index)] // parts, (part + 1) * t.shape[len(index)] // parts)

    def piece(leaf: str, names: dict) -> Piece:
        tensor = getattr(module, leaf)
        where = (*index, part) if leaf == "global_scale" else (*index, rows(tensor)) if parts > 1 else index
        shape = () if leaf == "global_scale" else tuple(tensor.shape[len(index) :])
        if parts > 1 and shape:
            shape = (shape[0] // parts, *shape[1:])
        return Piece(f"{name}.{leaf}", names, where, shape, model.config.weight_block_size)

    names = matrix_names(official, stored)
    if not module.quantised and stored is not WeightFormat.DENSE:
        yield piece("weight", names)  # dequantised
        return
    # in a file whose experts differ in format, some show as missing tensors
    names = matrix_names(official, module.storage.format)
    for role, leaf in (("weight", "weight"), ("scale", "scale"), ("global", "global_scale")):
        if role in names:
            yield piece(leaf, {"raw": names[role]})
