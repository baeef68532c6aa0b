"""`dtype_ledger` on GQA models: weights are dense floats on disk, none is narrowed in memory, rotary frequencies are
fp32."""

from collections.abc import Iterator

import torch

from dsv4.loaders.files import DTYPES
from dsv4.loaders.ledger import keeps_value
from dsv4.model.numerics import NUMERICS
from dsv4.probes.catalogue.dtype_ledger import FLOATS, DtypeLedger, of_model
from dsv4.probes.catalogue.load_ledger import named
from dsv4.probes.result import Check
from dsv4.probes.subject import Subject

DISK = "transformers' checkpoints of GQA models: dense floats; this project reads no quantised ones"
MEMORY = "native holds weights as stored, fp32 widens them: no bit is lost either way (dsv4.model.numerics)"


class GQADtypeLedger(DtypeLedger):
    """Weights are dense floats, and nothing in them is protected from a quantisation that they do not have."""

    def run(self, subject: Subject) -> list[Check]:
        return [*dtype_checks(subject), *(self._caches(subject) if "kernels" in subject.can else ())]


def dtype_checks(subject: Subject) -> Iterator[Check]:
    """On disk by the headers; in memory for this project's model, whose parameters have the names of the file."""
    stored = {name: source.dtype for name, source in subject.files.sources.items()}
    yield from named(
        "weight is a dense float on disk", [n for n in stored if stored[n] not in FLOATS], len(stored), DISK
    )
    if "kernels" not in subject.can:
        return
    held = {n: p.dtype for n, p in subject.model.named_parameters() if n in stored}
    fp32 = subject.numerics == "fp32"
    of_file = {n: DTYPES[stored[n]] for n in held}
    wrong = [
        n for n, d in held.items() if d is not (torch.float32 if fp32 else of_file[n]) or not keeps_value(of_file[n], d)
    ]
    yield from named("weight is held as the numerics say", wrong, len(held), MEMORY)
    asked = NUMERICS.get(subject.numerics)
    turns = "positions in the thousands turn by wrong angles in bf16"
    yield from of_model(subject.model, asked, "the numerics asked for at load", turns)
