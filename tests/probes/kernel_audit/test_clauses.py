"""Each clause that runs on a CPU finds its fault, and the fault goes unnoticed where the clause is left out."""

from functools import lru_cache

import pytest
import torch

from dsv4.probes.kernel_audit.audit import KernelAudit, audit_kernel
from dsv4.probes.kernel_audit.subject import SubjectSpec

FAULTS = {  # clause → (operation, plant)
    "gate": ("rms_norm", "zeros"),
    "poison": ("index_scores", None),
    "written": ("rms_norm", "old contents are multiplied by zero"),
    "guard": ("rms_norm", "a store beyond the end"),
    "inputs": ("rms_norm", "an argument is used as scratch"),
    "layout": ("rms_norm", "strides are ignored"),
    "empty": ("rms_norm", "an empty grid is launched"),
    "batch": ("rms_norm", "NaN of a neighbour spreads"),
    "repeats": ("rms_norm", "one call in seven differs"),
    "state": ("rms_norm", "results share a workspace"),
    "calls": ("rms_norm", "a result is kept by address"),
    "integrity": ("rms_norm", "a global flag is set"),
}


def fault(clause: str) -> tuple[str, str]:
    """(operation, name of a plant) of a clause; of one that rms_norm cannot have, the first of the operation."""
    from dsv4.probes.kernel_audit.plants import plants

    operation, name = FAULTS[clause]
    return operation, name or next(p.name for p in plants() if p.operation == operation and p.clause == clause)


@lru_cache
def audited(operation: str, plant: str, only: tuple[str, ...]) -> KernelAudit:
    spec = SubjectSpec(operation, "reference", plant=plant)
    return audit_kernel(spec, seed=1, dtypes=(torch.bfloat16,), only=only, repeats=12, limit=30)


@pytest.mark.every
@pytest.mark.parametrize("clause", FAULTS)
def test_a_clause_finds_its_fault(clause):
    found = audited(*fault(clause), tuple(dict.fromkeys(("gate", clause))))
    assert clause in found.caught, [c.note for c in found.findings]
    assert found.verdict == "FAIL"


@pytest.mark.every
@pytest.mark.parametrize("operation", ["rms_norm", "index_scores"])
def test_no_clause_accuses_a_sound_kernel(operation):
    found = audited(operation, "", tuple(FAULTS))
    assert found.verdict in ("PASS", "PASS, limited"), [(c.part, c.name, c.note) for c in found.findings]
    asked = {c.part for c in found.checks if c.name != "not run"}
    assert set(FAULTS) - asked <= {"poison"} and (operation == "rms_norm" or "poison" in asked)


@pytest.mark.every
@pytest.mark.parametrize("clause", ["inputs", "layout", "empty"])
def test_without_its_clause_a_fault_goes_unnoticed_and_another_is_found(clause):
    rest = tuple(c for c in ("gate", "inputs", "empty", "layout") if c != clause)
    operation, plant = fault(clause)
    assert audited(operation, plant, rest).caught == []
    other = "inputs" if clause != "inputs" else "empty"
    assert audited(*fault(other), rest).caught == [other]


def test_a_kernel_without_any_case_is_vacuous():
    spec = SubjectSpec("rms_norm", "reference")
    found = audit_kernel(spec, seed=1, dtypes=(torch.bfloat16,), only=("gate",), takes=lambda case: "not this one")
    assert found.verdict == "VACUOUS" and found.skipped
