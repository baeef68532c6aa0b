"""Which texts and positions lose: against counting by hand."""

import math

import pytest
import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.base.logits import Positions
from dsv4.probes.measure.sparse_prefill import distribution

CUT = Chunking(8, 2, 3)


def positions_losing(nats: list[float]) -> Positions:
    exact = torch.ones(len(nats), dtype=torch.float64)
    choice = torch.zeros(len(nats), dtype=torch.int64)
    return Positions(choice, choice, exact, exact, exact, exact + torch.tensor(nats, dtype=torch.float64))


def test_a_text_is_below_the_goal_by_its_perplexity():
    """5 % are 0.04879 nats a token."""
    below, above = (distribution.row_figures(positions_losing([x, x])) for x in (0.0487, 0.0489))
    assert (below["verdict"], above["verdict"]) == ("met", "MISSED") and below["positions"] == 2
    assert above["loss"] == pytest.approx(math.exp(0.0489) - 1)


@pytest.mark.parametrize(
    "losses, below, verdict", [([0.04, 0.06], 1, "met"), ([0.04, 0.06, 0.05], 1, "MISSED"), ([0.2], 0, "MISSED")]
)
def test_half_of_the_texts_are_enough(losses, below, verdict):
    found = distribution.texts_below(losses)
    assert (found["texts"], found["below"], found["verdict"]) == (len(losses), below, verdict)
    assert (found["least"], found["most"]) == (min(losses), max(losses))


def test_origins_are_those_of_a_search_from_behind():
    """Few different tokens, so that pairs recur in every class."""
    ids = torch.randint(0, 5, (121,), generator=torch.Generator().manual_seed(3))
    found = distribution.origins(ids, CUT, 8).tolist()
    for p in range(8, 120):
        begin = p // 8 * 8
        behind = [j for j in range(p) if (ids[j], ids[j + 1]) == (ids[p], ids[p + 1])]
        at = max(behind) + 1 if behind else None
        wanted = "nowhere" if at is None else "own chunk" if at >= begin else "local" if at >= begin - 2 else None
        assert distribution.ORIGINS[found[p - 8]] == (wanted or "before local"), p
    assert len(found) == 112 and set(found) == {0, 1, 2, 3}


def test_quarters_follow_the_chunk():
    assert distribution.quarters(CUT, 8, 11).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1]


def test_shares_of_classes_sum_to_the_whole_loss():
    rows = distribution.by_class(torch.tensor([1.0, 2.0, 3.0, -2.0]), torch.tensor([0, 0, 2, 2]), ("a", "b", "c"))
    assert [(r["class"], r["positions"], r["lost"], r["share"]) for r in rows] == [
        ("a", 2, 1.5, 0.75),
        ("b", 0, None, 0.0),
        ("c", 2, 0.5, 0.25),
    ]
    assert all(r["share"] is None for r in distribution.by_class(torch.zeros(2), torch.zeros(2), ("a",)))
