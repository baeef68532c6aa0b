"""Drafters of rounds: prompt lookup on the device drafts what `LookupDrafter` drafts; drafts of the block are drawn
from what it says."""

import pytest
import torch

from dsv4 import load_model
from dsv4.errors import InputError
from dsv4.sampling import Sampling, distribution
from dsv4.speculation.accept import draw
from dsv4.speculation.choosing import Sampled
from dsv4.speculation.device_drafters import LookupDrafts, primed
from dsv4.speculation.draft import LookupDrafter
from dsv4.speculation.noise import DRAFT, uniforms
from tests.speculation.scripted import Scripted, prompt_of

RANGES = [(4, 2), (3, 1), (1, 1), (5, 3)]


@pytest.mark.parametrize("longest, shortest", RANGES)
@pytest.mark.parametrize("letters", [2, 3, 8])
def test_lookup_is_the_host_s(letters, longest, shortest):
    """Ragged rows of few letters, which repeat all the time, told in pieces of 0 to 9 tokens: after each the same
    drafts of every size."""
    g = torch.Generator().manual_seed(letters)
    lengths, B = [1, 2, 3, 17, 60], 5
    prompts = [torch.randint(letters, (n,), generator=g).tolist() for n in lengths]
    first = torch.randint(letters, (B,), generator=g)
    device = LookupDrafts(prompts, first, 300, longest, shortest)
    host = LookupDrafter(longest, shortest)
    host.begin([row + [t] for row, t in zip(prompts, first.tolist())], None, None, None)
    empty = repeated = 0
    for _ in range(24):
        offered = device.offered.tolist()
        for D in (1, 3, 8):
            wanted = host.draft([D] * B)
            found = device.drafts(D, device.length - 1)
            assert found.q is None and [min(n, D) for n in offered] == wanted.sizes
            for b, size in enumerate(wanted.sizes):
                assert found.tokens[b, :size].tolist() == wanted.tokens[b, :size].tolist()
        empty, repeated = empty + offered.count(0), repeated + sum(map(bool, offered))
        chosen = torch.randint(letters, (B, 9), generator=g)
        chosen[0] = chosen[0, 0]  # one letter: matches reach the end, and drafts go on in what they draft
        count = torch.randint(0, 10, (B,), generator=g)
        device.note_tokens(chosen, count)
        host.commit(None, chosen, count.tolist())
    assert repeated > 20 and (empty or letters == 2 or shortest == 1)


def test_lookup_goes_on_from_another_text():
    held, fresh = (LookupDrafts([row], torch.tensor([5]), 40, 4, 2) for row in ([1, 2, 3, 1, 2], [7, 5, 9, 7]))
    assert held.offered.tolist() == [0] and fresh.offered.tolist() == [8]
    text = held.text
    held.take(fresh)
    assert held.text is text and held.drafts(3, held.length - 1).tokens.tolist() == [[9, 7, 5]]


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=3), Sampling(1.3, 0.7, 11)], ids=["temperature", "top_p"])
def test_chained_drafts_are_drawn_from_what_the_block_says(model, sampling):
    """q is the filtered distribution of the block's logits after the drafts before, and each draft the draw of its
    position."""
    ids, D = [prompt_of(model, n) for n in (9, 20)], 4
    cache, choice = model.new_cache(2, 40, 16), Sampled(sampling, 2, "cpu")
    tokens, drafter = primed(model, cache, ids, choice=choice)
    start = torch.tensor(cache.lengths)
    found = drafter.drafts(D, start)
    logits, streams = drafter.said, drafter.chained.unsqueeze(1)
    for j in range(D):
        q = distribution(logits, sampling)
        torch.testing.assert_close(found.q[:, j], q, atol=1e-4, rtol=1e-3)
        assert torch.equal(found.tokens[:, j], draw(found.q[:, j], uniforms(choice.seeds, start + 1 + j, DRAFT)))
        said, streams = model.mtp_logits(streams, found.tokens[:, j : j + 1], cache, return_streams=True)
        logits = said[:, 0]
    assert found.q.shape == (2, D, model.config.vocab_size)


def test_a_drafter_of_the_host_alone_is_refused(model):
    with pytest.raises(InputError, match="drafter scripted has no device implementation; expected mtp or lookup"):
        primed(model, model.new_cache(1, 20, 8), [[5, 6]], drafter=Scripted([[1]], 1, 10))
