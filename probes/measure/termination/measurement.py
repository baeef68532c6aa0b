"""`dsv4 termination`: from its options to its files."""

from pathlib import Path

from rich.console import Console

from dsv4.errors import InputError
from dsv4.probes.measure.base.measurement import ModelMeasurement
from dsv4.probes.measure.base.models import Say
from dsv4.probes.measure.base.tables import show_table
from dsv4.probes.measure.termination import document, markdown, plots
from dsv4.probes.measure.termination.settings import orders_of, rule_of, settle


class Termination(ModelMeasurement):
    def __init__(
        self,
        say: Say,
        checkpoint: Path,
        choices: tuple[str, str, str],
        *,
        reads: tuple[list[str] | None, list[int | float] | None],
        rule: tuple[float, float, int, int | None],
        text: Path | None,
        **given,
    ):
        """choices: numerics, backend, device. reads: policies, budgets. rule: τ, φ, patience, tile. given: to
        `settle`."""
        super().__init__(say, checkpoint, "termination", *choices)
        ruled = rule_of(self.model, *rule)
        self.policies = orders_of(self.model, *reads)
        self.settings = settle(self.model, rule=ruled, **given)
        self.text = self.read(text, self.settings.rows * max(self.settings.contexts + self.settings.asked))
        if self.settings.needles and self.text.tokenizer is None:
            raise InputError("--needles: the checkpoint has no tokenizer, and needles are sentences; pass --needles 0")

    def measured(self, command, say, advance) -> dict:
        return document.measured(self.subject, self.policies, self.settings, self.text, command, say)

    def show(self, found: dict, console: Console) -> None:
        console.print(found["title"])
        show_table(console, "by order and context", *markdown.together(found))
        show_table(console, "by layer: probe against the oracle, whole output", *markdown.whole_layers(found))
        show_table(console, "the bound by sums", *markdown.bound(found))
        show_table(console, "the bound by the probe", *markdown.probe_bound(found))
        show_table(console, "ablations", *markdown.ablations(found))
        if found["geometries"]:
            show_table(console, "published keep-sets", *markdown.geometries(found))
        if found["needles"]:
            show_table(console, "needles", *markdown.needles(found))

    draw, render = staticmethod(plots.draw), staticmethod(markdown.render)
