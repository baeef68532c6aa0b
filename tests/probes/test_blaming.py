"""The part that a finding names: what bisect knows better, and notes that explain something or say that they do not."""

import pytest
import torch

from dsv4.probes.blame.consult import culprit, left_of
from dsv4.probes.catalogue import influence
from dsv4.probes.catalogue.moe_edges import MoEEdges
from dsv4.probes.compare import heavy_tailed, oracle_of
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute
from dsv4.probes.result import Status
from dsv4.probes.selftest import run as selftest
from dsv4.probes.selftest.run import Bench, look
from dsv4.probes.subjects.ours import OurSubject
from dsv4.probes.subjects.transformers import TransformersSubject

BLAMED = {  # fault → (probe, part)
    "index scores averaged over heads": ("index_oracle", "indexer scores"),
    "router logits clamped": ("moe_edges", "routing weights"),
    "router adds to the sum that it divides by": ("moe_edges", "routing weights"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(profile.write(tmp_path_factory.mktemp("profiles") / "default").parent, "cpu")


# Over 5 s: what is red is explained by known mistakes, each of which is tried.
@pytest.mark.few(name=["index scores averaged over heads"])
@pytest.mark.parametrize("name", BLAMED)
def test_a_fault_is_blamed_on_its_part(bench, monkeypatch, name):
    probe, part = BLAMED[name]
    monkeypatch.setattr(selftest, "available", lambda: [probe])
    found = look(next(m for m in catalogue() if m.name == name), bench).found
    assert found.caught and part in found.part, found


def test_wo_a_without_scales_is_blamed_on_the_output_projection(official):
    """By one layer of `influence`, in one step: no known mistake explains it, bisect's swap does."""
    subject, changes = OurSubject(official), Site(official)
    next(m for m in catalogue() if m.name == "wo a without its scales").plant(changes)
    for change in changes.loaded:
        change(subject)
    x = heavy_tailed(subject, influence.length(subject, 1.0), 0, rows=2)
    case = influence.choose(subject, oracle_of(subject).layer(0), 0, x, 0)
    late = [c for c in influence.path_checks(influence.run_case(case, (), "layer 0")) if "specified path" in c.name]
    assert [(c.status, c.part) for c in late] == [(Status.FAIL, "output projection")]
    assert "layers.0.attn.wo_a" in late[0].note


def test_a_mistake_that_explains_nothing_is_not_named():
    assert left_of({"sink twice": 2.0, "no sink": 1.0}, 1.0) == "no known mistake explains any of it"
    assert left_of({"sink twice": 0.25, "no sink": 1.5}, 1.0) == "left of the difference by mistake: sink twice 0.25"


def test_bisect_names_no_module_of_a_sound_layer(official):
    subject = OurSubject(official)
    assert culprit(subject, 1, "attn_out") is None
    with torch.no_grad():
        subject.model.layers[1].attn.wo_b.weight.mul_(1.5)
    part, why = culprit(subject, 1, "attn_out")
    assert part == "output projection" and "layers.1.attn.wo_b" in why


@pytest.fixture(scope="module")
def theirs(official):
    return TransformersSubject(official)


def ffn_checks(subject):
    return [c for c in execute(MoEEdges(), subject)[0] if c.name == "ffn_out is the oracle's"]


def test_experts_are_held_to_what_rounding_does(official, theirs):
    """The limit is measured, below the smallest fault that was missed (5e-5), and sound subjects are well within."""
    for subject in (OurSubject(official), theirs):
        checks = ffn_checks(subject)
        assert {c.status for c in checks} == {Status.PASS}
        assert all(c.threshold < 5e-5 and c.measured < 0.5 * c.threshold for c in checks), checks


def test_a_small_fault_of_transformers_experts_is_seen(theirs, monkeypatch):
    for layer in theirs.model.model.layers:
        gate = layer.mlp.gate
        monkeypatch.setattr(gate, "routed_scaling_factor", gate.routed_scaling_factor * (1 + 5e-5))
    assert {c.status for c in ffn_checks(theirs)} == {Status.FAIL}
