"""From the files of a DeepSeek-V4 checkpoint to its model: the plan, the ledger, which part of which tensor of the file
each parameter is."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsv4.cache.host_tier.planning import brought_entries, check_entries, entries_plan
from dsv4.cache.streams import cache_streams
from dsv4.errors import ConfigError
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.expected import check_extent, official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import LoadLedger, Piece
from dsv4.loaders.load import Inventory, matrix_names
from dsv4.model.chat import plain_ids
from dsv4.model.config import ModelConfig
from dsv4.model.deepseek_v4 import Model
from dsv4.model.family import Family
from dsv4.model.filling import fill_latents
from dsv4.model.linear import Matrix, Storage
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks

ELSEWHERE = "an expert of another rank"


def has_mtp(config: ModelConfig, inventory: Inventory) -> bool:
    """Whether config.json states MTP blocks and the file holds them."""
    return bool(config.num_mtp_layers and inventory.mtp_blocks)


def plan_model(
    inventory: Inventory,
    numerics: Numerics,
    backend: str,
    mtp: bool | None,
    kernels: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> Model:
    """The model of one of `ranks` on the meta device, its ledger held against the checkpoint's headers (not yet
    checked)."""
    config = ModelConfig.from_official(inventory.config)
    check_extent(inventory.sources, config)
    if mtp is None:
        mtp = has_mtp(config, inventory)
    elif mtp and inventory.mtp_blocks < max(1, config.num_mtp_layers):
        raise ConfigError(
            f"MTP was asked for; the checkpoint holds {inventory.mtp_blocks} MTP blocks"
            + (" (its mtp.* tensors are DSpark draft stages, which this does not run)" if inventory.has_dspark else "")
        )
    _check_expert_dtype(inventory)
    try:
        with torch.device("meta"):
            store = lambda name: _storage(inventory, numerics, config, name)
            model = Model(config, numerics, backend, store, mtp, kernels, ranks)
    except RuntimeError as error:  # more bytes than 64 bits count
        if "overflow" not in str(error):
            raise
        raise ConfigError(
            f"config.json asks for a tensor that no machine holds ({str(error)[:120]}); correct a width"
        ) from None
    model.inventory, model.ledger = inventory, LoadLedger()
    model.ledger.account(
        pieces_of(model),
        inventory.sources,
        dict(model.named_parameters()),
        lambda name: _reason(name, mtp, inventory) or _elsewhere(name, config, ranks),
    )
    return model


def published_model(
    config: ModelConfig,
    numerics: Numerics,
    backend: str,
    mtp: bool,
    kernels: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> Model:
    """The model of one of `ranks` on the meta device, in the published formats (FP8 matrices, MXFP4 experts): of no
    checkpoint."""
    tensors = official_tensors(config, mtp)

    def store(name: str) -> Storage:
        dtype, _ = tensors[f"{_first_of_stack(name)}.weight"]
        form = {"F8_E4M3": WeightFormat.FP8, "I8": WeightFormat.MXFP4}.get(dtype, WeightFormat.DENSE)
        if numerics.dense:
            return Storage()
        return Storage(form, DTYPES[dtype]) if form is WeightFormat.DENSE else Storage(form, scale=torch.float8_e8m0fnu)

    with torch.device("meta"):
        return Model(config, numerics, backend, store, mtp, kernels, ranks)


def _check_expert_dtype(inventory: Inventory) -> None:
    """Check the format of the routed experts' tensors, if config.json states one."""
    stated = inventory.config.get("expert_dtype")
    found = {inventory.formats[n] for n in inventory.formats if ".ffn.experts." in n}
    allowed = {"fp4": {WeightFormat.MXFP4, WeightFormat.NVFP4}, "fp8": {WeightFormat.FP8}}.get(stated or "")
    if stated is not None and allowed is None:
        raise ConfigError(f"config.json has expert_dtype {stated!r}; expected 'fp4' or 'fp8'")
    if allowed is not None and not found <= allowed:
        raise ConfigError(
            f"expert_dtype is {stated!r} in config.json, the experts in the file are "
            f"{', '.join(sorted(f.value for f in found))}; correct one of them"
        )


def _storage(inventory: Inventory, numerics: Numerics, config: ModelConfig, name: str) -> Storage:
    """The storage of the matrix or vector with this official name."""
    name = _first_of_stack(name)
    form = inventory.formats.get(name)
    if form is None or numerics.dense:
        return Storage()  # the ledger reports absent tensors
    if form is WeightFormat.DENSE:
        return Storage(form, DTYPES[inventory.sources[f"{name}.weight"].dtype])
    scale = DTYPES[inventory.sources[f"{name}.scale"].dtype] if form is WeightFormat.FP8 else None
    return Storage(form, scale=scale, block=config.weight_block_size)


