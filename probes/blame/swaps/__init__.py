"""Swapping one module of a running subject for the oracle: what proves where a difference comes from.

`swapped(subject, i, module, layer, ids)` replaces the output of `module` (an official name within layer i, or one of
the steps without a tensor of their own: attn.rope, attn.queries, attn.latent) by what the oracle makes of the same
input, for runs of one row in one step from position 0. `supports` says which modules a subject's adapter can replace.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from dsv4.probes.blame.swaps.reference import Reference
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.subject import Subject

TOGETHER = {"hc": ("hc_attn", "hc_ffn")}  # what is swapped under one name


@contextmanager
def swapped(subject: Subject, i: int, module: str, layer: Layer, ids: torch.Tensor) -> Iterator[None]:
    """The subject with that module replaced while the `with` block lasts. ids int64 [1, T]: of the runs inside it."""
    with ExitStack() as undo:
        for name in TOGETHER.get(module, (module,)):
            _adapter(subject)(subject, i, Reference(layer, ids), undo).install(name)
        yield


def supports(subject: Subject, module: str) -> bool:
    """Whether that module of that kind of subject can be swapped."""
    adapter = _adapter(subject)
    return adapter is not None and adapter.MODULES.issuperset(TOGETHER.get(module, (module,)))


def _adapter(subject: Subject):
    from dsv4.probes.subjects.ours import OurSubject
    from dsv4.probes.subjects.transformers import TransformersSubject

    if isinstance(subject, OurSubject):
        from dsv4.probes.blame.swaps.ours import OurSwap

        return OurSwap
    if isinstance(subject, TransformersSubject):
        from dsv4.probes.blame.swaps.transformers import TransformersSwap

        return TransformersSwap
    return None
