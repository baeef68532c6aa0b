"""Probes of verification, of the engine's drafts and of their depth: green where sound, each planted fault named."""

import shutil

import pytest
import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.probes.catalogue import draft_depth, engine_drafts, verification
from dsv4.probes.catalogue.speculation import one
from dsv4.probes.compare import agreeing
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.scenes import engine_scene
from dsv4.probes.scenes.known_drafts import KnownDrafter, Plain, promises_bits
from dsv4.probes.subjects.opening import open_ours
from dsv4.probes.subjects.ours import OurSubject
from dsv4.speculation import verify

BY_NAME = {m.name: m for m in catalogue()}
RED = (Status.FAIL, Status.ERROR)


@pytest.fixture
def planted(brief_official, tmp_path):
    """Function: a subject with a fault, by name."""
    sites = []

    def plant(name: str) -> OurSubject:
        mutation, site = BY_NAME[name], Site(shutil.copytree(brief_official, tmp_path / "copy"))
        sites.append(site)
        mutation.plant(site)
        subject = OurSubject(site.checkpoint, mutation.numerics)
        for change in site.loaded:
            change(subject)
        return subject

    yield plant
    for site in sites:
        site.undo()


def parts(checks) -> set[str]:
    return {c.part for c in checks if c.status in RED}


def passes(subject, length=6):
    ids = torch.randint(0, 320, (1, length + MAX_DRAFTS + 1), generator=torch.Generator().manual_seed(0))
    yield from verification.places(subject, ids, length)


def scene(subject, together=False):
    right = [[0, MAX_DRAFTS], [MAX_DRAFTS, 1], [3, 2]]
    yield from engine_drafts.kept(engine_scene.Scene(subject, right, together, 0), "here")


def texts(subject):
    yield from verification.texts(subject, list(range(40, 52)))


def whole(name):
    return lambda subject: execute(probe_named(name)(), subject)[0]


FAULTS = [  # fault, what asks, the part it must name
    ("verification as one append", passes, "verification, logits"),
    ("verified one place late", passes, "verification, logits of the place before"),
    ("drafts judge themselves", texts, "verification, the draft's own logits"),
    ("a pass as wide as a block is cut", passes, "verification, logits"),
    ("engine rewinds at most one", scene, "engine rewind, length"),
    ("engine rewinds one too few", scene, "engine rewind, length"),
    ("engine rewinds another row", scene, "engine rewind, of another row"),
    ("engine forgets to rewind the block", scene, "engine, MTP window"),
    ("engine takes the bonus token of the last draft", scene, "engine, bonus token"),
    ("a cancelled row keeps its drafts", lambda s: engine_drafts.cancelled(s, 0), "engine, after a cancelled row"),
    ("the last draft of a block never stays", lambda s: draft_depth.accepted(s, 0), "acceptance by position"),
]


@pytest.mark.few(each=lambda p: p["ask"])
@pytest.mark.parametrize("fault, ask, part", FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_fault_is_named(planted, fault, ask, part):
    subject, found = planted(fault), []
    try:
        found.extend(ask(subject))
    except Exception:  # a fault may break what asks: the probe then keeps what came before
        pass
    found = parts(found)
    assert any(part in said for said in found), found


def test_entries_that_drafts_of_a_windows_depth_leave_are_seen_at_that_depth_alone(planted):
    subject = planted("drafts as deep as the window leave one entry")
    ask = lambda depth: parts(one(subject, 5, depth - 1, "here", 0, depth, (depth,), "draft depth"))
    assert not ask(4) and any("MTP window" in part for part in ask(MAX_DRAFTS))


@pytest.mark.parametrize("captures, numerics", [(True, "native"), (False, "native"), (False, "fp32")])
def test_a_fault_of_the_default_verification_is_planted_in_each_way_that_it_runs(
    brief_official, tmp_path, monkeypatch, captures, numerics
):
    monkeypatch.setattr(verify, "captures", lambda model: captures)
    subject = OurSubject(brief_official, numerics)
    cache, site = subject.model.new_cache(1, 256), Site(tmp_path)
    sound = type(verify.default(subject.model, cache))
    BY_NAME["verified one place late"].plant(site)
    found = type(verify.default(subject.model, cache))
    site.undo()
    assert found is not sound and issubclass(found, sound)


GREEN = {
    "passes": passes,
    "ragged passes": lambda subject: verification.ragged(subject, 0),
    "engine": scene,
    "engine, together": lambda subject: scene(subject, together=True),
    "cancelled": lambda subject: engine_drafts.cancelled(subject, 0),
    "accepted": lambda subject: draft_depth.accepted(subject, 0),
}


@pytest.mark.parametrize("numerics, backend", [("fp32", "reference"), ("native", "cpu"), ("qat", "cpu")])
@pytest.mark.parametrize("ask", GREEN)
def test_passes_and_the_engine_are_green(brief_official, numerics, backend, ask):
    found = list(GREEN[ask](OurSubject(brief_official, numerics, backend)))
    if ask in ("cancelled", "accepted"):
        assert not parts(found)
    else:
        assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS]
        assert all(c.samples and c.source for c in found)


