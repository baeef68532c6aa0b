"""The probe of captured steps: what each of its checks is for is seen red once."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dsv4.cache.cache import Cache
from dsv4.cache.rows import Tokens
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import OPERATIONS
from dsv4.model.config import ModelConfig
from dsv4.model.step import CapturedStep
from dsv4.probes.catalogue.backend_matrix import results
from dsv4.probes.catalogue.captured import SCENARIOS, Captured, exactly, starts_of
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute
from dsv4.probes.result import Status
from dsv4.probes.scenes.contract_cases import cases_beside
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.ours import OurSubject
from dsv4.runtime.graph import DecodeGraph
from tests.capturing import Refusing


@pytest.fixture(scope="module")
def subject(brief_official):
    return OurSubject(brief_official, "fp32")


def findings(subject):
    return [c for c in execute(Captured(), subject)[0] if c.status in (Status.FAIL, Status.ERROR)]


@pytest.mark.few(numerics=["fp32", "native"])
@pytest.mark.parametrize("numerics", ["fp32", "native", "qat:fp32"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_green_bit_for_bit(brief_official, numerics, backend):
    sound = OurSubject(brief_official, numerics, backend)
    checks, _ = execute(Captured(), sound)
    assert exactly(sound)
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS][:2]
    assert {c.where.partition(",")[0] for c in checks} >= set(SCENARIOS)


def test_rows_stand_where_it_matters(subject):
    """Across 128, past the window with more entries than are selected; the last one clear of a multiple of 128."""
    empty, near, far = starts_of(subject.config)
    steps = max(len(moves) * count for count, moves in SCENARIOS.values())
    assert empty == 0 and near < 128 <= near + 9 and far // 128 == (far + steps) // 128
    assert far // 4 > subject.config.index_topk and far > subject.config.sliding_window


def test_vacuous_elsewhere(subject):
    assert [c.status for c in execute(Captured(), Subject())[0]] == [Status.VACUOUS]


FAULTS = {  # part → (owner, method, fault: of what it was)
    "rotation": (CapturedStep, "cis", lambda real: lambda step, base: real(step, base) * 1.01),
    "rotation of entries": (CapturedStep, "window_cis", lambda real: lambda step, *args: real(step, *args).conj()),
    "visible entries": (CapturedStep, "visible", lambda real: lambda step, ratio: (step.pos + 2) // ratio),
    "rows of the window": (
        Tokens,
        "last",
        lambda real: lambda ring, step, W: real(ring, step, W).clamp(min=0) if step.captured else real(ring, step, W),
    ),
    "windows that complete": (CapturedStep, "completes", lambda real: lambda step, ratio: real(step, ratio) & False),
}


@pytest.mark.few(part=["rotation", "rows of the window", "windows that complete"])
@pytest.mark.parametrize("part", FAULTS)
def test_what_a_step_derives_is_named(subject, monkeypatch, part):
    owner, method, fault = FAULTS[part]
    monkeypatch.setattr(owner, method, fault(getattr(owner, method)))
    found = findings(subject)
    assert f"captured step, {part}" in {c.part for c in found}


@pytest.mark.few(part=["index keys", "layer output"])
@pytest.mark.parametrize("part", ["entries", "index keys", "window rows", "compressor rows", "layer output"])
def test_the_first_rows_that_differ_are_named(brief_official, part):
    broken = OurSubject(brief_official, "fp32")
    op, late = broken.model.op, lambda f: lambda *args: f(*args) * 1.01
    if part in ("entries", "index keys"):
        real, width = op.pool_entries, broken.config.head_dim if part == "entries" else broken.config.index_head_dim
        op.pool_entries = lambda *args: real(*args) * (1.01 if args[4].shape[0] == width else 1)
    elif part == "window rows":
        op.latent = late(op.latent)
    elif part == "compressor rows":
        real = op.store_rows
        op.store_rows = lambda raw, ape, *rest: real(raw, ape * 1.5, *rest)
    else:
        op.project_heads = late(op.project_heads)
    assert {c.part for c in findings(broken)} == {f"captured step, {part}"}


def test_differences_that_numerics_explain_are_none_where_something_is_fused(brief_official, monkeypatch):
    """Then sums may run in another order: the bits differ, the limit of the numerics holds; a fault is beyond it."""
    held, op = COMPOSITIONS["project_heads"], bind(OPERATIONS, "reference", DispatchLedger())
    for size, worst in ((1 + 1e-6, Status.PASS), (1.01, Status.FAIL)):
        fused = lambda *args, size=size: held.default(op, *args) * size
        monkeypatch.setitem(COMPOSITIONS, "project_heads", replace(held, implementations={"cpu": fused}))
        subject = OurSubject(brief_official, "fp32", "cpu")
        assert not exactly(subject)
        assert {c.status for c in execute(Captured(), subject)[0]} - {Status.PASS} == ({worst} - {Status.PASS})


def test_unwritten_memory_is_seen(subject, monkeypatch):
    """Entries beyond what is visible, at equal score: NaN reaches the logits."""
    monkeypatch.setattr(CapturedStep, "visible", lambda step, ratio: torch.full_like(step.pos, step.max_visible(ratio)))
    assert any("logits" in c.name for c in findings(subject))


def test_a_scenario_that_breaks_leaves_the_others(subject, monkeypatch):
    real = Cache.rewind

    def rewind(cache, n):
        if n == list(SCENARIOS["after a rewind"][1][2].forget):
            raise ValueError("no")
        real(cache, n)

    monkeypatch.setattr(Cache, "rewind", rewind)
    found = findings(subject)
    assert [(c.status, c.where) for c in found] == [(Status.ERROR, "after a rewind")]


def test_the_graph_under_test_is_decode_graph(subject, monkeypatch):
    monkeypatch.setattr(DecodeGraph, "step", lambda *args: 1 / 0)
    assert {c.status for c in findings(subject)} == {Status.ERROR}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_fault_of_a_fused_step_can_be_captured_and_is_wrong_numbers(tmp_path):
    """Planted on a GPU it has to be wrong entries, which `captured` names, and no error of the capture itself."""
    config, site = ModelConfig.from_official(profile.DEFAULT), Site(tmp_path)
    cases = cases_beside("attention_inputs", config, torch.float32, 0)
    case = next(c for c in cases if c.label.startswith("2 tokens, csa"))
    host, sound = torch.device("cpu"), COMPOSITIONS["attention_inputs"].implementations["triton"]
    wanted = results(sound, case, host)
    next(m for m in catalogue() if m.name == "windows in replays pool tokens that do not exist").plant(site)
    try:
        planted = COMPOSITIONS["attention_inputs"].implementations["triton"]
        with Refusing():
            found = results(planted, case, host)
    finally:
        site.undo()
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted)) if not torch.equal(a, b)]
    assert wrong == [5, 7]  # after queries, index queries, head weights, window and ring: entries, ring, index keys
