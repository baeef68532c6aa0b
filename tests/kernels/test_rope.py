"""RoPE pair by pair, against the definition in Python floats."""

import cmath
import math
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.rope import inverse_frequencies, rotate, rotation

FLASH_YARN = SimpleNamespace(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)


def test_flash_yarn_ramps_from_pair_15_to_25():
    plain, yarn = inverse_frequencies(64, 160000.0), inverse_frequencies(64, 160000.0, FLASH_YARN)
    ratio = yarn / plain
    assert torch.equal(ratio[:16], torch.ones(16))
    assert torch.allclose(ratio[25:], torch.full((7,), 1 / 16))
    assert all(1 / 16 < r < 1 for r in ratio[16:25].tolist())


@pytest.mark.parametrize("pair", range(4), ids=lambda i: f"pair {i}")
def test_a_one_hot_pair_turns_by_its_own_angle(pair):
    f = inverse_frequencies(8, 10000.0)
    x = torch.zeros(1, 12)
    x[0, 4 + 2 * pair] = 1.0
    got = rotate(x, rotation(torch.tensor([37]), f))
    turned = cmath.exp(1j * 37 * 10000.0 ** (-2 * pair / 8))
    wanted = torch.zeros(12)
    wanted[4 + 2 * pair], wanted[5 + 2 * pair] = turned.real, turned.imag
    assert torch.allclose(got[0], wanted, atol=1e-6)


def test_dims_before_the_last_are_left_alone():
    x = torch.randn(3, 2, 20)
    before = x.clone()
    rotate(x, rotation(torch.tensor([5, 6, 7]), inverse_frequencies(8, 1e4)).unsqueeze(1))
    assert torch.equal(x[..., :12], before[..., :12])
    assert not torch.allclose(x[..., 12:], before[..., 12:])


def test_the_conjugate_undoes_the_rotation_far_out():
    x = torch.randn(2, 64)
    before = x.clone()
    cis = rotation(torch.tensor([1_000_000, 131_071]), inverse_frequencies(64, 160000.0, FLASH_YARN))
    rotate(rotate(x, cis), cis.conj())
    assert torch.allclose(x, before, atol=1e-5)


def test_bf16_is_rotated_in_fp32_and_rounded_once():
    x = torch.randn(4, 24).bfloat16()
    cis = rotation(torch.arange(4), inverse_frequencies(16, 1e4))
    wanted = rotate(x.float(), cis).bfloat16()
    assert torch.equal(rotate(x, cis), wanted)


def test_correction_dims_match_the_closed_form():
    c = lambda n: 64 * math.log(65536 / (2 * math.pi * n)) / (2 * math.log(160000))
    assert (math.floor(c(32)), math.ceil(c(1))) == (15, 25)
