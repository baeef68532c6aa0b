"""`rollback` on GQA models, which have no MTP block."""

from dsv4.probes.catalogue.rollback import Rollback
from dsv4.probes.result import Check
from dsv4.probes.subject import Subject


class GQARollback(Rollback):
    """Drafts are rewound as tokens of the model itself are."""

    def _mtp(self, subject: Subject) -> list[Check]:
        return []
