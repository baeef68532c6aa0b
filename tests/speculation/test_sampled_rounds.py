"""Rounds that sample: their texts have the target's distribution, whatever is drafted and however sizes adapt, and
depend on seeds alone."""

import pytest
import torch

from dsv4.sampling import Sampling, distribution
from dsv4.speculation import choosing
from dsv4.speculation.accept import draw
from dsv4.speculation.noise import DRAFT, KEEP, OWN, row_seeds, uniforms
from dsv4.speculation.policy import Adaptive, Static
from dsv4.speculation.policy_device import DevicePolicy, on_device
from tests.speculation.chain import PROPOSALS, TARGET, V, chained
from tests.speculation.test_ring import Late

ROWS, NEW = 3000, 14
# of the chi-square distribution, 0.9999 quantile by degrees of freedom
CHI2_9999 = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51}


class Spiteful(DevicePolicy):
    """Many drafts after a round in which none stayed, and few after one in which all did."""

    def __init__(self, batch):
        self.size = torch.full((batch,), 3)

    def observe(self, accepted, proposed):
        self.size.copy_(torch.where(accepted == 0, 5, torch.where(accepted == proposed, 1, 3)))

    def choose(self, pressure, live=None):
        return self.size * live

    def reset(self, fresh):
        pass


POLICIES = {
    "static": lambda batch: on_device(Static(4), batch, "cpu"),
    "adaptive": lambda batch: on_device(Adaptive(), batch, "cpu"),
    "spiteful": Spiteful,
}


def worst(rows: list[list[int]], target: torch.Tensor) -> float:
    """The largest chi-square statistic, over its quantile, of tokens after each token: at each position, and over all
    of them."""
    text = torch.tensor([[0, *row] for row in rows])
    pairs = [(text[:, t], text[:, t + 1]) for t in range(text.shape[1] - 1)]
    pairs.append((text[:, :-1].flatten(), text[:, 1:].flatten()))
    found = []
    for before, after in pairs:
        for token in range(V):
            counts, p = torch.bincount(after[before == token], minlength=V).double(), target[token].double()
            if counts.sum() < 100 or int((p > 0).sum()) < 2:
                continue
            some = p > 0
            if counts[~some].any():
                return float("inf")
            expected = p[some] * counts.sum()
            found.append(float(((counts[some] - expected) ** 2 / expected).sum()) / CHI2_9999[int(some.sum()) - 1])
    return max(found)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PROPOSALS)
def test_texts_have_the_target_s_distribution(name, policy):
    """The next token by the last one, at every position: rounds begin and end at all of them, and draw again behind
    what they refused."""
    found = chained(PROPOSALS[name], ROWS, NEW, POLICIES[policy](ROWS))
    assert worst(found.run(), TARGET) < 1
    drafted = sum(d for row in found.history() for d, _ in row)
    kept = sum(a for row in found.history() for _, a in row)
    assert drafted and (kept == drafted if name == "the target" else kept < drafted)


def test_words_of_three_tokens_have_the_target_s_distribution():
    """Jointly: what was drafted for one token says nothing of those behind it."""
    rows = torch.tensor(chained(PROPOSALS["some of it"], 20_000, 6, Spiteful(20_000), ahead=1).run())
    for at in (0, 2):
        given = rows if at == 0 else rows[rows[:, at - 1] == 0]
        word = (given[:, at] * V + given[:, at + 1]) * V + given[:, at + 2]
        p = (TARGET[0].view(V, 1, 1) * TARGET.view(V, V, 1) * TARGET.view(1, V, V)).flatten().double() * len(given)
        likely = p > 5
        counts = torch.bincount(word, minlength=V**3).double()
        assert not counts[p == 0].any()
        value, freedom = float(((counts - p)[likely] ** 2 / p[likely]).sum()), int(likely.sum()) - 1
        assert value < freedom + 4 * (2 * freedom) ** 0.5


def test_temperature_and_top_p_are_those_of_plain_decoding():
    sampling = Sampling(0.7, 0.8)
    found = chained(PROPOSALS["some of it"], ROWS, NEW, POLICIES["adaptive"](ROWS), sampling, ahead=1).run()
    target = distribution(TARGET.log(), sampling)
    assert worst(found, target) < 1 < worst(found, TARGET)


