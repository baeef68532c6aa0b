"""Draws from logits that ranks have parts of, against one process that has all, and against definitions."""

import math
from fractions import Fraction

import pytest
import torch
from transformers import TopPLogitsWarper

from dsv4.errors import NotFinite
from dsv4.model.cut_values import CutValues, cut, in_parts, joined_along, stacked_along
from dsv4.model.ranks import Ranks
from dsv4.parallel.threads import together
from dsv4.sampling import ROUNDS, Sampling, distribution, draw, sample, weights
from dsv4.speculation.accept import accept_sampled
from dsv4.speculation.choosing import choice_of

SIZES = [2, 3, 4, 8]
INF, NAN = float("inf"), float("nan")
U = torch.cat((torch.linspace(0, 1, 200, dtype=torch.float64)[:-1], torch.tensor([1 - 2**-53]).double()))


def part_of(values, ranks):
    mine = ranks.slots(values.shape[-1])
    return cut(values[..., mine.start : mine.stop].contiguous(), ranks, values.shape[-1])


def equal_on(size, what, *values):
    """what(values) → tensors and cut values: those of ranks are equal, and have the bits of one process's."""
    wanted = what(*values)

    def of_rank(ranks):
        found = what(*(part_of(x, ranks) for x in values))
        assert all(isinstance(x, torch.Tensor) or x.vocab == values[0].shape[-1] for x in found)
        return [x.own if isinstance(x, CutValues) else x for x in found], [isinstance(x, CutValues) for x in found]

    found = together(size, of_rank)
    for i, mine in enumerate(wanted):
        parts, was_cut = [own[i] for own, _ in found], found[0][1][i]
        all_of_them = torch.cat(parts, -1) if was_cut else parts[0]
        assert torch.equal(all_of_them, mine), i
        assert was_cut or all(torch.equal(part, mine) for part in parts)
    return wanted


def logits_of(vocab, rows=40):
    """Rows of every kind: spread and narrow, with many ties, of one likely token, equal, and with −∞."""
    g = torch.Generator().manual_seed(vocab)
    found = torch.randn(rows, vocab, generator=g) * torch.logspace(-2, 1.5, rows).unsqueeze(1)
    found[::5] = torch.randint(0, 3, (len(found[::5]), vocab), generator=g).float()
    found[1] = 0.25
    found[2, vocab // 2] = 60.0
    found[3:6] = found[3:6].where(torch.rand(3, vocab, generator=g) > 0.5, -INF)
    found[3:6, vocab - 1] = 1.0
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [1, 2, 5, 9, 97, 386, 1000, 4099])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-9, 1 - 2**-53])
def test_weights_and_draws_have_the_bits_of_one_process(size, vocab, top_p):
    logits, u = logits_of(vocab), torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def found(logits):
        sampling = Sampling(0.8, top_p)
        w, p = weights(logits, sampling), distribution(logits, sampling)
        return w, p, draw(w, u), draw(p, u), draw(w, 0 * u), draw(p, 0 * u + 1 - 2**-53)

    w, p, *drawn = equal_on(size, found, logits)
    assert ((p.double().sum(-1) - 1).abs() < 1e-6).all() and w.amax(-1).eq(1).all()
    assert all(w.gather(1, tokens.unsqueeze(1)).gt(0).all() for tokens in drawn)
    if top_p == 1e-9:
        assert (w > 0).sum(-1).eq(1).all() and torch.equal(w.argmax(-1), logits.argmax(-1))
    if top_p > 0.999:
        assert torch.equal(w, weights(logits, Sampling(0.8)))


def kept_by_definition(w: list[float], top_p: float) -> list[int]:
    """In exact arithmetic: from the likeliest token on, of equal ones the lower first, up to the one that crosses."""
    bound, total, kept = Fraction(top_p) * sum(map(Fraction, w)), Fraction(0), []
    for token in sorted(range(len(w)), key=lambda i: (-w[i], i)):
        if total >= bound:
            break
        kept.append(token)
        total += Fraction(w[token])
    return sorted(kept)


@pytest.mark.parametrize("vocab", [3, 10, 200])
@pytest.mark.parametrize("top_p", [0.0625, 0.5, 0.75, 0.96875])  # exact in fp64, so that ties may meet the bound
def test_what_is_kept_is_what_the_definition_keeps(vocab, top_p):
    logits = logits_of(vocab)
    every = weights(logits, Sampling(0.7))
    [found] = equal_on(4, lambda logits: (weights(logits, Sampling(0.7, top_p)),), logits)
    for row, mine in zip(every, found):
        kept = kept_by_definition(row.tolist(), top_p)
        assert mine.nonzero().flatten().tolist() == kept and torch.equal(mine[kept], row[kept])


