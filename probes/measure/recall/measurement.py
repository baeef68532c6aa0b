"""`dsv4 recall`: from its options to its files."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dsv4.errors import InputError
from dsv4.model.ranks import here
from dsv4.probes import families
from dsv4.probes.audit import open_subject
from dsv4.probes.measure.base.measurement import Measurement
from dsv4.probes.measure.base.models import Say
from dsv4.probes.measure.base.settings import refuse_idle
from dsv4.probes.measure.base.text import read_text
from dsv4.probes.measure.recall import document, markdown, plots, tables
from dsv4.probes.measure.recall.settings import settle
from dsv4.probes.subjects.dump import DumpSubject
from dsv4.probes.subjects.files import FilesSubject
from dsv4.runtime.user_kernels import kernels_named

DEFAULTS = {"numerics": "native", "backend": "auto", "device": "cpu", "cache": "auto", "index_cache": "auto"}
INSTEAD = "this subject; leave it out, or use --subject ours"


class Recall(Measurement):
    """The settings are settled by the checkpoint's files, before anything is loaded."""

    COLUMNS, stem = 120, "recall"

    def __init__(
        self,
        say: Say,
        checkpoint: Path,
        *,
        dump: Path | None,
        kind: str,
        kernel: Sequence[str] | None,
        choices: Mapping[str, str | None],
        text: Path | None,
        contexts: list[int] | None,
        rows: int,
        needles: int | None,
        **given,
    ):
        """choices: of ours, by the keys of DEFAULTS, None for those that were not given. given: to `settle`."""
        if dump is not None or kind != "ours":
            options = {f"--{name.replace('_', '-')}": value for name, value in choices.items()}
            refuse_idle(options | {"--kernel": kernel}, INSTEAD)
        if dump is not None and here().size > 1:
            raise InputError(f"--dump was given to {here().size} ranks, and nothing is run for it: leave one out")
        if dump is not None:
            refuse_idle({"--text": text}, INSTEAD)
        self.kernels, stored = kernels_named(kernel), FilesSubject(checkpoint)
        families.of(stored).check_command("recall", stored.name)
        self.subject = None if dump is None else _recorded(dump, checkpoint, stored)
        rows, longest = (rows, None) if self.subject is None else self.subject.ids.shape
        choices = DEFAULTS | {name: value for name, value in choices.items() if value is not None}
        needles = needles if needles is not None else 20 if choices["device"].startswith("cpu") else 100
        contexts = contexts or (longest and [longest])
        self.settings = settle(stored.config, contexts, rows=rows, needles=needles, longest=longest, **given)
        self.tokens = rows * self.settings.contexts[-1]
        seed, size = self.settings.seed, stored.config.vocab_size
        self.text = None if self.subject else read_text(text, checkpoint, size, self.tokens, seed)
        self._opened, self._kind = partial(open_subject, checkpoint, kind, **choices, kernels=self.kernels), kind

    def open(self, say) -> None:
        say("loading")
        if self.subject is None:
            if self._kind not in ("ours", "transformers"):
                raise InputError(
                    f"--subject is {self._kind!r}; expected ours or transformers (recorded runs: --dump FILE)"
                )
            self.subject = self._opened()

    def measured(self, command, say, advance) -> dict:
        return document.measured(self.subject, self.settings, self.text, command, say, advance)

    show, draw, render = staticmethod(tables.show), staticmethod(plots.draw), staticmethod(markdown.render)


def _recorded(dump: Path, checkpoint: Path, stored: FilesSubject) -> DumpSubject:
    """A dump, whose weights are the checkpoint's."""
    subject = DumpSubject(dump, checkpoint)
    subject.files = stored.files
    return subject
