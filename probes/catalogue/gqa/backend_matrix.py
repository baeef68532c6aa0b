"""`backend_matrix` on GQA models: kernels of chunked prefill take some heads only."""

from dsv4.probes.catalogue.backend_matrix import BackendMatrix
from dsv4.probes.result import Check, vacuous
from dsv4.probes.subject import Subject


class GQABackendMatrix(BackendMatrix):
    """Heads of a width that the kernels of chunked prefill do not take leave nothing to compare."""

    def _without_inputs(self, subject: Subject, name: str) -> Check:
        if name != "chunked_prefill":
            return super()._without_inputs(subject, name)
        width = subject.config.head_dim
        return vacuous(name, f"its kernels take heads of a power of two, this model's have {width}", part=name)
