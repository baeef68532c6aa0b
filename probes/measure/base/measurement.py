"""A measurement as a command runs it: `dsv4.commands.measuring.measure` calls its methods in their order here."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from rich.console import Console

from dsv4.probes.measure.base.models import Advance, ModelSubject, Say
from dsv4.probes.measure.base.settings import Settings
from dsv4.probes.measure.base.text import Text, read_text
from dsv4.probes.report.document import slug
from dsv4.probes.report.json_report import dumped
from dsv4.probes.subject import Subject


class Measurement(ABC):
    """One measurement whose settings are settled. A room's subclass takes a command's options, and raises InputError
    for those that cannot be measured.

    COLUMNS: of the tables where stdout is no terminal. subject: what is measured, once `open` has run. stem: of
    the files' names. tokens: what a progress bar counts, None for lines alone. kernels: of the user's, by operation.
    """

    COLUMNS: ClassVar[int] = 160
    subject: Subject
    settings: Settings
    stem: str
    tokens: int | None = None
    kernels: Mapping = MappingProxyType({})

    def open(self, say: Say) -> None:
        """Load the subject, if that is not yet done."""

    @abstractmethod
    def measured(self, command: list[str], say: Say, advance: Advance) -> dict:
        """The document, valid by its schema."""

    @abstractmethod
    def show(self, found: dict, console: Console) -> None:
        """The document on a terminal."""

    @abstractmethod
    def draw(self, found: dict) -> dict[str, str]:
        """Title → SVG document. matplotlib is there."""

    @abstractmethod
    def render(self, found: dict, files: dict[str, str]) -> str:
        """The document as markdown. files: title of a plot → its file's name."""

    def dumped(self, found: dict) -> str:
        """The document as the text of its JSON file."""
        return dumped(found)


class ModelMeasurement(Measurement):
    """One of a model that is loaded before anything is settled: its settings are checked by its config."""

    def __init__(self, say: Say, checkpoint: Path, name: str, *choices):
        """choices: numerics, backend, device, and kernels by operation."""
        say(f"loading {checkpoint.name}")
        self.subject: ModelSubject = ModelSubject(checkpoint, *choices)
        self.model, self.checkpoint = self.subject.model, checkpoint
        self.stem = f"{name}_{slug(checkpoint.resolve().name)}"

    def read(self, text: Path | None, tokens: int) -> Text:
        return read_text(text, self.checkpoint, self.model.config.vocab_size, tokens, self.settings.seed)
