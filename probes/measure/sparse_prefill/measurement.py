"""`dsv4 sparse-prefill`: from its options to its files."""

from pathlib import Path

from rich.console import Console

from dsv4.probes.measure.base.measurement import ModelMeasurement
from dsv4.probes.measure.base.models import Say
from dsv4.probes.measure.sparse_prefill import document, markdown, plots
from dsv4.probes.measure.sparse_prefill.settings import settle, texts


class SparsePrefill(ModelMeasurement):
    def __init__(self, say: Say, checkpoint: Path, choices: tuple[str, str, str], *, text: Path | None, **given):
        """choices: numerics, backend, device. given: to `settle`."""
        super().__init__(say, checkpoint, "sparse_prefill", *choices)
        self.settings = settle(self.model, **given)
        prose = self.read(text, self.settings.rows * self.settings.contexts[-1])
        self.texts = texts(prose, alone=text is not None)

    def measured(self, command, say, advance) -> dict:
        found, self.maps = document.measured(self.subject, self.settings, self.texts, command, say)
        return found

    def show(self, found: dict, console: Console) -> None:
        console.file.write(markdown.terminal(found))

    def draw(self, found: dict) -> dict[str, str]:
        return plots.draw(found, self.maps)

    render, dumped = staticmethod(markdown.render), staticmethod(document.render)
