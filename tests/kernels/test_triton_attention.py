"""Triton's attention against the reference: every way a query is tiled and split, in every format of the pools."""

from itertools import product

import pytest
import torch

from dsv4.kernels.attention import hca_attention, sparse_attention
from dsv4.kernels.attention import triton as kernels
from dsv4.kernels.attention.triton_plan import Tile
from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout, write_rows
from dsv4.kernels.errors import UnsupportedInput
from tests.kernels.gqa_inputs import DEVICE, randn
from tests.kernels.products import poison  # noqa: F401 (a fixture: fresh buffers hold NaN)

TILES = {
    "small tiles": Tile(16, 16, 4, 1, 1, 1),
    "more keys": Tile(16, 32, 4, 2, 1, 1),
    "more heads, not chained": Tile(32, 16, 4, 2, 1, 1, unchain=True),
}
NAN = float("nan")


@pytest.fixture(
    params=[("small tiles", 3), ("more keys", 1), ("more heads, not chained", 2)],
    ids=lambda p: f"{p[0]}, {p[1]} splits",
)
def tiled(request, monkeypatch):
    """One kind of tile, its keys in that many splits (some of them empty)."""
    if DEVICE == "cuda":
        pytest.skip("the tiles of this GPU are tested at its own shapes")
    monkeypatch.setattr(kernels, "plan", lambda *shape: (TILES[request.param[0]], request.param[1]))


