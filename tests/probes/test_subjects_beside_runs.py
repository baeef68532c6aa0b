"""What subjects offer beside runs: weights, bytes, dumps; and what they refuse."""

import pytest
import torch

from dsv4.errors import InputError
from dsv4.probes.subject import CAPABILITIES, POINTS, Capture
from dsv4.probes.subjects.dump import DumpSubject, NotRecorded, Timeline, steps_of, write_dump
from dsv4.probes.subjects.files import FilesSubject
from dsv4.probes.subjects.ours import OurSubject
from dsv4.probes.subjects.transformers import TransformersSubject
from tests.probes.test_subjects import ALL, CONFIG, CSA, HCA, T, assert_same, checkpoint, expected, ids, ours, theirs  # noqa: F401  (fixtures)

# ---- files and weights -------------------------------------------------------------------


def test_weights_by_official_name(ours, theirs):
    stored = FilesSubject(ours.files.path)
    for name in stored.files.sources:
        value = stored.weight(name)
        assert torch.equal(value, ours.weight(name)) and torch.equal(value, theirs.weight(name)), name
    for subject in (stored, ours, theirs):
        subject.weight(name).zero_()  # a copy: nothing happens to the model
        assert subject.weight(name).any()
        with pytest.raises(Exception, match="layers.9.attn.wkv"):
            subject.weight("layers.9.attn.wkv.weight")


@pytest.mark.parametrize("numerics", ["native", "fp32"])
def test_weights_of_a_quantised_checkpoint(official, numerics):
    stored, held = FilesSubject(official), OurSubject(official, numerics)
    names = [n for n in stored.files.sources if n.endswith((".weight", "ape", "_fn", "tid2eid")) and "tok_emb" not in n]
    for name in names:
        assert torch.equal(stored.weight(name), held.weight(name)), name
    assert len(names) > 100 and stored.numerics.count("+") >= 2


def test_theirs_is_built_from_a_quantised_checkpoint(official):
    ids = torch.arange(40).view(1, -1)
    a, b = OurSubject(official, "fp32"), TransformersSubject(official)
    assert b.can >= {"files", "run", "layer"} and b.config == a.config
    assert_same(a.run(ids, (25, -5, 20), ALL), b.run(ids, want=ALL))
    rounded = TransformersSubject(official, torch.bfloat16)
    layer = rounded.model.model.layers[0]
    assert (layer.mlp.gate.weight.dtype, layer.attn_hc.fn.dtype) == (torch.bfloat16, torch.float32)
    assert rounded.numerics == "bf16" and len(rounded.run(ids, want=["streams"]).points) == 5


def test_cache_bytes_are_those_allocated(ours):
    got = ours.cache_bytes(2, 256)
    assert sum(got.values()) == ours.model.new_cache(2, 256).nbytes
    assert got["layer 2", "index keys"] == 2 * 64 * CONFIG["index_head_dim"] * 4
    assert {label for label, _ in got} == {f"layer {i}" for i in range(6)}


# ---- dumps -------------------------------------------------------------------------------


def test_a_dump_answers_for_its_run(ours, ids, tmp_path):
    schedule = (100, -20, 60)
    capture = ours.run(ids, schedule, ALL)
    about = {"name": "a", "numerics": "fp32", "schedule": schedule, "commit": "abc"}
    file = write_dump(capture, ids, tmp_path / "new" / "run.safetensors", about)
    dump = DumpSubject(file, ours.files.path / "config.json")
    again = dump.run(ids, schedule, ALL)
    assert list(again.points) == list(capture.points) and torch.equal(again.logits, capture.logits)
    assert all(torch.equal(again.points[k], v) and again.points[k].dtype is v.dtype for k, v in capture.points.items())
    assert (dump.can, dump.config, dump.numerics, dump.name) == ({"recorded"}, ours.config, "fp32", "a")
    assert dump.recorded()["selection"] == (2, 4) and dump.provenance["commit"] == "abc"
    assert {p for _, p in dump.run(ids, schedule, ["streams"]).points} == {"streams"}
    for wrong in ((ids + 1, schedule), (ids[:, :-1], schedule), (ids, ()), (ids, (100, 40))):
        with pytest.raises(NotRecorded) as error:
            dump.run(*wrong)
        assert "\n" not in str(error.value)


def test_dumps_that_are_none(ours, ids, tmp_path):
    (tmp_path / "junk").write_bytes(b"junk")
    capture = ours.run(ids[:, :5], want=["streams"])
    files = [tmp_path / "junk", tmp_path / "absent"]
    for key, value in (
        ((0, "unheard of"), torch.zeros(1)),
        ((9, "streams"), capture.points[0, "streams"]),
        ((0, "streams"), torch.zeros(2, 4, 4, 64)),
        ((CSA, "compressed_kv"), torch.zeros(2, 2, 32)),
    ):
        files.append(write_dump(Capture(None, {key: value}), ids[:, :5], tmp_path / str(len(files)), {}))
    DumpSubject(write_dump(capture, ids[:, :5], tmp_path / "good", {}), ours.files.path)
    for file in files:
        with pytest.raises(InputError):
            DumpSubject(file, ours.files.path)


