"""What is compiled ahead is what `backend_matrix` calls."""

import pickle

import pytest
import torch

from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import OPERATIONS
from dsv4.probes import machine
from dsv4.probes.audit import open_subject
from dsv4.probes.catalogue import backend_matrix
from dsv4.probes.result import Status
from dsv4.probes.scenes import compile_ahead
from dsv4.probes.scenes.compile_ahead import TURNS, Piece, pieces, run_piece


def test_every_operation_and_composition_is_a_piece_for_each_turn_and_dtype():
    found = pieces((torch.float32, torch.bfloat16), (OPERATIONS, COMPOSITIONS))
    assert len(found) == len(set(found)) == 2 * TURNS * (len(OPERATIONS) + len(COMPOSITIONS))
    assert {p.name for p in found[:8]} <= set(compile_ahead.HEAVY) <= {p.name for p in found}


def test_the_pieces_of_an_operation_make_the_calls_of_the_probe(golden_path):
    subject = open_subject(golden_path, "ours", "fp32", "cpu")
    config = pickle.loads(pickle.dumps(subject.config))  # as a process is given it
    threads = torch.get_num_threads()
    try:
        done = {
            name: sum(run_piece(config, Piece(name, torch.float32, t), "cpu", "cpu", 0) for t in range(TURNS))
            for name in ("rms_norm", "experts", "route_scored")
        }
        # fails, and says nothing
        assert run_piece(config, Piece("rms_norm", torch.float32, 2), "cpu", "nowhere", 0) == 0
    finally:
        torch.set_num_threads(threads)
    checks = backend_matrix.BackendMatrix().run(subject)
    for name, calls in done.items():
        mine = [c for c in checks if c.part == name and c.source != "nothing to compare"]
        assert calls == len(mine) > 0 and all(c.status is Status.PASS for c in mine), name


def test_processes_make_all_calls(golden_path, monkeypatch):
    """Two processes that import everything: 6 s."""
    subject = open_subject(golden_path, "ours", "fp32", "cpu")
    monkeypatch.setattr(
        compile_ahead,
        "pieces",
        lambda dtypes, tables: [Piece(n, torch.float32, 1) for n in ("rms_norm", "route_scored")],
    )
    here = sum(
        run_piece(subject.config, Piece(n, torch.float32, 1), "cpu", "cpu", 0) for n in ("rms_norm", "route_scored")
    )
    assert compile_ahead.compile_ahead([subject.config], (torch.float32,), "cpu", "cpu", 0, jobs=2) == here > 0
    monkeypatch.setattr(compile_ahead, "parent_process", lambda: object())
    assert compile_ahead.compile_ahead([subject.config], (torch.float32,), "cpu", "cpu", 0, jobs=2) == 0


@pytest.mark.parametrize(
    ("said", "most"), [("100000 100000", 1), ("20000 100000", 1), ("max 100000", 64), ("", 64), (None, 64)]
)
def test_a_container_s_share_of_a_host_is_what_may_be_used(tmp_path, monkeypatch, said, most):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda who: set(range(64)))
    if said is not None:
        (tmp_path / "cpu.max").write_text(said)
    assert machine.usable_processors(tmp_path / "cpu.max") == most
