"""From the files of a GQA checkpoint to its model: the plan, the ledger, and further checks."""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from dsv4.cache.host_tier.planning import brought_layers, check_grouped, grouped_plan
from dsv4.errors import InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import LoadLedger, Piece
from dsv4.loaders.load import Inventory
from dsv4.model.chat import templated_ids
from dsv4.model.family import Family
from dsv4.model.gqa import cache as caches
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.dummy import fill_grouped, planned, tensors_held
from dsv4.model.gqa.heads import heads_of
from dsv4.model.gqa.model import GQAModel
from dsv4.model.linear import Storage
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_choices(numerics: Numerics, mtp: bool | None, cache: str, index_cache: str) -> None:
    """Raise InputError for options that apply to DeepSeek-V4 models alone."""
    if numerics.simulate:
        raise InputError(
            f"numerics {numerics.name} simulate the FP8 and FP4 of DeepSeek-V4 checkpoints; the weights and caches of "
            "this GQA model have no such format: use native or fp32"
        )
    if mtp:
        raise InputError(
            "MTP was asked for; GQA models have no MTP block: use --speculate lookup, which drafts from the text itself"
        )
    if cache not in ("auto", "bf16"):
        raise InputError(
            f"cache format {cache!r} packs the latent rows of DeepSeek-V4; a GQA model's keys and values are held as "
            "its activations: use auto"
        )
    if index_cache != "auto":
        raise InputError(f"index cache format {index_cache!r} was asked for; a GQA model has no index keys: use auto")


def plan_model(
    inventory: Inventory, numerics: Numerics, backend: str, kernels: Mapping | None = None, ranks: Ranks = ALONE
) -> GQAModel:
    """The model of one of `ranks` on the meta device, its ledger held against the checkpoint's headers (not yet
    checked)."""
    config = GQAConfig.from_dict(inventory.config)

    def storage(name: str) -> Storage:
        source = inventory.sources.get(name)
        return Storage() if source is None or numerics.dense else Storage(WeightFormat.DENSE, DTYPES[source.dtype])

    with torch.device("meta"):
        model = GQAModel(config, numerics, backend, storage, kernels, ranks)
    model.inventory, model.ledger = inventory, LoadLedger()
    model.ledger.account(
        pieces_of(model), inventory.sources, dict(model.named_parameters()), lambda name: _reason(name, config)
    )
    return model


def pieces_of(model: GQAModel, within: str = "") -> list[Piece]:
    """Every parameter is the tensor of its own name, or this rank's part of it. within: only of the module of that
    name."""

    def piece(name: str, parameter: torch.Tensor) -> Piece:
        base, _, leaf = name.rpartition(".")
        return Piece(name, {"raw": name}, (), tuple(parameter.shape), cut=model.get_submodule(base).cuts.get(leaf))

    inside = lambda name: name.startswith(f"{within}." if within else "")
    return [piece(name, p) for name, p in model.named_parameters() if inside(name)]


def _reason(name: str, config: GQAConfig) -> str | None:
    """Why a tensor of the file may stay unused."""
    if name == HEAD and config.tie_word_embeddings:
        return "a copy of the embedding, which the tied head uses"
    if re.search(r"rotary_emb\.inv_freq$", name):
        return "rotary frequencies, which follow from config.json"
    return None


def check_copies(inventory: Inventory) -> None:
    """Raise CheckpointError if a tied head also has a matrix in the file that differs from the embedding."""
    if HEAD in inventory.sources and inventory.config.get("tie_word_embeddings", False):
        if not torch.equal(inventory.read(HEAD), inventory.read(EMBEDDING)):
            raise CheckpointError(
                f"tie_word_embeddings is true in config.json, but {HEAD} is not {EMBEDDING}; correct one of them"
            )


class GQA(Family):
    """The family of this package."""

    name, title, takes_attention = GQAConfig.family, "GQA models", True

    def read_config(self, raw):
        return GQAConfig.from_dict(raw)

    def check_choices(self, numerics, mtp, cache, index_cache):
        check_choices(numerics, mtp, cache, index_cache)

    def plan(self, inventory, numerics, backend, mtp, kernels=None, ranks=ALONE):
        return plan_model(inventory, numerics, backend, kernels, ranks)

    def rank_model(self, config, inventory, numerics, ranks):
        if inventory is None:
            return planned(config, numerics, "reference", ranks=ranks)
        model = self.plan(inventory, numerics, "reference", None, ranks=ranks)
        model.ledger.check()
        return model

    def part_config(self, config, ranks):
        heads = heads_of(config, ranks)
        return replace(config, num_attention_heads=heads.H, num_key_value_heads=heads.KV)

    def pieces(self, model, within=""):
        return pieces_of(model, within)

    def check_copies(self, inventory):
        check_copies(inventory)

    def prompt_ids(self, tokenizer, text, config):
        return templated_ids(tokenizer, text)

    def held_tensors(self, config, inventory, numerics):
        if inventory is None:
            return tensors_held(planned(config, numerics, "reference"))
        held = {name: s for name, s in inventory.sources.items() if _reason(name, config) is None}
        return {name: ("F32" if numerics.dense else s.dtype, s.shape) for name, s in held.items()}

    def cache_streams(self, asking):
        policy, memory = asking.attention and asking.attention.policy, asking.kv_memory
        heads = heads_of(asking.config, asking.ranks)
        sizes = asking.config, heads, asking.batch, asking.context, asking.numerics
        if memory is None:
            return caches.cache_streams(*sizes, policy), []
        check_grouped(asking.config, policy, memory)
        return grouped_plan(*sizes, policy, memory.staged), [brought_layers(*sizes)]

    def token_bytes(self, config, numerics):
        nbytes, formula = caches.token_bytes(config, heads_of(config, ALONE), numerics)
        return {"nbytes": nbytes, "formula": formula}

    def fill_cache(self, cache, lengths, seed):
        fill_grouped(cache, lengths, seed)
