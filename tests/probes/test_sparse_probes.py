"""The probes of sparse reading, termination, chunked prefill and caches in host memory: green on sound models, and red
with the right part for each planted fault."""

import copy
import shutil
import sys

import pytest
import torch

from dsv4.kernels.block_choice import Policy
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.choice import Attention
from dsv4.probes.audit import open_subject
from dsv4.probes.catalogue.chunked_prefill import ChunkedPrefill
from dsv4.probes.catalogue.host_tier import HostTier
from dsv4.probes.catalogue.sparse_reading import MOVES, POLICIES, SparseReading, lengths_of
from dsv4.probes.catalogue.termination import LENGTHS, TILE, TerminationProbe
from dsv4.probes.faults import Site, catalogue, gqa_profiles, profile
from dsv4.probes.oracle import chunks, reading, termination
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.scenes.gqa.keep_sets import Group, judged
from dsv4.probes.scenes.gqa.steps import Tally, Watched
from dsv4.probes.scenes.gqa.stop_points import Walk, alternatives, count
from dsv4.probes.selftest.run import named, texts_of

PROBES = (SparseReading, TerminationProbe, ChunkedPrefill, HostTier)
SECTIONS = ("1.15", "1.16", "1.17", "1.18")
FAULTS = [m for m in catalogue() if m.section in SECTIONS]
TRIED = (  # here; the self-test plants them all. Those of chunks are quick
    "selector off by one block",
    "sink block lost",
    "local blocks counted from the start of a step",
    "first head chooses for its group",
    "choice of the wrong head",
    "equal blocks go to the highest",
    "summary keeps a rewound row",
    "window queries see what follows",
    "budget of another layer",
    "window not kept",
    "chosen again by every step",
    "gathered blocks without a mask",
    "prompts read sparsely",
    "termination ignores direction",
    "a row stops its neighbours",
    "termination skips the sink",
    "blocks terminated in the order of their numbers",
    "terminated although never asked to",
    "stale staging row",
    "stale entries after a rewind",
    "slot table not updated on eviction",
    "staging copies the wrong head",
    "tokens are not written through",
)
QUICK = ("sink block lost", "termination ignores direction", "fusion without scaling", "tokens are not written through")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gqa")
    return {name: gqa_profiles.write_gqa(folder / name, name) for name in gqa_profiles.GQA_PROFILES}


def opened(path, numerics="fp32", backend="auto"):
    return open_subject(path, "ours", numerics, backend)


def of(probe, subject) -> list:
    return execute(probe(), subject)[0]


# ---- sound models -------------------------------------------------------------------------


# Over 5 s: the whole probe.
@pytest.mark.few("probe")
@pytest.mark.parametrize(
    "profile, numerics, backend",
    [("qwen2", "fp32", "auto"), ("qwen2", "native", "reference"), ("llama3", "native", "auto")],
)
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_green_with_evidence_for_everything(profiles, probe, profile, numerics, backend):
    subject = opened(profiles[profile], numerics, backend)
    before = subject.model.attention
    checks = of(probe, subject)
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS][:3]
    assert all(c.samples > 0 and c.source and c.part for c in checks)
    assert subject.model.attention is before
    assert not any(layer.self_attn._forward_pre_hooks for layer in subject.model.layers), "the model is as it was"


@pytest.mark.few(probe=[SparseReading, ChunkedPrefill])
@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_layers_with_a_window_are_left_alone(profiles, probe):
    """All of them: VACUOUS. Some of them: the others are judged."""
    [check] = of(probe, opened(profiles["mistral"]))
    assert check.status is Status.VACUOUS and "window" in check.note
    checks = of(probe, opened(profiles["yarn"]))
    assert {c.status for c in checks} <= {Status.PASS, Status.VACUOUS} and sum(
        c.status is Status.PASS for c in checks
    ) > 10
    assert all("layer 1" not in c.at for c in checks)


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_too_short_a_context_is_vacuous(profiles, probe):
    subject = opened(profiles["qwen2"])
    object.__setattr__(subject.model.config, "max_position_embeddings", 180)
    checks = [c for c in of(probe, subject) if c.status is not Status.PASS]
    assert checks and {c.status for c in checks} == {Status.VACUOUS} and "the checkpoint allows 180" in checks[0].note


@pytest.mark.few(numerics=["fp32"])
@pytest.mark.parametrize("numerics, cache, index", [("fp32", "auto", "auto"), ("qat", "fp8", "fp4")])
def test_entries_of_csa_in_host_memory(official, numerics, cache, index):
    checks = of(HostTier, open_subject(official, "ours", numerics, cache=cache, index_cache=index))
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS][:3]
    assert {c.part for c in checks} == {
        "host tier, output",
        "host tier, rows in host memory",
        "host tier, staged rows",
        "host tier, traffic",
    }


