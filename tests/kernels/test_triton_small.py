"""Triton kernels of norm, rotation, Hadamard and pooling against the references, and of quantisation at production
shapes."""

import pytest
import torch

from dsv4.kernels import compress, hadamard, quantize, rms_norm, rope
from dsv4.kernels.errors import UnsupportedInput
from tests.kernels.gqa_inputs import DEVICE, randn, turns
from tests.kernels.products import poison  # noqa: F401 (a fixture: fresh buffers hold NaN)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
gpu = pytest.mark.gpu


def close(got, wanted, tolerance=1e-5):
    """Shapes and dtypes equal; fp32 within `tolerance` relative to the norm, narrower types but for half a percent of
    flips."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not got.numel():
        return
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert error <= (tolerance if got.dtype is torch.float32 else 2e-3), float(error)
    # sums in another order move fp32 by an ulp, which moves a rounded result only at a tie
    if got.dtype is not torch.float32:
        assert (got != wanted).float().mean() <= 0.005 + 2 / got.numel()


# Norm -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (2, 3, 64), (5, 257), (1, 4096)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(shape, dtype):
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    for weight in (w, w.float(), None):
        close(rms_norm.rms_norm(x, weight, EPS, backend="triton"), rms_norm.rms_norm(x, weight, EPS))


def test_rms_norm_takes_strides_many_rows_and_zeros():
    x, w = randn(6, 90), randn(40, seed=1)
    for view in (x[:, 7:47], x.t()[:40].t(), x[:3, None, :40].expand(3, 2, 40)):
        close(rms_norm.rms_norm(view, w, EPS, backend="triton"), rms_norm.rms_norm(view, w, EPS))
    many = randn(4099, 8)
    close(rms_norm.rms_norm(many, None, EPS, backend="triton"), rms_norm.rms_norm(many, None, EPS))
    assert (rms_norm.rms_norm(torch.zeros(2, 40, device=DEVICE), w, EPS, backend="triton") == 0).all()
    with pytest.raises(UnsupportedInput, match="at most 65536"):
        rms_norm.rms_norm(torch.zeros(1, 65537, device=DEVICE), None, EPS, backend="triton")


# Rotation -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [1, 5, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_with_every_broadcast(half, dtype):
    cis = turns(6, half)
    for x, c in (
        (randn(6, 2 * half, dtype=dtype), cis),
        (randn(6, 3, 2 * half + 6, dtype=dtype), cis.unsqueeze(1)),
        (randn(2, 6, 70, dtype=dtype), cis),
        (randn(6, 70, dtype=dtype), cis[:1]),
        (randn(2, 3, 4, 64, dtype=dtype), cis.view(2, 3, 1, half)),
        (randn(6, 70, dtype=dtype), turns(12, half)[::2]),
    ):
        for turn in (c, c.conj(), c.conj().resolve_conj()):
            wanted, mine = rope.rotate(x.clone(), turn), x.clone()
            got = rope.rotate(mine, turn, backend="triton")
            assert got.data_ptr() == mine.data_ptr()
            close(got, wanted, 1e-6)
            assert torch.equal(got[..., : -2 * half], x[..., : -2 * half])


def test_rotation_leaves_other_columns_alone_whatever_they_hold():
    x, cis = randn(3, 12), turns(3, 4)
    x[:, 3] = float("nan")
    x[:, 2] = float("inf")
    got = rope.rotate(x.clone(), cis, backend="triton")
    assert torch.equal(got[:, :4].nan_to_num(5), x[:, :4].nan_to_num(5))
    assert torch.isfinite(got[:, 4:]).all()


def test_rotation_refuses_what_it_cannot_turn():
    for x, cis, said in (
        (randn(4, 16)[:, ::2], turns(4, 2), "contiguous"),
        (randn(4, 6), turns(4, 4), "do not fit"),
        (randn(4, 8), turns(3, 2), "broadcast"),
        (randn(4, 8), turns(4, 2).to(torch.complex128), "complex128"),
    ):
        with pytest.raises(UnsupportedInput, match=said):
            rope.rotate(x, cis, backend="triton")
    empty = randn(0, 8)
    assert rope.rotate(empty, turns(0, 2), backend="triton") is empty


# Hadamard -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 4, 32, 64, 128, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hadamard(d, dtype):
    x = randn(3, 5, d, dtype=dtype)
    close(hadamard.hadamard(x, backend="triton"), hadamard.hadamard(x), 1e-6)
    once = torch.eye(d, device=DEVICE)[:128]  # rows of the matrix: Sylvester's order, not some other
    assert torch.allclose(hadamard.hadamard(once, backend="triton"), hadamard.hadamard(once), atol=1e-7)


def test_hadamard_takes_strides_and_nothing_and_refuses_other_widths():
    x = randn(8, 6)
    close(hadamard.hadamard(x.t(), backend="triton"), hadamard.hadamard(x.t().contiguous()), 1e-6)
    assert hadamard.hadamard(x[:, :0].t(), backend="triton").shape == (0, 8)
    with pytest.raises(UnsupportedInput, match="power of two"):
        hadamard.hadamard(x, backend="triton")


# Pooling --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 512), (3, 9, 130), (2, 128, 64), (5, 1, 3), (2, 40, 1)], ids=str)
def test_gated_pool(shape):
    kv, gate = randn(*shape), randn(*shape, seed=1) * 8
    gate[torch.rand(shape, device=DEVICE) < 0.3] = float("-inf")
    gate[:, -1] = 0.5
    close(compress.gated_pool(kv, gate, backend="triton"), compress.gated_pool(kv, gate))


def test_gated_pool_of_ties_strides_and_large_gates():
    kv, gate = randn(2, 3, 5), torch.full((2, 3, 5), 80.0, device=DEVICE)
    close(compress.gated_pool(kv, gate, backend="triton"), kv.mean(1))
    kv, gate = randn(7, 4, 12).transpose(0, 2), randn(7, 4, 12, seed=1).transpose(0, 2)
    close(compress.gated_pool(kv, gate, backend="triton"), compress.gated_pool(kv, gate))
    none = torch.full((1, 3, 5), float("-inf"), device=DEVICE)
    # as the definition says
    assert compress.gated_pool(kv[:1, :3, :5].contiguous(), none, backend="triton").isnan().all()


# Repeats, production shapes -------------------------------------------------------------------------------------------


def operations():
    """(name, function of no arguments) at the model's sizes."""
    rows = 4096
    x, h, w, cis = randn(rows, 512), randn(rows * 16, 128), randn(512, seed=1), turns(rows, 32)
    kv, gate = randn(rows, 8, 128), randn(rows, 8, 128, seed=1)
    return [
        ("rms_norm", lambda: rms_norm.rms_norm(x, w, EPS, backend="triton")),
        ("rotate", lambda: rope.rotate(x.clone(), cis, backend="triton")),
        ("hadamard", lambda: hadamard.hadamard(h, backend="triton")),
        ("gated_pool", lambda: compress.gated_pool(kv, gate, backend="triton")),
        ("fp8", lambda: quantize.simulate_fp8_blocks(x, 64, 64, backend="triton")),
        ("fp4", lambda: quantize.simulate_fp4_blocks(h, 32, backend="triton")),
    ]


