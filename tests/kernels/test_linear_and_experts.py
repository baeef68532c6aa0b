"""Products with weights as stored, against dense fp64 products of the dequantised values."""

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.experts import experts, shared_expert
from dsv4.kernels.experts.exact import exact_experts
from dsv4.kernels.linear import grouped_linear, linear, reference
from dsv4.kernels.quantize import to_float
from dsv4.kernels.quantize.weights import expert
from tests.kernels.products import pack, stack

SMALL_BLOCKS = ["fp8 blocks of 32", "fp8 fp32 scales of blocks of 32"]
FORMATS = ["dense fp32", "dense bf16", *SMALL_BLOCKS, "mxfp4", "nvfp4"]


def test_simulation_of_a_dense_weight_is_refused():
    with pytest.raises(UnsupportedInput, match="dense"):
        linear(torch.randn(1, 32), pack(torch.randn(8, 32), "dense fp32"), True)


@pytest.mark.parametrize("form", FORMATS)
def test_tiles_of_rows_make_no_difference(form, monkeypatch):
    x, w = torch.randn(3, 96), pack(torch.randn(100, 96), form)
    whole = linear(x, w)
    assert torch.allclose(whole, x @ to_float(w).T, atol=1e-4)
    monkeypatch.setattr(reference, "SCRATCH_BYTES", 1)
    assert torch.allclose(linear(x, w), whole, atol=1e-5)


@pytest.mark.parametrize("scratch", [4 << 20, 1], ids=["one tile", "tiles that span groups"])
@pytest.mark.parametrize("form", FORMATS)
def test_each_group_meets_its_own_rows(form, scratch, monkeypatch):
    monkeypatch.setattr(reference, "SCRATCH_BYTES", scratch)
    G, R, K = 3, 20, 64  # R is no multiple of the FP8 block
    x, w = torch.randn(4, G, K), pack(torch.randn(G * R, K), form)
    value = to_float(w).view(G, R, K)
    got = grouped_linear(x, w)
    for g in range(G):
        assert torch.allclose(got[:, g], x[:, g] @ value[g].T, atol=1e-4)


@pytest.mark.parametrize("form", SMALL_BLOCKS)
@pytest.mark.parametrize("simulate", [False, True], ids=["plain", "simulated"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_experts_of_small_blocks_and_of_scales_that_are_no_powers_of_two(form, simulate, tokens, backend):
    """The contract has the other formats."""
    g = torch.Generator().manual_seed(3)
    E, D, I, k, limit = 5, 64, 32, 2, 10.0
    x = torch.randn(tokens, D, generator=g) * 4
    w13, w2 = stack(E, 2 * I, D, form, 2), stack(E, D, I, form, 1, 100)
    indices = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(tokens)])
    args = x, indices, torch.rand(tokens, k, generator=g), w13, w2, limit, simulate
    y = x.double() @ to_float(expert(w13, 0)).double().T
    assert (y > limit).any() and (y < -limit).any()  # both clamps are crossed
    got, wanted = experts(*args, backend=backend), exact_experts(*args)
    assert got.dtype == torch.float32
    # a value on the edge between two FP8 codes may fall either way, a step of 2^-4
    assert (got - wanted).abs().max() < (0.02 if simulate else 1e-5) * wanted.abs().max()
    assert (got - wanted).abs().median() < 1e-5 * wanted.abs().max()


def test_gate_is_clamped_from_above_only():
    w = [pack(torch.eye(4), "dense fp32")] * 3
    x = torch.tensor([[50.0, -50.0, 3.0, 0.0]])
    got = shared_expert(x, *w, 10.0, False)
    silu = lambda v: v / (1 + torch.exp(torch.tensor(-v)).item())
    assert got[0].tolist() == pytest.approx([silu(10.0) * 10, silu(-50.0) * -10, silu(3.0) * 3, 0.0], abs=1e-4)


@pytest.mark.parametrize("simulate", [False, True], ids=["plain", "simulated"])
def test_parts_of_a_shared_experts_width_add_up_to_the_whole_in_bf16_too(simulate):
    """A part that is rounded before the sum would be off by up to 2^-9 of its size."""
    g = torch.Generator().manual_seed(5)
    x, I = torch.randn(20, 64, generator=g).bfloat16(), 384
    w1, w3, w2 = (torch.randn(*shape, generator=g) for shape in ((I, 64), (I, 64), (64, I)))
    of = lambda i: [pack(w, "fp8") for w in (w1[i].contiguous(), w3[i].contiguous(), w2[:, i].contiguous())]
    parts = [shared_expert(x, *of(slice(start, start + 128)), 10.0, simulate) for start in range(0, I, 128)]
    whole = shared_expert(x, *of(slice(0, I)), 10.0, simulate)
    assert whole.dtype == torch.float32 and not torch.equal(whole, whole.bfloat16().float())
    assert (sum(parts) - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_expert_of_another_rank_has_the_bits_of_one_with_weight_0(dtype, backend, tokens):
    g = torch.Generator().manual_seed(4)
    E, D, I, k = 4, 64, 64, 3
    x = torch.randn(tokens, D, generator=g).to(dtype)
    w13, w2 = stack(E, 2 * I, D, "mxfp4", 2), stack(E, D, I, "mxfp4", 1, 100)
    indices = torch.stack([torch.randperm(E + 3, generator=g)[:k] for _ in range(tokens)])
    routing, foreign = torch.rand(tokens, k, generator=g), indices >= E
    assert foreign.any()
    zero = experts(x, indices % E, routing.masked_fill(foreign, 0.0), w13, w2, 10.0, True, backend=backend)
    skipped = experts(x, indices.masked_fill(foreign, -1), routing, w13, w2, 10.0, True, backend=backend)
    assert torch.equal(skipped, zero) and not (skipped == 0).all()
    assert (skipped.view(torch.int32) != -(2**31)).all()  # no −0
