"""The probe of sampling: green on sound models of both families, each fault named; its own definition by hand."""

import shutil

import pytest
import torch

from dsv4.probes.audit import open_subject
from dsv4.probes.catalogue import sampling
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.selftest.run import Bench, look

FAULTS = [m for m in catalogue() if m.probes[:1] == ("sampling",)]
P = torch.tensor([0.1, 0.4, 0.2, 0.3]).double()
ANY = sampling.Setting(4, 1.0, 1.0, P, None)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    for name in ("default", "qwen2"):
        profile.write(folder / name, name)
    return folder


def test_kept_tokens_by_hand():
    assert sampling.kept_tokens(P, 0.3) == [1] and sampling.kept_tokens(P, 0.41) == [1, 3]
    assert sampling.kept_tokens(P, 0.75) == [1, 3, 2] and sampling.kept_tokens(P, 1.0) == [1, 3, 2, 0]
    assert torch.allclose(sampling.within(P, 0.6), torch.tensor([0, 4 / 7, 0, 3 / 7]).double())
    p = sampling.probabilities(torch.tensor([0.0, 2.0]), 2.0)
    assert torch.allclose(p, torch.tensor([1 / (1 + torch.e), torch.e / (1 + torch.e)]).double())


@pytest.mark.parametrize("spread", [3, 10])
def test_a_temperature_has_its_spread(spread):
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 5
    p = sampling.probabilities(logits, sampling.temperature_of(logits, spread))
    assert (-(p * p.log()).sum()).exp().item() == pytest.approx(spread, rel=1e-6)


def test_the_bound_holds_for_right_draws_and_not_for_wrong_ones():
    """Of 300 right samples none is beyond it; of another distribution every one is."""
    g = torch.Generator().manual_seed(2)
    judged = lambda p: [
        next(sampling.distributed(torch.multinomial(p, 2000, True, generator=g), ANY, P, "", "")).status
        for _ in range(300)
    ]
    assert set(judged(P)) == {Status.PASS} and set(judged(P.roll(1))) == {Status.FAIL}


def test_equal_logits_prove_nothing():
    [check] = sampling.distributed(torch.arange(4).repeat(50), ANY, torch.full((4,), 0.25).double(), "", "")
    assert check.status is Status.VACUOUS


@pytest.mark.parametrize("name, numerics", [("default", "fp32"), ("default", "native"), ("qwen2", "fp32")])
def test_green_on_sound_models(profiles, name, numerics):
    checks, _ = execute(probe_named("sampling")(), open_subject(profiles / name, "ours", numerics))
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS]
    assert {c.part for c in checks} == {
        "temperature",
        "top-p",
        "generation",
        "seed",
        "greedy choice",
        "rejection sampling",
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_fault_is_named(profiles, fault):
    found = look(fault, Bench(profiles, "cpu", probe="sampling")).found
    assert found.caught and found.word in fault.parts, found


@pytest.mark.few(each=lambda p: p["fault"].parts)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_fault_is_seen_on_a_gqa_model(profiles, tmp_path, fault):
    site = Site(shutil.copytree(profiles / "qwen2", tmp_path / "copy"))
    try:
        fault.plant(site)
        checks, _ = execute(probe_named("sampling")(), open_subject(site.checkpoint, "ours"))
    finally:
        site.undo()
    assert any(c.status is Status.FAIL for c in checks)