def test_what_is_kept_is_what_transformers_keeps():
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(2)).double() * 2
    for top_p in (0.3, 0.9, 0.99):
        theirs = TopPLogitsWarper(top_p)(None, logits.clone()).isfinite()
        assert torch.equal(weights(logits, Sampling(1.0, top_p)) > 0, theirs)


@pytest.mark.parametrize("vocab", [129_280, 151_936])
def test_sums_of_weights_and_of_probabilities_are_exact_in_any_order(vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    for found in (weights(logits, Sampling(1.0)), distribution(logits, Sampling(1.0))):
        exact = math.fsum(found.tolist())
        for order in (found, found.flip(0), found.sort().values, found.sort(descending=True).values):
            assert order.double().cumsum(0)[-1].item() == exact == order.double().sum().item()
        unrounded = (logits - logits.max()).exp()
        assert torch.cumsum(unrounded.double(), 0)[-1] != torch.cumsum(unrounded.flip(0).double(), 0)[-1]


def test_rounding_moves_no_probability_by_more_than_fp32_does():
    logits = torch.randn(129_280, generator=torch.Generator().manual_seed(0)) * 4
    wanted, found = logits.double().softmax(-1), distribution(logits, Sampling(1.0)).double()
    assert (found - wanted).abs().sum() < 1e-6 and (found - wanted).abs().max() < 1e-8
    assert ((found - wanted).abs() / wanted)[wanted > 1e-5].max() < 1e-6


def beyond_chance(counts: torch.Tensor, p: torch.Tensor) -> float:
    """The chi-square statistic of counts [V] against probabilities fp64 [V], in standard deviations above its mean;
    rare tokens are one cell."""
    expected = p * counts.sum()
    some = expected > 20
    cells = lambda x: torch.cat((x[some], x[~some].sum().view(1)))
    mine, theirs = cells(counts.double()), cells(expected)
    mine, theirs = mine[theirs > 1], theirs[theirs > 1]
    freedom = len(theirs) - 1
    return float((((mine - theirs) ** 2 / theirs).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_have_torch_s_softmax_as_their_distribution(size, top_p):
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 1.5
    p = (logits / 1.3).double().softmax(-1)
    if top_p < 1:
        p = TopPLogitsWarper(top_p)(None, p.log().unsqueeze(0)).softmax(-1)[0]
    u = torch.rand(50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def counts(ranks):
        w = in_parts(weights(part_of(logits, ranks), Sampling(1.3, top_p)))
        return torch.bincount(draw(w.expand(len(u), 60), u), minlength=60)

    for found in together(size, counts):
        assert not found[p == 0].any() and beyond_chance(found, p) < 4 < beyond_chance(found, p.roll(1))


def test_plain_decoding_takes_one_number_and_has_that_distribution():
    logits, sampling = torch.randn(30, generator=torch.Generator().manual_seed(5)), Sampling(0.9)
    g, other = torch.Generator().manual_seed(6), torch.Generator().manual_seed(6)
    found = [sample(logits, sampling, g) for _ in range(20_000)]
    assert beyond_chance(torch.bincount(torch.tensor(found), minlength=30), (logits / 0.9).double().softmax(-1)) < 4
    torch.rand(20_000, dtype=torch.float64, generator=other)
    assert torch.equal(g.get_state(), other.get_state())


# ---- drafts ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [5, 9, 386])
@pytest.mark.parametrize("chosen", [False, True], ids=["drawn", "chosen"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_rejection_sampling_has_the_bits_of_one_process(size, vocab, chosen, top_p):
    """A ragged batch with pads of NaN; proposals that are the target, near it and apart from it."""
    g, B, W = torch.Generator().manual_seed(7), 120, 4
    target = torch.randn(B, W + 1, vocab, generator=g) * 2
    proposal = target[:, :W] + torch.randn(B, W, vocab, generator=g) * torch.tensor([0.0, 1e-6, 0.5, 4.0]).repeat(
        B // 4
    ).view(B, 1, 1)
    sizes, u = torch.randint(0, W + 1, (B,), generator=g), torch.rand(B, W + 1, dtype=torch.float64, generator=g)
    pads = torch.arange(W) >= sizes.unsqueeze(1)
    sampling = Sampling(0.9, top_p)
    proposal[pads], target[:, 1:][pads] = NAN, NAN
    drafts = draw(distribution(proposal, sampling), torch.rand(B, W, dtype=torch.float64, generator=g))
    drafts = proposal.nan_to_num().argmax(-1) if chosen else drafts.clamp(max=vocab - 1)

    def found(target, proposal):
        q = None if chosen else distribution(proposal, sampling)
        count, tokens = accept_sampled(distribution(target, sampling), q, drafts, sizes, u[:, 1:], u[:, 0])
        return count, tokens.where(torch.arange(W + 1) <= count.unsqueeze(1), -1)

    count, tokens = equal_on(size, found, target, proposal)
    assert 0 < count.sum() < sizes.sum() and (tokens < vocab).all()
    assert chosen or (count == sizes)[::4].all()  # there p is q


@pytest.mark.parametrize("size", SIZES)
def test_rounds_choose_what_one_process_chooses(size):
    g = torch.Generator().manual_seed(8)
    target, proposal = torch.randn(50, 4, 97, generator=g), torch.randn(50, 97, generator=g)
    at, sizes = torch.arange(50), torch.full((50,), 3)
    for sampling in (Sampling(0.8, 1.0, 3), Sampling(0.8, 0.9, 3)):

        def found(target, proposal, sampling=sampling):
            choice = choice_of(sampling, 50, "cpu")
            drafts, q = zip(*(choice.draft(proposal, at + i) for i in range(3)))
            drafts = torch.stack(drafts, 1)
            drawn = choice.accept(target, drafts, stacked_along(list(q), 1), sizes, at)
            return choice.own(target, at), drafts, *drawn, *choice.accept(target, drafts, None, sizes, at)

        equal_on(size, found, target, proposal)


# ---- what is sent ------------------------------------------------------------------------


def sent_by(size, what, *values):
    """Bytes of each exchange of the last rank."""

    def of_rank(ranks):
        what(*(part_of(x, ranks) for x in values))
        return ranks.group.sent

    return together(size, of_rank)[-1]


def test_few_bytes_are_sent_for_a_token():
    """However many tokens the vocabulary has. docs/parallel.md has these numbers."""
    logits, draws = torch.randn(3, 5, 1000), torch.rand(3, 5, dtype=torch.float64)
    one = lambda top_p: sent_by(2, lambda x: draw(weights(x, Sampling(0.8, top_p)), draws), logits)
    plain, search = [4, 8, 8], [8 * tried for tried in ROUNDS.values()]
    assert one(1.0) == [15 * n for n in plain] and sum(plain) == 20
    nucleus = [4, 8, *search, 16, 8, 8]
    assert one(0.9) == [15 * n for n in nucleus] and sum(nucleus) == 6700
    p, drafts, sizes = torch.rand(3, 5, 1000), torch.zeros(3, 4, dtype=torch.int64), torch.full((3,), 4)
    judge = lambda p, q: accept_sampled(p, q, drafts, sizes, draws[:, 1:], draws[:, 0])
    assert sent_by(4, judge, p, p[:, :4]) == [3 * 4, 3 * 8, 3 * 8, 3 * 8]


def test_no_rank_joins_what_it_draws_from(monkeypatch):
    monkeypatch.setattr(Ranks, "joined", lambda *given: pytest.fail("joined"))
    monkeypatch.setattr(CutValues, "whole", lambda *given: pytest.fail("joined"))
    logits = torch.randn(386, generator=torch.Generator().manual_seed(9))
    for top_p in (1.0, 0.9):
        drawn = lambda x, s: torch.tensor([sample(x, s, torch.Generator().manual_seed(n)) for n in range(40)])
        equal_on(4, lambda x, s=Sampling(0.8, top_p): (drawn(x, s),), logits)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_from_which_nothing_can_be_drawn_are_an_error_on_every_rank(bad, place, top_p):
    logits = torch.zeros(10)
    logits[place] = bad

    def refused(ranks):
        with pytest.raises(NotFinite, match="no token can be drawn"):
            sample(part_of(logits, ranks), Sampling(1.0, top_p), torch.Generator())

    for size in (1, 2, 3, 8):
        together(size, refused)


def test_values_are_shaped_as_a_tensor_of_them():
    values = torch.rand(4, 3, 10)

    def shaped(x):
        held = in_parts(x).new_zeros(4, 3, 10)
        held[[0, 2], 1] = in_parts(x)[[0, 2], 1]
        beside = joined_along((held[:1], in_parts(x)[1:]), 0).clone()
        tokens = torch.tensor([0, 4, 9])
        mine = beside.mine(tokens)
        return (
            held,
            beside,
            beside[0].indicator(tokens),
            beside.sum(),
            beside.max(),
            beside.ranks.through(beside[1].at(tokens).where(mine, 0).double())[-1],
        )

    *_, taken = equal_on(4, lambda x: tuple(t if isinstance(x, CutValues) or isinstance(t, torch.Tensor) else t.own
                                            for t in shaped(x)), values)  # fmt: skip
    assert torch.equal(taken, values[1].gather(1, torch.tensor([[0], [4], [9]])).flatten().double())
