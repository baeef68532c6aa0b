"""Contracts of compositions: honest kernels are within the limits, planted faults are not."""

import pytest
import torch

from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.fusions.contract import CONTRACTS
from dsv4.kernels.operations import OPERATIONS
from tests.kernels.contracts import checks

NAMES = [contract.operation for contract in CONTRACTS]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("operation", NAMES)
def test_honest_kernels_are_within_the_limits(operation, dtype):
    host = bind(OPERATIONS, "cpu", DispatchLedger(), COMPOSITIONS)
    checks.honest_is_green(operation, dtype, {"cpu": getattr(host, operation)})


@pytest.mark.parametrize("plant", checks.faults_of(*NAMES), ids=lambda p: f"{p.operation}: {p.name}")
def test_faults_exceed_the_limits(plant):
    checks.fault_is_red(plant)


@pytest.mark.parametrize("operation", NAMES)
def test_canaries_fail_in_every_case(operation):
    checks.canaries_fail(operation)