def listed(N, W, rows, seed=0):
    """Rows in any order, −1 first, last and anywhere; the last query has no row at all if there are several."""
    index = torch.randint(-1, rows, (N, W), generator=torch.Generator().manual_seed(seed))
    if W > 2:
        index[0, 0] = index[0, -1] = index[N // 2, 1] = -1
    if N > 1:
        index[-1] = -1
    return index.to(DEVICE)


def unseen(index, rows):
    kept = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    kept[index[index >= 0]] = True
    return ~kept


def packed(rows: torch.Tensor, rope: int, batch: int | None = None) -> PackedRows:
    """rows [R, D] (or [batch, R, D]) as KV_FP8, in a buffer that is longer and holds NaN elsewhere."""
    R, D = rows.shape[-2:]
    page = pack_layout(RowFormat.KV_FP8, D, rope).page
    data = torch.full((batch or 1, -(-R // 64) + 1, page), 255, dtype=torch.uint8, device=DEVICE)
    for b in range(batch or 1):
        run = PackedRows(RowFormat.KV_FP8, data[b], D, rope, R)
        write_rows(run, torch.arange(R, device=DEVICE), rows if batch is None else rows[b])
    return PackedRows(RowFormat.KV_FP8, data if batch else data[0], D, rope, R)


def as_pool(rows, form: str, rope: int, batch: int | None = None):
    return (
        packed(rows, rope, batch) if form == "fp8" else rows.to({"fp32": torch.float32, "bf16": torch.bfloat16}[form])
    )


def close(got, wanted, tolerance=1e-5):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and torch.equal(got.isfinite(), wanted.isfinite())
    error = (got - wanted).double().nan_to_num().norm() / wanted.double().nan_to_num().norm().clamp(min=1e-30)
    assert error <= tolerance, float(error)


def both(operation, q, *args, tolerance=1e-5):
    got = operation(q, *args, backend="triton")
    close(got, operation(q.contiguous(), *args), tolerance)
    return got


# Selected entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [0, 1, 15, 16, 17], ids=lambda k: f"{k} selected")
def test_selected_entries(tiled, K):
    N, H, D, W = 3, 5, 24, 18
    wi, ei, window, entries = listed(N, W, 20), listed(N, K, 40, 1), randn(20, D), randn(40, D, seed=1)
    window[unseen(wi, 20)], entries[unseen(ei, 40)] = NAN, NAN
    got = both(
        sparse_attention, randn(N, H, D, seed=2), window, wi, entries, ei, torch.linspace(-8, 8, H, device=DEVICE), 0.35
    )
    assert torch.equal(got[-1], torch.zeros_like(got[-1]))  # only the sink


@pytest.mark.parametrize("W,K", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty_lists(W, K):
    args = (randn(4, 16), listed(2, W, 4), randn(4, 16, seed=1), listed(2, K, 4, 1), randn(3), 0.35)
    got = sparse_attention(randn(2, 3, 16), *args, backend="triton")
    # the reference cannot divide its scratch by no rows at all
    close(got, sparse_attention(randn(2, 3, 16), *args) if W + K else torch.zeros_like(got))


@pytest.mark.parametrize("W", [1, 33], ids=lambda w: f"window of {w}")
def test_window_only(tiled, W):
    both(sparse_attention, randn(2, 17, 16), randn(9, 16, seed=1), listed(2, W, 9), None, None, randn(17), 0.35)


@pytest.mark.parametrize(
    "D,rope,forms",
    [
        (64, 32, ("fp32", "fp8")),
        (64, 32, ("fp8", "fp32")),
        (64, 32, ("fp8", "fp8")),
        (64, 32, ("bf16", "fp32")),
        (128, 64, ("bf16", "fp8")),
        (128, 64, ("fp8", "fp8")),
        (80, 16, ("fp8", "fp8")),
    ],
    ids=str,
)
def test_formats_of_the_pools(D, rope, forms):
    N, H, W, K = 2, 8, 9, 20
    wi, ei = listed(N, W, 70), listed(N, K, 130, 1)
    window, entries = as_pool(randn(70, D), forms[0], rope), as_pool(randn(130, D, seed=1), forms[1], rope)
    both(sparse_attention, randn(N, H, D, seed=2), window, wi, entries, ei, randn(H), D**-0.5)
    seen = torch.tensor([[20], [70]], device=DEVICE)
    runs = as_pool(randn(2, 70, D, seed=4), forms[1], rope, batch=2)
    both(hca_attention, randn(2, 1, H, D, seed=2), window, listed(2, W, 70, 3), runs, seen, randn(H), D**-0.5)


@pytest.mark.parametrize("offset", [0, 4, 1], ids=["aligned", "at 4 bytes", "at an odd byte"])
def test_packed_rows_anywhere_in_a_buffer(offset):
    rows = packed(randn(70, 64), 32)
    wide = torch.full((3, rows.data.shape[1] + 2 * offset), 255, dtype=torch.uint8, device=DEVICE)
    wide[:, offset : offset + rows.data.shape[1]] = torch.cat((rows.data, rows.data))[:3]
    moved = rows._replace(data=wide[:, offset : offset + rows.data.shape[1]])
    args = (listed(2, 17, 70), None, None, randn(4), 0.2)
    wanted = sparse_attention(randn(2, 4, 64), rows, *args, backend="triton")
    assert torch.equal(sparse_attention(randn(2, 4, 64), moved, *args, backend="triton"), wanted)


# All visible entries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 16, 37], ids=lambda n: f"{n} entries")
def test_visible_entries(tiled, n):
    B, T, H, D, W = 2, 3, 3, 24, 5
    wi, window, entries = listed(B * T, W, 9), randn(9, D), randn(B, n + 11, D, seed=1)
    seen = torch.tensor([[0, n // 2, n], [n // 3, 1, 0]], device=DEVICE).clamp(max=n)
    window[unseen(wi, 9)] = NAN
    for b in range(B):  # slots of a longer buffer that this row has not written yet
        entries[b, seen[b].max() :] = NAN
    entries = entries[:, :n] if n < 37 else entries
    both(
        hca_attention,
        randn(B, T, H, D, seed=2),
        window,
        wi,
        entries,
        seen,
        torch.linspace(-8, 8, H, device=DEVICE),
        0.35,
    )


def test_what_a_query_does_not_see_is_not_read(tiled):
    """Not even what another query of its row sees."""
    window, entries, seen = randn(4, 16), randn(1, 40, 16, seed=1), torch.tensor([[3, 19, 40]], device=DEVICE)
    q, wi, sink = randn(1, 3, 4, 16, seed=2), listed(3, 4, 4), randn(4)
    wanted = hca_attention(q, window, wi, entries, seen, sink, 0.35)
    entries[0, 19:] = NAN
    got = hca_attention(q, window, wi, entries, seen, sink, 0.35, backend="triton")
    close(got[:, :2], wanted[:, :2])
    assert bool(got[:, 2].isnan().all())


def test_visible_beyond_the_buffer_and_below_zero_is_clamped(tiled):
    q, window, entries, sink = randn(1, 2, 4, 16), randn(4, 16, seed=1), randn(1, 20, 16, seed=2), randn(4)
    wi = torch.tensor([[0, 3], [1, 2]], device=DEVICE)
    both(hca_attention, q, window, wi, entries, torch.tensor([[1000, -5]], device=DEVICE), sink, 0.35)


# What both take -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_strides(dtype):
    q = randn(4, 3, 2, 16, dtype=dtype).permute(2, 0, 1, 3)  # [2, 4, 3, 16]
    window, entries = randn(9, 40, seed=1, dtype=dtype)[:, 8:24], randn(21, 2, 16, seed=2, dtype=dtype).transpose(0, 1)
    wi, seen = listed(1, 10, 9)[:, ::2].expand(8, 5), torch.tensor([[21], [7]], device=DEVICE).expand(2, 4)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    both(hca_attention, q, window, wi, entries, seen, randn(6)[::2], 0.35, tolerance=tolerance)
    # columns are not side by side
    apart = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, window, entries)]
    both(hca_attention, *apart[:2], wi, apart[2], seen, randn(3), 0.35, tolerance=tolerance)
    ei = torch.randint(0, 42, (18, 8), generator=torch.Generator().manual_seed(5)).to(DEVICE).t()
    both(
        sparse_attention, q.flatten(0, 1), window, wi, entries.reshape(42, 16), ei, randn(3), 0.35, tolerance=tolerance
    )


@pytest.mark.parametrize("shape", [(0, 4, 16), (3, 0, 16)], ids=["no queries", "no heads"])
def test_nothing_to_do(shape):
    N, H, D = shape
    q, window, index = randn(*shape), randn(4, 16), torch.zeros(N, 3, dtype=torch.int64, device=DEVICE)
    assert sparse_attention(q, window, index, window, index, randn(H), 0.35, backend="triton").shape == shape
    seen = torch.zeros(1, N, dtype=torch.int64, device=DEVICE)
    assert hca_attention(q[None], window, index, window[None], seen, randn(H), 0.35, backend="triton").shape == (
        1,
        *shape,
    )


def test_extreme_logits_and_sinks(tiled):
    q, window, entries = randn(2, 4, 16), randn(5, 16, seed=1), randn(20, 16, seed=2)
    wi, ei = listed(2, 5, 5), listed(2, 20, 20, 1)
    sink = torch.tensor([-8.0, 8, -1e4, 1e4], device=DEVICE)
    both(sparse_attention, q * 300, window * 30, wi, entries * 30, ei, sink, 1.0, tolerance=1e-4)
    both(sparse_attention, q * 0, window, wi, entries, ei, torch.zeros(4, device=DEVICE), 1.0)  # all logits are equal
    infinite = torch.full((4,), -float("inf"), device=DEVICE)  # no sink: a query without keys is 0 / 0
    assert bool(both(sparse_attention, q, window, wi, entries, ei, infinite, 1.0)[-1].isnan().all())
    entries[ei[0][ei[0] >= 0][0]] = NAN  # a row that is seen
    both(sparse_attention, q, window, wi, entries, ei, torch.zeros(4, device=DEVICE), 1.0)


def test_complete_is_only_a_hint():
    q, window, entries = randn(3, 4, 16), randn(5, 16, seed=1), randn(20, 16, seed=2)
    wi, ei = listed(3, 5, 5), listed(3, 7, 20, 1)
    wanted = sparse_attention(q, window, wi, entries, ei, randn(4), 0.35)
    close(sparse_attention(q, window, wi, entries, ei, randn(4), 0.35, True, backend="triton"), wanted)


@pytest.mark.parametrize("forms", [("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8")], ids="+".join)
def test_bf16_queries(forms):
    window, entries = as_pool(randn(9, 64), forms[0], 32), as_pool(randn(40, 64, seed=1), forms[1], 32)
    args = (window, listed(3, 9, 9), entries, listed(3, 40, 40, 1), randn(5), 0.125)
    both(sparse_attention, randn(3, 5, 64, seed=2, dtype=torch.bfloat16), *args, tolerance=4e-3)


def test_many_splits_are_merged(monkeypatch):
    """More splits than the merge takes at a time, and more than there are tiles; the same bits each time."""
    monkeypatch.setattr(kernels, "plan", lambda *shape: (TILES["small tiles"], 70))
    args = (
        randn(1, 1, 2, 16),
        randn(4, 16, seed=1),
        listed(1, 4, 4),
        randn(1, 68 * 16, 16, seed=2),
        torch.tensor([[68 * 16 - 5]], device=DEVICE),
        randn(2),
        0.35,
    )
    assert torch.equal(both(hca_attention, *args), hca_attention(*args, backend="triton"))
    both(
        hca_attention,
        randn(1, 1, 2, 16),
        randn(4, 16, seed=1),
        listed(1, 4, 4),
        randn(1, 40, 16, seed=2),
        torch.tensor([[33]], device=DEVICE),
        randn(2),
        0.35,
    )


@pytest.mark.few(T=[5])
@pytest.mark.parametrize("T", [2, 5, 16])
def test_tokens_of_a_row_have_the_bits_that_each_has_alone(T):
    """As many splits for a pass that verifies drafts as for the steps that it stands for, however many programs that
    makes."""
    q, pool, sink = randn(T, 2, 64), randn(300, 64, seed=1), randn(2)
    near, far = listed(T, 40, 300), listed(T, 200, 300)
    alone = [
        sparse_attention(
            q[t : t + 1], pool, near[t : t + 1], pool, far[t : t + 1], sink, 0.35, False, 1, backend="triton"
        )
        for t in range(T)
    ]
    assert torch.equal(
        sparse_attention(q, pool, near, pool, far, sink, 0.35, False, T, backend="triton"), torch.cat(alone)
    )
    seen = torch.arange(100, 100 + T, device=DEVICE).view(1, T)
    alone = [
        hca_attention(
            q[None, t : t + 1], pool, near[t : t + 1], pool[None], seen[:, t : t + 1], sink, 0.35, backend="triton"
        )
        for t in range(T)
    ]
    assert torch.equal(
        hca_attention(q[None], pool, near, pool[None], seen, sink, 0.35, backend="triton"), torch.cat(alone, 1)
    )


def test_what_is_not_taken_is_named():
    q, window, index, sink = (
        randn(1, 4, 16),
        randn(4, 16),
        torch.zeros(1, 3, dtype=torch.int64, device=DEVICE),
        randn(4),
    )
    attend = lambda *args: sparse_attention(*args, None, None, sink, 0.35, backend="triton")
    with pytest.raises(UnsupportedInput, match="head_dim 520"):
        attend(randn(1, 4, 520), randn(4, 520), index)
    with pytest.raises(UnsupportedInput, match="int64"):
        attend(q, window, index.int())
    page = torch.zeros(1, pack_layout(RowFormat.INDEX_FP8, 16).page, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(UnsupportedInput, match="fp8 index keys"):
        attend(q, PackedRows(RowFormat.INDEX_FP8, page, 16, 0, 64), index)
    with pytest.raises(UnsupportedInput, match="4 and 8"):
        pools = [packed(randn(4, 16), rope) for rope in (4, 8)]
        sparse_attention(q, pools[0], index, pools[1], index, sink, 0.35, backend="triton")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_plans_fill_the_gpu_and_no_more(capability):
    forms = (
        (True, False, False),
        (False, False, False),
        (False, False, True),
        (False, True, False),
        (False, True, True),
    )
    for N, K, (fp32, packed, copied) in product((1, 2, 8, 64, 131, 4096), (0, 1, 512, 8192, 32768), forms):
        tile, splits = kernels.plan(N, 64, 512, 128, K, fp32, packed, copied, capability, 132)
        tiles, programs = -(-128 // tile.keys) + -(-K // tile.keys), N * -(-64 // tile.heads)
        assert 1 <= splits <= tiles and (splits == 1 or programs * splits <= 132)
        assert -(-tiles // -(-tiles // splits)) == splits  # no split is empty when all is visible
    shape = 64, 512, 128, 512, False, False, True, capability, 132
    assert kernels.plan(1, *shape)[1] > 8 and kernels.plan(4096, *shape)[1] == 1
    assert kernels.plan(4096, *shape)[0].copied == (capability == (9, 0))
