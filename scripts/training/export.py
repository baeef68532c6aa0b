"""A trained state as an official checkpoint: FP8 matrices, MXFP4 experts, in shards.

What is written has exactly the values that `trainee.stored` gave the model while it was trained in simulated numerics.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from dsv4.errors import InputError
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, to_float
from dsv4.loaders.expected import Tensors, official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import Piece
from dsv4.loaders.write import tensor_bytes, write_checkpoint
from dsv4.model.deepseek_v4 import Model
from dsv4.model.families import pieces_of
from scripts.training import state
from scripts.training.architecture import CONFIG, FP32, build
from scripts.training.tokenizer import BOS_ID, EOS_ID
from scripts.training.trainee import Trainee

SHARD_BYTES = 6 << 20
# by the dtype of the official weight; any other is dense
FORMS = {"F8_E4M3": WeightFormat.FP8, "I8": WeightFormat.MXFP4}


def export(data: Path, where: Path, out: Path) -> None:
    """Write the state in `where` as a checkpoint directory `out`, with the tokenizer in `data`, and print what came of
    it.

    Raises InputError without a state or a tokenizer and for parameters that are not finite, WriteError when `out`
    exists.
    """
    model = build(CONFIG, FP32, "cpu")
    parameters = dict(Trainee(model).named_parameters())
    state.load(where, parameters)
    tokenizer = data / "tokenizer.json"
    if not tokenizer.is_file():
        raise InputError(f"{tokenizer} does not exist; run scripts.training.corpus first")
    planned = official_tensors(model.config)
    values = Values(planned, official_parts(model, planned))
    documents = {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer.json": json.loads(tokenizer.read_text(encoding="utf-8")),
    }
    write_checkpoint(out, planned, values, documents, max_shard_bytes=SHARD_BYTES)
    size = sum(tensor_bytes(*entry) for entry in planned.values())
    print(f"wrote {out}: {len(planned)} tensors, {size / 2**20:.1f} MiB")
    for form, (error, name) in values.errors.items():
        print(f"largest relative rounding error in {form}: {error:.2e} ({name})")


def official_parts(model: Model, planned: Tensors) -> dict[str, torch.Tensor]:
    """Official name of each tensor that is no scale → the part of a parameter that it holds, in fp32 or int64.

    The loader's own plan, read backwards.
    """
    forms = {n.removesuffix(".weight"): FORMS.get(dtype, WeightFormat.DENSE) for n, (dtype, _) in planned.items()}
    model.inventory = SimpleNamespace(formats=forms)  # all that the plan reads of a file
    parameters = dict(model.named_parameters())
    return {_values_of(piece): parameters[piece.parameter].detach()[piece.index] for piece in pieces_of(model)}


def _values_of(piece: Piece) -> str:
    return piece.names.get("raw") or piece.names["weight"]


class Values:
    """From official tensor name to what is stored under it; keeps the largest rounding error of each form on the way.

    The error of a tensor is the norm of what rounding changes over the norm of the tensor.
    """

    def __init__(self, planned: Tensors, parts: dict[str, torch.Tensor]):
        self.planned, self.parts = planned, parts
        self.errors: dict[str, tuple[float, str]] = {}

    def __call__(self, name: str) -> torch.Tensor:
        weight = name if name in self.parts else f"{name.removesuffix('.scale')}.weight"
        part, dtype = self.parts[weight], self.planned[weight][0]
        if part.is_floating_point() and not part.isfinite().all():
            raise InputError(f"{weight} holds values that are not finite; the training has diverged")
        if dtype not in FORMS:
            value = part.to(DTYPES[dtype])
            self._account(name, dtype, part, value)
            return value
        w = quantised(part, FORMS[dtype])
        if name != weight:
            return w.scale
        self._account(name, FORMS[dtype].name, part, to_float(w))
        return w.weight.view(DTYPES[dtype])

    def _account(self, name: str, form: str, part: torch.Tensor, value: torch.Tensor) -> None:
        norm = part.double().norm().item()
        error = (value.double() - part.double()).norm().item() / norm if norm else 0.0
        self.errors[form] = max(self.errors.get(form, (0.0, name)), (error, name))


def quantised(part: torch.Tensor, form: WeightFormat) -> PackedWeight:
    """One matrix [O, K] in `form`."""
    return PackedWeight(form, *(quantize_fp8 if form is WeightFormat.FP8 else quantize_mxfp4)(part))