@gpu
def test_repeats_and_graph_replays_at_production_shapes():
    for name, run in operations():
        first = run()
        assert all(torch.equal(run(), first) for _ in range(20)), name
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = run()
        graph.replay()
        assert torch.equal(replayed, first), name


@gpu
@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_production_shapes(rows):
    dtype = torch.bfloat16
    for shape in ((rows, 4096), (rows, 1024), (rows, 64, 512)):
        x, w = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
        for weight in (w, None):
            close(rms_norm.rms_norm(x, weight, EPS, backend="triton"), rms_norm.rms_norm(x, weight, EPS))
    x, cis = randn(rows, 64, 512, dtype=dtype), turns(rows, 32)
    close(rope.rotate(x.clone(), cis.unsqueeze(1), backend="triton"), rope.rotate(x.clone(), cis.unsqueeze(1)))
    h = randn(rows, 64, 128, dtype=dtype)
    close(hadamard.hadamard(h, backend="triton"), hadamard.hadamard(h))
    assert torch.equal(quantize.simulate_fp4_blocks(h, backend="triton"), quantize.simulate_fp4_blocks(h))
    y = randn(rows, 4096, dtype=dtype)
    assert torch.equal(quantize.simulate_fp8_blocks(y, 128, backend="triton"), quantize.simulate_fp8_blocks(y, 128))
    kv, gate = randn(max(1, rows // 4), 8, 512), randn(max(1, rows // 4), 8, 512, seed=1)
    close(compress.gated_pool(kv, gate, backend="triton"), compress.gated_pool(kv, gate))


@gpu
def test_offsets_beyond_two_gib():
    rows, last = (1 << 31) // 512 + 64, slice(-64, None)  # of 512 columns: more than 2^31 numbers
    x = torch.ones(rows, 512, dtype=torch.bfloat16, device=DEVICE)
    x[last] = randn(64, 512, dtype=torch.bfloat16)
    tail = x[last].clone()
    for run in (
        lambda t: rms_norm.rms_norm(t, None, EPS, backend="triton"),
        lambda t: hadamard.hadamard(t, backend="triton"),
        lambda t: quantize.simulate_fp8_blocks(t, 64, 64, backend="triton"),
    ):
        assert torch.equal(run(x)[last], run(tail))
    cis = turns(64, 32)
    everyone = torch.ones(rows, 32, dtype=torch.complex64, device=DEVICE)
    everyone[last] = cis
    assert torch.equal(rope.rotate(x, everyone, backend="triton")[last], rope.rotate(tail, cis, backend="triton"))
