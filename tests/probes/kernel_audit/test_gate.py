"""The gate on a small operation: cases that cannot tell are VACUOUS. And what wrong results look like."""

import sys

import pytest
import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Work, outcome, rebuilt
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.drawing import Draw
from dsv4.kernels.rope.reference import rotate
from dsv4.kernels.widths import SMALL
from dsv4.probes.kernel_audit.acceptance import listed, truth_of
from dsv4.probes.kernel_audit.clauses import gate
from dsv4.probes.kernel_audit.diagnosis import explained
from dsv4.probes.kernel_audit.errors import SubjectFailed
from dsv4.probes.kernel_audit.harness import Harness
from dsv4.probes.kernel_audit.plants import plants
from dsv4.probes.kernel_audit.scene import Scene
from dsv4.probes.kernel_audit.subject import SubjectSpec, reference_of
from dsv4.probes.result import Status


def twice(x):
    return x * 2


def cases(w, draw):
    """Inputs that can tell; zeros, of which zeros are right."""
    yield Case("4 rows", "random", (draw.act(4, 64),))
    yield Case("4 rows", "blind", (torch.zeros(4, 64, dtype=draw.dtype),))


TWICE = Contract(
    *("twice", "y = 2x", (Argument("x", ("rows", "d"), "activation", "any"),)),
    (Output("y", ("rows", "d"), "activation", "2x"),),
    *(lambda x: x.double() * 2, {"fp32": twice}, cases, lambda x: Work(0, 0, "")),
)


def leaves_x(x, cis):
    return rotate(x.clone(), cis)


def returns_zeros(x, cis):
    return torch.zeros_like(rotate(x, cis))


class Here:
    """A worker in this process."""

    def __init__(self, spec):
        self.harness, self.asked = Harness(spec), 0

    def ask(self, function, *arguments, limit=None):
        return function(self.harness, *arguments)


@pytest.fixture
def scene(monkeypatch):
    """The scene of `twice`, which is registered among the contracts."""
    monkeypatch.setattr("dsv4.kernels.contracts.contracts", lambda: {"twice": TWICE})
    monkeypatch.setitem(sys.modules, "twice_for_a_test", sys.modules[__name__])
    worker = Here(SubjectSpec("twice", "twice_for_a_test:twice"))
    return Scene(contract_of("twice"), SMALL, "", "cpu", 1, worker, (torch.bfloat16,))


def test_a_case_that_would_accept_zeros_is_vacuous(scene):
    can_tell, blind = gate.run(scene)
    assert can_tell.status is Status.PASS and can_tell.chance > 1
    assert blind.status is Status.VACUOUS and "it would accept zeros" in blind.note


def wrong_results(operation: str, make, count: int = 4):
    """(truth, results) of cases that a faulty kernel gets wrong."""
    contract, found = contract_of(operation), []
    for case in contract.cases(SMALL, Draw(1, torch.bfloat16)):
        truth = truth_of(contract, case, contract.default(torch.bfloat16))
        results = list(listed(make(reference_of(operation))(*rebuilt(case.arguments, torch.clone))))
        if truth.judge(results).ratio > 1:
            found.append((truth, results))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("name", ["the sink is ignored", "the sink is counted twice"])
def test_a_planted_fault_looks_like_itself(name):
    (plant,) = (p for p in plants() if p.operation == "sparse_attention" and p.name == name)
    assert explained(wrong_results("sparse_attention", plant.make))[0] == name


def test_a_sound_kernel_and_an_unknown_fault_look_like_nothing():
    assert explained(wrong_results("sparse_attention", lambda honest: honest)) == []
    noise = lambda honest: lambda *a: honest(*a) + 0.25 * torch.randn_like(a[0])
    wrong = wrong_results("sparse_attention", noise)
    assert len(wrong) == 4 and explained(wrong) == []


@pytest.mark.parametrize("function", ["leaves_x", "returns_zeros"])
def test_an_argument_that_is_overwritten_is_what_must_be_returned(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "rotations_for_a_test", sys.modules[__name__])
    harness = Harness(SubjectSpec("rotate", f"rotations_for_a_test:{function}"))
    case = next(iter(contract_of("rotate").cases(SMALL, Draw(1))))
    with pytest.raises(SubjectFailed, match="x is returned as another tensor; expected the argument, overwritten"):
        harness.call(harness.place(case.arguments))


def test_what_is_written_in_place_counts_and_what_is_missing_is_wrong():
    contract = contract_of("rotate")
    case = next(iter(contract.cases(SMALL, Draw(1))))
    truth = truth_of(contract, case, "fp32")
    of = lambda function, x: truth.judge(outcome(contract, function(x, case.arguments[1]), (x,))).ratio
    assert of(rotate, case.arguments[0].clone()) <= 1
    assert of(leaves_x, case.arguments[0].clone()) > 100
    rows = contract_of("rotary_rows")
    case = next(iter(rows.cases(SMALL, Draw(1))))
    judged = truth_of(rows, case, "fp32").judge(outcome(rows, None, case.arguments))
    assert judged.ratio == float("inf") and judged.place == "2 tensors, expected 3"
