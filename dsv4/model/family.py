"""What a model family brings with it: how its config is read, its model planned, its prompts encoded.

Code that is not a family's own asks `families.of` for one of these and never which family it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.streams import Stream
from dsv4.loaders.ledger import Piece
from dsv4.loaders.load import Inventory
from dsv4.model.causal import CausalLM
from dsv4.model.gqa.choice import Attention
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Asking:
    """What a plan is made for: `batch` rows of `context` tokens. inventory: None of a published configuration without a
    checkpoint; attention: a policy, and kv_memory: caches in host memory, where they are asked for; ranks: which rank
    it is for; embedding_memory: 'device' or 'host'."""

    config: Any
    inventory: Inventory | None
    numerics: Numerics
    batch: int
    context: int
    max_rewind: int
    attention: Attention | None = None
    kv_memory: HostMemory | None = None
    ranks: Ranks = ALONE
    embedding_memory: str = "device"


class Family(ABC):
    """name: as `dsv4.loaders.config_files.family_of` gives it; title: for people. takes_attention: whether a policy may
    decide how much of the cache its steps read; succeeds_v32: whether its plan has DeepSeek-V3.2's cache beside it."""

    name: ClassVar[str]
    title: ClassVar[str]
    takes_attention: ClassVar[bool] = False
    succeeds_v32: ClassVar[bool] = False

    @abstractmethod
    def read_config(self, raw: Mapping) -> Any:
        """The checked config of config.json in the official form. Raises ConfigError naming the key."""

    def check_choices(self, numerics: Numerics, mtp: bool | None, cache: str, index_cache: str) -> None:
        """Raises InputError for what such models do not have."""

    @abstractmethod
    def plan(
        self,
        inventory: Inventory,
        numerics: Numerics,
        backend: str,
        mtp: bool | None,
        kernels: Mapping | None = None,
        ranks: Ranks = ALONE,
    ) -> CausalLM:
        """The model of one of `ranks` on the meta device, its ledger held against the checkpoint's headers (not yet
        checked)."""

    @abstractmethod
    def rank_model(self, config: Any, inventory: Inventory | None, numerics: Numerics, ranks: Ranks) -> CausalLM:
        """The model of one of `ranks` on the meta device, held against the checkpoint's headers; without a checkpoint,
        of the published formats. Raises InputError for numbers that so many ranks cannot share, CheckpointError."""

    def part_config(self, config: Any, ranks: Ranks) -> Any:
        """The config of a model whose decode step reads as much of its cache as the part of one of `ranks` does."""
        return config

    @abstractmethod
    def pieces(self, model: Any, within: str = "") -> list[Piece]:
        """Pieces of every parameter, or of those within the module of that name."""

    @abstractmethod
    def check_copies(self, inventory: Inventory) -> None:
        """Raises CheckpointError where tensors that must be equal differ."""

    @abstractmethod
    def prompt_ids(self, tokenizer: Tokenizer, text: str, config: Any) -> list[int]:
        """Token ids of a prompt that is no conversation."""

    @abstractmethod
    def held_tensors(self, config: Any, inventory: Inventory | None, numerics: Numerics) -> dict:
        """Name → (dtype, shape) of the file's tensors as the numerics hold them; without a file, of the published
        formats."""

    @abstractmethod
    def cache_streams(self, asking: Asking) -> tuple[list, list[Stream]]:
        """Streams of each layer's cache, and those that all layers share. Raises InputError for host memory that would
        hold nothing, CapacityError for fewer staged blocks than a step reads."""

    def token_bytes(self, config: Any, numerics: Numerics) -> dict | None:
        """Bytes that one token of one row takes in all layers, with their formula; None where tokens differ."""
        return None

    @abstractmethod
    def fill_cache(self, cache: Any, lengths: list[int], seed: int) -> None:
        """Plausible numbers in every buffer of a cache, as if row b held lengths[b] tokens."""
