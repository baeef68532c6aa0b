"""The probe of experts in host memory: green where sound, and each planted fault named."""

import shutil

import pytest

from dsv4.probes.catalogue.expert_memory import ExpertMemoryProbe
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute, left_out
from dsv4.probes.result import Status
from dsv4.probes.subjects.opening import open_ours

FAULTS = {m.name: m for m in catalogue() if m.probes[:1] == ("expert_memory",)}
QUICK = ["an evicted expert stays in the table", "scales are fetched of the expert before"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return profile.write(tmp_path_factory.mktemp("profile") / "default", "default")


def red(subject) -> set[str]:
    """Parts without the probe's name."""
    found, _ = execute(ExpertMemoryProbe(), subject)
    return {c.part.removeprefix("expert memory, ") for c in found if c.status in (Status.FAIL, Status.ERROR)}


@pytest.mark.few(fault=QUICK)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "-"))
def test_a_fault_is_named(checkpoint, tmp_path, fault):
    site = Site(shutil.copytree(checkpoint, tmp_path / "copy"))
    try:
        FAULTS[fault].plant(site)
        found = red(open_ours(site.checkpoint, FAULTS[fault].numerics, "cpu"))
    finally:
        site.undo()
    assert any(word in f"expert memory, {part}" for word in FAULTS[fault].parts for part in found), found


@pytest.mark.few(numerics=["native"])
@pytest.mark.parametrize("numerics, backend", [("fp32", "reference"), ("native", "cpu"), ("qat", "cpu")])
def test_a_sound_model_is_green(checkpoint, numerics, backend):
    found, _ = execute(ExpertMemoryProbe(), open_ours(checkpoint, numerics, backend))
    assert {c.status for c in found} == {Status.PASS} and len(found) == 5, found


def test_what_cannot_be_asked_is_vacuous(checkpoint, tmp_path):
    found, _ = execute(ExpertMemoryProbe(effort=1e-6), open_ours(checkpoint))
    assert [c.status for c in found] == [Status.VACUOUS] and "would be loaded again" in found[0].note
    gqa = open_ours(profile.write(tmp_path / "qwen2", "qwen2"))
    assert "they have no routed experts" in left_out(ExpertMemoryProbe(), gqa)
