"""Agreement, KL, perplexity, prefixes, findability and needles, against what is computed by hand."""

import math

import pytest
import torch

from dsv4.errors import NotFinite
from dsv4.kernels.block_choice import Policy, block_bounds, choose_blocks
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.probes.measure.base.haystack import ADJECTIVES, NOUNS, chance_of_a_guess
from dsv4.probes.measure.base.logits import exact_prefixes, figures, joined, positions, prefix_figures
from dsv4.probes.measure.base.needles import Asked, row
from dsv4.probes.measure.base.plots import by_depth
from dsv4.probes.measure.base.variants import Variant, of_csa
from dsv4.probes.measure.fidelity.findability import added, block_mass, blocks, tally
from dsv4.probes.measure.fidelity.findability import figures as kept_figures


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    """Rows of probabilities as logits."""
    return torch.tensor(rows, dtype=torch.float64).log()


EXACT = logits((0.5, 0.3, 0.2), (0.8, 0.15, 0.05), (0.1, 0.2, 0.7), (0.3, 0.6, 0.1))
OTHER = logits((0.2, 0.3, 0.5), (0.5, 0.4, 0.1), (0.1, 0.2, 0.7), (0.9, 0.05, 0.05))
NEXT = torch.tensor([1, 0, 2, 1])


def test_positions_by_hand():
    found = positions(EXACT, OTHER, NEXT)
    assert found.exact_choice.tolist() == [0, 0, 2, 1] and found.choice.tolist() == [2, 0, 2, 0]
    assert found.margin.tolist() == pytest.approx([math.log(5 / 3), math.log(0.8 / 0.15), math.log(3.5), math.log(2)])
    assert found.kl.tolist() == pytest.approx(
        [
            0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5),
            0.8 * math.log(0.8 / 0.5) + 0.15 * math.log(0.15 / 0.4) + 0.05 * math.log(0.05 / 0.1),
            0,
            0.3 * math.log(0.3 / 0.9) + 0.6 * math.log(0.6 / 0.05) + 0.1 * math.log(0.1 / 0.05),
        ],
        abs=1e-12,
    )
    assert found.exact_nll.exp().tolist() == pytest.approx([1 / 0.3, 1 / 0.8, 1 / 0.7, 1 / 0.6])
    assert found.nll.exp().tolist() == pytest.approx([1 / 0.3, 2, 1 / 0.7, 20])


def test_figures_by_hand():
    """Confident are the second and the third position, of the exact run; the variant would be so at the third and the
    fourth."""
    found = figures(positions(EXACT, OTHER, NEXT))
    assert found["positions"] == 4 and found["agreement"] == 0.5
    assert found["confident"] == 2 and found["agreement_confident"] == 1.0
    # by frequencies of choices 0, 1, 2
    assert found["agreement_chance"] == pytest.approx(0.5 * 0.5 + 0.25 * 0 + 0.25 * 0.5)
    assert found["kl"] == pytest.approx(positions(EXACT, OTHER, NEXT).kl.mean().item())
    assert found["perplexity"] == pytest.approx((1 / 0.3 * 2 * 1 / 0.7 * 20) ** 0.25)
    assert found["perplexity_exact"] == pytest.approx((0.3 * 0.8 * 0.7 * 0.6) ** -0.25)


def test_no_confident_position_is_no_figure():
    found = figures(positions(EXACT[:1], OTHER[:1], NEXT[:1]))
    assert found["confident"] == 0 and found["agreement_confident"] is None


def test_divergence_has_a_direction():
    p, q = logits((0.5, 0.5)), logits((0.9, 0.1))
    assert positions(p, q, NEXT[:1] * 0).kl.item() == pytest.approx(0.510826, abs=1e-6)
    assert positions(q, p, NEXT[:1] * 0).kl.item() == pytest.approx(0.368064, abs=1e-6)


def test_the_same_logits_are_faithful():
    found = figures(joined([positions(EXACT, EXACT, NEXT)] * 2))
    assert (found["positions"], found["agreement"], found["agreement_confident"], found["kl"], found["kl_p99"]) == (
        8,
        1.0,
        1.0,
        0.0,
        0.0,
    )
    assert found["perplexity"] == found["perplexity_exact"]


def test_logits_that_are_no_numbers():
    for exact, other, name in ((EXACT, OTHER * float("nan"), "variant"), (EXACT / 0, OTHER, "exact run")):
        with pytest.raises(NotFinite, match=f"logits of the {name} are infinite or NaN at 4 of 4"):
            positions(exact, other, NEXT)


def test_a_prefix_ends_at_the_first_difference():
    exact = torch.tensor([[1, 2, 3, 4]] * 4)
    other = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 9]])
    assert exact_prefixes(exact, other) == [4, 1, 0, 3]
    assert prefix_figures([4, 1, 0, 3], 4) == {
        "prompts": 4,
        "new_tokens": 4,
        "prefix_mean": 2.0,
        "prefix_median": 2.0,
        "prefix_full": 0.25,
        "prefixes": [0, 1, 3, 4],
    }


# ---- findability --------------------------------------------------------------------------