# ---- the interface -----------------------------------------------------------------------


def test_what_each_can(ours, theirs):
    assert ours.can <= CAPABILITIES.keys() and theirs.can == {"run", "layer", "block"}
    for subject in (ours, theirs):
        assert subject.name and subject.provenance and subject.numerics == "fp32"
    assert theirs.config.compress_ratios == ours.config.compress_ratios
    assert ours.operations["index_scores"] is not None


def test_nothing_stays_on_the_models(ours, theirs, ids):
    import transformers.models.deepseek_v4.modeling_deepseek_v4 as modeling

    kept = [dict(vars(m)) for m in ours.model.modules()]
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    for subject in (ours, theirs):
        subject.run(ids[:, :9], want=ALL)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())
    assert [vars(m).keys() for m in ours.model.modules()] == [m.keys() for m in kept]
    assert modeling.ALL_ATTENTION_FUNCTIONS is functions


def test_what_cannot_be_asked(ours, theirs, ids):
    pad_first = ids[:, :5].clone()
    pad_first[0, 0] = -1
    asked = [
        lambda: ours.run(ids, (T + 1,)),
        lambda: ours.run(ids, (100,)),
        lambda: ours.run(ids, (10, -20, 150)),
        lambda: ours.run(ids, (10, 0, 130)),
        lambda: ours.run(ids, want=["attn_mid"]),
        lambda: ours.run(pad_first),
        lambda: theirs.run(ids, (100, -10, 50)),
        lambda: theirs.run(pad_first),
        lambda: ours.attention(0, torch.zeros(2, T, 64), ids, want=["streams"]),
    ]
    for ask in asked:
        with pytest.raises(InputError) as error:
            ask()
        assert "\n" not in str(error.value)


def test_a_position_that_is_run_again_is_overwritten():
    line = Timeline(1, 4)
    line.put(0, "index_scores", torch.ones(1, 3, 2), [0])
    line.put(0, "index_scores", torch.zeros(1, 1, 1), [1])
    got = line.capture().points[0, "index_scores"]
    inf = float("-inf")
    assert got.tolist() == [[[1, 1], [0, inf], [1, 1], [inf, inf]]]
    assert steps_of(4, (3, -1, 2)) == [(0, 3), (3, -1), (2, 2)] and steps_of(4, ()) == [(0, 4)]


def test_tensors_that_transformers_does_not_have(theirs):
    """Experts of an MTP block are not those of layer 0, and scales are multiplied out."""
    for name in (
        "mtp.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.0.w1.scale",
        "layers.0.ffn.experts.0.w4.weight",
    ):
        with pytest.raises(InputError, match="holds no parameter"):
            theirs.weight(name)
    assert theirs.weight("layers.0.ffn.experts.0.w1.weight").dim() == 2


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_layers_handed_over_one_by_one_are_those_of_a_run(request, ids, kind):
    """`stream` gives what `run` gives, and `block` on the streams before a layer gives that layer again."""
    subject, seen = request.getfixturevalue(kind), {}
    whole = subject.run(ids, want=ALL)

    def see(i, points):
        assert list(points) == [p for p in POINTS if p in points]
        seen[i] = points

    logits = subject.stream(ids, ALL, see)
    assert list(seen) == list(range(CONFIG["num_hidden_layers"])) and torch.equal(logits, whole.logits)
    assert {(i, p) for i in seen for p in seen[i]} == set(whole.points)
    assert all(torch.equal(v, whole.points[i, p]) for i in seen for p, v in seen[i].items())
    for i in (CSA, HCA):
        again = subject.block(i, seen[i - 1]["streams"], ids, ALL).points
        assert all(torch.equal(v, seen[i][p]) for (_, p), v in again.items()) and len(again) == len(seen[i])


def test_a_dump_hands_over_its_layers(ours, ids, tmp_path):
    capture, seen = ours.run(ids, (100, 40), ALL), {}
    dump = DumpSubject(
        write_dump(capture, ids, tmp_path / "run", {"schedule": (100, 40)}), ours.files.path / "config.json"
    )
    logits = dump.stream(ids, ALL, lambda i, points: seen.update({(i, p): v for p, v in points.items()}))
    assert torch.equal(logits, capture.logits) and all(torch.equal(seen[k], v) for k, v in capture.points.items())
    with pytest.raises(NotRecorded):
        dump.stream(ids + 1, ALL, lambda i, points: None)
