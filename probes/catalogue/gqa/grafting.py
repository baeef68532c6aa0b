"""`grafting` on GQA models, which decode by a policy meanwhile: summaries of blocks are borrowed too."""

from collections.abc import Iterator

from dsv4.kernels.block_choice import Policy
from dsv4.model.gqa.choice import Attention
from dsv4.probes.catalogue.grafting import Case, Grafting
from dsv4.probes.result import Check
from dsv4.probes.scenes.gqa.fitted import FittedCache
from dsv4.probes.scenes.grafted_steps import stepping
from dsv4.probes.scenes.patching import kept
from dsv4.probes.subject import Subject

BOUNDS = Policy("bounds of 16", "bound", 16, 1, 2, 3)  # 96 tokens of 128 and more


class GQAGrafting(Grafting):
    """Captured steps are not held against `append`: policies may choose otherwise by a rounding."""

    def run(self, subject: Subject) -> list[Check]:
        with kept(subject.model, "attention"):
            subject.model.attention = Attention(BOUNDS)
            return super().run(subject)

    @staticmethod
    def _plain(model, room: int) -> FittedCache:
        return FittedCache(model, room)

    def _mtp(self, subject: Subject) -> list[Check]:
        return []

    def _stepping(self, case: Case) -> Iterator[Check]:
        return stepping(case.subject, case.cache(), None, case.shared, self.seed)
