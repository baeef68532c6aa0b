"""The clause `shared`: processes beside the kernel begin and end, and the worst of many calls is judged."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.contracts import contract_of
from dsv4.kernels.widths import SMALL
from dsv4.probes.kernel_audit import stops
from dsv4.probes.kernel_audit.acceptance import Judgement
from dsv4.probes.kernel_audit.clauses import shared
from dsv4.probes.kernel_audit.harness import Harness, apart, same_bits
from dsv4.probes.kernel_audit.scene import Scene
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.kernel_audit.worker import Worker
from dsv4.probes.result import Status

ALIVE = SimpleNamespace(poll=lambda: None)


@contextmanager
def begun(*_):
    """Processes in whose place nothing runs."""
    yield [ALIVE] * shared.PROCESSES


def checks(monkeypatch, plant: str, beside=begun, least: int = 0) -> list:
    """Of a kernel in host memory, which the clause takes for one on a device."""
    monkeypatch.setattr(shared, "others", beside)
    monkeypatch.setattr(shared, "LEAST", least)
    monkeypatch.setattr(shared, "SECONDS", 0.2)
    monkeypatch.setattr(shared, "ALONE", 0.1)
    with Worker(SubjectSpec("rms_norm", "reference", plant=plant)) as worker:
        scene = Scene(contract_of("rms_norm"), SMALL, "", "cuda", 1, worker, (torch.bfloat16,), case="random")
        monkeypatch.setattr(scene, "few", lambda count: scene.truths[:1])
        return list(shared.run(scene))


def test_the_worst_of_many_calls_is_judged(monkeypatch):
    worst, same = checks(monkeypatch, "")
    assert {c.status for c in (worst, same)} == {Status.PASS} and worst.part == "shared"
    assert worst.samples == same.samples >= shared.UNDER_WAY


def test_bits_that_differ_alone_too_are_for_repeats(monkeypatch):
    (worst,) = checks(monkeypatch, "one call in seven differs")  # by less than the limit
    assert worst.status is Status.PASS


def test_wrong_results_and_other_bits_beside_other_processes_are_findings():
    truth = SimpleNamespace(judge=lambda results: Judgement(results, "relative L2 of a row"))
    scene = SimpleNamespace(label=lambda truth: "a case")
    found = lambda ratio, differ: [
        c.status for c in shared.judged(scene, truth, (100, 0, 0, 0, 0.0), (100, differ, ratio, 270, 9.0))
    ]
    assert found(0.1, 0) == [Status.PASS, Status.PASS]
    assert found(0.1, 1) == [Status.PASS, Status.FAIL]
    assert found(1.1, 1) == [Status.FAIL, Status.FAIL]


def test_a_device_that_was_not_shared_is_no_evidence(monkeypatch):
    (found,) = checks(monkeypatch, "", least=1)
    assert found.status is Status.VACUOUS and "was stopped 0 times" in found.note


def test_nor_is_one_that_the_processes_left(monkeypatch):
    @contextmanager
    def ended(*_):
        yield [ALIVE] * (shared.PROCESSES - 1) + [SimpleNamespace(poll=lambda: 1)]

    (found,) = checks(monkeypatch, "", ended)
    assert found.status is Status.VACUOUS and "could use the device" in found.note


def test_differences_of_numbers_and_of_bits():
    one = torch.tensor([1.0, 2.0])
    far = lambda *values: apart(torch.tensor(values), one).item()
    assert far(1.0, 2.0) == 0 and far(1.0, 2.5) == 0.25 and far(float("nan"), 2.0) == float("inf")
    assert not same_bits(torch.tensor([-0.0]), torch.tensor([0.0]))
    nan = torch.tensor([float("nan")])
    assert apart(nan, nan.clone()).item() == 0 and same_bits(nan, nan.clone())
    assert apart(torch.tensor([3, 4]), torch.tensor([3, 9])).item() == 0.5
    assert apart(torch.empty(0), torch.empty(0)).item() == 0


def test_results_are_those_that_are_furthest_from_the_first():
    """Also in types that have no arithmetic."""
    harness = Harness(SubjectSpec("rms_norm", "reference"))
    calls = iter(range(1000))
    values = [torch.tensor([1.0, v]).to(torch.float8_e4m3fn) for v in (2.0, 2.0, 7.0, 3.0)]
    harness.call = lambda *_: [values[min(next(calls), 3)]]
    harness.ordered = list
    count, differ, (worst,), *_ = shared.by_turns(harness, (), (), 1e-9)
    assert (count, differ) == (shared.UNDER_WAY, shared.UNDER_WAY - 1)
    assert torch.equal(torch.as_tensor(worst).float(), values[2].float())


def test_a_device_is_watched_during_each_call(monkeypatch):
    """A call may wait for the device, and its turn with it."""
    asked = []
    watched = SimpleNamespace(watch=lambda: asked.append(1), read=lambda: (0, 0.0))
    monkeypatch.setattr(stops, "Stops", lambda device: watched)
    harness = Harness(SubjectSpec("rms_norm", "reference"))
    harness.call = lambda *_: [torch.ones(2)]
    calls, *_ = shared.by_turns(harness, (), (), 1e-9)
    assert len(asked) == calls == shared.UNDER_WAY


def test_arguments_that_a_call_may_write_in_are_read_from_the_host_once():
    """Else each call would wait for the device while they are copied to it."""
    given = torch.arange(6.0).view(2, 3)
    for operation, written in (("rotate", True), ("rms_norm", False)):
        fresh = Harness(SubjectSpec(operation, "reference")).fresh((given,))
        (one,) = fresh()
        one += 1
        (two,) = fresh()
        assert torch.equal(two, given + (not written)) and given[0, 0] == 0
        given += 2
        (three,) = fresh()
        assert torch.equal(three, two)
        given -= 2


def test_processes_begin_and_end_with_the_context():
    """They import this project: 6 s."""
    with shared.others("cpu", 2) as beside:
        assert len(beside) == 2
        time.sleep(0.2)
        assert [p.poll() for p in beside] == [None, None]
    assert all(p.returncode for p in beside)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_process_that_cannot_use_the_device_is_not_counted():
    with shared.others("cuda", 1) as beside:
        assert beside == []
