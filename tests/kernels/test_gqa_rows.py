"""Operations of GQA models: attention against torch's SDPA in fp64, rotation against transformers, the Triton kernels
against both."""

import pytest
import torch
import torch.nn.functional as F

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.grouped_attention import grouped_attention
from dsv4.kernels.rope import rotation
from dsv4.kernels.rotary_rows import rotary_rows
from dsv4.kernels.silu_mul import silu_mul
from tests.kernels.gqa_inputs import DEVICE, randn
from tests.kernels.products import poison  # noqa: F401 (a fixture: fresh buffers hold NaN)

BACKENDS = ["reference", "triton"]


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T, window", [(1, None), (1, 5), (7, None), (7, 5), (7, 1), (40, 33)])
@pytest.mark.parametrize("H, KV", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_attention_is_sdpa(T, window, H, KV, dtype):
    B, S, D, start = 3, 128, 16, torch.tensor([0, 61, 13], device=DEVICE)
    q, k, v = (
        randn(B, T, H, D, dtype=dtype),
        randn(B, KV, S, D, dtype=dtype, seed=1),
        randn(B, KV, S, D, dtype=dtype, seed=2),
    )
    position = start.view(B, 1) + torch.arange(T, device=DEVICE)
    behind = position.unsqueeze(-1) - torch.arange(S, device=DEVICE)
    mask = (behind >= 0) & (behind < (window or S))
    wide = lambda x: x.double().repeat_interleave(H // KV, 1)
    wanted = F.scaled_dot_product_attention(
        q.double().transpose(1, 2), wide(k), wide(v), mask.unsqueeze(1), scale=0.3
    ).transpose(1, 2)
    beyond = torch.arange(S, device=DEVICE) > position[:, -1:]
    for cache in (k, v):  # nobody has written there
        cache.masked_fill_(beyond[:, None, :, None], float("nan"))
    got = grouped_attention(q, k, v, start, window, 0.3)
    assert got.dtype is dtype and (got.double() - wanted).abs().max() < (1e-5 if dtype is torch.float32 else 0.02)


# Rotation and rows ----------------------------------------------------------------------------------------------------


def inputs(B, T, H, KV, D, S, dtype, biased):
    N = B * T
    q, k, v = (randn(N, heads * D, dtype=dtype, seed=i) for i, heads in enumerate((H, KV, KV)))
    biases = tuple(randn(heads * D, dtype=dtype, seed=9 + i) for i, heads in enumerate((H, KV, KV))) if biased else None
    start = torch.randint(0, S - T + 1, (B,), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    position = (start.unsqueeze(1) + torch.arange(T, device=DEVICE)).flatten()
    cis = rotation(position, 1e4 ** -(torch.arange(0, D, 2, device=DEVICE) / D))
    keys, values = (torch.full((B, KV, S, D), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    return q, k, v, biases, cis, keys, values, start


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("B, T, H, KV, D", [(1, 1, 4, 1, 16), (3, 5, 6, 2, 12), (2, 40, 2, 2, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_that_of_transformers_and_rows_stand_at_their_positions(backend, biased, B, T, H, KV, D, dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v, biases, cis, keys, values, start = inputs(B, T, H, KV, D, 64, dtype, biased)
    got = rotary_rows(q, k, v, biases, cis, keys, values, start, backend=backend)
    full = [x.double() + (0 if biases is None else bias.double()) for x, bias in zip((q, k, v), biases or (q, k, v))]
    heads = [x.view(B, T, -1, D).transpose(1, 2) for x in full]
    cos, sin = (torch.cat((part, part), -1).double().view(B, T, D) for part in (cis.real, cis.imag))
    rotated, turned = apply_rotary_pos_emb(heads[0], heads[1], cos, sin)
    small = 1e-5 if dtype is torch.float32 else 2e-2
    assert got.dtype is dtype and (got.double() - rotated.transpose(1, 2)).abs().max() < small
    for cache, wanted in ((keys, turned), (values, heads[2])):
        for b in range(B):
            first = int(start[b])
            assert (cache[b, :, first : first + T].double() - wanted[b]).abs().max() < small
            cache[b, :, first : first + T] = 7.0
        assert (cache == 7.0).all()  # and nothing else was written


def test_triton_rows_take_strides_and_many_tokens():
    q, k, v, biases, cis, keys, values, start = inputs(2, 513, 2, 1, 8, 600, torch.bfloat16, True)
    stacked = torch.cat((q, k, v), 1)
    a = rotary_rows(*stacked.split([16, 8, 8], 1), biases, cis, keys, values, start, backend="triton")
    ours = keys.clone(), values.clone()
    b = rotary_rows(q, k, v, biases, cis, keys, values, start)
    for x, y in zip((a, *ours), (b, keys, values)):
        assert (x != y).float().mean() < 0.005 and (x.float() - y.float()).abs().max() < 0.05  # an ulp at a tie


def test_triton_rows_refuse_what_they_cannot_take():
    q, k, v, biases, cis, keys, values, start = inputs(2, 3, 2, 1, 8, 16, torch.float32, False)
    for broken in (
        (q[:, :9], k, v, None, cis, keys, values),
        (q, k[:, :7], v, None, cis, keys, values),
        (q, k, v, None, cis[:3], keys, values),
        (q, k, v, None, cis, keys[:, :, :8], values[:, :, :8]),
    ):
        with pytest.raises(UnsupportedInput, match="rotary_rows"):
            rotary_rows(*broken, start, backend="triton")


# The gate of the MLP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("N, width", [(1, 7), (3, 80), (2, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_mul(backend, biased, N, width, dtype):
    both = randn(N, 2 * width, dtype=dtype) * 30
    biases = (randn(width, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=2)) if biased else None
    gate, up = both[:, :width], both[:, width:]
    g, u = (x.double() + (0 if biases is None else b.double()) for x, b in zip((gate, up), biases or (gate, up)))
    got = silu_mul(gate, up, biases, backend=backend)
    assert (
        got.dtype is dtype
        and (
            (got.double() - F.silu(g) * u).abs() <= (1e-5 if dtype is torch.float32 else 8e-3) * (1 + (g * u).abs())
        ).all()
    )


# Whole sequences, for training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
def test_whole_sequences_and_their_gradients_are_those_of_the_reference(biased):
    from dsv4.kernels.rotary_rows.training import Whole

    B, T, H, KV, D = 2, 9, 4, 2, 12
    q, k, v, biases, *_ = inputs(B, T, H, KV, D, 16, torch.float32, biased)
    start = torch.zeros(B, dtype=torch.int64, device=DEVICE)
    cis = rotation(torch.arange(T, device=DEVICE).repeat(B), 1e4 ** -(torch.arange(0, D, 2, device=DEVICE) / D))
    found = []
    for backend in ("reference", "training"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *(biases or ()))]
        if backend == "training":
            caches = Whole(), Whole()
        else:
            caches = tuple(torch.zeros(B, KV, T, D, device=DEVICE) for _ in range(2))
        turned = rotary_rows(*leaves[:3], tuple(leaves[3:]) or None, cis, *caches, start, backend=backend)
        if backend == "reference":  # grouped_attention of the reference writes in place: SDPA stands for it here
            o = F.scaled_dot_product_attention(
                turned.transpose(1, 2), *(c.repeat_interleave(H // KV, 1) for c in caches), is_causal=True, scale=0.4
            ).transpose(1, 2)
        else:
            o = grouped_attention(turned, *caches, start, None, 0.4, backend="training")
        grads = torch.autograd.grad((o * randn(*o.shape, seed=8)).sum(), leaves)
        found.append((o, *grads))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(*found))
    o = grouped_attention(
        turned,
        *(torch.stack([c.rows[b].transpose(0, 1) for b in range(B)]).contiguous() for c in caches),
        start,
        None,
        0.4,
    )
    assert (o - found[1][0]).abs().max() < 1e-5
    with pytest.raises(UnsupportedInput, match="window of 3"):
        grouped_attention(turned, *caches, start, 3, 0.4, backend="training")


def test_the_kernel_of_training_turns_and_turns_back():
    from dsv4.kernels.rotary_rows.reference import rotate_halves
    from dsv4.kernels.rotary_rows.training import _Turn

    x, cis = (
        randn(70, 3, 12),
        rotation(torch.arange(70, device=DEVICE), 100.0 ** -(torch.arange(0, 12, 2, device=DEVICE) / 12)),
    )
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want, weight = _Turn.apply(a, torch.view_as_real(cis), 1.0), rotate_halves(b, cis), randn(70, 3, 12, seed=5)
    assert (y - want).abs().max() < 1e-6
    (y * weight).sum().backward(), (want * weight).sum().backward()
    assert (a.grad - b.grad).abs().max() < 1e-6


@pytest.mark.parametrize("biased", [False, True])
def test_the_gate_of_training(biased):
    gate, up = randn(3, 20), randn(3, 20, seed=1)
    biases = (randn(20, seed=2), randn(20, seed=3)) if biased else None
    assert (silu_mul(gate, up, biases, backend="training") - silu_mul(gate, up, biases)).abs().max() < 1e-6
