"""`load_ledger` on GQA models, whose tensors have the names of the file."""

from dsv4.probes.catalogue.load_ledger import LoadLedgerProbe
from dsv4.probes.oracle.gqa import config_at, tensor_shapes
from dsv4.probes.subject import Subject


class GQALoadLedger(LoadLedgerProbe):
    """Names and shapes are those that config.json asks for, by the oracle's own table."""

    def _asked(self, subject: Subject) -> dict[str, tuple]:
        return {name: ("", shape) for name, shape in tensor_shapes(config_at(subject.files.path)).items()}

    def _places(self, key: str, shape: tuple) -> dict[str, tuple[str, int]]:
        return {key: (key, 0)}
