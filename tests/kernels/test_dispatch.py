"""Backends never fall back silently, and what ran is counted."""

import pytest

from dsv4.kernels.dispatch import DispatchLedger, Operation, bind
from dsv4.kernels.errors import BackendUnavailable
from dsv4.kernels.operations import OPERATIONS


def double(x):
    return 2 * x


def test_an_operation_needs_a_reference():
    with pytest.raises(ValueError, match="no reference"):
        Operation("op", {"triton": double})


def test_a_missing_backend_raises_when_bound_and_names_the_operation():
    with pytest.raises(BackendUnavailable, match="'triton'.*'op'"):
        bind({"op": Operation("op", {"reference": double})}, "triton", DispatchLedger())


def test_an_unknown_backend_raises():
    with pytest.raises(BackendUnavailable, match="'cuda' is unknown"):
        bind({"op": Operation("op", {"reference": double})}, "cuda", DispatchLedger())


def test_calls_are_counted_with_the_reason():
    ledger = DispatchLedger()
    op = bind({"op": Operation("op", {"reference": double})}, "cpu", ledger)
    assert op.op(3) == 6 and op.op(4) == 8
    [row] = ledger.rows()
    assert row["calls"] == 2 and row["operation"] == "op" and "reference" in row["why"]


def test_every_operation_is_registered_under_its_own_name():
    assert all(name == op.name for name, op in OPERATIONS.items())
    assert all(op.__doc__ for op in OPERATIONS.values())
