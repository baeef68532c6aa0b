"""What a model family brings with it: how its config is read, its model planned, its prompts encoded.

Code that is not a family's own asks `families.of` for one of these and never which family it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.loaders.ledger import Piece
from dsv4.loaders.load import Inventory
from dsv4.model.causal import CausalLM


@dataclass(frozen=True)
class Family:
    """name: as `dsv4.loaders.config_files.family_of` gives it; title: for people.

    read_config(config.json in the official form) → the checked config. Raises ConfigError naming the key.
    check_choices(numerics, mtp, spread, cache, index_cache): raises InputError for what such models do not have.
    plan(inventory, numerics, backend, mtp, kernels) → the model on the meta device, with its ledger.
    pieces(model, within) → the pieces of every parameter, or of those within the module of that name.
    check_copies(inventory): raises CheckpointError where tensors that must be equal differ.
    prompt_ids(tokenizer, text, config) → the token ids of a prompt that is no conversation.
    held_tensors(config, inventory, numerics) → name → (dtype, shape) of the file's tensors as the numerics hold them.
    takes_attention: whether a policy may decide how much of the cache its steps read; spreads: whether its
    layers can be spread over devices.
    """

    name: str
    title: str
    read_config: Callable[[Mapping], Any]
    check_choices: Callable[..., None]
    plan: Callable[..., CausalLM]
    pieces: Callable[[Any, str], list[Piece]]
    check_copies: Callable[[Inventory], None]
    prompt_ids: Callable[..., list[int]]
    held_tensors: Callable[..., dict[str, tuple[str, tuple[int, ...]]]]
    takes_attention: bool = False
    spreads: bool = False
