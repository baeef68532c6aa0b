"""Noise by counting: the published sequence, uniform and independent across seeds, positions and roles, the same for a
row in any batch."""

import pytest
import torch

from dsv4.speculation.noise import DRAFT, KEEP, OWN, ROLES, row_seeds, splitmix64, uniforms

MASK = (1 << 64) - 1
BINS, CHI2 = 64, 103.4  # the chi-square distribution of 63 degrees of freedom exceeds this once in 1000


def specified(state: int, n: int) -> int:
    """SplitMix64 in whole numbers, as published."""
    z = (state + n * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def test_the_published_sequence():
    words = [n & MASK for n in splitmix64(torch.tensor(1234567), torch.arange(1, 6)).tolist()]
    assert words == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_words_of_any_seed_and_place_are_those_of_whole_numbers():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    at = [0, 1, 2, 1000, 2**40]
    for role in range(ROLES):
        found = uniforms(torch.tensor(seeds), torch.tensor(at).expand(len(seeds), -1), role)
        wanted = [
            [(specified(specified(seed & MASK, 1), ROLES * t + role + 1) >> 11) * 2.0**-53 for t in at]
            for seed in seeds
        ]
        assert found.dtype == torch.float64 and found.tolist() == wanted


def chi2(u: torch.Tensor) -> float:
    """Of u fp64 [n] in [0, 1), in equal bins."""
    counts = torch.bincount((u * BINS).long(), minlength=BINS).double()
    expected = u.numel() / BINS
    return float(((counts - expected) ** 2 / expected).sum())


def many(role: int, seeds: int = 500, places: int = 400) -> torch.Tensor:
    """fp64 [seeds, places] of neighbouring seeds and positions, as rows of a batch have them."""
    return uniforms(torch.arange(seeds), torch.arange(places).expand(seeds, -1), role)


@pytest.mark.parametrize("role", range(ROLES))
def test_uniform_over_positions_and_over_seeds(role):
    u = many(role)
    assert u.min() >= 0 and u.max() < 1
    values = torch.tensor(
        [chi2(u.flatten()), *(chi2(u[:, t]) for t in range(0, 400, 7)), *(chi2(row) for row in u[::9])]
    )
    assert (
        values[0] < CHI2
        and float((values > CHI2).double().mean()) < 0.03
        and abs(float(values.mean()) - (BINS - 1)) < 6
    )


def test_numbers_are_distinct_across_seeds_positions_and_roles():
    u = torch.stack([many(role) for role in range(ROLES)])
    assert u.unique().numel() == u.numel()


@pytest.mark.parametrize("pair", [(DRAFT, KEEP), (DRAFT, OWN), (KEEP, OWN)])
def test_roles_of_a_position_are_independent(pair):
    """Jointly uniform in 8 × 8 squares, at the same position and at neighbouring ones, and without correlation."""
    a, b = (many(role) for role in pair)
    for shift in (0, 1, 2):
        x, y = a[:, shift:].flatten(), b[:, : 400 - shift].flatten()
        assert chi2(((x * 8).long() * 8 + (y * 8).long()).double() / BINS + 1e-9) < CHI2
        assert abs(float(torch.corrcoef(torch.stack((x, y)))[0, 1])) < 4 / x.numel() ** 0.5


@pytest.mark.parametrize("role", range(ROLES))
def test_neighbouring_seeds_and_positions_are_independent(role):
    u = many(role)
    for x, y in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, :-3], u[:-1, 3:])):
        x, y = x.flatten(), y.flatten()
        assert chi2(((x * 8).long() * 8 + (y * 8).long()).double() / BINS + 1e-9) < CHI2


def test_a_row_by_itself_draws_what_it_draws_in_a_batch():
    seeds, at = row_seeds(41, 4, "cpu"), torch.tensor([7, 7, 90, 3])
    assert seeds.tolist() == [41, 42, 43, 44] and row_seeds(2**63 - 1, 2, "cpu").tolist() == [2**63 - 1, -(2**63)]
    for role in (DRAFT, KEEP, OWN):
        whole = uniforms(seeds, at.unsqueeze(1) + torch.arange(9), role)
        for b in range(4):
            alone = uniforms(row_seeds(41 + b, 1, "cpu"), at[b : b + 1], role)
            assert alone.tolist() == whole[b, :1].tolist() == uniforms(seeds, at, role)[b : b + 1].tolist()
