"""A recorded run is green if it is sound, and red at the right layer and point if not, by points, selection and
path."""

import pytest
import torch

from dsv4.probes.catalogue.recorded import Recorded
from dsv4.probes.compare import tokens
from dsv4.probes.probe import execute
from dsv4.probes.report import json_report
from dsv4.probes.result import Status, worst
from dsv4.probes.subject import POINTS, Subject
from dsv4.probes.subjects.dump import DumpSubject, write_dump
from dsv4.probes.subjects.ours import OurSubject
from dsv4.probes.subjects.record import record
from tests.probes.test_bisect import Other, comb, gate_bias, indexer_compressor, kv_norm, lowest_scores, rope_base

T = 300


def checks_of(subject, official, tmp_path, points=tuple(POINTS)):
    file, _ = record(subject, tokens(subject, T, 0), list(points), tmp_path / "run.safetensors")
    checks, _ = execute(Recorded(), DumpSubject(file, official))
    return checks


@pytest.mark.parametrize("numerics", ["fp32", "native", "qat"])
def test_a_sound_run_is_green(official, tmp_path, numerics):
    checks = checks_of(OurSubject(official, numerics), official, tmp_path)
    assert worst(checks) is Status.PASS, [c for c in checks if c.status is not Status.PASS]
    paths = {c.where: c.measured for c in checks if c.name == "path"}
    kinds = ("window only", "selected", "all", "selected", "all")
    assert paths == {f"layer {i}": kind for i, kind in enumerate(kinds)}
    assert all(c.source and c.samples and c.part for c in checks)


@pytest.mark.few("plant", plant=[rope_base, lowest_scores, gate_bias])
@pytest.mark.parametrize(
    "plant,layer,part,point",
    [
        (kv_norm, 2, "window rows", "kv_window"),
        (rope_base, 3, "queries", "q_after_rope"),
        (comb, 2, "experts", "ffn_out"),
        (indexer_compressor, 3, "indexer keys", "index_keys"),
        (lowest_scores, 3, "selection", "selection"),
        (gate_bias, 4, "experts", "ffn_out"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_a_faulty_run_is_red_where_the_fault_is(official, tmp_path, plant, layer, part, point):
    subject = OurSubject(official)
    plant(subject.model.layers)
    failed = [c for c in checks_of(subject, official, tmp_path) if c.status is Status.FAIL]
    assert (
        {c.where for c in failed} == {f"layer {layer}"} and failed[0].part == part and failed[0].name.startswith(point)
    )


def window_only(attn):
    """The motivating failure: the indexer says what it selects, and attention ignores it."""
    attend = attn.op.sparse_attention
    only = lambda q, window, index, entries, picks, *rest: attend(q, window, index, None, None, *rest[:-1], False)
    attn.op = Other(attn.op, sparse_attention=only)


def all_entries(attn):
    real = attn.indexer.forward
    attn.indexer.forward = lambda x, qr, step, cache: (real(x, qr, step, cache), cache.index.entries.all_visible(step))[
        1
    ]


@pytest.mark.parametrize(
    "plant,path", [(window_only, "window only"), (all_entries, None)], ids=["window only", "all entries"]
)
def test_the_path_of_a_run(official, tmp_path, plant, path):
    subject = OurSubject(official)
    plant(subject.model.layers[1].attn)
    failed = [c for c in checks_of(subject, official, tmp_path) if c.status is Status.FAIL]
    assert {c.where for c in failed} == {"layer 1"}
    if path is None:  # it attends to what it says it selects, which is too much
        assert [c.part for c in failed] == ["selection"]
    else:
        assert [c.measured for c in failed if c.name == "path"] == [path] and failed[-1].part == "compressed entries"


def test_what_was_not_recorded_is_no_evidence(official, tmp_path):
    checks = checks_of(OurSubject(official), official, tmp_path, ("kv_window", "attn_out"))
    assert {c.status for c in checks} == {Status.PASS, Status.VACUOUS}  # of layer 0 the streams before it are known
    assert {c.where for c in checks if c.status is Status.PASS} == {"layer 0"}
    ids = torch.zeros(1, 5, dtype=torch.long)
    empty = write_dump(OurSubject(official).run(ids), ids, tmp_path / "empty.safetensors", {})
    assert worst(execute(Recorded(), DumpSubject(empty, official))[0]) is Status.VACUOUS
    assert worst(execute(Recorded(), Subject())[0]) is Status.VACUOUS


def test_a_dump_on_the_command_line(run, official, tmp_path):
    file = tmp_path / "their run.safetensors"
    assert run("record", official, "--tokens", 80, "--out", file)[0] == 0
    code, err = run(
        official, "--subject", file, "--probe", "recorded", "--probe", "config_ledger", "--out", tmp_path / "out"
    )
    assert code == 0 and "PASS     config_ledger" in err and "recorded" in err
    report = json_report.load(next((tmp_path / "out").glob("*.json")))
    assert report["provenance"]["recorded"]["name"] == "their run.safetensors"
    for name in (f"dump:{file}", str(file)):
        assert run(official, "--subject", name, "--probe", "isolation")[0] == 2  # one recorded run has no neighbours
    code, err = run(official, "--subject", tmp_path / "absent.safetensors")
    assert code == 2 and "no dump that can be read" in err and len(err.strip().splitlines()) == 1


def test_an_audit_of_a_dump_asks_what_a_dump_can_be_asked(run, official, tmp_path):
    """Without --probe, `recorded` is among the probes of a dump, and of nothing else."""
    from dsv4.probes.audit import audit, open_subject

    file = tmp_path / "run.safetensors"
    run("record", official, "--tokens", 20, "--out", file)
    names = lambda kind: [s.probe for s in audit(open_subject(official, kind), budget=-1.0).sections]
    assert names(str(file))[-1] == "recorded" and "recorded" not in names("files")


def test_the_path_is_told_where_the_paths_are_apart_and_not_at_the_end(official, tmp_path, monkeypatch):
    """For the last 64 queries every path gives what the specified one gives."""
    from dsv4.probes.catalogue import recorded
    from dsv4.probes.oracle import kinds

    def alike(layer, points, real=recorded.paths):
        outs = real(layer, points)
        for out in outs.values():
            out[:, -64:] = outs[kinds.PATHS[layer.ratio]][:, -64:]
        return outs

    monkeypatch.setattr(recorded, "paths", alike)
    found = [c for c in checks_of(OurSubject(official), official, tmp_path) if c.name == "path"]
    assert len(found) == 5 and {c.status for c in found} == {Status.PASS}
