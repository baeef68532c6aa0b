"""The probes of attention are green on this project's model, and red, at the right part, on one with a planted
fault."""

from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.rope import inverse_frequencies
from dsv4.probes.catalogue.index_oracle import IndexOracle
from dsv4.probes.catalogue.influence import Influence
from dsv4.probes.catalogue.rope import Rope
from dsv4.probes.probe import execute
from dsv4.probes.result import Status
from dsv4.probes.subjects.ours import OurSubject

CSA, HCA = (1, 3), (2, 4)


@pytest.fixture
def subject(official):
    """To be damaged: a model of one's own."""
    return OurSubject(official)


def failures(probe, subject) -> list:
    checks, _ = execute(probe, subject)
    assert not [c for c in checks if c.status is Status.ERROR and not c.where], checks  # of the probe itself
    return [c for c in checks if c.status is Status.FAIL]


def parts(found, layer: int | None = None) -> set[str]:
    return {c.part for c in found if layer is None or c.where.startswith(f"layer {layer}")}


@pytest.mark.parametrize("probe", [Rope, IndexOracle, Influence], ids=lambda p: p.name)
def test_green(subject, probe):
    checks, _ = execute(probe(), subject)
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS]
    assert all(c.source and c.samples and c.where and c.part for c in checks)


@pytest.mark.few("probe")
@pytest.mark.parametrize("numerics", ["native", "qat", "qat:fp32"])
@pytest.mark.parametrize("probe", [Rope, IndexOracle], ids=lambda p: p.name)
def test_green_in_other_numerics(official, probe, numerics):
    checks, _ = execute(probe(), OurSubject(official, numerics))
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS]


def test_fewer_entries_than_chance_needs_are_vacuous(subject):
    checks, _ = execute(IndexOracle(effort=0.01), subject)
    assert [c.status for c in checks] == [Status.VACUOUS] * 2


def test_indexer_compressor_that_never_loaded(subject):
    """Selection is wrong, and the path is still that of a selection."""
    weight = subject.model.layers[1].attn.indexer.compressor.wkv_gate.weight
    weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.std()
    found = failures(IndexOracle(), subject)
    assert parts(found, 1) == {"indexer keys", "selection"} and not parts(found, 3)


# 6 s: every layer is told by every schedule, and other layers must be left alone
def test_entries_dropped(subject):
    """The motivating failure: the window only."""
    for i in CSA:
        attn = subject.model.layers[i].attn
        attn.indexer.register_forward_hook(lambda module, args, out: torch.full_like(out, -1))
    found = failures(Influence(), subject)
    assert parts(found, 1) >= {"compressed entries"} and not parts(found, 2)
    assert {c.measured for c in found if c.name == "path"} == {"window only"}


@pytest.mark.sweep  # the whole probe again, 6 s; of a recorded run test_recorded tells the same fault
def test_entries_dropped_after_the_selection(subject):
    """The indexer says what it selects, and attention ignores it."""
    attend = subject.model.layers[1].attn.op.sparse_attention
    only = lambda q, window, index, entries, picks, *rest: attend(q, window, index, None, None, *rest[:-1], False)
    attn = subject.model.layers[1].attn
    attn.op = Other(attn.op, sparse_attention=only)
    found = failures(Influence(), subject)
    assert {c.measured for c in found if c.name == "path"} == {"window only"} and len({c.where for c in found}) >= 3
    assert parts(found, 1) >= {"compressed entries"} and not parts(found, 3) and not failures(IndexOracle(), subject)


# 5 s, for the same reason
def test_all_entries_instead_of_the_selected(subject):
    """Attention gets every visible entry; the indexer's own answer is as it should be."""
    attn = subject.model.layers[1].attn
    attn.forward = everything_of(attn)
    found = failures(Influence(), subject)
    assert {c.measured for c in found if c.name == "path"} == {"all"}
    assert parts(found, 1) >= {"selection"} and not parts(found, 3)
    assert any("unselected" in c.name for c in found)


