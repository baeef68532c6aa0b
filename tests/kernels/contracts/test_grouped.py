"""Contracts of GQA operations: honest kernels are within limits, faults are not."""

import pytest
import torch

from tests.kernels.contracts import checks

OPERATIONS = ("grouped_attention", "gather_attention", "choose_blocks", "summarise_blocks", "rotary_rows")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_honest_kernels_are_within_the_limits(operation, dtype):
    checks.honest_is_green(operation, dtype)


@pytest.mark.parametrize("plant", checks.faults_of(*OPERATIONS), ids=lambda p: f"{p.operation}: {p.name}")
def test_faults_exceed_the_limits(plant):
    checks.fault_is_red(plant)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_canaries_fail_in_every_case(operation):
    checks.canaries_fail(operation)
