"""Rounds without drafts leave the MTP block alone; it follows them together, and then drafts as if it had followed
each."""

from types import SimpleNamespace

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate, generate_on_device
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.policy import Static
from dsv4.speculation.rounds import Rounds
from tests.speculation.test_rounds import Cycle, chain, forced, prompts, rounds, static


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


@pytest.fixture(scope="module")
def edges(model):
    """Prompts that end below and at the edge of the sliding window, and what follows each."""
    ids = prompts(model, (5, 121, 128, 131))
    return ids, [generate(model, row, 37).token_ids for row in ids]


def rest(found, n):
    for _ in range(n):
        found._launch(0)
        found._read(None)


def seldom(model, lengths, new, most, seed=0, back=8):
    """Rounds of up to `most` drafts over a cache that can be rewound by `back`, each row's prompt, and its first
    token."""
    ids = prompts(model, lengths, seed)
    cache = model.new_cache(len(ids), max(lengths) + new + most, max_rewind=back)
    tokens, *start = primed(model, cache, ids)
    return (
        Rounds(model, cache, most, tokens, *start, [new - 1] * len(ids), (), static(model, len(ids), most)),
        ids,
        tokens.tolist(),
    )


@pytest.mark.few(behind=[[1], [9], [32, 3], [8, 8, 3], [2, 1]])  # at once, in sizes of two kinds, in many parts
@pytest.mark.parametrize(
    "most, back, rested, behind",
    [
        (8, 31, 1, [1]),
        (8, 31, 2, [2]),
        (8, 31, 3, [3]),
        (8, 31, 8, [8]),
        (8, 31, 9, [9]),
        (8, 31, 32, [32]),
        (2, 31, 35, [32, 3]),
        (8, 30, 10, [8, 2]),
        (8, 8, 19, [8, 8, 3]),
        (3, 3, 5, [2, 2, 1]),
        (1, 1, 3, [2, 1]),
    ],
)
def test_drafts_are_as_if_the_block_had_followed_each_round(model, edges, most, back, rested, behind):
    """By no more tokens at once than the cache can be rewound, in few sizes. At the edge of the sliding window too, in
    the smallest ring that it may have."""
    found, ids, first = seldom(model, (5, 121, 128, 131), 60, most, back=back)
    assert ids == edges[0]
    plain = edges[1]
    rest(found, rested)
    found._follow_rests()
    assert found.counts.caught_up == behind and found.rested == 0 and found.written.tolist() == [rested] * 4
    drafts = found._drafts(most).tokens.tolist()
    assert drafts == [chain(model, row + text[: 1 + rested], most) for row, text in zip(ids, plain)]


def test_by_turns_with_rounds_that_draft(model):
    """Whatever is accepted between; what is drafted and accepted afterwards is what the same text gives without such
    rounds."""
    found, ids, first = seldom(model, (5, 131, 30), 60, 4, seed=2)
    plain, real = [generate(model, row, 60).token_ids for row in ids], found._drafts
    for rested, wrong in ((1, (0, 1, 2)), (3, (4, 0, 3)), (6, (2, 2, 0)), (0, (1, 4, 4))):
        rest(found, rested)
        forced(found, ids, plain, wrong)
        found._launch(4)
        found._read(None)
        found._drafts = real
        rest(found, 2)
        found._follow_rests()
        now = found.written.tolist()
        assert found._drafts(4).tokens.tolist() == [
            chain(model, row + text[: 1 + n], 4) for row, text, n in zip(ids, plain, now)
        ]
    assert found.counts.caught_up == [1, 2, 3, 2, 6, 2, 2]
    assert found.written.tolist() == [
        sum(w[b] + 1 for w in ((0, 1, 2), (4, 0, 3), (2, 2, 0), (1, 4, 4))) + 18 for b in range(3)
    ]


def test_following_again_changes_nothing(model):
    found, *_ = seldom(model, (5, 131), 30, 8)
    rest(found, 6)
    found._catch_up(8)
    held = found.drafter.features, found.drafter.chained, found.cache.mtp_layers[0].window.flat
    once = [t.clone() for t in held]
    found._catch_up(8)
    assert all(torch.equal(a, b) for a, b in zip(once, held))


def test_rows_that_end_while_others_rest(model):
    """A row that is done keeps what the block said of it, and the others are followed as far as they came."""
    ids, new = prompts(model, (5, 131, 30), 3), (4, 30, 9)
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, new)]
    found, _ = rounds(model, ids, new, static(model, 3, 8))
    rest(found, 7)
    found._follow_rests()
    assert found.done.tolist() == [True, False, False] and found.written.tolist() == [3, 7, 7]
    drafts = found._drafts(3).tokens.tolist()
    assert drafts == [chain(model, row + text[: 1 + n], 3) for row, text, n in zip(ids, plain, (3, 7, 7))]


