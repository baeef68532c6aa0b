"""Compositions on Triton against their definitions, run through the reference operations."""

from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions import compositions
from dsv4.kernels.fusions.triton_compress import pool_entries
from dsv4.kernels.fusions.triton_heads import index_queries, latent, query_heads
from dsv4.kernels.operations import OPERATIONS
from tests.kernels.gqa_inputs import DEVICE, randn, turns
from tests.kernels.products import poison  # noqa: F401 (a fixture: fresh buffers hold NaN)

REFERENCE = SimpleNamespace(**{name: op.implementations["reference"] for name, op in OPERATIONS.items()})
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
gpu = pytest.mark.gpu


def close(got, wanted, simulated=False):
    """fp32 to rounding; bf16 and simulated values equal but for flips.

    The kernels add in another order, so fp32 values differ by an ulp or so, and a value at a tie of the next rounding
    may go the other way: of bf16 with a chance near 2^−24 / 2^−9. A flip before the simulation moves a value of the
    grid by at most a step (E4M3: 2^−3 of it, E2M1: half), and a whole block only if it moved the block's largest value
    over a power of two.
    """
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not got.numel():
        return
    flips = (got != wanted).float().mean().item()
    if got.dtype is torch.float32 and not simulated:
        assert (got - wanted).norm() <= 2e-6 * wanted.norm()
    else:
        assert (got.double() - wanted.double()).norm() <= (1e-2 if simulated else 2e-3) * wanted.double().norm()
        if got.dtype is torch.bfloat16:
            assert flips <= 0.005 + 2 / got.numel(), flips
        else:  # of fp32 values the simulated ones are on the grid, the kept ones are not
            assert ((got - wanted).abs() > 1e-5 * wanted.abs()).float().mean() <= 0.005 + 2 / got.numel()


# Heads ----------------------------------------------------------------------------------------------------------------


def test_query_heads_of_a_wider_buffer():
    wide, cis = randn(3, 4 * 64 + 32), turns(3, 8)
    q = wide[:, 32:].unflatten(1, (4, 64))
    wanted = compositions.query_heads(REFERENCE, q.clone(), cis, EPS)
    close(query_heads(q, cis, EPS), wanted)
    for x, turn in ((randn(1, 1, 2), turns(1, 1)), (randn(2, 3, 96, dtype=torch.bfloat16), turns(2, 4).conj())):
        close(query_heads(x.clone(), turn, EPS), compositions.query_heads(REFERENCE, x.clone(), turn, EPS))
    assert torch.equal(wide[:, :32], randn(3, 4 * 64 + 32)[:, :32])
    one = randn(3, 2, 64)
    close(query_heads(one.clone(), cis[:1], EPS), compositions.query_heads(REFERENCE, one.clone(), cis[:1], EPS))
    many = randn(820, 5, 16)  # rows enough for several a program
    close(
        query_heads(many.clone(), turns(820, 4), EPS),
        compositions.query_heads(REFERENCE, many.clone(), turns(820, 4), EPS),
    )


