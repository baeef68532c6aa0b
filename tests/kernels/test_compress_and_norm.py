"""Gated pooling and RMS norm against their definitions."""

import torch

from dsv4.kernels.compress import gated_pool
from dsv4.kernels.rms_norm import rms_norm


def test_pooling_is_a_softmax_per_channel():
    kv, gate = torch.randn(2, 5, 3), torch.randn(2, 5, 3) * 4
    got = gated_pool(kv, gate)
    for m in range(2):
        for c in range(3):
            p = torch.exp(gate[m, :, c].double())
            assert abs(got[m, c].item() - ((p / p.sum()) @ kv[m, :, c].double()).item()) < 1e-6


def test_a_slot_of_minus_infinity_has_no_part():
    kv, gate = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    gate[:, :2] = float("-inf")
    assert torch.allclose(gated_pool(kv, gate), gated_pool(kv[:, 2:], gate[:, 2:]))


def test_rms_norm_rounds_once():
    x, w = torch.randn(7, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()
    got = rms_norm(x, w, 1e-6)
    assert got.dtype == torch.bfloat16
    twice = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * w
    assert (got.double() - exact).abs().max() <= (exact.abs() * 2**-8).max()
    assert not torch.equal(got, twice)  # a cast before the weight would show here


def test_rms_norm_without_a_weight():
    x = torch.randn(3, 2, 16)
    assert torch.allclose(rms_norm(x, None, 1e-6).square().mean(-1), torch.ones(3, 2), atol=1e-4)


def test_host_form_of_the_norm_equals_the_reference():
    for x, w in (
        (torch.randn(1, 64), torch.randn(64)),
        (torch.randn(1, 1, 32), None),
        (torch.randn(1, 64).bfloat16(), torch.randn(64).bfloat16()),
        (torch.randn(2, 64), torch.randn(64)),
    ):
        got, wanted = rms_norm(x, w, 1e-6, backend="cpu"), rms_norm(x, w, 1e-6)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert (got.float() - wanted.float()).abs().max() < (1e-5 if x.dtype is torch.float32 else 4e-2)
