"""The training backend under audit: green as it is, every fault of it named, and refused where it has no cache."""

import pytest

from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.audit import open_subject
from dsv4.probes.faults import catalogue, profile
from dsv4.probes.probe import applying, available, execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.scenes.training_cases import CASES
from dsv4.probes.selftest import run as selftest
from dsv4.probes.selftest.run import Bench, look
from tests import checkpoints

FAULTS = [m.name for m in catalogue() if m.backend == "training"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(profile.write(tmp_path_factory.mktemp("profiles") / "default").parent, "cpu")


@pytest.fixture(scope="module")
def subject(official):
    return open_subject(official, "ours", "fp32", "training")


def test_it_is_green_and_tells_every_point_of_every_layer(subject):
    checks, _ = execute(probe_named("training")(), subject)
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS][:3]
    for layer in range(subject.config.num_hidden_layers):
        names = {c.name.partition(" ")[0] for c in checks if c.where == f"layer {layer}"}
        assert {"q_after_rope", "kv_window", "attn_out", "ffn_out", "streams"} <= names
    assert {"selection:", "index_scores", "compressed_kv"} <= {c.name.partition(" ")[0] for c in checks}


def test_every_operation_with_a_form_for_training_has_cases():
    every = {name for name, op in (OPERATIONS | GQA_OPERATIONS).items() if "training" in op.implementations}
    assert set(CASES) == every - {"topk_entries"}  # a choice has no derivative; the selections of a run are checked


@pytest.mark.few(name=["training mask one entry off", "training experts pass back one slot only"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(bench, monkeypatch, name):
    """In an HCA window and a few tokens; CSA layers choose among them all the same."""
    monkeypatch.setattr("dsv4.probes.catalogue.training.TOKENS", 140)
    monkeypatch.setattr(selftest, "available", lambda: ["training"])
    outcome = look(next(m for m in catalogue() if m.name == name), bench)
    assert outcome.found.caught and not outcome.left, outcome.found


def test_probes_of_caches_do_not_apply(subject):
    names = applying(subject, available())
    assert {"training", "config_ledger", "moe_edges", "mhc"} <= set(names)
    assert not {"schedules", "rollback", "poison", "captured", "backend_matrix", "rope"} & set(names)


@pytest.mark.parametrize("probe", ["rollback", "schedules", "memory_map"])
def test_a_probe_of_caches_is_refused_with_the_reason(run, official, probe):
    code, said = run(official, "--backend", "training", "--probe", probe)
    assert code == 2 and "keeps no cache" in said and "Error" not in said


def test_quantised_weights_are_refused_in_one_line(run, official):
    code, said = run(official, "--backend", "training", "--numerics", "native", "--probe", "training")
    assert code == 2 and "takes dense weights" in said and len(said.strip().splitlines()) == 1


def test_gqa_models_are_refused_in_one_line(run, tmp_path):
    code, said = run(profile.write(tmp_path / "gqa", "qwen2"), "--backend", "training")
    assert code == 2 and "cannot be audited" in said and len(said.strip().splitlines()) == 1


def test_a_dense_checkpoint_is_audited_in_bf16(tmp_path):
    """Values of simulated and bf16 runs are held against the tolerances of those numerics."""
    root = checkpoints.write_dense(tmp_path / "dense", {**checkpoints.SMALL, "index_n_heads": 16}, "BF16")
    checks, _ = execute(probe_named("training")(), open_subject(root, "ours", "native", "training"))
    assert not [c for c in checks if c.status in (Status.FAIL, Status.ERROR)]
