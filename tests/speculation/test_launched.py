"""The probe's batch on pages that were taken beforehand: green when sound, and each planted fault named; those of the
loop by the kernel's own source on a thread."""

import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.probes.faults import Site, catalogue, launching
from dsv4.probes.result import Status
from dsv4.probes.scenes import launched
from dsv4.probes.selftest.detection import select
from dsv4.probes.subjects.ours import OurSubject

FAULTS = [m for m in catalogue() if m.plant.__module__ == launching.__name__]
OF_THE_LOOP = [m for m in FAULTS if m.backend]
OF_PAGES = [m for m in FAULTS if not m.backend]


def named(m):
    return m.name.replace(" ", "-")


def asked(checkpoint, numerics="fp32"):
    """What the probe finds, up to where it stops."""
    found = []
    try:
        found.extend(launched.launched(OurSubject(checkpoint, numerics), 4, 0))
    except Exception as error:
        return found, error
    return found, None


def planted(mutation, checkpoint, tmp_path):
    site = Site(shutil.copytree(checkpoint, tmp_path / "copy"))
    try:
        mutation.plant(site)
        return asked(site.checkpoint)
    finally:
        site.undo()


def failed(found):
    return [c.part for c in found if c.status is Status.FAIL]


def check_named(mutation, found, error):
    """By a check, and not by an error: a fault of pages is wrong numbers."""
    assert error is None and any(mutation.parts[0] in part for part in failed(found)), (failed(found), error)


@pytest.fixture
def loops(on_a_thread, monkeypatch):
    """The probe takes this processor for a device with loops."""
    monkeypatch.setattr(launched, "captures", lambda model: True)
    monkeypatch.setattr(launched, "missing", lambda device: "")
    return on_a_thread


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_sound_pages_are_green(brief_official, numerics):
    found, error = asked(brief_official, numerics)
    assert error is None and {c.status for c in found} == {Status.PASS} and len(found) == 5
    assert all(c.samples and c.source and c.where == "pages taken beforehand" for c in found)


class SumsByShape(TorchDispatchMode):
    """Products err in their last bits by a draw for each shape, as on a device that chooses its kernels by shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return result
        draw = torch.Generator().manual_seed(hash(tuple(a.shape for a in args)) % 2**31)
        return result * (1 + (torch.rand(result.shape, generator=draw) - 0.5) * 2.0**-20)


def test_sums_that_depend_on_shapes_are_the_same_on_both_sides(brief_official):
    with SumsByShape():
        found, error = asked(brief_official, "qat")
    assert error is None and {c.status for c in found} == {Status.PASS}


@pytest.mark.parametrize("mutation", OF_PAGES, ids=named)
def test_a_fault_of_pages_is_named(brief_official, tmp_path, mutation):
    check_named(mutation, *planted(mutation, brief_official, tmp_path))


@pytest.mark.parametrize("mutation", OF_PAGES, ids=named)
def test_a_fault_of_pages_is_named_where_rounds_are_captured(brief_official, tmp_path, loops, mutation):
    """On a GPU the planted code runs inside a capture, which refuses copies from the host."""
    check_named(mutation, *planted(mutation, brief_official, tmp_path))


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_a_sound_loop_is_green(brief_official, loops, numerics):
    found, error = asked(brief_official, numerics)
    assert error is None and {c.status for c in found} == {Status.PASS} and len(found) == 6
    assert {c.where for c in found} == {"one launch"} and len(loops.threads) == 2


@pytest.mark.parametrize("mutation", OF_THE_LOOP, ids=named)
def test_a_fault_of_the_loop_is_named(brief_official, tmp_path, loops, mutation):
    """By a check, or by an error, which the probe files under the same part."""
    found, error = planted(mutation, brief_official, tmp_path)
    assert error is not None or any("one launch" in part for part in failed(found)), failed(found)


def test_faults_of_the_loop_are_planted_where_there_is_one():
    assert len(OF_THE_LOOP) == 4 and not set(OF_THE_LOOP) & set(select(probe="speculation"))
    assert set(FAULTS) <= set(select(probe="speculation", backend="triton"))
