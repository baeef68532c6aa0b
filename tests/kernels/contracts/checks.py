"""What every contract must pass with its own plants; the test files of topics bind it to operations."""

import torch

from dsv4.kernels.contracts import contract_of
from dsv4.probes.kernel_audit.plants import plants
from tests.kernels.contracts import within

torch.set_num_threads(1)
FINE = ("the table in bf16",)  # faults that a result in bf16 hides: a rotation keeps the size of each pair


def honest_is_green(operation: str, dtype: torch.dtype, more: dict | None = None) -> None:
    """Every class within its own limits, and other implementations within those of the default class."""
    contract = contract_of(operation)
    others = within.implementations(operation) if more is None else more
    for case in within.drawn(contract, dtype):
        for name, function in contract.classes.items():
            far = within.excess(contract, function, case, name)
            assert far <= 1, (name, case.family, case.label, far)
        for name, function in others.items():
            far = within.excess(contract, function, case)
            assert far <= 1, (name, case.family, case.label, far)


def faults_of(*operations: str) -> list:
    return [p for p in plants() if p.operation in operations and p.clause == "gate"]


def fault_is_red(plant) -> None:
    """At least twice over the limit in one case, in bf16 unless it is one of `FINE`."""
    contract = contract_of(plant.operation)
    honest = next(iter(contract.classes.values()))
    dtype = torch.float32 if plant.name in FINE else torch.bfloat16
    cases = within.drawn(contract, dtype)
    far = max(within.excess(contract, plant.make(honest), case, coarse=True) for case in cases)
    least = 1.5 if plant.entry == 14 else 2  # FP8 has an error of 2.6 %, and the widest limit in bf16 is 1.6 %
    assert far >= least, (plant.name, far)


def canaries_fail(operation: str) -> None:
    """Zeros, and inputs in a lower precision, are refused in every case that does not say why not."""
    contract = contract_of(operation)
    honest = next(iter(contract.classes.values()))
    canaries = {
        canary: plant.make(honest)
        for plant in faults_of(operation)
        for canary, name in (("zeros", "zeros"), ("lower precision", "inputs in a lower precision"))
        if plant.name == name
    }
    for case in within.drawn(contract):
        for canary, function in canaries.items():
            if canary not in case.exempt:
                assert within.excess(contract, function, case, coarse=True) > 1, (canary, case.family, case.label)
