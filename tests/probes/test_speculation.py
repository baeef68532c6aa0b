"""The probe of speculative decoding: green on sound decoders, red with the right part where one is not."""

import shutil
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from dsv4.engine import acceptance as passes_acceptance
from dsv4.engine.acceptance import Rejection
from dsv4.probes.catalogue.speculation import DRAFTS, PROMPTS, Speculation, one, ragged
from dsv4.probes.faults import Site, catalogue
from dsv4.probes.probe import execute
from dsv4.probes.result import Status
from dsv4.probes.scenes.acceptance import TARGET, acceptance, chi_square, sampled
from dsv4.probes.scenes.cache_contents import Held, first_of, rows_checks
from dsv4.probes.scenes.scripted import ASTRAY, STOP, WRONG, Script
from dsv4.probes.scenes.speculative_rounds import LENGTHS, outputs, states
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.ours import OurSubject
from dsv4.speculation import choosing
from dsv4.speculation.accept import Accepted, draw
from dsv4.speculation.captured import CapturedBlock
from dsv4.speculation.rounds import Rounds

FORMATS = [("fp32", "auto", "auto"), ("native", "auto", "auto"), ("qat", "fp8", "fp4")]


@pytest.fixture(scope="module")
def subject(brief_official):
    return OurSubject(brief_official, "fp32")


@pytest.fixture
def short(monkeypatch):
    """One of the probe's prompts, whose passes cross 128: half of the time, where that is not what is tested."""
    monkeypatch.setattr("dsv4.probes.catalogue.speculation.PROMPTS", PROMPTS[:1])


def red(subject) -> list:
    return [c for c in execute(Speculation(), subject)[0] if c.status in (Status.FAIL, Status.ERROR)]


@pytest.mark.few(numerics=["fp32"])  # both prompts: 9 s
@pytest.mark.parametrize("numerics, cache, index_cache", FORMATS)
def test_green_bit_for_bit_in_every_format(brief_official, numerics, cache, index_cache):
    sound = OurSubject(brief_official, numerics, cache=cache, index_cache=index_cache)
    checks, _ = execute(Speculation(), sound)
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS][:2]
    assert all(c.samples > 0 and c.source for c in checks)
    assert len({c.where for c in checks if "accepted after" in c.where}) == len(PROMPTS) * (DRAFTS + 1)
    assert "captured" not in vars(sound.model), "the model is as it was"


@pytest.mark.sweep  # the next test is green on this backend under a harder condition
def test_green_on_the_reference_backend(brief_official, short):
    assert not red(OurSubject(brief_official, "fp32", "reference"))