def _first_of_stack(name: str) -> str:
    """A stack of experts has the format of its first."""
    return name.replace(".experts.w", ".experts.0.w")


def _reason(name: str, mtp: bool, inventory: Inventory) -> str | None:
    """Why a tensor of the file may stay unused."""
    if re.fullmatch(r"mtp\.\d+\.(emb\.tok_emb|embed|head)\.weight", name):
        return "a copy of the main model's embedding or head, which MTP shares"
    if name.startswith("mtp.") and inventory.has_dspark:
        return "DSpark draft stage, which this does not run"
    if name.startswith("mtp.") and not mtp:
        return "MTP is off"
    if name.endswith(".input_scale"):
        return "static activation scale of NVFP4 products; activations here are quantised dynamically or not at all"
    return None


def _elsewhere(name: str, config: ModelConfig, ranks: Ranks) -> str | None:
    """Why a rank may leave out a tensor that another rank holds whole."""
    if not ranks.by_expert:
        return None
    expert = re.search(r"\.ffn\.experts\.(\d+)\.", name)
    mine = ranks.even(config.n_routed_experts, "n_routed_experts")
    return ELSEWHERE if expert and not mine.start <= int(expert[1]) < mine.stop else None


def official_name(parameter: str) -> str:
    """Official tensor name of a parameter that is stored as one tensor."""
    return re.sub(r"hc_(attn|ffn|head)\.(fn|base|scale)$", r"hc_\1_\2", parameter)


def pieces_of(model: Model, within: str = "") -> list[Piece]:
    """Pieces of every parameter, or of those within the module of that name."""
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
                Piece(
                    f"{name}.{leaf}",
                    {"raw": official_name(f"{name}.{leaf}")},
                    (),
                    tuple(p.shape),
                    cut=getattr(module, "cuts", {}).get(leaf),
                )
                for leaf, p in module.named_parameters(recurse=False)
            ]
    return pieces


def _stack_pieces(model: Model, name: str, module: Matrix) -> Iterator[Piece]:
    """Several matrices of the file in one parameter, in equal parts of its rows; for experts a stack of those."""
    base, parts = name.rpartition(".")[0], len(module.stacked)
    places = (
        [((e,), f"{base}.{model.get_submodule(base).part.start + e}") for e in range(module.weight.shape[0])]
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
        cut = module.cuts.get(leaf) if "raw" in names else module.cut
        return Piece(f"{name}.{leaf}", names, where, shape, model.config.weight_block_size, cut)

    names = matrix_names(official, stored)
    if not module.quantised and stored is not WeightFormat.DENSE:
        yield piece("weight", names)  # dequantised
        return
    # in a file whose experts differ in format, some show as missing tensors
    names = matrix_names(official, module.storage.format)
    for role, leaf in (("weight", "weight"), ("scale", "scale"), ("global", "global_scale")):
        if role in names:
            yield piece(leaf, {"raw": names[role]})


class DeepSeekV4(Family):
    """The family of this file."""

    name, title = ModelConfig.family, "DeepSeek-V4 models"
    succeeds_v32 = True

    def read_config(self, raw):
        return ModelConfig.from_official(raw)

    def plan(self, inventory, numerics, backend, mtp, kernels=None, ranks=ALONE):
        return plan_model(inventory, numerics, backend, mtp, kernels, ranks)

    def rank_model(self, config, inventory, numerics, ranks):
        if inventory is None:
            return published_model(config, numerics, "reference", True, ranks=ranks)
        model = self.plan(inventory, numerics, "reference", None, ranks=ranks)
        model.ledger.check()
        return model

    def pieces(self, model, within=""):
        return pieces_of(model, within)

    def check_copies(self, inventory):
        inventory.check_tied()

    def prompt_ids(self, tokenizer, text, config):
        return plain_ids(tokenizer, text, config.bos_token_id)

    def held_tensors(self, config, inventory, numerics):
        if inventory is None or numerics.dense:
            mtp = inventory is None or has_mtp(config, inventory)
            return official_tensors(config, mtp, **({"dense": "F32", "experts": "F32"} if numerics.dense else {}))
        return {name: (s.dtype, s.shape) for name, s in inventory.sources.items()}

    def cache_streams(self, asking):
        config, memory = asking.config, asking.kv_memory
        mtp = asking.inventory is None or has_mtp(config, asking.inventory)
        layers = cache_streams(config, asking.batch, asking.context, asking.max_rewind, asking.numerics, mtp)
        if memory is None:
            return layers, []
        check_entries(layers)
        return entries_plan(layers, config.index_topk, memory.staged), [brought_entries(layers)]

    def fill_cache(self, cache, lengths, seed):
        fill_latents(cache, lengths, seed)