def test_the_block_and_its_head_do_not_run(model, monkeypatch):
    found, ids, first = seldom(model, (5, 30), 30, 8)
    ran, written, heads = [], [], []
    block, head = model.mtp[0], model.head
    experts, remember = block.ffn.forward, block.attn.remember
    monkeypatch.setattr(block.ffn, "forward", lambda *given: ran.append(len(given[0])) or experts(*given))
    monkeypatch.setattr(block.attn, "remember", lambda *given: written.append(len(given[0])) or remember(*given))
    monkeypatch.setattr(
        found.drafter,
        "model",
        type(
            "Heads",
            (),
            {
                "__getattr__": lambda self, name: getattr(model, name),
                "head": SimpleNamespace(own=lambda x: heads.append(len(x)) or head.own(x)),
            },
        )(),
    )
    rest(found, 8)
    assert ran == written == heads == []
    rest(found, 1)
    assert written == [2 * 8] and ran == [2] and heads == []  # followed, and nothing asked
    found._launch(2)
    # the one that waited, by two; what was verified; two drafts
    assert written == [2 * 8, 2 * 2, 2 * 3] and heads == [2, 2]
    assert ran == [2, 2, 2, 2]  # the last token of each row, and one that was chained


def test_what_never_drafts_has_nothing_to_follow(model, monkeypatch):
    """No draft can ever be wanted: the block is left out, in a run and after it."""
    ids = prompts(model, (5, 131))
    plain = [generate(model, row, 12).token_ids for row in ids]
    made = []

    def make(*given, **more):
        made.append(Rounds(*given, **more))
        monkeypatch.setattr(model.mtp[0], "forward", lambda *given: pytest.fail("the block ran"))
        return made[0]

    outs = generate_on_device(model, ids, 12, policy=Static(0), make=make)
    assert [out.token_ids for out in outs] == plain and made[0].catch_up_widths == () and made[0].counts.caught_up == []


@pytest.mark.few(ahead=[2])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_run_follows_before_it_drafts_and_at_its_end(model, ahead):
    ids = prompts(model, (9, 40), seed=4)
    plain = [generate(model, row, 40).token_ids for row in ids]
    sizes = Cycle(*[(0, 0)] * 11, (2, 0), (0, 0), *[(0, 0)] * 50)
    found, first = rounds(model, ids, (40, 40), sizes, ahead=ahead)  # over a cache that can be rewound by 16
    out = found.run()
    assert [[t, *row] for t, row in zip(first, out)] == plain
    counts = found.counts
    at = counts.rounds.index(2)
    assert 8 < at <= 16 and counts.caught_up[:2] == [8, at - 8] and sum(counts.caught_up) == len(counts.rounds) - 1
    assert found.cache.lengths == found.cache.mtp_lengths


def test_others_begin_in_the_same_rows_with_nothing_kept(model):
    ids = prompts(model, (9, 40), seed=5)
    found, _ = rounds(model, ids, (30, 30), Cycle(*[(0, 0)] * 100))
    rest(found, 5)
    found.cache.reset()
    ids = prompts(model, (9, 40), seed=6)
    tokens, *start = primed(model, found.cache, ids)
    found.restart(tokens, *start, [20, 20])
    assert found.rested == 0 and found.drafter.kept.tolist() == [0, 0]
    assert found._drafts(3).tokens.tolist() == [chain(model, row + [t], 3) for row, t in zip(ids, tokens.tolist())]


def test_sizes_that_come_and_go_change_no_text(model):
    ids = prompts(model, (33,), seed=6)
    plain = generate(model, ids[0], 60).token_ids
    pattern = [(n,) for n in (0, 3, 0, 0, 1, 8, 0, 0, 0, 0, 0, 2) * 6]
    found, first = rounds(model, ids, (60,), Cycle(*pattern), ahead=1)
    assert first + found.run()[0] == plain and len(found.counts.caught_up) > 3


def test_a_capture_between_such_rounds_changes_nothing_that_is_kept(model):
    """As many as may wait are kept already."""
    found, ids, first = seldom(model, (5, 131), 30, 8, seed=7)
    plain = [generate(model, row, 30).token_ids for row in ids]
    rest(found, 8)
    with found._undisturbed():
        found._round(0)
    found._follow_rests()
    assert found._drafts(3).tokens.tolist() == [chain(model, row + text[:9], 3) for row, text in zip(ids, plain)]
