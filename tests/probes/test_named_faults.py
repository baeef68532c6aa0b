"""Faults of selection, attention, hyper-connections and experts are found by the probe that is theirs, which names the
part."""

import shutil

import pytest
import torch

from dsv4.probes.compare import attended, heavy_tailed, oracle_of, points_at
from dsv4.probes.faults import Site, catalogue
from dsv4.probes.oracle.attention import attention_layer
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.subjects.ours import OurSubject

FAULTS = [  # mutation, probe, the part it must name, where
    ("missing picks read entry 0", "influence", "absent keys", "layer 1, one step"),
    ("entry visible one token late", "influence", "visibility", "layer 2, one step"),
    ("only entries of the last chunk", "influence", "selection", "layer 1, chunks"),
    ("selection of another row", "influence", "selection", "layer 1, one step"),
    ("entries of the first row", "influence", "rows of the batch", "layer 3, one step"),
    ("entries masked off in prefill", "influence", "compressed entries", "layer 1, one step"),
    ("csa layers take the window path", "influence", "compressed entries", "layer 1, one step"),
    ("window one too long", "influence", "window", "layer 1, one step"),
    ("sink dropped with one query", "influence", "sink", "layer 0, decode, one row"),
    ("softmax scale with mscale", "influence", "softmax scale", "layer 2, decode"),
    ("values without rotated dims", "influence", "values", "layer 0, one step"),
    ("output groups in reverse", "influence", "output projection", "layer 4, one step"),
    ("no mask without entries", "edges", "HCA attention", "3 queries, 0 entries"),
    ("lanes beyond the selection are read", "edges", "sparse attention", "70 queries, 7 entries"),
    ("absent rows in the denominator", "edges", "absent keys", "1 queries, 1 entries"),
    ("sink counted twice", "edges", "sink", "1 queries, 64 entries, all keys present"),
    ("top k ends at a width", "edges", "selection", "40000 entries"),
    ("at most 512 picks", "edges", "selection", "k = 1024"),
    ("nan scores select garbage", "edges", "selection", "70 queries"),
    ("comb transposed", "mhc", "mHC comb", "layer 1"),
    ("output goes to one stream", "mhc", "mHC post", "layer 3"),
    ("input is the mean of the streams", "mhc", "mHC pre", "layer 2"),
    ("embedding in one stream", "mhc", "embedding", "layer 0"),
    ("sinkhorn without eps", "mhc", "Sinkhorn", "eps 0.01"),
    ("pre without eps", "mhc", "mHC pre", "1 tokens"),
    ("wrong at many tokens", "mhc", "mHC post", "300 tokens"),
    ("ffn norm twice", "moe_edges", "ffn_norm", "layer 2"),
    ("one expert fewer", "moe_edges", "routing weights", "layer 0"),
    ("token ids pass through bf16", "moe_edges", "hash table", "layer 1"),
    ("experts one off", "moe_edges", "expert order", "layer 4"),
    ("shared expert dropped", "moe_edges", "shared expert", "layer 3"),
]


@pytest.mark.few("probe", probe=["edges", "mhc", "moe_edges"])  # `influence` is slow: red in test_attention_probes
@pytest.mark.parametrize("fault, probe, part, where", FAULTS, ids=lambda value: str(value).replace(" ", "-"))
def test_a_fault_is_named(official, tmp_path, fault, probe, part, where):
    mutation = next(m for m in catalogue() if m.name == fault)
    site = Site(shutil.copytree(official, tmp_path / "copy"))
    try:
        mutation.plant(site)
        subject = OurSubject(site.checkpoint, mutation.numerics)
        for change in site.loaded:
            change(subject)
        checks, _ = execute(probe_named(probe)(), subject)
    finally:
        site.undo()
    found = {(c.part, c.at) for c in checks if c.status in (Status.FAIL, Status.ERROR)}
    assert any(part in named and where in at for named, at in found), found


@pytest.mark.few(probe=["edges", "mhc", "moe_edges"])
@pytest.mark.parametrize("numerics", ["native", "qat", "qat:fp32"])
@pytest.mark.parametrize("probe", ["influence", "edges", "mhc", "moe_edges"])
def test_green_in_other_numerics(official, probe, numerics):
    checks, _ = execute(probe_named(probe)(), OurSubject(official, numerics))
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_some_queries_of_the_oracle_are_those_of_all(official, layer):
    subject = OurSubject(official)
    x, at = heavy_tailed(subject, 60, 0), torch.tensor([0, 7, 31, 59])
    own = oracle_of(subject).layer(layer)
    wanted, found = attention_layer(own, x.double()), points_at(own, x, at)
    _, masses = attended(own, found, found.get("selection"))
    assert torch.allclose(found["q_after_rope"], wanted["q_after_rope"][:, at], atol=1e-12)
    assert torch.allclose(masses["sink"], wanted["masses.sink"][:, at], atol=1e-12)
    if layer == 1:
        assert torch.equal(found["selection"], wanted["selection"][:, at])