# Over 5 s: the whole probe, on the slower backend.
@pytest.mark.few(numerics=["fp32"])
@pytest.mark.parametrize("numerics", ["fp32", "qat"])
def test_green_where_a_product_of_other_rows_sums_in_another_order(brief_official, monkeypatch, numerics, short):
    """As BLAS may do, by the processor and its threads; one token of each of the five rows is on one side of it, all
    else on the other."""
    real, halved = torch.nn.functional.linear, []

    def linear(x, weight):
        if len(x) <= len(LENGTHS):
            return real(x, weight)
        halved.append(half := x.shape[1] // 2)
        return real(x[:, :half], weight[:, :half]) + real(x[:, half:], weight[:, half:])

    monkeypatch.setattr("dsv4.kernels.linear.reference.F", SimpleNamespace(linear=linear))
    assert not red(OurSubject(brief_official, numerics, "reference"))
    assert halved


def test_all_pieces_behind_a_prompt_of_one_token_run_as_the_drafter_runs_them(subject, monkeypatch):
    """As if captured steps of the block summed in another order: such a prompt leaves no piece of its own."""

    class Nudged(CapturedBlock):
        def __call__(self, streams, *rest):
            return super().__call__(streams * 1.001, *rest)

    for module in ("probes.catalogue.speculation", "speculation.draft"):
        monkeypatch.setattr(f"dsv4.{module}.CapturedBlock", Nudged)
    assert {c.status for c in one(subject, 1, 0, "here", 0)} == {Status.PASS}


def test_what_is_tried_is_where_it_matters():
    """Rounds and passes cross 128; with every number of drafts they stand at every residue mod 4; one row is shorter
    than a window."""
    assert min(PROMPTS) < 8 and max(PROMPTS) < 128 <= max(PROMPTS) + DRAFTS and len(LENGTHS) == DRAFTS + 1
    assert {(max(PROMPTS) + a + 1) % 4 for a in range(DRAFTS + 1)} == {0, 1, 2, 3}


def test_vacuous_without_decoders_and_in_part_without_a_block(brief_official, short):
    assert [c.status for c in execute(Speculation(), Subject())[0]] == [Status.VACUOUS]
    alone = OurSubject(brief_official, "fp32")
    alone.model.mtp = torch.nn.ModuleList()
    checks, _ = execute(Speculation(), alone)
    assert [(c.status, c.note) for c in checks if c.status is not Status.PASS] == [
        (Status.VACUOUS, "the subject has no MTP block")
    ]


DECISIONS = [
    ("drafts compared one place late", "greedy acceptance"),
    ("one wrong draft stays", "greedy acceptance"),
    ("bonus token of the last place", "bonus token"),
    ("residual not clamped", "rejection sampling"),
    ("weights of the mean exchanged on the device", "device policy, mean"),
    ("weights of the mean exchanged in the specification", "mean of the specification"),
    ("pressure ignored on the device", "device policy, pressure cap"),
]


def passes(subject):
    for accepted in range(DRAFTS + 1):
        yield from one(subject, PROMPTS[0], accepted, "here", 0)


ASKED = {  # the first word of a part → the piece of the probe that tells it
    "after a pass": passes,
    "after a round": lambda subject: states(subject, DRAFTS, 0),
    "stop id": lambda subject: chain(ragged(subject, 0), outputs(subject, DRAFTS, 0)),
}
STATES = [
    ("window rows of rejected drafts stay", "after a pass, window rows"),
    ("index raw rows of rejected drafts stay", "after a pass, the indexer's compressor rows"),
    ("guessed entries of the block stay", "after a pass, MTP window"),
    ("block follows a round by its own streams", "after a round, MTP window"),
    ("stop id beyond the accepted prefix ends a row", "stop id"),
    ("stop id noticed at the end of a block", "stop id"),
]


@pytest.mark.parametrize("fault, part", DECISIONS, ids=lambda value: value.replace(" ", "-"))
def test_a_wrong_decision_is_named(tmp_path, fault, part):
    site = Site(tmp_path)
    try:
        next(m for m in catalogue() if m.name == fault).plant(site)
        found = {c.part for c in acceptance(0, torch.device("cpu")) if c.status is Status.FAIL}
    finally:
        site.undo()
    assert part in found, found


@pytest.mark.few(each=lambda p: p["part"].split(", ")[0])
@pytest.mark.parametrize("fault, part", STATES, ids=lambda value: value.replace(" ", "-"))
def test_a_fault_is_named(brief_official, tmp_path, fault, part):
    """By the piece of the probe that is for it, which stops where it is."""
    mutation, site = (
        next(m for m in catalogue() if m.name == fault),
        Site(shutil.copytree(brief_official, tmp_path / "copy")),
    )
    found = []
    try:
        mutation.plant(site)
        for check in ASKED[part.split(", ")[0]](OurSubject(site.checkpoint, mutation.numerics)):
            found += [check.part] if check.status is Status.FAIL else []
            if part in found:
                break
    finally:
        site.undo()
    assert part in found, found


# 7 s: the whole probe is red here once, both decoders with it
def test_a_rejected_draft_that_comes_out_is_seen(subject, monkeypatch, short):
    """In both decoders, though their acceptance is right."""
    for owner, name in ((Rejection, "_accept"), (Rounds, "_accept")):
        real = getattr(owner, name)

        def accept(self, logits, drafts, *rest, real=real):
            found = real(self, logits, drafts, *rest)
            tokens = getattr(drafts, "tokens", drafts)
            wide = torch.cat((tokens, found[1][:, -1:]), 1) if tokens.shape[1] else found[1]
            return Accepted(found[0], wide)

        monkeypatch.setattr(owner, name, accept)
    where = {c.where for c in red(subject) if c.part == "rejected drafts in the output"}
    assert where == {"generate_speculative", "Rounds"}


# 7 s: that the other pieces of the probe still run takes all of them
def test_a_case_that_breaks_leaves_the_others(subject, monkeypatch, short):
    monkeypatch.setattr(Rounds, "run", lambda self, **more: 1 / 0)
    broken = [("Rounds", "accepted tokens"), ("a batch", "one launch")]
    assert [(c.status, c.where, c.part) for c in red(subject)] == [(Status.ERROR, *what) for what in broken]


# ---- what it decides by -------------------------------------------------------------------


def test_the_script_goes_astray_after_a_wrong_draft():
    script = Script(50, 1, 8, 0)
    script.text[0] = torch.arange(10, 18)
    assert script.chosen(torch.tensor([[5, 12, 13, 99, 15]]), [2]).tolist() == [[12, 13, 14, ASTRAY, ASTRAY]]
    assert script.drafts([2], [4], [3]).tolist() == [[12, 13, 14, WRONG]]
    assert script.outcome(0, 5, 4, [2, 0], 7) == ([5, 11, 12, 13, 14, 15, 16], [2, 0, 0, 0])
    script.text[0, 3] = STOP
    assert script.outcome(0, 5, 4, [4], 7) == ([5, 11, 12, STOP], [4])
    assert script.outcome(0, STOP, 4, [4], 7) == ([STOP], [])


def test_the_statistic_tells_distributions_apart():
    g = torch.Generator().manual_seed(0)
    right = torch.multinomial(TARGET[0], 20_000, True, generator=g)
    assert chi_square(right, TARGET[0]) < 1 < chi_square(right, TARGET[0].roll(1)) and chi_square(
        right, TARGET[1]
    ) == float("inf")


@pytest.mark.parametrize("broken", range(2), ids=["generate_speculative", "Rounds"])
def test_a_rule_that_keeps_nothing_is_distributed_right_and_seen_all_the_same(broken, monkeypatch):
    def none(p, q, drafts, sizes, u, u_last):
        return Accepted(torch.zeros_like(sizes), torch.cat((draw(p[:, 0], u_last).unsqueeze(1), drafts), 1))

    monkeypatch.setattr((passes_acceptance, choosing)[broken], "accept_sampled", none)
    found = [c.status for c in sampled("uniform", torch.full((2, 5), 0.2), 0)]
    assert found[2 * broken :][:2] == [Status.PASS, Status.FAIL] and found.count(Status.FAIL) == 1


@pytest.mark.few(seed=[1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_seeds_are_green(seed):
    assert {c.status for c in acceptance(seed, torch.device("cpu"))} == {Status.PASS}


def test_what_differs_first_is_named(official):
    subject = OurSubject(official, "fp32")
    bad = lambda *streams: dict.fromkeys(streams, 1)
    assert first_of(subject, bad(("layer 1", "entries"), ("layer 2", "window"))) == ("layer 1", "entries")
    assert first_of(subject, bad(("layer 2", "window"), ("layer 2", "main raw rows"), ("layer 3", "window"))) == (
        "layer 1",
        "layer output",
    )
    assert first_of(subject, bad(("mtp 0", "mtp window"))) == ("mtp 0", "MTP window")
    assert first_of(subject, {}) == ("", "")


def test_rows_within_the_numerics_pass_where_bits_need_not_be_equal(subject):
    rows = lambda factor: {("layer 0", "window"): Held((torch.ones(4, 8) * factor).view(torch.uint8), torch.float32)}
    found = lambda factor, exact: [
        c.status for c in rows_checks("x", "", "y", subject, [("now", rows(factor), rows(1))], exact)
    ]
    assert found(1, True) == [Status.PASS] and found(1 + 1e-6, True) == [Status.FAIL]
    assert found(1 + 1e-6, False) == [Status.PASS] and found(1.01, False) == found(float("nan"), False) == [Status.FAIL]
