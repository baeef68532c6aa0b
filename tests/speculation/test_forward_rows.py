"""The MTP block follows tokens whose results nobody asks for by their latents alone: what it leaves and says is that of
the whole block."""

import pytest
import torch

from dsv4 import load_model
from dsv4.speculation.device_drafters import primed, run_block
from tests.speculation.test_rounds import prompts

LENGTHS = (5, 14, 16, 131)  # the golden's window is 16
WIDTHS = (2, 3, 8)


@pytest.fixture(scope="module", params=["fp32", "qat"])
def model(request, brief_golden):
    return load_model(brief_golden, numerics=request.param, mtp=True)


def both(model, T, last):
    """Of the whole block and of what follows: what they say of tokens `last`, and rows of the block's window."""
    cache = model.new_cache(len(LENGTHS), max(LENGTHS) + 16, max_rewind=8)
    tokens, drafter = primed(model, cache, prompts(model, LENGTHS))
    window, start = cache.mtp_layers[0].window.flat, torch.tensor(cache.mtp_lengths)
    before, g = window.clone(), torch.Generator().manual_seed(T)
    streams = torch.randn(len(LENGTHS) * T, *drafter.chained.shape[1:], generator=g).to(drafter.chained.dtype)
    ids, last = torch.randint(model.config.vocab_size, (len(LENGTHS), T), generator=g), torch.tensor(last)
    with torch.inference_mode():
        whole = run_block(model, cache, streams, ids, start)
        row, left = torch.arange(len(LENGTHS)) * T + last, window.clone()
        window.copy_(before)
        found = run_block(model, cache, streams, ids, start, last)
    return [said.index_select(0, row) for said in whole] + [left], [*found, window], before


@pytest.mark.parametrize("T", WIDTHS)
def test_what_it_says_and_leaves_is_the_whole_block_s(model, T):
    """At every token that may be the last, at the edge of the window too."""
    fp32 = model.numerics.name == "fp32"
    for last in range(T):
        whole, found, before = both(model, T, [last, T - 1, 0, T - 1 - last])
        for a, b in zip(whole, found):
            # Sums of 1 and of T rows have other orders, and in qat other roundings. The bound is 32 units in the last
            # place of the largest number; processors were seen to differ by 11.
            within = 2**-18 * float(a.abs().max()) if fp32 else 0.05
            torch.testing.assert_close(a, b, atol=within, rtol=0 if fp32 else within)
        assert int((found[2] != before).any(-1).sum()) == T * len(LENGTHS)  # every token of every row, and nothing else


def test_experts_run_for_what_is_asked_alone(model, monkeypatch):
    experts, ran = model.mtp[0].ffn.forward, []
    monkeypatch.setattr(model.mtp[0].ffn, "forward", lambda x, *given: ran.append(len(x)) or experts(x, *given))
    both(model, 8, [0, 1, 2, 3])
    assert ran[-2:] == [8 * len(LENGTHS), len(LENGTHS)]


def test_a_token_or_two_go_through_the_whole_block(model, monkeypatch):
    """Where a step of its own would cost more than it saves."""
    monkeypatch.setattr(type(model.mtp[0]), "forward_rows", lambda *given: pytest.fail("apart"))
    cache = model.new_cache(1, 40, max_rewind=8)
    _, drafter = primed(model, cache, prompts(model, (5,)))
    streams = drafter.chained.expand(2, *drafter.chained.shape[1:]).contiguous()
    with torch.inference_mode():
        run_block(model, cache, streams, torch.tensor([[3, 4]]), torch.tensor(cache.mtp_lengths), torch.tensor([0]))
