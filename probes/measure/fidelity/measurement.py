"""`dsv4 fidelity`: from its options to its files."""

from collections.abc import Sequence
from pathlib import Path

from dsv4.cache.host_tier.choice import memory_named
from dsv4.probes.measure.base.measurement import ModelMeasurement
from dsv4.probes.measure.base.models import Say, family
from dsv4.probes.measure.fidelity import document, markdown, plots, tables
from dsv4.probes.measure.fidelity.settings import settle, variants_of
from dsv4.runtime.user_kernels import kernels_named


class Fidelity(ModelMeasurement):
    def __init__(
        self,
        say: Say,
        checkpoint: Path,
        choices: tuple[str, str, str],
        *,
        kernel: Sequence[str] | None,
        reads: tuple[list[int] | None, list[str] | None, list[int | float] | None, int | None],
        text: Path | None,
        kv_memory: str = "device",
        **given,
    ):
        """choices: numerics, backend, device. reads: k of CSA; policies, budgets and block of a GQA model. kv_memory:
        where its caches are, as on the command line. given: to `settle`."""
        self.kernels = kernels_named(kernel)
        super().__init__(say, checkpoint, "fidelity", *choices, self.kernels, memory_named(kv_memory))
        self.stem += f"_{family(self.model)}"
        self.settings = settle(self.model, **given)
        self.variants = variants_of(self.model, self.settings, *reads)
        self.text = self.read(text, self.settings.rows * self.settings.contexts[-1])
        self.tokens = document.work(self.variants, self.settings)

    def measured(self, command, say, advance) -> dict:
        return document.measured(self.subject, self.variants, self.settings, self.text, command, say, advance)

    show, draw, render = staticmethod(tables.show), staticmethod(plots.draw), staticmethod(markdown.render)
