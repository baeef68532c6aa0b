"""config.json by the oracle's own table: its three forms, its rotations, and what depends on the reader no more."""

import json
import math

import pytest
import torch

from dsv4.loaders import config_files
from dsv4.probes.compare import oracle_of
from dsv4.probes.faults import catalogue, profile, readings
from dsv4.probes.faults.readings import FORMS
from dsv4.probes.oracle import Oracle, OracleConfig
from dsv4.probes.oracle.config import Rotation
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.selftest import run as selftest
from dsv4.probes.selftest.run import Bench, look
from dsv4.probes.subjects.files import FilesSubject
from tests import checkpoints


def in_form(root, form: str):
    """The checkpoint with its config.json in another form."""
    file = root / "config.json"
    file.write_text(json.dumps(FORMS[form](json.loads(file.read_text()))))
    return root


@pytest.mark.parametrize("form", FORMS)
def test_every_form_means_the_same(form):
    assert OracleConfig.of(FORMS[form](checkpoints.SMALL)) == OracleConfig.of(checkpoints.SMALL)


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_checkpoint_in_another_form_is_green(official, copy_of, form):
    checks, _ = execute(probe_named("config_ledger")(), FilesSubject(in_form(copy_of(official), form)))
    assert not [c for c in checks if c.status in (Status.FAIL, Status.ERROR)]
    assert {"rope_theta", "compress_rope_theta", "rope_scaling.factor", "swiglu_limit"} <= {c.where for c in checks}


def test_what_a_form_leaves_out_is_that_of_the_releases():
    raw = FORMS["inference"]({k: v for k, v in checkpoints.SMALL.items() if k not in ("rope_theta", "hc_eps")})
    config = OracleConfig.of({k: v for k, v in raw.items() if k not in ("rope_factor", "original_seq_len")})
    assert (config.swiglu_limit, config.main.theta, config.hc_eps) == (10.0, 10000.0, 1e-6)
    assert (config.compress.factor, config.compress.original) == (16, 65536)


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn without betas": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_rotations_are_those_of_transformers(scaling):
    """Of the layers that compress alone; window layers rotate by θ."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    from dsv4.probes.subjects.transformers_config import theirs

    config = OracleConfig.of({**checkpoints.SMALL, "rope_scaling": scaling})
    part = {"partial_rotary_factor": config.qk_rope_head_dim / config.head_dim}
    parameters = {name: theirs(getattr(config, name)) | part for name in ("main", "compress")}
    made = DeepseekV4Config(num_hidden_layers=1, head_dim=config.head_dim, rope_parameters=parameters, **part)
    rotary = DeepseekV4RotaryEmbedding(made)
    for name in ("main", "compress"):
        wanted = getattr(rotary, f"{name}_inv_freq").double()
        assert torch.allclose(getattr(config, name).frequencies(config.qk_rope_head_dim), wanted, rtol=1e-6)
        assert getattr(rotary, f"{name}_attention_scaling") == 1.0
    assert config.main == Rotation(10000.0)


def test_frequencies_by_hand():
    assert torch.equal(Rotation(16.0, "linear", 4.0).frequencies(4), torch.tensor([0.25, 0.0625]).double())
    llama = Rotation(1e4, "llama3", 8.0, original=2 * math.pi * 10, low=1.0, high=4.0).frequencies(4)
    assert llama.tolist() == pytest.approx([1.0, 0.01 / 8])  # ten turns are kept, a tenth of one is divided


def test_hash_layers_at_any_place_and_tied_heads_are_taken():
    raw = FORMS["transformers"](checkpoints.SMALL)
    kinds = ["moe", "hash_moe", "moe", "moe", "hash_moe"]
    config = OracleConfig.of(raw | {"mlp_layer_types": kinds, "tie_word_embeddings": True})
    assert config.hashed == (False, True, False, False, True) and config.output_weight == "embed.weight"


def test_a_tied_head_is_the_embedding(official, copy_of):
    root = copy_of(official)
    plain = Oracle.open(official)
    tied = Oracle(OracleConfig.of({**checkpoints.SMALL, "tie_word_embeddings": True}), plain.weights)
    streams = torch.randn(1, 3, 4, 128, generator=torch.Generator().manual_seed(0)).double()
    embedding, head = (plain.weights(name) for name in ("embed.weight", "head.weight"))
    hidden = torch.linalg.lstsq(head, plain.head(streams)[0].T).solution
    assert torch.allclose(tied.head(streams)[0], (embedding @ hidden).T) and root.exists()


def test_the_oracle_does_not_take_the_readers_word(official, copy_of, monkeypatch):
    """A reader that has another base and clamp gives the oracle and transformers' model no other one."""
    from dsv4.probes.subjects.transformers import TransformersSubject

    real, root = config_files._from_transformers, in_form(copy_of(official), "transformers")
    wrong = {"compress_rope_theta": 10000.0, "swiglu_limit": 3.0}
    monkeypatch.setattr(config_files, "_from_transformers", lambda raw: (real(raw)[0] | wrong, real(raw)[1]))
    theirs = TransformersSubject(root)
    assert theirs.config.swiglu_limit == 3.0  # of the reader
    assert theirs.model.config.swiglu_limit == 10.0
    assert theirs.model.config.rope_parameters["compress"]["rope_theta"] == 160000
    oracle = oracle_of(theirs)
    assert (oracle.config.swiglu_limit, oracle.config.compress.theta) == (10.0, 160000)
    red = {c.where for c in execute(probe_named("config_ledger")(), theirs)[0] if c.status is Status.FAIL}
    assert {"swiglu_limit", "compress_rope_theta"} <= red


def test_transformers_reads_an_inference_config_by_the_oracles_table(official, copy_of):
    from dsv4.probes.subjects.transformers import TransformersSubject

    root = in_form(copy_of(official), "inference")
    ids = torch.arange(40).view(1, -1)
    found, wanted = (TransformersSubject(path).run(ids).logits for path in (root, official))
    assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    for name in ("default", "qwen2"):
        profile.write(folder / name, name)
    return Bench(folder, "cpu")


@pytest.mark.parametrize("name", [m.name for m in catalogue() if m.plant.__module__ == readings.__name__])
def test_a_wrong_reading_or_writing_is_named(bench, monkeypatch, name):
    monkeypatch.setattr(selftest, "available", lambda: ["config_ledger"])
    outcome = look(next(m for m in catalogue() if m.name == name), bench)
    assert outcome.found.caught and not outcome.left, outcome.found