FAULTS = {
    "the number that drew a draft keeps it": ("KEEP", DRAFT),
    "the number that refused a draft draws in its place": ("OWN", KEEP),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_statistic_sees_one_number_used_twice(fault, monkeypatch):
    monkeypatch.setattr(choosing, *FAULTS[fault])
    assert worst(chained(PROPOSALS["some of it"], ROWS, NEW, POLICIES["static"](ROWS), ahead=1).run(), TARGET) > 1


def serial(seeds: int, new: int, length: int = 3, sampling: Sampling = Sampling(1.0)) -> list[list[int]]:
    """What decoding without drafts draws with the same noise."""
    token, out = torch.zeros(seeds, dtype=torch.int64), []
    for t in range(new):
        token = draw(
            distribution(TARGET.log()[token], sampling),
            uniforms(row_seeds(0, seeds, "cpu"), torch.full((seeds,), length + 1 + t), OWN),
        )
        out.append(token)
    return torch.stack(out, 1).tolist()


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_lookup_draws_what_decoding_without_drafts_draws(policy, ahead):
    found = chained(TARGET, 50, 40, POLICIES[policy](50), lookup=True, ahead=ahead)
    assert found.run() == serial(50, 40)
    assert sum(a for row in found.history() for _, a in row) > 100


def test_rounds_without_drafts_draw_the_same():
    assert chained(TARGET, 50, 40, on_device(Static(0), 50, "cpu")).run() == serial(50, 40)
    assert worst(serial(ROWS, NEW), TARGET) < 1


@pytest.mark.parametrize("lookup", [False, True], ids=["mtp", "lookup"])
@pytest.mark.parametrize("policy", ["static", "adaptive"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_row_by_itself_says_what_it_says_in_a_batch(ahead, policy, lookup):
    q, n = PROPOSALS["some of it"], 6
    whole = chained(q, n, 30, POLICIES[policy](n), lookup=lookup, ahead=ahead).run()
    assert whole == [
        chained(q, 1, 30, POLICIES[policy](1), lookup=lookup, seed=b, ahead=ahead).run()[0] for b in range(n)
    ]
    assert len(set(map(tuple, whole))) == n


def test_texts_do_not_depend_on_how_far_the_host_is_behind():
    texts = [chained(PROPOSALS["some of it"], 20, 30, POLICIES["static"](20), ahead=ahead).run() for ahead in (1, 2, 3)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("lookup", [False, True], ids=["mtp", "lookup"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_texts_do_not_depend_on_the_clock(ahead, lookup, monkeypatch):
    """Sizes that adapt decide how many are drafted, by records that arrive early or late."""
    texts = []
    for at_once in (1, 40, 10_000):
        monkeypatch.setattr(Late, "at_once", at_once)
        told = [[] for _ in range(4)]
        found = chained(PROPOSALS["some of it"], 4, 60, POLICIES["adaptive"](4), lookup=lookup, kind=Late, ahead=ahead)
        texts.append(found.run(lambda row, tokens: told[row].extend(tokens)))
        assert told == texts[-1] and len(set(found.counts.rounds)) > 1  # every token once, in order
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("lookup", [False, True], ids=["mtp", "lookup"])
def test_stop_ids_and_lengths(lookup):
    """A row with a stop id says what it says without, up to the first; no row says more than it may."""
    q = PROPOSALS["some of it"]
    whole = chained(q, 40, 25, POLICIES["static"](40), lookup=lookup).run()
    assert all(len(row) == 25 for row in whole)
    stopped = chained(q, 40, 25, POLICIES["static"](40), lookup=lookup, stop_ids=(4,)).run()
    wanted = [row[: row.index(4) + 1] if 4 in row else row for row in whole]
    assert stopped == wanted and len({len(row) for row in wanted}) > 10
    for new in (1, 2, 5):
        assert all(len(row) == new for row in chained(q, 40, new, POLICIES["static"](40), lookup=lookup).run())


def test_what_is_not_found_is_not_proposed():
    """A row whose text repeats nothing drafts nothing in that round, and its policy hears so; rounds in which none does
    have no drafts."""
    heard, policy = [], on_device(Static(3), 2, "cpu")
    policy.observe = lambda accepted, proposed: heard.append(proposed.tolist())
    found = chained(TARGET, 2, 12, policy, lookup=True, ahead=1)
    host = [[1, 2, 0, 0]] * 2  # the prompts and the tokens after them
    for _ in range(5):
        sizes = [3 * any(row[-1] == token for token in row[:-1]) for row in host]
        assert found.sizes.tolist() == [min(size, int(n) - 1) for size, n in zip(sizes, found.left)]
        proposed = found.sizes.tolist()
        found._round(3)
        assert heard[-1] == proposed
        host = [row[:4] + out[:n] for row, out, n in zip(host, found.out.tolist(), found.written.tolist())]
    texts = chained(TARGET, 1, 60, on_device(Static(3), 1, "cpu"), lookup=True)
    texts.run()
    assert {0, 3} <= set(texts.counts.rounds)
