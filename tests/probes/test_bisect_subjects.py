"""Bisection of transformers' model and of recorded runs, other references than the oracle, and the command."""

from xml.etree import ElementTree

import pytest

from dsv4.probes.blame.bisect_report import sentence
from dsv4.probes.compare import tokens
from dsv4.probes.report import json_report
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.dump import DumpSubject
from dsv4.probes.subjects.ours import OurSubject
from dsv4.probes.subjects.record import record
from dsv4.probes.subjects.transformers import TransformersSubject
from tests.probes.test_bisect import T, bisected, gate_bias, kv_norm


@pytest.fixture
def theirs(official):
    return TransformersSubject(official)


def their_comb(layers):
    layers[2].attn_hc.register_forward_hook(lambda _, args, out: (out[0], out[1].transpose(-1, -2), out[2]))


def their_indexer(layers):
    layers[3].self_attn.compressor.indexer.kv_proj.weight.data.normal_(0, 0.1)


def their_rope(layers):
    layers[3].self_attn.rope_layer_type = "main"


def their_experts(layers):
    layers[1].mlp.experts.down_proj.data[:, 5] = 0


@pytest.mark.few("plant", plant=[their_rope, None])
@pytest.mark.parametrize(
    "plant,layer,point,module",
    [
        (their_comb, 2, "ffn_out", "layers.2.hc_attn"),
        (their_rope, 3, "q_after_rope", "layers.3.attn.rope"),
        (their_indexer, 3, "index_keys", "layers.3.attn.indexer.compressor"),
        (their_experts, 1, "ffn_out", "layers.1.ffn.experts"),
        (None, None, None, None),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_transformers(theirs, plant, layer, point, module):
    if plant is None:
        return _clean(bisected(theirs))
    plant(theirs.model.model.layers)
    _, verdict = bisected(theirs)
    assert (verdict.first.layer, verdict.first.point, verdict.module, verdict.confirmed) == (layer, point, module, True)


def _clean(result):
    found, verdict = result
    assert verdict is None and all(r.found for r in found.layers), verdict and sentence(found, verdict)


@pytest.mark.parametrize("point", ["kv_window", "ffn_out"])
def test_a_dump_is_bisected_but_not_confirmed(official, tmp_path, point):
    subject = OurSubject(official)
    (kv_norm if point == "kv_window" else gate_bias)(subject.model.layers)
    file, _ = record(subject, tokens(subject, T, 0), list(POINTS), tmp_path / "run.safetensors")
    found, verdict = bisected(DumpSubject(file, official))
    assert (verdict.first.layer, verdict.first.point) == ((2, point) if point == "kv_window" else (4, point))
    assert not verdict.confirmed and "a recorded run cannot be changed" in sentence(found, verdict)


@pytest.mark.few(kind=["ours"])
@pytest.mark.parametrize("kind", ["transformers", "ours", "dump"])
def test_other_references(brief_official, tmp_path, kind):
    """transformers, this project's model or a dump instead of the oracle: sound ones agree, and a fault is found.

    Up to 6 s: a sound model and a faulty one are bisected, and transformers is imported first.
    """
    reference = TransformersSubject(brief_official) if kind == "transformers" else OurSubject(brief_official)
    if kind == "dump":
        file, _ = record(reference, tokens(reference, T, 0), list(POINTS), tmp_path / "run.safetensors")
        reference = DumpSubject(file, brief_official)
    _clean(bisected(OurSubject(brief_official), reference))
    broken = OurSubject(brief_official)
    kv_norm(broken.model.layers)
    _, verdict = bisected(broken, reference)
    assert (verdict.first.layer, verdict.first.point) == (2, "kv_window")
    assert verdict.confirmed == (kind != "dump")


def test_points_that_were_not_recorded_are_left_out(official, tmp_path):
    """A dump of attention alone: nothing after it is judged, and nothing is called clean that was not seen."""
    subject = OurSubject(official)
    file, _ = record(
        subject, tokens(subject, T, 0), ["attn_in", "kv_window", "attn_out"], tmp_path / "some.safetensors"
    )
    found, verdict = bisected(DumpSubject(file, official))
    assert verdict is None and {d.point for r in found.layers[1:] for d in r.found} == {"kv_window", "attn_out"}
    assert all(r.accumulated is None for r in found.layers)


# ---- the command -----------------------------------------------------------------------------


def test_the_command(run, official, tmp_path):
    code, err = run("bisect", official, "--tokens", 60, "--out", tmp_path)
    assert code == 0 and "nothing above the noise floor" in err
    [plot] = tmp_path.glob("*.svg")
    ElementTree.parse(plot)
    report = json_report.load(next(tmp_path.glob("*.json")))
    assert report["provenance"]["about"]["tokens"] == 60 and plot.name in next(tmp_path.glob("*.md")).read_text()
    file = tmp_path / "run.safetensors"
    assert run("record", official, "--subject", "ours:native", "--tokens", 60, "--out", file)[0] == 0
    assert run("bisect", official, "--subject", file)[0] == 0
    assert run("bisect", official, "--subject", "ours:native", "--reference", file)[0] == 0


def test_layers_beyond_the_budget_are_no_evidence(run, official):
    assert run("bisect", official, "--tokens", 30, "--budget", "0.000001s")[0] == 2


@pytest.mark.parametrize(
    "args,message",
    [
        (("bisect", "--subject", "files"), "runs nothing"),
        (("bisect", "--subject", "nobody"), "subject 'nobody' is unknown"),
        (("bisect", "--subject", "ours:fp7"), "numerics 'fp7' is unknown"),
        (("bisect", "--tokens", "0"), "--tokens is 0"),
        (("bisect", "--reference", "absent.safetensors"), "no dump that can be read"),
        (("bisect", "--text", "absent.txt"), "cannot read"),
        (("record", "--out", "run.bin"), "ends in .safetensors"),
        (("record", "--out", "run.safetensors", "--subject", "files"), "nothing to record"),
        (("record", "--out", "run.safetensors", "--point", "nonsense"), "'nonsense' is unknown"),
    ],
)
def test_wrong_input_is_one_line_and_2(run, official, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    code, err = run(args[0], official, *args[1:])
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and not list(tmp_path.glob("run*"))