@pytest.mark.parametrize("D,half", [(96, 16), (200, 8), (32, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_of_a_wider_buffer_with_a_weight_in_fp32(D, half, dtype):
    """Of 32 columns all are rotated, and nothing is left to simulate."""
    kv, weight, cis = randn(3, D + 24, dtype=dtype)[:, 8 : D + 8], randn(D, seed=1), turns(3, half)
    wanted = compositions.latent(REFERENCE, kv.clone(), weight, EPS, cis, False)
    close(latent(kv, weight, EPS, cis, False), wanted)
    wanted = compositions.latent(REFERENCE, kv.clone(), weight, EPS, cis, 2 * half < D)
    close(latent(kv, weight, EPS, cis, True), wanted, 2 * half < D)


def test_simulated_values_lie_on_their_grids():
    kv = latent(randn(4, 512, dtype=torch.bfloat16), randn(512, seed=1), EPS, turns(4, 32), True)
    assert torch.equal(REFERENCE.simulate_fp8_blocks(kv, 64, 64), kv)
    q = index_queries(randn(2, 4, 128, dtype=torch.bfloat16), turns(2, 32), True)
    assert torch.equal(REFERENCE.simulate_fp4_blocks(q, 32), q)


def test_heads_refuse_what_they_cannot_take():
    with pytest.raises(UnsupportedInput, match="even number"):
        query_heads(randn(2, 3, 65), turns(2, 4), EPS)
    with pytest.raises(UnsupportedInput, match="no more pairs"):
        latent(randn(2, 8), randn(8), EPS, turns(2, 5), False)
    with pytest.raises(UnsupportedInput, match="power of two"):
        index_queries(randn(2, 3, 96), turns(2, 4), True)
    with pytest.raises(UnsupportedInput, match="adjacent"):
        query_heads(randn(2, 8, 6).transpose(1, 2), turns(2, 4), EPS)


# Compressors ----------------------------------------------------------------------------------------------------------


def windows(M, S, R, seed=0):
    """Slots of windows with absent ones anywhere, but one present at least."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, R, (M, S), generator=g)
    slots[torch.rand(M, S, generator=g) < 0.3] = -1
    slots[:, -1] = torch.randint(0, R, (M,), generator=g)
    return slots.to(DEVICE)


@pytest.mark.parametrize(
    "M,S,overlap,D,half",
    [
        (3, 8, 2, 64, 16),
        (2, 128, 1, 64, 16),
        (2, 40, 1, 96, 16),
        (1, 8, 2, 512, 32),
        (4, 1, 1, 64, 8),
        (2, 6, 2, 32, 8),
    ],
)
@pytest.mark.parametrize("simulate", [None, "kv", "key"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pool_entries(M, S, overlap, D, half, simulate, dtype):
    if simulate == "key" and D & (D - 1):
        pytest.skip("the Hadamard transform needs a power of two")
    pool, slots, weight, cis = (
        randn(50, 2 * overlap * D),
        windows(M, S, 50),
        randn(D, dtype=dtype, seed=1),
        turns(M, half),
    )
    args = slots, overlap, dtype, weight, EPS, cis, simulate
    got = pool_entries(pool, *args)
    close(got, compositions.pool_entries(REFERENCE, pool, *args), simulate is not None)
    seen = torch.zeros(50, dtype=torch.bool, device=DEVICE)
    seen[slots[slots >= 0]] = True
    pool[~seen] = float("nan")
    assert torch.equal(pool_entries(pool, *args), got)
    # rows of a wider buffer
    assert torch.equal(pool_entries(torch.cat((pool, pool), 1)[:, pool.shape[1] :], *args), got)
    assert torch.equal(pool_entries(pool, slots.t().contiguous().t(), *args[1:]), got)


def test_an_absent_window_is_zero_and_dead_ones_are_not_computed():
    pool, slots, weight, cis = randn(9, 256), windows(4, 8, 9), randn(64, seed=1), turns(4, 8)
    slots[1] = -1
    pool[0] = float("nan")
    slots[slots == 0] = 3
    for simulate in (None, "kv", "key"):
        got = pool_entries(pool, slots, 2, torch.bfloat16, weight, EPS, cis, simulate)
        assert (got[1] == 0).all() and (got[[0, 2, 3]] != 0).any(1).all()
        for live in (
            torch.tensor([True, False, False, True]),
            torch.tensor([1, 0, 0, 7]),
            torch.tensor([2, 9, 0, 9, 0, 9, 1, 9], dtype=torch.int32)[::2],
        ):
            kept = pool_entries(pool, slots, 2, torch.bfloat16, weight, EPS, cis, simulate, live.to(DEVICE))
            assert torch.equal(kept[[0, 3]], got[[0, 3]]) and kept[[1, 2]].isnan().all()  # what the fresh buffer held


def test_equal_gates_give_the_mean_and_large_ones_do_not_overflow():
    pool, cis, ones = (
        randn(8, 128),
        torch.ones(1, 4, dtype=torch.complex64, device=DEVICE),
        torch.ones(64, device=DEVICE),
    )
    for gate in (0.0, 80.0, -3e38, 3e38):
        pool[:, 64:] = gate
        got = pool_entries(pool, torch.arange(8, device=DEVICE)[None], 1, torch.float32, ones, EPS, cis, None)
        close(got, REFERENCE.rms_norm(pool[:, :64].mean(0, keepdim=True), None, EPS))


def test_pooling_refuses_what_it_cannot_take():
    pool, weight, cis = randn(9, 256), randn(64), turns(1, 8)
    with pytest.raises(UnsupportedInput, match="pieces"):
        pool_entries(pool, windows(1, 5, 9), 2, torch.float32, weight, EPS, cis, None)
    with pytest.raises(UnsupportedInput, match="power of two"):
        pool_entries(randn(9, 384), windows(1, 8, 9), 2, torch.float32, randn(96), EPS, cis, "key")


# Repeats, production shapes -------------------------------------------------------------------------------------------


def runs(tokens, dtype=torch.bfloat16, heads=64, D=512, DI=128, ratio=128):
    """(name, ours, definition, simulated), each a function of no arguments, of a step of `tokens` tokens."""
    half = D // 16
    q, kv, qi = (
        randn(tokens, heads, D, dtype=dtype),
        randn(tokens, D, dtype=dtype),
        randn(tokens, heads, DI, dtype=dtype),
    )
    cis, weight, wi = turns(tokens, half), randn(D, dtype=dtype, seed=1), randn(DI, dtype=dtype, seed=1)
    M = max(1, tokens // 4)
    rows, csa, hca, keys = 4 * M + 8, randn(4 * M + 8, 4 * D), randn(2 * ratio, 2 * D), randn(4 * M + 8, 4 * DI)
    late = turns(M, half, 1)
    few = max(1, tokens // ratio)
    cases = [
        ("query_heads", query_heads, compositions.query_heads, lambda: (q.clone(), cis, EPS), False),
        ("latent", latent, compositions.latent, lambda: (kv, weight, EPS, cis, True), True),
        ("index_queries", index_queries, compositions.index_queries, lambda: (qi.clone(), cis, True), True),
        (
            "CSA entries",
            pool_entries,
            compositions.pool_entries,
            lambda: (csa, windows(M, 8, rows), 2, dtype, weight, EPS, late, "kv"),
            True,
        ),
        (
            "index keys",
            pool_entries,
            compositions.pool_entries,
            lambda: (keys, windows(M, 8, rows), 2, dtype, wi, EPS, late, "key"),
            True,
        ),
        (
            "HCA entries",
            pool_entries,
            compositions.pool_entries,
            lambda: (hca, windows(few, ratio, 2 * ratio), 1, dtype, weight, EPS, turns(few, half), "kv"),
            True,
        ),
    ]
    for name, ours, definition, args, simulated in cases:
        yield name, lambda f=ours, a=args: f(*a()), lambda f=definition, a=args: f(REFERENCE, *a()), simulated


@gpu
@pytest.mark.parametrize("tokens", [1, 8, 512, 4096])
def test_production_shapes(tokens):
    for name, run, definition, simulated in runs(tokens):
        got = run()
        close(got, definition(), simulated)
        assert all(torch.equal(run(), got) for _ in range(20 if tokens < 100 else 3)), name


@gpu
def test_graph_replays():
    q, kv = randn(8, 64, 512, dtype=torch.bfloat16), randn(8, 512, dtype=torch.bfloat16)
    cis, weight, pool, slots = turns(8, 32), randn(512, seed=1), randn(99, 2048), windows(8, 8, 99)
    live = torch.tensor([1, 0, 1, 0, 1, 1, 0, 1], device=DEVICE)

    def step():
        return (
            query_heads(q.clone(), cis, EPS),
            latent(kv, weight, EPS, cis, True),
            pool_entries(pool, slots, 2, torch.bfloat16, weight, EPS, cis, "kv", live)[live != 0],
        )

    first, graph = step(), torch.cuda.CUDAGraph()
    mask = live != 0
    with torch.cuda.graph(graph):
        replayed = (
            query_heads(q.clone(), cis, EPS),
            latent(kv, weight, EPS, cis, True),
            pool_entries(pool, slots, 2, torch.bfloat16, weight, EPS, cis, "kv", live),
        )
    graph.replay()
    for a, b in zip((*replayed[:2], replayed[2][mask]), first):
        assert torch.equal(a, b)


@gpu
def test_offsets_beyond_two_gib():
    R, D = (1 << 31) // 2048 + 64, 512
    ring, small = torch.zeros(R, 4 * D, device=DEVICE), randn(64, 4 * D)
    ring[-64:] = small
    args = 2, torch.bfloat16, randn(D, seed=1), EPS, turns(16, 32), "kv"
    picked = windows(16, 8, 64)
    far = torch.where(picked < 0, -1, picked + R - 64)
    assert torch.equal(pool_entries(ring, far, *args), pool_entries(small, picked, *args))
    del ring
    q, cis = torch.ones(65600, 64, D, dtype=torch.bfloat16, device=DEVICE), turns(1, 32).expand(65600, 32)
    last = randn(8, 64, D, dtype=torch.bfloat16)
    q[-8:] = last
    assert torch.equal(query_heads(q, cis, EPS)[-8:], query_heads(last, cis[:8], EPS))