def test_what_is_kept_by_hand():
    mass = torch.tensor([[0.1, 0.3, 0.2, 0.4], [0.5, 0.1, 0.2, 0.0], [0.2, 0.2, 0.2, 0.2]])
    choices = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()  # the third query has none
    kept = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]]).bool()  # of the first one's, one is no choice
    sums = tally(mass, kept, choices, top=2)
    assert sums == pytest.approx(
        {
            "queries": 2,
            "mass": 0.6 + 0.8,
            "mass_kept": 0.3 + 0.3,
            "mass_best": 0.3 + 0.7,
            "wanted": 4,
            "found": 1 + 1,
            "chance": 1 / 3 + 2 / 4,
        }
    )
    found = kept_figures(added(sums, sums))
    assert found == {
        "queries": 4,
        "status": "MEASURED",
        "chance": pytest.approx(5 / 12),
        "attention_on_choices": pytest.approx(0.7),
        "mass_kept": pytest.approx(0.6 / 1.4),
        "mass_best": pytest.approx(1 / 1.4),
        "findability": 0.5,
        "top": 8,
    }


def test_keeping_every_choice_is_vacuous():
    mass, all_of = torch.rand(3, 5), torch.ones(3, 5, dtype=torch.bool)
    found = kept_figures(tally(mass, all_of, all_of))
    assert (found["status"], found["chance"], found["mass_kept"], found["findability"]) == ("VACUOUS", 1.0, 1.0, 1.0)
    nothing = kept_figures(tally(mass, all_of, ~all_of))
    assert nothing["status"] == "VACUOUS" and nothing["findability"] is None


def test_blocks_of_a_gqa_layer():
    """Mass against float64 loops; kept blocks against the keep-set that decoding uses."""
    make, policy = torch.Generator().manual_seed(0), block_bounds(96, 16)
    q, keys = torch.randn(1, 5, 4, 8, generator=make), torch.randn(1, 2, 256, 8, generator=make)
    start, scale = torch.tensor([190]), 0.5
    mass, kept, choices = (t.view(5, 2, -1) for t in blocks(q, keys, start, scale, policy))
    low, high = (torch.zeros(1, 2, 16, 8) for _ in range(2))
    summarise_blocks(keys, start * 0, 195, low, high, None, 16)
    wanted = choose_blocks(q, 2, low, high, None, start, policy)[0]
    for t in range(5):
        current = (190 + t) // 16
        assert choices[t, 0].nonzero().flatten().tolist() == list(range(1, current - 1))
        for kv in range(2):
            heads = [
                (keys[0, kv, : 191 + t].double() @ q[0, t, h].double() * scale).softmax(-1)
                for h in (2 * kv, 2 * kv + 1)
            ]
            p = (heads[0] + heads[1]) / 2
            assert mass[t, kv].tolist() == pytest.approx(
                [p[16 * b : 16 * b + 16].sum().item() for b in range(13)], abs=1e-6
            )
            assert {*kept[t, kv].nonzero().flatten().tolist(), 0, current - 1, current} == set(wanted[t, kv].tolist())
    assert kept.sum(-1).eq(3).all() and torch.allclose(block_mass(q, keys, start, scale, 16).sum(-1), torch.ones(5, 2))


def test_a_policy_without_a_selector_keeps_no_choice():
    q, keys = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 128, 8)
    _, kept, choices = blocks(q, keys, torch.tensor([100]), 1.0, Policy("window", None, 16, 1, 2))
    assert not kept.any() and choices.any()


# ---- needles ------------------------------------------------------------------------------


def test_chance_is_the_best_constant_guess():
    """A number of four digits: of three equally likely ranges 1000 … 9999, 99999, 999999, three quarters of the
    values."""
    assert chance_of_a_guess() == pytest.approx(0.75 / 3 * (1 / 9000 + 1 / 99000 + 1 / 999000))
    assert 0.25 / (len(set(ADJECTIVES)) * len(set(NOUNS))) < chance_of_a_guess() < 1e-4


def test_a_row_of_needles():
    asked = lambda depth: Asked([0] * 100, [1] * 4, depth)
    found = row(of_csa(2), "prose", 100, [asked(d) for d in (0.1, 0.5, 0.9, 0.95)], [True, False, True, True])
    assert (found["hits"], found["trials"], found["share"], found["status"]) == (3, 4, 0.75, "MEASURED")
    assert found["at_least"] == pytest.approx(0.1941, abs=5e-5) and found["at_most"] == pytest.approx(0.9937, abs=5e-5)
    assert found["chance"] == chance_of_a_guess() and by_depth(found["depths"]) == ([0.15, 0.55, 0.95], [1.0, 0.0, 1.0])
    for k, status in ((26, "VACUOUS"), (25, "MEASURED")):  # 100 tokens and 4 more of the answer
        assert row(of_csa(k), "prose", 100, [asked(0.1)], [True])["status"] == status


def test_what_keeps_all_of_a_context():
    assert of_csa(25).keeps_all(100) and of_csa(25).keeps_all(103) and not of_csa(25).keeps_all(104)
    assert not Variant("w", budget=8, control=True).keeps_all(4) and Variant("dense", exact=True).keeps_all(1 << 20)