def test_gqa_models_are_asked_without_a_block(tmp_path):
    subject = open_ours(profile.write(tmp_path / "mistral", "mistral"))
    found = [*passes(subject), *scene(subject), *draft_depth.accepted(subject, 0)]
    assert {c.status for c in found} == {Status.PASS} and not any("MTP" in c.where for c in found)


@pytest.mark.parametrize("name", ["verification", "engine_drafts"])
def test_a_context_that_is_too_short_is_vacuous(brief_official, name):
    subject = OurSubject(brief_official)
    object.__setattr__(subject.config, "max_position_embeddings", 100)
    assert [c.status for c in whole(name)(subject)] == [Status.VACUOUS]


def test_depths_stand_at_the_edges(brief_official):
    window = OurSubject(brief_official).config.sliding_window
    found = draft_depth.edges(OurSubject(brief_official))
    ends = [length + depth + 1 for depth, length, _ in found]
    assert {128, 129} <= set(ends) and {window + 1, window + 2} <= set(ends)
    assert max(depth for depth, _, _ in found) == MAX_DRAFTS


# ---- what they decide by ------------------------------------------------------------------


def test_known_drafts_are_right_as_far_as_asked():
    drafter = KnownDrafter([[5, 6, 7, 8], [1, 2, 3, 4]], [2, 0], vocab=10)
    drafter.begin([[], []], None, None, None)
    drafter.commit(None, torch.zeros(2, 1), [1, 1])
    assert drafter.draft([3, 0]).tokens.tolist() == [[6, 7, 9], [0, 0, 0]]
    drafter.commit(None, torch.zeros(2, 1), [2, 0])
    assert drafter.draft([1, 2]).tokens.tolist() == [[9, 0], [2, 3]]


def test_a_text_may_leave_plain_decodings_only_where_two_tokens_are_close(brief_official):
    subject, close = OurSubject(brief_official), torch.zeros(2, 320)
    close[0, 3], close[0, 4], close[1, 7] = 1.0, 1.0 - 1e-6, 1.0
    plain = Plain([3, 7], close)
    assert not promises_bits(subject) and promises_bits(OurSubject(brief_official, "native"))
    assert plain.differs([4, 9], subject) is None and plain.differs([3, 9], subject) == 1
    assert plain.differs([3], subject) == 1 and plain.differs([3, 7], subject) is None


def test_logits_of_a_neighbouring_place_are_told():
    g = torch.Generator().manual_seed(0)
    wanted = torch.randn(1, 4, 50, generator=g)
    assert verification.shifted(torch.cat((wanted[:, :1], wanted[:, :-1]), 1), wanted).endswith("before")
    assert verification.shifted(torch.cat((wanted[:, 1:], wanted[:, -1:]), 1), wanted).endswith("behind")
    assert verification.shifted(torch.randn(1, 4, 50, generator=g), wanted) == ""


ROW = [0, 0, 0, 0.541, 0.115, 0.064, 0.098, 0.084, 0.072, 0.112]


@pytest.mark.every
@pytest.mark.parametrize(
    "numerics,measured", [("qat", ROW), ("qat:fp32", ROW), ("native", [0.004] * 8 + [0.051, 0.056])]
)
def test_a_value_beside_a_boundary_is_no_finding_in_a_row_of_rounded_numbers(numerics, measured):
    """Errors as measured in sound rows, one token of which rounded or picked otherwise; a row of other tokens errs by
    about 1."""
    row = torch.tensor(measured)
    value, _, limit = agreeing(row, numerics, chained=True)
    assert value <= limit and not agreeing(row + 1, numerics, chained=True)[0] <= limit
    independent, _, limit = agreeing(row, numerics)
    assert independent > limit
    assert agreeing(row, "fp32", chained=True) == agreeing(row, "fp32")
