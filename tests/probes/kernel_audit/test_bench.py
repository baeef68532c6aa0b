"""Timed replays are looked at: what differs from the first is judged, not condemned. Graphs are faked on the CPU."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.contracts import contract_of
from dsv4.kernels.drawing import Draw
from dsv4.kernels.widths import SMALL
from dsv4.probes.kernel_audit import bench, bench_document, timed
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.kernel_audit.worker import packed, unpacked
from scripts import kernel_table
from tests.probes.kernel_audit.kernels import SOURCE, written

DEVICE = {"bytes_per_s": 1e15, "flops_per_s": 1e15, "sm_clock_mhz": None}
CALLS = 1 + 3 * 2  # the answer before the race, then a capture and a first replay of each of three sets
KERNELS = """
from dsv4.probes.kernel_audit.subject import reference_of

count, held = 0, {}


def out(x):
    return held.setdefault(x.data_ptr(), torch.empty_like(x))


def steady(x, weight, eps):
    return out(x).copy_(good(x, weight, eps))


def rounds(x, weight, eps):
    "Another value of each number in every call, nearer than an ulp."
    global count
    count += 1
    y = good(x.double(), weight.double(), eps).double()
    return out(x).copy_(y * (1 + (count % 5) * 2**-11))


def later(x, weight, eps, wrong):
    global count
    count += 1
    y = out(x)
    return y.copy_(good(x, weight, eps)) if count <= CALLS else wrong(y)


def unwritten(x, weight, eps):
    return later(x, weight, eps, lambda y: y)


def a_row_is_missing(x, weight, eps):
    def wrong(y):
        y[1:].copy_(good(x, weight, eps)[1:])
        return y

    return later(x, weight, eps, wrong)


def stale(x, weight, eps):
    return later(x, weight, eps, lambda y: y.copy_(good(x + 0.1, weight, eps)))


def rounds_and_ends_in_nan(x, weight, eps):
    y = rounds(x, weight, eps)
    return y.fill_(float("nan")) if count > CALLS + 60 else y


def in_another_order(scores, *more):
    "The same indices, turned by another number of places in every call."
    global count
    count += 1
    best = reference_of("topk_entries")(scores, *more)
    return held.setdefault(scores.data_ptr(), torch.empty_like(best)).copy_(best.roll(count, -1))


def captured_wrong(x, weight, eps):
    "Its answer is right, and every replay writes the same wrong numbers."
    global count
    count += 1
    return out(x).copy_(good(x, weight, eps) * (1 if count == 1 else 1.5))
"""


class Graph:
    """Runs again; kernels above write the memory that they returned in the capture."""

    def __init__(self, run):
        run()
        self.replay = run


class Asked:
    """A worker in this process, whose answers go through bytes as a process's do."""

    def ask(self, function, *arguments):
        return unpacked(packed(function(None, *unpacked(packed(arguments)))))


@pytest.fixture
def raced(monkeypatch, tmp_path):
    """Function: kernel, operation, replays → the row of one case."""
    monkeypatch.setattr(timed, "Clock", lambda: SimpleNamespace(once=lambda replay, cold: (replay(), 5.0)[1]))
    monkeypatch.setattr(timed, "capture", Graph)
    monkeypatch.setattr(timed, "count_kernels", lambda graph: 1)
    monkeypatch.setattr(timed, "_empty", lambda clock: 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)

    def race(kernel: str, operation: str = "rms_norm", replays: int = 30) -> bench.Row:
        path = written(tmp_path, f"{SOURCE}\nCALLS = {CALLS}\n{KERNELS}")
        spec = SubjectSpec(operation, kernel if kernel == "reference" else f"{path}:{kernel}")
        contract = contract_of(operation)
        case = next(c for c in contract.cases(SMALL, Draw(0, torch.bfloat16)) if c.family == "random")
        return bench._row(contract, case, [spec], {spec.kernel: "PASS"}, Asked(), DEVICE, replays)

    return race


def test_a_kernel_that_rounds_otherwise_each_time_is_right_and_its_replays_are_counted(raced):
    (time,) = raced("rounds").times
    assert time.verdict == "right" and 1 < time.unsteady <= time.looked < 10


@pytest.mark.parametrize(
    "kernel,operation",
    [
        ("steady", "rms_norm"),
        ("reference", "rotate"),
        ("reference", "write_rows"),
        ("in_another_order", "topk_entries"),
    ],
)
def test_a_steady_kernel_has_none_also_of_results_in_place_and_of_indices_in_another_order(raced, kernel, operation):
    (time,) = raced(kernel, operation).times
    assert (time.verdict, time.unsteady) == ("right", 0) and time.looked > 1


@pytest.mark.parametrize(
    "kernel,said",
    [
        ("unwritten", "inf × limit at y[0], element 0"),
        ("a_row_is_missing", "inf × limit at y[0], element 0"),
        ("stale", "× limit at y["),
        ("captured_wrong", "× limit at y["),
    ],
)
def test_a_replay_whose_result_is_wrong_is_suspect(raced, kernel, said):
    (time,) = raced(kernel).times
    assert time.verdict.startswith("SUSPECT: a replay's result is ") and said in time.verdict and time.unsteady == 0


def test_the_farthest_results_are_judged_and_not_the_first_ones(raced):
    (time,) = raced("rounds_and_ends_in_nan", replays=100).times
    assert time.looked > timed.KEPT + 2 and time.verdict.startswith("SUSPECT: a replay's result is inf")


def test_reports_say_in_how_many_replays_bits_differ_and_older_ones_are_read():
    times = [
        bench.Time("mine", "right", 5.0, 4.0, 0.5, (1.0, 0.9, 1.1), 1, 4, 3),
        bench.Time("other", "right", 5.0, 4.0),
    ]
    times = [asdict(t) | {"share": 0.5, "ratio": (1.0, 0.9, 1.1)} for t in times]
    for field in ("looked", "unsteady"):
        del times[1][field]
    row = {"label": "9 rows", "floor_us": 1.0, "bytes": 1, "flops": 1, "formula": "", "times": times}
    about = {"device": "cpu", "versions": {}, "command": "", "date": "", "commit": ""}
    limits = {"bytes_per_s": 1e12, "flops_per_s": 1e12, "sm_clock_mhz": None}
    report = {"about": about, "operation": "rms_norm", "shapes": "small", "seed": 1, "rows": [row], "audits": {}}
    report["device limits"] = limits
    said = "bits differ in 3 of 4 looked-at replays"
    assert [line.split("  ")[-1] for line in bench_document.lines(report)[1:]] == [f"right; {said}", "right"]
    page = bench_document.markdown(report)
    assert f"| right; {said} |" in page and "| right |" in page
    speeds = kernel_table.speeds([report])
    assert speeds["rms_norm", "mine"] == f"1.00 [0.90, 1.10] (9 rows; {said})"
    assert speeds["rms_norm", "other"] == "1.00 [0.90, 1.10] (9 rows)"
