"""Drafters: the MTP block's cache stays in step with the final tokens; prompt lookup finds what a search would."""

import random

import pytest
import torch

from dsv4 import load_model
from dsv4.errors import InputError
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from tests.speculation.scripted import drafted, prompt_of


@pytest.fixture(scope="module")
def model(brief_official):
    return load_model(brief_official, numerics="fp32")


class Watched(MTPDrafter):
    """Keeps the tokens that stood before each draft, and what was drafted."""

    def begin(self, prompts, model, cache, choose):
        super().begin(prompts, model, cache, choose)
        self.now, self.seen = [list(p) for p in prompts], []

    def commit(self, streams, tokens, counts):
        super().commit(streams, tokens, counts)
        for row, new, n in zip(self.now, tokens.tolist(), counts):
            row.extend(new[:n])

    def draft(self, sizes):
        found = super().draft(sizes)
        self.seen += [
            (list(row), drafts[:n]) for row, drafts, n in zip(self.now, found.tokens.tolist(), found.sizes) if n
        ]
        return found


def from_scratch(model, tokens: list[int], n: int) -> list[int]:
    """n chained drafts after `tokens`, from empty caches."""
    ids = torch.tensor([tokens])
    cache = model.new_cache(1, len(tokens) + n)
    _, streams = model.append(ids[:, :-1], cache, return_streams=True)
    step_ids, out = ids[:, 1:], []
    for _ in range(n):
        logits, streams = model.mtp_logits(streams, step_ids, cache, return_streams=True)
        streams, step_ids = streams[:, -1:], logits[:, -1:].argmax(-1)
        out.append(int(step_ids))
    return out


@pytest.mark.parametrize("size", [1, 4])
def test_every_draft_is_that_of_a_block_that_never_guessed(model, size):
    """After accepted and rejected drafts alike, ragged rows, past the block's window: entries made of its own streams
    are gone."""
    watched = Watched()
    drafted(model, [prompt_of(model, n) for n in (1, 6, 9)], 14, watched, size)
    assert len(watched.seen) > 20
    for tokens, drafts in watched.seen[::2]:
        assert drafts == from_scratch(model, tokens, len(drafts))


def test_rows_that_draft_nothing_for_a_while_catch_up(model):
    """Final tokens wait until the row drafts again."""
    from dsv4.engine.generate import generate_speculative
    from dsv4.speculation.policy import Static

    class Sometimes(Static):
        turns = iter([2, 0, 0, 3, 0, 1] * 20)

        def choose(self, states, pressure=False):
            return [0 if state is None else next(self.turns) for state in states]

    watched = Watched()
    generate_speculative(model, [prompt_of(model, 5), prompt_of(model, 11)], 12, watched, policy=Sometimes(3))
    assert watched.seen
    for tokens, drafts in watched.seen:
        assert drafts == from_scratch(model, tokens, len(drafts))


def test_ragged_drafting_logits_equal_each_row_alone(model):
    g = torch.Generator().manual_seed(2)
    streams = torch.randn(3, 5, model.config.hc_mult, model.config.hidden_size, generator=g)
    ids, counts = torch.randint(model.config.vocab_size, (3, 5), generator=g), [5, 0, 3]
    cache = model.new_cache(3, 8)
    logits, after = model.mtp_logits(streams, ids, cache, n_new=counts, return_streams=True, logits="last")
    assert cache.mtp_lengths == counts and logits.shape == (3, 1, model.config.vocab_size)
    for b in (0, 2):
        want, own = model.mtp_logits(streams[b : b + 1, : counts[b]], ids[b : b + 1, : counts[b]], return_streams=True)
        torch.testing.assert_close(logits[b], want[0, -1:], atol=1e-4, rtol=0)
        torch.testing.assert_close(after[b, : counts[b]], own[0], atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="n_new is"):
        model.mtp_logits(streams, ids, cache, n_new=[6, 0, 0])


def searched(tokens: list[int], size: int, longest: int, shortest: int) -> list[int]:
    """What lookup should draft, by looking at every earlier place."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        # the latest occurrence first; one at the very end has no follower
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                whole = list(tokens)
                for i in range(size):
                    whole.append(whole[end + i])
                return whole[len(tokens) :]
    return []


@pytest.mark.parametrize("longest, shortest", [(1, 1), (3, 1), (4, 2), (5, 5)])
def test_lookup_finds_what_a_search_finds(longest, shortest):
    rng, found = random.Random(longest), 0
    drafter = LookupDrafter(longest, shortest)
    tokens = [rng.randrange(3) for _ in range(10)]
    drafter.begin([tokens, [1]], None, None, None)
    for _ in range(200):
        drafts = drafter.draft([5, 0])
        want = searched(tokens, 5, longest, shortest)
        assert drafts.tokens[0, : drafts.sizes[0]].tolist() == want and drafts.sizes[1] == 0
        found += bool(want)
        new = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        drafter.commit(None, torch.tensor([new, [0] * len(new)]), [len(new), 0])
        tokens += new
    assert found > 50


def test_lookup_bounds_are_checked():
    with pytest.raises(InputError, match="1 <= shortest <= longest"):
        LookupDrafter(2, 3)


def test_a_row_that_another_request_joins_knows_nothing_of_the_last():
    drafter = LookupDrafter(2, 1)
    drafter.begin([[1, 2, 3, 1], [1, 2, 3, 1]], None, None, None)
    drafter.join(0, [4, 5, 1])
    assert drafter.draft([2, 2]).sizes == [0, 2]


def test_what_is_due_runs_once_by_drafting_or_by_settling(model):
    """Settling leaves the block as drafting does; joining forgets what was due."""
    ids = torch.tensor([prompt_of(model, 9)])
    cache = model.new_cache(1, 20)
    _, streams = model.append(ids, cache, return_streams=True)
    following, drafted = torch.cat((ids[:, 1:], torch.tensor([[3]])), 1), []
    for settled in (False, True):
        drafter = MTPDrafter()
        drafter.begin([[]], model, cache, lambda logits, rows: (drafted.append(logits), (logits.argmax(-1), None))[1])
        drafter.commit(streams, following, [6])
        assert drafter.due(0) == 6
        drafter.settle(0) if settled else drafter.draft([1])
        assert drafter.due(0) == 0 and cache.mtp_lengths == [6]
        drafter.commit(streams[:, 6:], following[:, 6:], [3])
        drafter.draft([1])
        cache.rewind_mtp(9)
    assert torch.equal(drafted[1], drafted[2]) and len(drafted) == 3
    drafter.commit(streams, following, [2])
    drafter.join(0, [])
    assert drafter.due(0) == 0
