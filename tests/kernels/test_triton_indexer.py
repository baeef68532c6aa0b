"""The Triton kernels of the indexer against the reference: scores, selection, and both in one."""

import pytest
import torch

from dsv4.kernels.cache_rows import KEY_FORMATS, PAGE, PackedRows, RowFormat, encode_rows, pack_layout
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer import index_scores, reference, triton_choose, triton_scores
from dsv4.kernels.indexer import triton as ours
from dsv4.kernels.indexer.triton_choose import Plan
from tests.kernels import ptx
from tests.kernels.products import fill_fresh_buffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
FORMATS = [None, *KEY_FORMATS]
gpu = pytest.mark.gpu
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.value if f else "plain")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh buffers hold NaN or the largest integer: a kernel that reads what was not written shows it."""
    fill_fresh_buffers(monkeypatch, torch.iinfo(torch.int64).max)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """In the interpreter, take the paths that a GPU takes for bf16."""
    if DEVICE == "cpu":
        monkeypatch.setitem(ptx.OPERATIONS, "min.u32", lambda a, b: a.clip(max=b))
        monkeypatch.setattr(triton_scores, "capability", lambda device: (9, 0))
        ptx.compiled(monkeypatch, triton_scores)


def pack(values: torch.Tensor, form: RowFormat, spare: int = 1, fill: int = 255) -> PackedRows:
    """Keys [B, n, D] packed, in pages that hold `fill` wherever no key is."""
    B, n, D = values.shape
    pages = torch.full(
        (B, -(-n // PAGE) + spare, pack_layout(form, D).page), fill, dtype=torch.uint8, device=values.device
    )
    rows = PackedRows(form, pages, D, 0, n)
    payload, scales = encode_rows(values.reshape(-1, D), form)
    e = torch.arange(n, device=values.device)
    rows.payload[:, e // PAGE, e % PAGE] = payload.view(B, n, -1)
    rows.scales[:, e // PAGE, e % PAGE] = scales.view(B, n, -1)
    return rows


def case(B=2, T=3, H=5, D=64, n=70, form=None, dtype=torch.float32, seed=0, integers=False):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, high=4):
        return (
            torch.randint(-high, high + 1, shape, generator=g).float() if integers else torch.randn(*shape, generator=g)
        )

    q, w, k = draw(B, T, H, D).to(dtype).to(DEVICE), draw(B, T, H).to(DEVICE), draw(B, n, D, high=3).to(DEVICE)
    visible = torch.randint(0, n + 1, (B, T), generator=g).to(DEVICE)
    visible[0, -1] = n
    return q, w, pack(k, form) if form else k.to(dtype), visible


def assert_scores(got, wanted, tolerance=1e-5):
    """Masks of −inf are equal, scores are close relative to the norm."""
    assert got.shape == wanted.shape and got.dtype is torch.float32
    assert torch.equal(got == -INF, wanted == -INF)
    seen = wanted != -INF
    if seen.any():
        error = (got[seen].double() - wanted[seen].double()).norm() / wanted[seen].double().norm().clamp(min=1e-30)
        assert error <= tolerance, float(error)


def assert_selected(got, wanted):
    assert got.shape == wanted.shape and got.dtype is torch.int64
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)


# Scores ---------------------------------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize(
    "shape",
    [
        dict(B=1, T=1, H=8),
        dict(),
        dict(B=1, T=9, H=8, D=128, n=130),
        dict(T=1, H=64, D=128, n=65),
        dict(B=1, H=17, D=96, n=5),
        dict(B=1, T=2, H=2, D=32, n=1),
    ],
    ids=str,
)
def test_scores(shape, form):
    q, w, k, visible = case(**shape, form=form)
    assert_scores(index_scores(q, w, k, visible, backend="triton"), index_scores(q, w, k, visible))


@formats
@pytest.mark.parametrize(
    "shape",
    [dict(), dict(B=1, T=9, H=8, D=128, n=130), dict(T=1, H=64, D=128, n=65), dict(B=1, T=15, H=20, D=32, n=67)],
    ids=str,
)
def test_scores_of_bf16_queries(shape, form, like_a_gpu):
    q, w, k, visible = case(**shape, form=form, dtype=torch.bfloat16)
    assert_scores(index_scores(q, w, k, visible, backend="triton"), index_scores(q, w, k, visible))


def test_fp4_scales_of_every_size(like_a_gpu):
    """Scales 2^-61 … 2^65, all nibbles: decoding is exact."""
    B, D = 1, 128
    g = torch.Generator().manual_seed(0)
    size = torch.randint(-61, 64, (B, 140, D // 32, 1), generator=g)
    k = (torch.randint(-12, 13, (B, 140, D // 32, 32), generator=g) / 2.0 * 2.0**size).flatten(2).to(DEVICE)
    q, w, _, _ = case(B=B, T=1, H=16, D=D, dtype=torch.bfloat16)
    visible = torch.full((B, 1), 140, device=DEVICE)
    rows = pack(k, RowFormat.INDEX_FP4)
    got, wanted = ours.index_scores(q, w, rows, visible), index_scores(q, w, rows, visible)
    assert ((got - wanted).abs() <= 1e-5 * index_scores(q.abs(), w.abs(), k.abs(), visible)).all()


@pytest.mark.parametrize("query, key", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_mixed_dtypes_multiply_in_fp32(query, key):
    q, w, k, visible = case()
    q, k = q.to(query), k.to(key)
    assert_scores(index_scores(q, w, k, visible, backend="triton"), index_scores(q, w, k, visible))


@formats
@pytest.mark.parametrize("queries", [1, 3])
def test_what_is_not_visible_is_not_read(queries, form, like_a_gpu):
    q, w, k, visible = case(B=1, T=queries, form=form, dtype=torch.bfloat16)
    visible.clamp_(max=33)
    wanted = index_scores(q, w, k, visible)
    if form:
        k.payload[:, 0, 33:], k.scales[:, 0, 33:] = 0x7F, 255
        k.data[:, 1:] = 255
    else:
        k[:, 33:] = NAN
    assert_scores(index_scores(q, w, k, visible, backend="triton"), wanted)


def test_nan_of_a_visible_key_or_query_shows():
    q, w, k, visible = case(B=1, T=2, H=4)
    k[0, 3, 5], q[0, 1, 2, 7] = NAN, NAN
    visible[:] = 70
    got = ours.index_scores(q, w, k, visible)
    assert got[0, 0].isnan().nonzero().flatten().tolist() == [3] and got[0, 1].isnan().all()


def test_keys_that_are_views_of_longer_buffers():
    q, w, k, visible = case(n=40)
    held = torch.full((2, 100, 2, 64), NAN, device=DEVICE)
    held[:, 10:50, 1] = k
    view = held[:, 10:50, 1]
    assert_scores(ours.index_scores(q, w, view, visible), index_scores(q, w, k, visible))
    assert_scores(
        ours.index_scores(q[:, 1:], w.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:], view, visible[:, 1:]),
        index_scores(q, w, k, visible)[:, 1:],
    )


def test_visible_beyond_the_keys_and_negative():
    q, w, k, _ = case(B=1, T=3)
    visible = torch.tensor([[-5, 70, 1000]], device=DEVICE)
    assert_scores(ours.index_scores(q, w, k, visible), index_scores(q, w, k, visible))


@pytest.mark.parametrize("shape", [dict(n=0), dict(B=0), dict(T=0)], ids=str)
def test_nothing_to_score_or_to_select(shape):
    B, T, n = shape.get("B", 2), shape.get("T", 3), shape.get("n", 70)
    q, w, k = (
        torch.zeros(B, T, 5, 64, device=DEVICE),
        torch.zeros(B, T, 5, device=DEVICE),
        torch.zeros(B, n, 64, device=DEVICE),
    )
    visible = torch.zeros(B, T, dtype=torch.int64, device=DEVICE)
    scores = ours.index_scores(q, w, k, visible)
    assert scores.shape == (B, T, n)
    assert ours.topk_entries(scores, 4).shape == ours.select_entries(q, w, k, visible, 4).shape == (B, T, min(4, n))


def test_what_the_scores_do_not_take():
    q, w, k, visible = case(B=1, T=1, H=4)
    zeros = torch.zeros(1, 70, 300, 128, device=DEVICE)
    wide = zeros[:, :1], zeros[:, :1, :, 0], zeros[:, :, 0]
    odd = PackedRows(RowFormat.INDEX_FP8, torch.zeros(1, 2, 64 * 67, dtype=torch.uint8, device=DEVICE), 63, 0, 70)
    across = k.transpose(1, 2).contiguous().transpose(1, 2)
    for inputs in (
        (q.half(), w, k),
        (q, w.bfloat16(), k),
        (q, w, k.half()),
        (q, w, across),
        (q, w, k[..., :32]),
        (q[..., :63], w, odd),
        wide,
    ):
        with pytest.raises(UnsupportedInput):
            ours.index_scores(*inputs, visible)


def assert_select(q, w, k, visible, count):
    """Integers make every sum exact, so that both select the same entries."""
    wanted = reference.topk_entries(reference.index_scores(q, w, k, visible), count)
    assert_selected(ours.select_entries(q, w, k, visible, count), wanted)


@formats
@pytest.mark.parametrize("n", [1, 15, 16, 17, 90])
def test_select(n, form, like_a_gpu):
    assert_select(*case(B=2, T=5, n=n, form=form, integers=True, dtype=torch.bfloat16), 16)


@pytest.mark.parametrize(
    "method, levels, n",
    [
        ("descend", 1, 300),
        ("descend", 2, 900),
        ("collect", 1, 300),
        ("collect", 2, 900),
        ("filter", 0, 300),
    ],
)
def test_select_by_maxima(method, levels, n, monkeypatch):
    monkeypatch.setattr(ours, "plan", lambda rows, n, k: Plan(method, 64, levels))
    assert_select(*case(B=1, T=2, H=2, D=32, n=n, integers=True), 8)


@pytest.mark.parametrize("levels, n", [(1, 300), (2, 900)])
def test_select_by_maxima_of_bf16_products(levels, n, monkeypatch, like_a_gpu):
    """Whose rows come in an order of their own."""
    monkeypatch.setattr(ours, "plan", lambda rows, n, k: Plan("descend", 64, levels))
    assert_select(*case(B=1, T=5, H=4, D=32, n=n, form=RowFormat.INDEX_FP4, integers=True, dtype=torch.bfloat16), 8)


@pytest.mark.parametrize("rows", [1, 3, 6, 100])
@pytest.mark.parametrize("B, T", [(3, 5), (5, 1), (1, 21)])
def test_select_in_chunks(B, T, rows, monkeypatch):
    monkeypatch.setattr(ours, "SCRATCH_BYTES", rows * 4 * 128)
    monkeypatch.setattr(ours, "plan", lambda rows, n, k: Plan("descend", 64, 1))
    assert_select(*case(B=B, T=T, H=3, D=32, n=90, integers=True), 8)


def test_select_repeats_itself_bit_for_bit():
    q, w, k, visible = case(B=1, T=2, H=4, D=32, n=300, integers=True)
    for how in (Plan("descend", 64, 1), Plan("collect", 64, 1), Plan("filter", 32, 0)):
        scores = ours.index_scores(q, w, k, visible)
        first, again = (torch.empty(1, 2, 8, dtype=torch.int64, device=DEVICE) for _ in range(2))
        triton_choose.choose(how, scores, 300, 8, visible, first)
        triton_choose.choose(how, scores, 300, 8, visible, again)
        assert torch.equal(first, again)
    assert torch.equal(scores, ours.index_scores(q, w, k, visible))
