"""What a decode step does between its products, on Triton, against the definitions run through the reference
operations."""

from functools import partial

import pytest
import torch

from dsv4.kernels.cache_rows import PackedRows, RowFormat, decode_rows, pack_layout
from dsv4.kernels.contracts import productions
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions import compositions, triton_step
from dsv4.kernels.fusions.compositions import IndexHeads, Kept, Latents, Windows
from dsv4.kernels.fusions.triton_step_inputs import attention_inputs
from dsv4.kernels.operations import OPERATIONS
from dsv4.kernels.rope import rotation
from dsv4.kernels.widths import SMALL
from tests.kernels.products import fill_fresh_buffers
from tests.kernels.test_triton_fusions import DEVICE, DTYPES, EPS, close, randn

REFERENCE = bind(OPERATIONS, "reference", DispatchLedger())
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh buffers hold NaN, or a number that is no row: a kernel that reads what it has not written shows it."""
    fill_fresh_buffers(monkeypatch, 99)


def pool(rows: int, D: int, rope: int, how, seed: int = 0):
    """Rows that hold something: of a dtype, or packed in a format."""
    if isinstance(how, torch.dtype):
        return randn(rows, D, seed=seed).to(how)
    data = torch.randint(
        0, 256, (-(-rows // 64), pack_layout(how, D, rope).page), generator=torch.Generator().manual_seed(seed)
    )
    return PackedRows(how, data.to(torch.uint8).to(DEVICE), D, rope, rows)


def values(rows, used: torch.Tensor) -> torch.Tensor:
    """fp32 values of the rows `used`; NaN codes as some number."""
    held = decode_rows(rows._replace(data=rows.data.unsqueeze(0)))[0] if isinstance(rows, PackedRows) else rows
    return held[used].nan_to_num().float()


def copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(*map(copy, value)) if hasattr(value, "_fields") else value


class Layer:
    """Inputs of a step of T tokens of rows that stand at `starts`. One compressor a width in `widths`: (D, simulate,
    pool)."""

    def __init__(self, starts, T, ratio, overlap, widths, dtype, near, index, D=96, rope=16, H=3):
        B, self.rope = len(starts), rope
        N, S, R, n = B * T, overlap * ratio, overlap * ratio + 9, max(70, max(starts) // ratio + T)
        start = torch.tensor(starts, device=DEVICE)
        f = randn(rope // 2).abs()
        kept = (Kept(ratio, overlap, R, (n,)),)
        found = compositions.place(REFERENCE, start, T, (f,), (8, 20), kept)
        _, slots, cis, _, _, phase, rings, _, live, rows, entry_cis, entry_slots = found
        self.live, self.entry_slots, self.slots = live, entry_slots, slots
        windows = []
        for seed, (width, simulate, how) in enumerate(widths):
            w = overlap * width
            ring = randn(B * R, 2 * w, seed=seed + 3)
            windows.append(
                Windows(
                    randn(N, 2 * w, seed=seed),
                    randn(ratio, w, seed=seed + 1),
                    phase,
                    ring,
                    rings,
                    rows,
                    live,
                    overlap,
                    1 + randn(width, dtype=dtype) / 8,
                    torch.view_as_complex(entry_cis),
                    simulate,
                    pool(B * n, width, rope if how is RowFormat.KV_FP8 else 0, how),
                    entry_slots,
                )
            )
        simulate_kv = near is RowFormat.KV_FP8
        latents = Latents(
            randn(N, D, dtype=dtype), 1 + randn(D, dtype=dtype) / 8, simulate_kv, pool(B * 20, D, rope, near), slots
        )
        asked = None
        if index is not None:
            asked = IndexHeads(randn(N, 5, 32, dtype=dtype, seed=7), randn(N, 5, dtype=dtype), 0.3, index)
        self.arguments = (
            B,
            randn(N, H, D, dtype=dtype),
            torch.view_as_complex(cis),
            EPS,
            latents,
            asked,
            tuple(windows),
        )

    def check(self) -> None:
        theirs = self.arguments
        mine = (*map(copy, self.arguments[:-1]), tuple(map(copy, self.arguments[-1])))
        got, wanted = attention_inputs(*mine), compositions.attention_inputs(REFERENCE, *theirs)
        assert len(got) == len(wanted) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(got, wanted))
        close(got[0], wanted[0])
        asked = self.arguments[5]
        if asked is not None:
            close(got[1], wanted[1], asked.simulate)
            assert torch.equal(got[2], wanted[2])
        packed = isinstance(mine[4].pool, PackedRows)
        close(values(mine[4].pool, self.slots), values(theirs[4].pool, self.slots), packed)
        self.untouched(mine[4].pool, theirs[4].pool, self.slots)
        for a, b in zip(mine[-1], theirs[-1]):
            assert torch.equal(a.ring, b.ring)
            used = self.entry_slots[self.live]
            close(values(a.entries, used), values(b.entries, used), True)
            # on pages, entries of windows that are not complete may be others'
            self.untouched(a.entries, b.entries, used)

    @staticmethod
    def untouched(a, b, used) -> None:
        others = torch.ones(a.count if isinstance(a, PackedRows) else len(a), dtype=torch.bool, device=DEVICE)
        others[used] = False
        if isinstance(a, PackedRows):
            for part, other in ((a.payload, b.payload), (a.scales, b.scales)):
                assert torch.equal(
                    part.flatten(0, 1)[: len(others)][others], other.flatten(0, 1)[: len(others)][others]
                )
        else:
            assert torch.equal(a[others], b[others])


KV, FP8, FP4 = RowFormat.KV_FP8, RowFormat.INDEX_FP8, RowFormat.INDEX_FP4


@pytest.mark.parametrize("starts, T", [((0, 3, 18), 1), ((7,), 1), ((2, 7, 9), 5)], ids=str)
@pytest.mark.parametrize(
    "near, main, keys, simulate",
    [
        (torch.bfloat16, (96, None, torch.bfloat16), (32, None, torch.bfloat16), False),
        (KV, (96, "kv", KV), (32, "key", FP4), True),
        (KV, (96, "kv", KV), (32, None, FP8), False),
        (torch.bfloat16, (96, "kv", torch.bfloat16), (32, "key", torch.bfloat16), True),
    ],
    ids=("plain", "fp8 fp4", "fp8 fp8", "simulated"),
)
def test_a_layer_with_an_indexer(starts, T, near, main, keys, simulate):
    Layer(starts, T, 4, 2, (main, keys), torch.bfloat16, near, simulate).check()


@pytest.mark.parametrize("starts", [(127, 4), (254, 127), (0, 126)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_of_long_windows(starts, dtype):
    how = KV if dtype is torch.bfloat16 else dtype
    for T in (1, 3):
        Layer(starts, T, 128, 1, ((64, "kv" if how is KV else None, how),), dtype, how, None, D=64).check()


def test_a_window_layer_and_wide_heads():
    Layer((5, 11), 1, 4, 2, (), torch.float32, torch.float32, None, D=512, rope=64, H=5).check()
    Layer((5,), 2, 4, 2, (), torch.bfloat16, KV, None, D=512, rope=64, H=2).check()


def test_refusals():
    layer = Layer((5,), 1, 4, 2, ((32, None, torch.float32),), torch.float32, torch.float32, None)
    B, q, cis, eps, latents, index, windows = layer.arguments
    with pytest.raises(UnsupportedInput, match="contiguous"):
        attention_inputs(B, q.transpose(1, 2), cis, eps, latents, index, windows)
    with pytest.raises(UnsupportedInput, match="float32"):
        attention_inputs(B, q, cis, eps, latents, index, (windows[0]._replace(ape=windows[0].ape.half()),))
    with pytest.raises(UnsupportedInput, match="multiples"):
        attention_inputs(2, q, cis, eps, latents, index, windows)
    with pytest.raises(UnsupportedInput, match="int64"):
        triton_step.place(torch.zeros(2, dtype=torch.int32, device=DEVICE), 1, (randn(4),), (8, 9), ())
    with pytest.raises(UnsupportedInput, match="int64"):
        triton_step.embed_streams(torch.zeros(2, dtype=torch.int32, device=DEVICE), randn(4, 4), 2, torch.float32)


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("starts", [(0,), (3, 127, 1_000_000), (126, 0, 20_001, 255)], ids=str)
def test_place(starts, T):
    start = torch.tensor(starts, device=DEVICE)
    frequencies = tuple((10000.0 ** (-torch.arange(k) / k)).to(DEVICE) for k in (12, 12))
    args = start, T, frequencies, (24, 30), (Kept(4, 2, 23, (250_001, 250_064)), Kept(128, 1, 150, (7_813,)))
    got, wanted = triton_step.place(*args), compositions.place(REFERENCE, *args)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).abs().max() < 1e-6 if b.is_floating_point() else torch.equal(a, b)
    # angles are fp32 products
    exact = rotation(start.double().view(-1, 1) + torch.arange(T, device=DEVICE), frequencies[0])
    assert (torch.view_as_complex(got[2]) - exact.flatten(0, 1)).abs().max() < 1e-6


@pytest.mark.parametrize("T", [1, 5])
def test_a_start_beyond_the_cache_writes_no_entries(T):
    """Windows of 4 tokens in a pool of 9 entries a row: the last one that has room, and all behind it."""
    start, frequencies = torch.arange(30, 60, device=DEVICE), (randn(12).abs(),)
    args = start, T, frequencies, (24, 30), (Kept(4, 2, 23, (9, 64)),)
    for found in (triton_step.place(*args), compositions.place(REFERENCE, *args)):
        new, live, rows, slots = found[7].flatten(), found[8], found[9], found[11]
        row = torch.arange(len(start), device=DEVICE).repeat_interleave(len(new) // len(start))
        assert live.any() and torch.equal(slots[live] // 9, row[live])  # not in another row's, nor behind the last
        complete = (new + 1) * 4 <= start[row] + T
        assert torch.equal(live, complete & (new < 9)) and (complete & ~live).any() and (rows[~live] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_and_chosen_rows(dtype):
    table, ids = randn(11, 40, dtype=dtype), torch.tensor([3, 10, 0], device=DEVICE)
    assert torch.equal(
        triton_step.embed_streams(ids, table, 4, dtype), compositions.embed_streams(REFERENCE, ids, table, 4, dtype)
    )
    wide = triton_step.embed_streams(torch.tensor([3, 11, -1], device=DEVICE), table, 2, torch.float32)
    assert torch.equal(wide[0, 1], table[3].float()) and wide[1:].isnan().all()
    for shape in ((1, 2, 7), (3, 1, 7), (2, 3, 1200)):
        entry = torch.randint(-1, 900, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        assert torch.equal(triton_step.chosen_rows(entry, 1000), compositions.chosen_rows(REFERENCE, entry, 1000))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_end_of_the_streams(dtype):
    N, n, d = 3, 4, 96
    args = (
        randn(N, d, dtype=dtype),
        randn(N, n, d, dtype=dtype),
        randn(N, n),
        randn(N, n, n),
        randn(n, n * d) / 9,
        randn(1),
        randn(n),
        1e-6,
        EPS,
        1 + randn(d, dtype=dtype) / 8,
        EPS,
    )
    for got, wanted in zip(triton_step.mhc_post_head_norm(*args), compositions.mhc_post_head_norm(REFERENCE, *args)):
        close(got, wanted, dtype is torch.bfloat16)


@gpu
def test_one_launch_at_v4_widths():
    """Replays of a graph equal the definition's numbers, and one another, bit for bit."""
    layer = Layer(
        (8191, 4095), 1, 4, 2, ((512, "kv", KV), (128, "key", FP4)), torch.bfloat16, KV, None, D=512, rope=64, H=64
    )
    layer.check()
    B, q, *rest = layer.arguments
    q0, results = q.clone(), []
    graph = torch.cuda.CUDAGraph()
    attention_inputs(B, q, *rest)
    with torch.cuda.graph(graph):
        found = attention_inputs(B, q, *rest)
    for _ in range(3):
        q.copy_(q0)
        graph.replay()
        results.append([t.clone() for t in found])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("kind", ["window", "CSA", "HCA"])
@pytest.mark.parametrize("step", [dict(batch=2), dict(batch=2, tokens=5), dict(batch=2, packed=False)], ids=str)
def test_the_production_calls_of_attention_inputs_are_such_steps(kind, step):
    """Those that are timed and compiled, at small widths."""
    drawn = partial(productions()["attention_inputs"].drawn, SMALL, 3, DEVICE, torch.float32, kind=kind, **step)
    for got, want in zip(attention_inputs(*drawn()), compositions.attention_inputs(REFERENCE, *drawn()), strict=True):
        assert (got.float() - want.float()).norm() <= 1e-4 * want.float().norm()
