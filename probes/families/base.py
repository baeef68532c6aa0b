"""What the probes know of a family of models. It is written here and not asked of the engine, which is what they audit.

A probe asks `dsv4.probes.families.of` for one of these and never which family it is. Where a probe does something else
altogether for a family, it has a form of its own in `dsv4.probes.catalogue.FAMILY`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache
from dsv4.errors import InputError
from dsv4.kernels.replacing import Replacement
from dsv4.probes.families.cache_rows import Buffer, Rows
from dsv4.probes.scenes.tile_cases import TileCase
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.answers import Answer
from dsv4.probes.subjects.ours import OurSubject

Pages = Mapping[str, Mapping[int, int]]  # group → logical page → physical page, 0 for none


class ProbedFamily(ABC):
    """name: as `dsv4.loaders.config_files.family_of` gives it; title: for people. lacks: probes that find nothing to
    measure, and why. refuses: commands that do not take such models, and the error, with {} for the subject's name.
    chosen: the capture points that say what a query chose to read."""

    name: ClassVar[str]
    title: ClassVar[str]
    lacks: ClassVar[Mapping[str, str]] = {}
    refuses: ClassVar[Mapping[str, str]] = {}
    chosen: ClassVar[tuple[str, ...]] = ()

    def check_command(self, command: str, subject: str) -> None:
        """Raises InputError for a command that does not take the subject of that name."""
        if command in self.refuses:
            raise InputError(self.refuses[command].format(subject))

    # ---- subjects -------------------------------------------------------------------------

    @abstractmethod
    def open_ours(self, path: str | Path, *choices: str, kernels: Mapping[str, Replacement]) -> OurSubject:
        """This project's model of a checkpoint; choices and kernels as `OurSubject` takes them."""

    @abstractmethod
    def open_training(self, path: str | Path, *choices: str) -> OurSubject:
        """This project's model on the training backend. Raises InputError where that is not audited."""

    @abstractmethod
    def open_theirs(self, path: str | Path) -> Subject:
        """transformers' model of a checkpoint, in fp32."""

    @abstractmethod
    def answer(self, result: object, config: Any, batch: int, tokens: int) -> Answer:
        """What another implementation's `run` returned of [batch, tokens]."""

    # ---- a model --------------------------------------------------------------------------

    @abstractmethod
    def tables(self) -> tuple[dict, dict]:
        """Operations and compositions that such models bind."""

    @abstractmethod
    def cases(self) -> Mapping[str, Callable]:
        """Operation or composition → function of `scenes.backend_cases.Inputs` that makes calls of it, where contracts
        do not have them all."""

    @abstractmethod
    def tile_cases(self, seed: int) -> Iterator[TileCase]:
        """Calls of every operation that goes by tiles."""

    @abstractmethod
    def windows(self, config: Any) -> set[int]:
        """Lengths of the sliding windows that layers have."""

    # ---- its cache ------------------------------------------------------------------------

    @abstractmethod
    def made_of_input(self, config: Any, layer: int) -> set[str]:
        """Streams of a layer that are computed from its input alone: where all of them differ, the layer before is at
        fault."""

    @abstractmethod
    def buffers(self, subject: Subject, cache: Cache, mtp: bool) -> Iterator[Buffer]:
        """All buffers of a cache; without `mtp` those of the backbone."""

    @abstractmethod
    def visible(self, subject: Subject, cache: Cache, b: int, length: int, mtp_length: int) -> Rows:
        """What batch row b of `length` tokens and `mtp_length` entries of the MTP block may read of a plain cache from
        its next token on."""

    @abstractmethod
    def of_pages(self, subject: Subject, cache: PagedCache, pages: Pages, length: int, mtp_length: int) -> Rows:
        """What a row or a snapshot that holds `pages` may read from its next token on. Rows that no page holds are
        bytes of 255."""


def made(makers: tuple[Callable, ...], seed: int) -> Iterator[TileCase]:
    """The cases of all `makers`, which draw from one generator."""
    g = torch.Generator().manual_seed(seed)
    for maker in makers:
        yield from maker(lambda *shape: torch.randn(*shape, generator=g), g)
