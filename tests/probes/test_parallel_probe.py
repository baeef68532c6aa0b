"""The probe of ranks that hold a model together: green where sound, and each planted fault named where it is."""

import shutil

import pytest
import torch

from dsv4.probes.catalogue import parallel
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute, left_out
from dsv4.probes.result import Status
from dsv4.probes.scenes import shared_model
from dsv4.probes.subjects.opening import open_ours

RED = (Status.FAIL, Status.ERROR)
FOLLOWS = {"attention", "MoE", "logits", "greedy text"}  # of whatever went wrong before
NAMED = {  # fault → the parts that are red, but those that follow
    "scales of a cut block are the first ones": {
        "cut queries",
        "queries",
        "groups",
        "output projection",
        "shared expert",
    },
    "every rank has the sinks of the first heads": {"cut sink", "heads and sinks"},
    "queries of a rank begin a head late": {"cut queries", "queries"},
    "a rank has its groups in reverse order": {"groups"},
    "columns of wo b are dealt out in turn": {"cut output projection", "output projection"},
    "a ranks experts are counted from one later": {"routed experts"},
    "experts of other ranks are not masked": {"routed experts"},
    "every rank counts the shared expert": {"shared expert"},
    "experts of one rank are clamped otherwise": {"routed experts"},
    "columns of w2 are another ranks": {"cut experts", "routed experts", "shared expert"},
    "scales of w2 are another ranks": {"cut experts", "routed experts", "shared expert"},
    "the up half begins at another rows": {"cut experts", "routed experts", "shared expert"},
    "the routed scaling factor is shared out": {"router"},
    "two ranks hold the same experts": {"ledger", "cut experts", "routed experts"},
    "ranks after the first route without bias": {"replicated router", "bits of router"},
    "attention is not summed over ranks": {"sum of attention", "bits of attention"},
    "experts are not summed over ranks": {"sum of MoE", "bits of MoE"},
    "the embedding is not summed over ranks": {"embedding", "bits of embedding"},
    "attention is summed over ranks twice": {"sum of attention"},
    "each rank begins a sum with its own part": {"bits of attention", "bits of MoE"},
    "sums read what other ranks gave before": {
        "sum of attention",
        "bits of attention",
        "sum of MoE",
        "bits of MoE",
    },
    "padding of the last shard wins": {"head"},
    "padding of the last shard is chosen": {"greedy text"},
    "tokens of another part are not masked": {"embedding"},
    "each rank joins its own logits first": {"bits of head", "bits of logits"},
    "selections of ranks are joined in reverse": {"selection", "heads and sinks"},
    "a rank keeps to its own selection": {"selection", "bits of selection", "heads and sinks"},
    "a replicated norm differs on one rank": {"replicated norms"},
    "one rank is given another token": {"tokens of ranks"},
    "each rank draws by another seed": {"tokens of ranks"},
    "the last ranks sum is left out of the total": {"drawn tokens"},
    "a rank takes its own sum for the total": {"drawn tokens"},
    "top p is a share of a ranks own sum": {"drawn tokens"},
    "one rank chooses the second best token": {"tokens of ranks"},
}
BY_WIDTH = {name for name in NAMED if "w2 are another" in name or "up half" in name}
QUICK = ["every rank has the sinks of the first heads", "attention is summed over ranks twice"]
BY_NAME = {m.name: m for m in catalogue() if m.probes[:1] == ("parallel",)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return profile.write(tmp_path_factory.mktemp("profile") / "ranks", "ranks")


def red(subject) -> set[str]:
    """Parts without the probe's name."""
    return {c.part.removeprefix("parallel, ") for c in execute(parallel.Parallel(), subject)[0] if c.status in RED}


def test_every_fault_is_listed():
    assert set(NAMED) == set(BY_NAME) and len(NAMED) >= 14


@pytest.mark.few(fault=QUICK)
@pytest.mark.parametrize("fault", NAMED, ids=lambda name: name.replace(" ", "-"))
def test_a_fault_is_named_and_nothing_before_it(ranks, tmp_path, monkeypatch, fault):
    # two ranks have one order of a sum only
    way = (4 if fault == "each rank begins a sum with its own part" else 2, fault not in BY_WIDTH)
    monkeypatch.setattr(parallel, "WAYS", (way,))
    site = Site(shutil.copytree(ranks, tmp_path / "copy"))
    try:
        BY_NAME[fault].plant(site)
        found = red(open_ours(site.checkpoint))
    finally:
        site.undo()
    assert found - (FOLLOWS - NAMED[fault]) == NAMED[fault]


@pytest.mark.few(numerics=["native"])
@pytest.mark.parametrize(
    "numerics, backend, caches",
    [
        ("fp32", "reference", ("auto", "auto")),
        ("native", "cpu", ("auto", "auto")),
        ("qat", "cpu", ("fp8", "fp4")),
        ("qat:fp32", "cpu", ("auto", "auto")),
    ],
)
def test_ranks_are_green(ranks, numerics, backend, caches):
    subject = open_ours(ranks, numerics, backend, "cpu", *caches)
    found, _ = execute(parallel.Parallel(), subject)
    assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS]
    parts = {c.part.removeprefix("parallel, ") for c in found}
    stages = {stage.name for stage in (*shared_model.STAGES, *shared_model.AROUND)}
    assert (
        stages | {"ledger", "replicated", "cut", "sum of MoE", "sum of attention", "tokens of ranks", "drawn tokens"}
        <= parts
    )
    assert {c.where.partition(",")[0] for c in found} == {"2 ranks", "2 ranks by width", "4 ranks"}


def test_what_cannot_be_shared_is_vacuous(ranks, tmp_path):
    found, _ = execute(parallel.Parallel(), open_ours(profile.write(tmp_path / "default", "default")))
    assert [(c.status, c.note) for c in found] == [
        *[(Status.VACUOUS, "o_groups is 3, which 2 ranks cannot share equally")] * 2,
        (Status.VACUOUS, "num_attention_heads is 6, which 4 ranks cannot share equally"),
    ]
    found, _ = execute(parallel.Parallel(effort=1e-6), open_ours(ranks))
    assert [c.status for c in found] == [Status.VACUOUS] and "would be loaded again" in found[0].note
    gqa = open_ours(profile.write(tmp_path / "qwen2", "qwen2"))
    assert "it takes DeepSeek-V4 layers apart" in left_out(parallel.Parallel(), gqa)


def test_logits_of_another_width_are_told():
    found = parallel.stage_check("head", "head", torch.zeros(3, 8), torch.zeros(3, 7), "2 ranks", torch.float32)
    assert found.status is Status.FAIL and "[3, 8]; expected [3, 7]" in found.note