def test_the_other_probes_do_not_apply_to_csa(official):
    subject = opened(official)
    for probe in PROBES[:3]:
        [check] = of(probe, subject)
        assert check.status is Status.VACUOUS and check.note


# ---- planted faults -----------------------------------------------------------------------


@pytest.mark.few(fault=[m for m in FAULTS if m.name in QUICK], each=lambda p: p["fault"].section)
@pytest.mark.parametrize(
    "fault", [m for m in FAULTS if m.section == "1.17" or m.name in TRIED], ids=lambda m: m.name.replace(" ", "-")
)
def test_a_fault_is_named_by_its_probe(profiles, tmp_path_factory, tmp_path, monkeypatch, fault):
    """Most show under the first policy that the probe tries; where one does not, all are tried."""
    path = profiles.get(fault.profile)
    if path is None:
        path = profiles[fault.profile] = profile.write(
            tmp_path_factory.mktemp("profile") / fault.profile, fault.profile
        )
    site, probe = Site(shutil.copytree(path, tmp_path / "copy")), probe_named(fault.probes[0])
    home = sys.modules[probe.__module__]
    tried = getattr(home, "POLICIES", ())
    try:
        fault.plant(site)
        for policies in (tried[:1], tried):
            monkeypatch.setattr(home, "POLICIES", policies, raising=False)
            checks = of(probe, opened(site.checkpoint, fault.numerics))
            red = [c for c in checks if c.status is Status.FAIL]
            if any(named(fault.parts, texts_of(c)) for c in red):
                break
    finally:
        site.undo()
    assert any(named(fault.parts, texts_of(c)) for c in red), [(c.name, c.part) for c in red] or "no check is red"
    assert not any(c.status is Status.ERROR for c in checks)


def test_each_technique_has_its_faults():
    assert all(sum(m.section == section for m in FAULTS) >= 10 for section in SECTIONS)
    assert {m.section for m in FAULTS if m.name in TRIED} == {"1.15", "1.16", "1.18"} and set(TRIED) <= {
        m.name for m in FAULTS
    }


# ---- what they judge by -------------------------------------------------------------------


def test_scenarios_reach_what_matters():
    """Rows with more distant blocks than are kept; a step over a border of blocks; rewinds over one; tiles enough for a
    patience."""
    for policy in POLICIES:
        far, near, short = lengths_of(policy)
        among = lambda n: len(reading.candidates(n - 1, policy.block, policy.sink, policy.local))
        assert among(far) > policy.topk + 2 and among(short) == 0
        start, crossed = near, False
        for T, forget in MOVES:
            crossed |= T > 1 and start // policy.block != (start + T - 1) // policy.block
            start += T - forget[1]
        assert crossed
    assert max(forget[0] for _, forget in MOVES) > 2 * 16 and max(LENGTHS) // TILE > 10


def group(scores, block=2):
    """One head, one channel: blocks whose keys are `scores`, each twice."""
    keys = torch.tensor(scores, dtype=torch.float64).repeat_interleave(block).unsqueeze(1)
    low, high, mean = reading.summaries(keys, block)
    return Group(torch.ones(1, 1, dtype=torch.float64), None, keys, keys, low, high, mean)


@pytest.mark.parametrize(
    "listed, sink, local, distant, order",
    [
        ([0, 2, 4, 6, 7, -1], False, False, False, True),
        ([0, 2, 4, 6, 7], False, False, False, False),
        ([0, 2, 3, 6, 7], False, False, True, False),
        ([2, 3, 4, 6, 7], True, False, True, False),
        ([0, 2, 3, 4, 7], False, True, True, False),
        ([0, 4, 2, 6, 7], False, False, False, True),
        ([0, 2, 2, 6, 7], False, False, True, True),
        ([0, 2, 6, 7, -1], False, False, True, False),
    ],
)
def test_a_keep_set_is_judged_part_by_part(listed, sink, local, distant, order):
    """Eight blocks of two tokens; sink 0, local 6 and 7, the best of 1 … 5 are 2 and 4."""
    policy = copy.copy(Policy("p", "bound", 16, 1, 2, 2))
    object.__setattr__(policy, "block", 2)
    v = judged(listed, 15, [group([9, 1, 5, 2, 4, 3, 9, 9])], 0, policy)
    assert (v.sink, v.local, v.distant, v.order) == (sink, local, distant, order)
    assert v.random == pytest.approx(0.9)


