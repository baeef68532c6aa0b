"""What is kept while several tokens share dequantised weights is what dequantising gives, and it is bounded."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat, kept
from dsv4.kernels.quantize.exact import values
from dsv4.kernels.quantize.kept import dequantised, dequantised_stack, keeping
from dsv4.kernels.quantize.weights import expert, quantize_fp8, to_float


def weights(seed=0, n=3):
    g = torch.Generator().manual_seed(seed)
    parts = [quantize_fp8(torch.randn(256, 128, generator=g)) for _ in range(n)]
    return PackedWeight(
        WeightFormat.FP8, torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), None, (128, 128)
    )


def test_kept_weights_are_the_dequantised_ones():
    stack, index = weights(), torch.tensor([2, 0, 2])
    one = expert(stack, 1)
    with keeping():
        for _ in range(2):
            assert torch.equal(dequantised(one), to_float(one)) and torch.equal(
                dequantised(one, slice(128, 256)), to_float(one, slice(128, 256))
            )
            assert torch.equal(dequantised_stack(stack, index), to_float(expert(stack, index)))
        assert dequantised(one) is dequantised(one)
        with keeping():
            assert dequantised(one) is dequantised(one)
    assert dequantised(one) is not dequantised(one) and kept._kept.get() is None


def test_matrices_of_the_same_codes_and_other_scales_are_told_apart():
    one = expert(weights(), 0)
    other = one._replace(scale=quantize_fp8(torch.randn(256, 128) * 64)[1])
    with keeping():
        for made, want in ((dequantised, to_float), (values, lambda w: to_float(w).double())):
            for w in (one, other, one):
                assert torch.equal(made(w), want(w)) and made(w).dtype is want(w).dtype
        assert values(one) is values(one)
    assert not torch.equal(to_float(one), to_float(other))


def test_bytes_that_are_read_in_other_formats_are_told_apart():
    codes, scale = torch.full((8, 32), 0x22, dtype=torch.uint8), torch.ones(8, 4).to(torch.float8_e4m3fn)
    one = PackedWeight(WeightFormat.NVFP4, codes, scale, torch.ones(1))
    other = one._replace(scale=one.scale.view(torch.float8_e8m0fnu))
    with keeping():
        assert not torch.equal(values(one), values(other)) and torch.equal(values(one), to_float(one).double())


def test_dense_matrices_are_kept_as_doubles():
    dense = PackedWeight(WeightFormat.DENSE, torch.randn(8, 4).bfloat16())
    with keeping():
        assert torch.equal(values(dense), dense.weight.double())
        assert values(dense) is values(dense)


def test_what_takes_more_than_the_limit_is_not_kept(monkeypatch):
    one = expert(weights(), 0)
    monkeypatch.setattr(kept, "LIMIT", 256 * 128 * 8 - 1)
    with keeping():
        whole = dequantised(one)
        assert torch.equal(values(one), to_float(one).double())
        assert dequantised(one) is whole and len(kept._kept.get()) == 1


def test_no_more_than_the_limit_is_kept(monkeypatch):
    stack = weights()
    monkeypatch.setattr(kept, "LIMIT", 2 * 256 * 128 * 4)
    with keeping():
        first = dequantised(expert(stack, 0))
        dequantised(expert(stack, 1))
        assert dequantised(expert(stack, 0)) is first  # used last, so number 1 goes next
        dequantised(expert(stack, 2))
        assert len(kept._kept.get()) == 2 and dequantised(expert(stack, 0)) is first


def test_an_error_ends_it():
    with pytest.raises(ZeroDivisionError):
        with keeping():
            1 / 0
    assert kept._kept.get() is None


def test_threads_do_not_share_it():
    """Two that enter one after the other and leave in the same order: neither sees the other's, and nothing is left."""
    one, turn = expert(weights(), 0), Barrier(2)

    def first():
        with keeping():
            values = dequantised(one)
            turn.wait()
            turn.wait()
        turn.wait()
        return values

    def second():
        turn.wait()
        with keeping():
            values = dequantised(one)
            turn.wait()
            turn.wait()
        return values, kept._kept.get()

    with ThreadPoolExecutor(2) as pool:
        a, (b, left) = (f.result() for f in (pool.submit(first), pool.submit(second)))
    assert torch.equal(a, b) and a is not b and left is None and kept._kept.get() is None


def test_memory_of_a_freed_matrix_is_not_taken_for_it():
    """As where layers are read from disk for each step: the second matrix may lie where the first one lay."""
    with keeping():
        for seed in range(8):
            one = expert(weights(seed, 1), 0)
            assert torch.equal(dequantised(one), to_float(one)), seed
