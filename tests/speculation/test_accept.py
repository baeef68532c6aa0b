"""Acceptance: greedy by hand, sampling against the exact target distribution."""

import pytest
import torch

from dsv4.speculation.accept import accept_drawn, accept_greedy, accept_sampled, draw

DRAWS, V = 40_000, 5
P = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.05, 0.6, 0.3, 0.0], [0.0, 0.25, 0.25, 0.25, 0.25]])
PROPOSALS = {
    "the target itself": P[:2].clone(),
    "uniform": torch.full((2, V), 0.2),
    "disjoint from the second": torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6], [0.0, 0.0, 0.0, 0.0, 1.0]]),
    "sharper": torch.tensor([[0.9, 0.1, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]]),
    "zero where the target is not": torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0, 0.0]]),
}
# of the chi-square distribution, 0.999 quantile by degrees of freedom
CHI2_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}


def chi2(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Statistic of counts [V] against probabilities [V], and what it exceeds once in 1000. Counts where the probability
    is 0: inf."""
    some = wanted > 0
    if found[~some].any():
        return float("inf"), 0.0
    expected = wanted[some] * found.sum()
    return float(((found[some] - expected) ** 2 / expected).sum()), CHI2_999[int(some.sum()) - 1]


def drawn(q: torch.Tensor | None, seed: int = 0, rule=accept_sampled):
    """Many rows of two drafts: (accepted counts, tokens [DRAWS, 3]). q None: always drafts tokens 0 and 2."""
    g = torch.Generator().manual_seed(seed)
    if q is None:
        drafts = torch.tensor([[0, 2]]).expand(DRAWS, 2)
    else:
        drafts = torch.stack([torch.multinomial(q[i], DRAWS, True, generator=g) for i in range(2)], 1)
        q = q.expand(DRAWS, 2, V)
    u = torch.rand(DRAWS, 3, generator=g, dtype=torch.float64)
    return rule(P.expand(DRAWS, 3, V), q, drafts, torch.full((DRAWS,), 2), u[:, 1:], u[:, 0])


def worst(out) -> list[tuple[float, float]]:
    """chi2 of the token at each place, among rows that emitted one there: each must follow the target of its place."""
    count, tokens = out
    return [
        chi2(torch.bincount(tokens[count >= place, place], minlength=V).double(), P[place].double())
        for place in range(3)
        if int((count >= place).sum()) > 500
    ]


@pytest.mark.parametrize("q", [*PROPOSALS.values(), None], ids=[*PROPOSALS, "a point mass"])
def test_every_place_has_the_target_s_distribution(q):
    for value, limit in worst(drawn(q)):
        assert value < limit


@pytest.mark.parametrize("q", [*PROPOSALS.values(), None], ids=[*PROPOSALS, "a point mass"])
def test_pairs_are_independent_as_the_target_s_are(q):
    """First and second token jointly: what was accepted first says nothing about the second, here where the target says
    nothing."""
    count, tokens = drawn(q, 1)
    first, second = tokens[count >= 1].T[:2]
    for token in first.unique():
        if (first == token).sum() > 500:
            value, limit = chi2(torch.bincount(second[first == token], minlength=V).double(), P[1].double())
            assert value < limit


@pytest.mark.parametrize("q", [PROPOSALS[name] for name in list(PROPOSALS)[1:]], ids=list(PROPOSALS)[1:])
def test_the_statistic_sees_a_rule_that_accepts_everything(q):
    def always(p, q, drafts, sizes, u, u_last):
        return sizes, torch.cat((drafts, draw(p[:, 2], u_last).unsqueeze(1)), 1)

    assert any(value > limit for value, limit in worst(drawn(q, rule=always)))


def test_the_statistic_sees_a_residual_that_is_the_target():
    def no_residual(p, q, drafts, sizes, u, u_last):
        count, tokens = accept_sampled(p, q, drafts, sizes, u, u_last)
        return count, tokens.scatter(1, count.unsqueeze(1), draw(p[torch.arange(len(p)), count], u_last).unsqueeze(1))

    assert any(value > limit for value, limit in worst(drawn(PROPOSALS["sharper"], rule=no_residual)))


def test_the_target_itself_is_always_accepted():
    assert (drawn(PROPOSALS["the target itself"]).count == 2).all()


def test_acceptance_is_the_overlap_of_both():
    """P(accept) = Σ min(p, q): Leviathan et al., corollary 3.6."""
    for q in PROPOSALS.values():
        share = float((drawn(q).count >= 1).double().mean())
        assert share == pytest.approx(float(torch.minimum(P[0], q[0]).sum()), abs=0.01)


def test_ragged_rows_and_pads_of_nan():
    """A row's pads are never looked at, whatever they hold, and its neighbours change nothing."""
    g = torch.Generator().manual_seed(5)
    p, q = torch.rand(4, 4, V, generator=g).softmax(-1), torch.rand(4, 3, V, generator=g).softmax(-1)
    drafts, u, last = torch.randint(V, (4, 3), generator=g), torch.rand(4, 3, generator=g), torch.rand(4, generator=g)
    sizes = torch.tensor([0, 1, 3, 2])
    alone = [
        accept_sampled(
            p[b : b + 1, : n + 1],
            q[b : b + 1, :n],
            drafts[b : b + 1, :n],
            sizes[b : b + 1],
            u[b : b + 1, :n],
            last[b : b + 1],
        )
        for b, n in enumerate(sizes.tolist())
    ]
    for b, n in enumerate(sizes.tolist()):
        p[b, n + 1 :], q[b, n:] = float("nan"), float("nan")
    count, tokens = accept_sampled(p, q, drafts, sizes, u, last)
    for b, (n, found) in enumerate(alone):
        assert count[b] == n[0] <= sizes[b] and torch.equal(tokens[b, : n[0] + 1], found[0, : n[0] + 1])


def test_greedy_is_the_longest_right_prefix_and_one_more():
    best = torch.tensor([[3, 1, 4, 1], [2, 2, 2, 2], [0, 1, 2, 3], [4, 0, 0, 0]])
    logits = torch.nn.functional.one_hot(best, V).float()
    drafts = torch.tensor([[3, 1, 4], [2, 0, 2], [1, 1, 2], [4, 0, 0]])
    count, tokens = accept_greedy(logits, drafts, torch.tensor([3, 3, 3, 1]))
    assert count.tolist() == [3, 1, 0, 1]
    assert [row[: n + 1] for row, n in zip(tokens.tolist(), count)] == [[3, 1, 4, 1], [2, 2], [0], [4, 0]]


def test_draws_are_never_of_weight_zero():
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    u = torch.cat(
        (torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1], torch.tensor([1 - 2**-53], dtype=torch.float64))
    )
    found = draw(weights.expand(len(u), -1), u)
    assert set(found.tolist()) == {1, 3} and (found[u < 0.299] == 1).all() and (found[u > 0.301] == 3).all()


def test_the_draws_of_plain_decoding_decide_and_none_is_made_in_vain():
    """Each place is drawn once, in order, up to the first that is not its draft; a caller that stops draws no
    further."""
    asked, plain = [], [7, 8, 9, 5]

    def draw(place):
        asked.append(place)
        return plain[place]

    for drafts, out in (([], [7]), ([7, 8, 9], plain), ([7, 3, 9], [7, 8]), ([1, 8, 9], [7])):
        asked.clear()
        assert list(accept_drawn(drafts, draw)) == out and asked == list(range(len(out)))
    asked.clear()
    assert next(accept_drawn([7, 8, 9], draw)) == 7 and asked == [0]