def test_the_bound_is_the_maximum_over_a_group_of_products_that_no_key_exceeds():
    g = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(n, 6, generator=g).double() for n in (3, 64))
    low, high, mean = reading.summaries(keys, 16)
    bound = reading.bounds(q, low, high)
    assert (bound >= (q @ keys.T).unflatten(1, (4, 16)).amax(-1)).all() and torch.allclose(
        mean, keys.view(4, 16, 6).mean(1)
    )
    assert torch.allclose(reading.bounds(q, keys, keys), q @ keys.T), "of one token it is the product"


def test_stop_points_by_hand():
    """Probes that stand still from the third tile on; that turn without growing; that grow without turning."""
    still = torch.tensor([[1.0, 0], [0, 1], [0, 1], [0, 1], [0, 1]]).unsqueeze(1).double()
    assert termination.stops(still, 1e-3, 1e-3, 2) == [4] and termination.stops(still, 1e-3, 1e-3, 9) == [5]
    growing = torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0]]).unsqueeze(1).double()
    assert termination.stops(growing, 0.1, 0.1, 1) == [4] and termination.stops(growing, 0.1, 0.1, 1, scale=False) == [
        2
    ]
    turning = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]]).unsqueeze(1).double() * 1e-3
    assert termination.stops(turning, 0.1, 0.1, 1) == [4] and termination.stops(
        turning, 0.1, 0.1, 1, direction=False
    ) == [2]
    broken = torch.tensor([[0.0, 1], [0, 1], [1, 0], [1, 0], [1, 0]]).unsqueeze(1).double()
    assert termination.stops(broken, 0.1, 0.1, 2) == [5] and termination.stops(broken, 0.1, 0.1, 2, in_a_row=False) == [
        4
    ]


def test_tiles_of_a_traversal():
    assert termination.newest_first(9, 4) == [[0, 1, 2, 3], [8, 9], [4, 5, 6, 7]] and termination.newest_first(
        2, 4
    ) == [[0, 1, 2]]
    assert termination.listed([0, 3, -1, 2], 2, 4, 6) == [[0, 1, 6], [4, 5]]


def test_the_outputs_of_a_walk_are_softmaxes():
    g = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(n, 5, generator=g).double() for n in (2, 10, 10))
    walk = Walk(0, 9, q, keys, values, termination.newest_first(9, 4), 0.4, False)
    [outs] = walk.outputs()
    assert torch.allclose(outs[-1], reading.attend(q, keys, values, 0.4))
    assert torch.allclose(outs[1], reading.attend(q, keys[[0, 1, 2, 3, 8, 9]], values[[0, 1, 2, 3, 8, 9]], 0.4))
    rule = Termination(1e9, 2.0, 1, tile=64)
    assert count([outs], rule) == 2 and dict(alternatives(walk, [outs], rule, 2))["never stopping"] == 3


def test_fused_chunks_are_one_softmax_at_any_size_of_logits():
    g = torch.Generator().manual_seed(0)
    q, keys, far, values, far_values = (
        torch.randn(*n, 4, generator=g).double() for n in ((1, 3), (3,), (2,), (3,), (2,))
    )
    for a, b in ((100, -100), (-100, 100), (1, 1)):
        own, s = chunks.within(q, keys, 1.0) + a, q @ far.T + b
        found = chunks.fused(own, s, values, far_values)
        for t in range(3):
            p = torch.softmax(torch.cat((own[0, t, : t + 1], s[0, t])), -1)
            assert torch.allclose(found[0, t], p @ torch.cat((values[: t + 1], far_values)))
    assert float(chunks.own_mass(chunks.within(q, keys, 1.0)).sum()) == pytest.approx(3)


def test_a_tally_names_what_explains_most():
    tally = Tally()
    tally.see(0, 5, "early")
    for n in range(10):
        tally.see(1, 1, f"place {n}", ("one",) if n else ("two",))
    check = tally.counted("x", "part", "source", "where")
    assert (check.status, check.at, check.part, check.measured, check.samples) == (
        Status.FAIL,
        "where, place 0",
        "part, one",
        10,
        15,
    )
    tally.see(1, 1, "another")
    assert tally.counted("x", "part", "source", "where").part == "part"


def test_what_is_watched_is_what_runs(profiles):
    model = opened(profiles["yarn"]).model
    real = model.op.grouped_attention
    with Watched(model, "grouped_attention") as watched:
        model.attention = Attention(termination=Termination(tau=0, tile=64))
        cache = model.new_cache(1, 40)
        model.append(torch.arange(20).view(1, -1), cache, prompt=True)
        assert [call.layer for call in watched.taken("grouped_attention")] == [0], (
            "layers with a window are not looked at"
        )
        model.append(torch.tensor([[3]]), cache)
        [call] = watched.taken("grouped_attention")
        assert torch.equal(watched.attended[0].view_as(call.out[0]), call.out[0]) and len(watched.attended) == 3
    assert model.op.grouped_attention is real and not watched.taken("grouped_attention")