def everything_of(attn):
    """The layer's forward, whose cache gives all visible entries for any selection."""
    real = type(attn).forward

    def forward(x, step, cache):
        entries = cache.main.entries
        chosen = entries.chosen
        entries.chosen = lambda step, selection, op: chosen(step, entries.all_visible(step), op)
        try:
            return real(attn, x, step, cache)
        finally:
            del entries.chosen

    return forward


def test_wrong_base_on_compressing_layers(subject):
    c, real = subject.config, subject.model.rope_frequencies
    subject.model.rope_frequencies = lambda: (
        real() | {"compress": inverse_frequencies(c.qk_rope_head_dim, c.rope_theta)}
    )
    found = failures(Rope(), subject)
    assert {c.where for c in found} == {f"layer {i}" for i in CSA + HCA}
    things = ("queries", "window rows", "compressed entries", "indexer keys")
    assert {f"rotation of {thing}" for thing in things} <= parts(found)
    assert "base of the other kind, no YaRN" in {c.measured for c in found}


@pytest.mark.parametrize(
    "fault, part", [("no inverse", "rotation of the output"), ("entry number", "rotation of compressed entries")]
)
def test_other_wrong_rotations(subject, fault, part):
    attn = subject.model.layers[2].attn
    if fault == "no inverse":
        attn.forward = lambda x, step, cache: type(attn).forward(attn, x, plain_back(step), cache)
    else:
        inner = attn.compressor
        inner.forward = lambda x, step, cache: type(inner).forward(inner, x, by_number(step), cache)
    assert parts(failures(Rope(), subject)) == {part}


def plain_back(step):
    step.inverse_cis = lambda base: torch.ones_like(step.cis(base))
    return step


def by_number(step):
    from dsv4.kernels.rope import rotation

    step.window_cis = lambda ratio, base: rotation(step.new_windows(ratio).flatten(), step.frequencies[base])
    return step


def test_relu_missing(subject):
    indexer = subject.model.layers[3].attn.indexer

    def index_scores(q, w, keys, visible):
        scores = torch.einsum("bth,bthd,bnd->btn", w, q, keys)
        return scores.masked_fill(torch.arange(keys.shape[1]) >= visible.unsqueeze(-1), float("-inf"))

    indexer.op = Other(indexer.op, index_scores=index_scores)
    found = failures(IndexOracle(), subject)
    assert not parts(found, 1) and any(c.part == "indexer scores" and "ReLU missing" in c.note for c in found)


def test_temperature_missing_changes_no_pick_and_is_seen(subject):
    subject.model.layers[1].attn.indexer.scale = 1.0
    found = failures(IndexOracle(), subject)
    assert parts(found) == {"indexer weights"}


@pytest.mark.sweep  # minutes on a busy machine; its parts have tests of their own
def test_sinks_zeroed(subject):
    for block in subject.model.layers:
        block.attn.attn_sink.data.zero_()
    found = failures(Influence(), subject)
    assert {c.where.split(",")[0] for c in found if c.part == "sink"} == {f"layer {i}" for i in range(5)}
    assert not [c for c in found if c.name == "path"]


class Other:
    """Operations of which some are others."""

    def __init__(self, op, **others):
        self.__dict__ |= others
        self._op = op

    def __getattr__(self, name):
        return getattr(self._op, name)


def test_keys_beside_a_rounding_boundary_are_left_out_of_scores_and_others_are_not():
    """A code of FP4 that falls otherwise moves a score of every later query; a wrong key, or too many, are judged as
    they are."""
    from dsv4.probes.catalogue.index_oracle import rounded_otherwise

    keys = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0))

    def left_out(changed: dict[int, float], numerics: str = "qat:fp32") -> list[int]:
        found = keys.clone()
        for entry, factor in changed.items():
            found[0, entry] *= factor
        case = SimpleNamespace(
            subject=SimpleNamespace(numerics=numerics),
            points={"index_keys": found},
            wanted={"keys": keys, "index_scores": torch.zeros(1, 3, 10)},
        )
        return rounded_otherwise(case).nonzero().flatten().tolist()

    assert left_out({3: 1.1}) == [3] and left_out({}) == [] and left_out({3: 1.1}, "fp32") == []
    assert left_out({3: 2.0}) == [] and left_out(dict.fromkeys(range(6), 1.1)) == []
