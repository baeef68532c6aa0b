"""Faults that a probe was blind to until it was made to see them: each guards one check, planted by its mutation."""

import shutil

import pytest
import torch

from dsv4.loaders.files import open_checkpoint, read_header
from dsv4.loaders.layouts import canonical_sources, detect_layout
from dsv4.probes.faults import Site, catalogue
from dsv4.probes.oracle import names
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.subjects.ours import OurSubject
from dsv4.probes.subjects.transformers import TransformersSubject
from tests import checkpoints, oracle

SEEN = (  # mutation, probe, its check, a word of the part or place
    ("norms of a layer exchanged", "load_ledger", "taken from the key that means it", "norms"),
    ("gate and kv exchanged in transformers names", "load_ledger", "taken from the key that means it", "compressor"),
    ("mtp block ignored as unexpected", "load_ledger", "taken from the key that means it", "MTP"),
    ("mtp block left out of a quantised artifact", "load_ledger", "MTP block that the config announces", "MTP"),
    ("rope scaling ignored", "config_ledger", "key is read", "rope_scaling.factor"),
    ("rope scaling ignored", "config_ledger", "rotary frequencies", "base compress"),
    ("max context clamped", "config_ledger", "key is read", "max_position_embeddings"),
    ("index topk clamped while reading", "config_ledger", "differ from config.json", "index_topk"),
    ("a stated option that nothing obeys", "config_ledger", "effective value", "norm_topk_prob"),
    ("mscale in the softmax", "config_ledger", "values that modules took", "softmax scale"),
    ("activation scale rounded down", "format_decode", "simulated FP8 of activations", "FP8 simulation"),
    ("rotated dims of kv quantised too", "format_decode", "simulated FP8 of main KV", "FP8 simulation"),
    ("fp4 simulation a stub", "format_decode", "simulated FP4", "FP4 simulation"),
    ("hadamard missing", "format_decode", "Hadamard", "Hadamard"),
    ("inputs of fp8 linears not quantised", "dtype_ledger", "inputs of FP8 and FP4", "layers.0.attn.wq_a"),
    ("mscale in cos and sin", "rope", "equal the oracle's", "rotation of queries"),
    ("positions counted from the start of a chunk", "rope", "the rotation that explains it", "rotation of queries"),
    ("rows beyond the first rotated wrongly in decode", "rope", "turn by the right angles", "rotation of queries"),
    ("decode pools otherwise than prefill", "rope", "equal the oracle's", "compressed entries"),
    ("index keys not cached", "index_oracle", "index scores equal", "indexer scores"),
    ("indexer inert for a single token", "index_oracle", "selection recall", "decode"),
    ("index keys not written in decode", "index_oracle", "index keys equal", "decode"),
    ("keys of the first row for every row", "index_oracle", "index scores equal", "row 1"),
    ("scores zero beyond a length", "index_oracle", "scores of every entry", "indexer scores"),
    ("relu after the sum over heads", "index_oracle", "index scores equal", "indexer scores"),
    ("index keys off by one row", "index_oracle", "index scores equal", "indexer keys"),
    ("index keys read in another layout", "index_oracle", "index scores equal", "indexer keys"),
    ("weights from the token before", "index_oracle", "index scores equal", "indexer weights"),
    ("rows of scores lost to nan", "index_oracle", "index scores equal", "indexer scores"),
)


@pytest.fixture(scope="module")
def mutations():
    return {m.name: m for m in catalogue()}


@pytest.mark.few("probe")
@pytest.mark.parametrize("name, probe, check, word", SEEN, ids=lambda value: str(value).replace(" ", "_"))
def test_planted_fault_is_seen_by_the_check_that_was_added(official, tmp_path, mutations, name, probe, check, word):
    site = Site(shutil.copytree(official, tmp_path / "copy"))
    try:
        mutations[name].plant(site)
        subject = OurSubject(site.checkpoint, mutations[name].numerics)
        for change in site.loaded:
            change(subject)
        found = [c for c in execute(probe_named(probe)(), subject)[0] if c.status is Status.FAIL]
    finally:
        site.undo()
    mine = [c for c in found if check in c.name]
    assert any(word in f"{c.part} {c.at}" for c in mine), found


def test_weights_and_scores_that_are_right_are_not_blamed(official, tmp_path, mutations):
    """Only the second row is wrong: everything about the first stays green."""
    site = Site(shutil.copytree(official, tmp_path / "copy"))
    try:
        mutations["keys of the first row for every row"].plant(site)
        checks = execute(probe_named("index_oracle")(), OurSubject(site.checkpoint))[0]
    finally:
        site.undo()
    assert all(c.status is Status.PASS for c in checks if "row 1" not in c.at)


@pytest.mark.parametrize("probe", ["config_ledger", "rope"])
def test_another_implementation_is_no_exception(official, probe):
    """transformers writes defaults into the config that it is given, and takes one row in steps of all sizes."""
    checks = execute(probe_named(probe)(), TransformersSubject(official, torch.float32))[0]
    assert not [c for c in checks if c.status in (Status.FAIL, Status.ERROR)], checks


# ---- the oracle's table of names ---------------------------------------------------------------


def test_names_of_every_layout_are_those_of_the_loader(official, tmp_path):
    model = oracle.randomised(oracle.TINY)
    saved = oracle.save_in_memory_names(model, oracle.TINY, tmp_path)
    model.save_pretrained(tmp_path / "saved")
    for root in (official, saved, tmp_path / "saved", checkpoints.write_dense(tmp_path / "dense")):
        files = open_checkpoint(root)
        sources = canonical_sources(files.tensors, detect_layout(files.tensors))
        found = {}
        for shard in files.shards:
            for key, (_, shape, *_) in read_header_of(shard).items():
                found |= names.places(key, shape)
        assert {n: place[0] for n, place in found.items()} == {n: s.tensor.key for n, s in sources.items()}
        size = lambda s: s.tensor.nbytes // max(1, torch.Size(s.tensor.shape).numel())
        assert {n: place[1] for n, place in found.items()} == {n: s.start // size(s) for n, s in sources.items()}


def read_header_of(shard):
    return {key: (t.dtype, t.shape) for key, t in read_header(shard).items()}


@pytest.mark.parametrize(
    "key, official_name",
    [
        ("model.layers.3.self_attn.compressor.indexer.kv_proj.weight", "layers.3.attn.indexer.compressor.wkv.weight"),
        ("model.layers.3.self_attn.compressor.indexer.kv_norm.weight", "layers.3.attn.indexer.compressor.norm.weight"),
        ("model.layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight"),
        ("model.layers.3.self_attn.kv_norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", "layers.3.ffn.shared_experts.w2.weight"),
        ("model.layers.3.ffn_hc.fn", "layers.3.hc_ffn_fn"),
        ("model.hc_head.hc_base", "hc_head_base"),
        ("lm_head.weight", "head.weight"),
        ("model.layers.3.self_attn.sinks", "layers.3.attn.attn_sink"),
        ("mtp.0.e_proj.scale", "mtp.0.e_proj.scale"),
    ],
)
def test_a_key_means_what_the_specification_says(key, official_name):
    assert names.official(key) == official_name
