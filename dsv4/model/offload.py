"""Spreading a model over GPUs, host memory and the checkpoint on disk, with accelerate.

accelerate decides which block goes where from the sizes of the empty (meta) model, and its hooks bring a block's
weights to the executing device for the block's own forward. Weights "on disk" are read from the checkpoint itself,
through the same strict loader: nothing is copied to another folder.
"""

from collections.abc import Iterator, Mapping

import torch
from accelerate import infer_auto_device_map
from accelerate.hooks import ModelHook, add_hook_to_module, attach_align_device_hook_on_blocks
from accelerate.utils import get_max_memory

from dsv4.errors import CapacityError
from dsv4.loaders.files import Progress
from dsv4.loaders.ledger import Piece, poison
from dsv4.loaders.load import fill
from dsv4.model.causal import CausalLM
from dsv4.model.families import pieces_of
from dsv4.model.module import give_memory
from dsv4.model.parameters import write_parameters


class CheckpointWeights(Mapping):
    """Parameters by name: held in host memory where the map put them there, else read from the checkpoint each time."""

    def __init__(self, model: CausalLM, held: dict[str, torch.Tensor], disk: set[str]):
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


class BesideEmbedding(ModelHook):
    """Of a head that is tied to the embedding: it runs where the embedding does, whose matrix is brought for it too."""

    def __init__(self, embedding):
        self.embedding = embedding

    def pre_forward(self, module, *args, **kwargs):
        return self.embedding._hf_hook.pre_forward(self.embedding, *args, **kwargs)

    def post_forward(self, module, output):
        return self.embedding._hf_hook.post_forward(self.embedding, output)


def spread(
    model: CausalLM,
    device_map: str | Mapping,
    max_memory: dict | None,
    target: torch.device,
    progress: Progress | None = None,
) -> CausalLM:
    """Place a planned (meta) model. Blocks that do not run on their own device run on `target`.

    device_map: 'auto', or {module name: GPU index, 'cpu' or 'disk'}. max_memory: {GPU index or 'cpu': bytes}. Raises
    CapacityError when even one block does not fit where it must run.
    """
    if target.type == "cuda" and target.index is None:  # 'cuda' alone would mean any GPU that a tensor is on already
        target = torch.device("cuda", torch.cuda.current_device())
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
        give_memory(module, "cpu" if offloaded[name] else runs[name])
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
        preload_module_classes=whole(model),
    )
    if model.head not in model.units.values():
        add_hook_to_module(model.head, BesideEmbedding(model.embed))
    names = {unit: name for name, unit in model.units.items()}
    model.device = runs[names[model.embed]]
    model.layer_devices = [runs[names[layer]] for layer in (*model.layers, *model.mtp)]
    model.placement = {name: str(where) if isinstance(where, str) else f"cuda:{where}" for name, where in place.items()}
    return model


def whole(model: CausalLM) -> list[str]:
    """Names of the classes that accelerate must not split: a layer's parts use each other's parameters."""
    return sorted({type(layer).__name__ for layer in (*model.layers, *model.mtp)})


def _auto_map(model: CausalLM, max_memory: dict | None, target: torch.device) -> Mapping:
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in model.units.values())
    limits = get_max_memory(max_memory)
    if target.type == "cpu":
        limits = {"cpu": limits["cpu"]}
    room = max(limits.values())  # accelerate itself keeps room on the main device for the largest block that runs there
    if room < largest:
        raise CapacityError(
            f"one block needs {largest} bytes and no device is allowed more than {room}; raise --max-memory"
        )
    return infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole(model))


def _places(model: CausalLM, device_map: Mapping) -> dict:
    """The place of each unit: its own entry, or that of a module that contains it."""
    places = {}
    for unit in model.units:
        owners = [name for name in device_map if name in ("", unit) or unit.startswith(f"{name}.")]
        if not owners:
            raise CapacityError(f"the device map has no place for {unit}; it names {', '.join(device_map)}")
        places[unit] = device_map[max(owners, key=len)]
    return places
