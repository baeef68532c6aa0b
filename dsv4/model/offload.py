"""Spreading a model over GPUs, host memory and the checkpoint on disk, with accelerate.

accelerate decides which block goes where from the sizes of the empty (meta) model, and its hooks bring a block's
weights to the executing device for the block's own forward. Weights "on disk" are read from the checkpoint itself,
through the same strict loader: nothing is copied to another folder.
"""

from collections.abc import Iterator, Mapping

import torch
from accelerate import infer_auto_device_map
from accelerate.hooks import attach_align_device_hook_on_blocks
from accelerate.utils import get_max_memory

from dsv4.errors import CapacityError
from dsv4.loaders.files import Progress
from dsv4.loaders.ledger import Piece, poison
from dsv4.loaders.load import fill
from dsv4.model.deepseek_v4 import Model
from dsv4.model.families import pieces_of
from dsv4.model.parameters import write_parameters

WHOLE = ["Block", "MTPBlock"]  # never split: a block's parts use each other's parameters


class CheckpointWeights(Mapping):
    """Parameters by name: held in host memory where the map put them there, else read from the checkpoint each time."""

    def __init__(self, model: Model, held: dict[str, torch.Tensor], disk: set[str]):
        self.inventory, self.held = model.inventory, held
        self.shapes = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces_of(model):
            if piece.parameter in disk:
                self.pieces.setdefault(piece.parameter, []).append(piece)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.held:
            return self.held[name]
        shape, dtype = self.shapes[name]
        value = torch.empty(shape, dtype=dtype)
        poison(value)
        fill(self.pieces[name], self.inventory, {name: value})
        return value

    def __iter__(self) -> Iterator[str]:
        yield from (*self.held, *self.pieces)

    def __len__(self) -> int:
        return len(self.held) + len(self.pieces)


def spread(
    model: Model,
    device_map: str | Mapping,
    max_memory: dict | None,
    target: torch.device,
    progress: Progress | None = None,
) -> Model:
    """Place a planned (meta) model. Blocks that do not run on their own device run on `target`.

    device_map: 'auto', or {module name: GPU index, 'cpu' or 'disk'}. max_memory: {GPU index or 'cpu': bytes}. Raises
    CapacityError when even one block does not fit where it must run.
    """
    if device_map == "auto":
        device_map = _auto_map(model, max_memory, target)
    place = _places(model, device_map)
    runs = {name: target if where in ("cpu", "disk") else torch.device("cuda", where) for name, where in place.items()}
    offloaded = {name: where == "disk" or (where == "cpu" and target.type != "cpu") for name, where in place.items()}
    held, disk, resident = {}, set(), []
    for name, where in place.items():
        module = model.get_submodule(name)
        if where == "disk":
            disk |= {f"{name}.{leaf}" for leaf, _ in module.named_parameters()}
            continue
        module.to_empty(device="cpu" if offloaded[name] else runs[name])
        resident += pieces_of(model, name)
        if offloaded[name]:
            held |= {f"{name}.{leaf}": p.data for leaf, p in module.named_parameters()}
    write_parameters(model, resident, progress)
    weights = CheckpointWeights(model, held, disk)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=runs,
        offload=offloaded,
        weights_map=weights,
        offload_buffers=False,
        preload_module_classes=WHOLE,
    )
    n = model.config.num_hidden_layers
    model.device = runs["embed"]
    model.layer_devices = [runs[f"layers.{i}"] for i in range(n)] + [runs[f"mtp.{i}"] for i in range(len(model.mtp))]
    model.placement = {name: str(where) if isinstance(where, str) else f"cuda:{where}" for name, where in place.items()}
    return model


def _auto_map(model: Model, max_memory: dict | None, target: torch.device) -> Mapping:
    largest = max(sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in _units(model))
    limits = get_max_memory(max_memory)
    if target.type == "cpu":
        limits = {"cpu": limits["cpu"]}
    room = max(limits.values())  # accelerate itself keeps room on the main device for the largest block that runs there
    if room < largest:
        raise CapacityError(
            f"one block needs {largest} bytes and no device is allowed more than {room}; raise --max-memory"
        )
    return infer_auto_device_map(model, max_memory=limits, no_split_module_classes=WHOLE)


def _units(model: Model) -> list[str]:
    """The modules that are placed whole, in the order they run."""
    layers = [f"layers.{i}" for i in range(model.config.num_hidden_layers)] + [
        f"mtp.{i}" for i in range(len(model.mtp))
    ]
    return ["embed", *layers, "hc_head", "norm", "head"]


def _places(model: Model, device_map: Mapping) -> dict:
    """The place of each unit: its own entry, or that of a module that contains it."""
    places = {}
    for unit in _units(model):
        owners = [name for name in device_map if name in ("", unit) or unit.startswith(f"{name}.")]
        if not owners:
            raise CapacityError(f"the device map has no place for {unit}; it names {', '.join(device_map)}")
        places[unit] = device_map[max(owners, key=len)]
    return places
