"""The Triton kernels of the indexer against the reference: scores, selection, and both in one."""

import pytest
import torch

from kernels.cache_rows import PAGE, PackedRows, RowFormat, encode_rows, pack_layout
from kernels.errors import UnsupportedInput
from kernels.indexer import index_scores, reference, topk_entries, triton_choose, triton_scores
from kernels.indexer import triton as ours
from kernels.indexer.triton_choose import Plan
from tests.kernels import ptx

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
FORMATS = [None, RowFormat.INDEX_FP8, RowFormat.INDEX_FP4]
gpu = pytest.mark.gpu
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.value if f else "plain")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh buffers hold NaN or the largest integer: a kernel that reads what was not written shows it."""
    make = torch.empty

    def empty(*args, **kwargs):
        t = make(*args, **kwargs)
        return t.fill_(NAN if t.is_floating_point() else torch.iinfo(t.dtype).max)
    monkeypatch.setattr(torch, "empty", empty)


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
    pages = torch.full((B, -(-n // PAGE) + spare, pack_layout(form, D).page), fill, dtype=torch.uint8, device=values.device)
    rows = PackedRows(form, pages, D, 0, n)
    payload, scales = encode_rows(values.reshape(-1, D), form)
    e = torch.arange(n, device=values.device)
    rows.payload[:, e // PAGE, e % PAGE] = payload.view(B, n, -1)
    rows.scales[:, e // PAGE, e % PAGE] = scales.view(B, n, -1)
    return rows


def case(B=2, T=3, H=5, D=64, n=70, form=None, dtype=torch.float32, seed=0, integers=False):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape, high=4):
        return torch.randint(-high, high + 1, shape, generator=g).float() if integers else torch.randn(*shape, generator=g)
    q, w, k = draw(B, T, H, D).to(dtype).to(DEVICE), draw(B, T, H).to(DEVICE), draw(B, n, D, high=3).to(DEVICE)
    visible = torch.randint(0, n + 1, (B, T), generator=g).to(DEVICE)
    visible[0, -1] = n
    return q, w, pack(k, form) if form else k.to(dtype), visible


def assert_scores(got, wanted, tolerance=1e-5):
    """The same mask of −inf; close relative to the norm."""
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
@pytest.mark.parametrize("shape", [
    dict(B=1, T=1, H=8), dict(), dict(B=1, T=9, H=8, D=128, n=130), dict(T=1, H=64, D=128, n=65), dict(B=1, H=17, D=96, n=5),
    dict(B=1, T=2, H=2, D=32, n=1)], ids=str)
def test_scores(shape, form):
    q, w, k, visible = case(**shape, form=form)
    assert_scores(index_scores(q, w, k, visible, backend="triton"), index_scores(q, w, k, visible))


@formats
@pytest.mark.parametrize("shape", [
    dict(), dict(B=1, T=9, H=8, D=128, n=130), dict(T=1, H=64, D=128, n=65), dict(B=1, T=15, H=20, D=32, n=67)], ids=str)
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
    assert_scores(ours.index_scores(q[:, 1:], w.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:], view, visible[:, 1:]),
                  index_scores(q, w, k, visible)[:, 1:])


def test_visible_beyond_the_keys_and_negative():
    q, w, k, _ = case(B=1, T=3)
    visible = torch.tensor([[-5, 70, 1000]], device=DEVICE)
    assert_scores(ours.index_scores(q, w, k, visible), index_scores(q, w, k, visible))


@pytest.mark.parametrize("shape", [dict(n=0), dict(B=0), dict(T=0)], ids=str)
def test_nothing_to_score_or_to_select(shape):
    B, T, n = shape.get("B", 2), shape.get("T", 3), shape.get("n", 70)
    q, w, k = torch.zeros(B, T, 5, 64, device=DEVICE), torch.zeros(B, T, 5, device=DEVICE), torch.zeros(B, n, 64, device=DEVICE)
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
    for inputs in ((q.half(), w, k), (q, w.bfloat16(), k), (q, w, k.half()), (q, w, across), (q, w, k[..., :32]),
                   (q[..., :63], w, odd), wide):
        with pytest.raises(UnsupportedInput):
            ours.index_scores(*inputs, visible)


# Selection ------------------------------------------------------------------------------------------------------------


def rows_of(kind: str, n: int, B: int = 1, T: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    scores = torch.randn(B, T, n, generator=g)
    match kind:
        case "ties":
            scores = torch.randint(-3, 4, scores.shape, generator=g).float() * 1e-3
        case "equal":
            scores.fill_(-0.0)
            scores[..., ::3] = 0.0
        case "few":  # most are −inf
            scores[torch.rand(scores.shape, generator=g) < 0.99] = -INF
        case "clustered":  # the best lie next to each other
            scores[..., n // 3:n // 3 + 60] += 10
        case "apart":  # at most one of the best in eight entries
            scores = -1 - scores.abs() - 100 * (torch.arange(n) % 8 > 0)
        case "wide":  # every exponent and sign
            scores = torch.randint(-2**31, 2**31 - 1, scores.shape, generator=g).int().view(torch.float32)
            scores[scores.isnan()] = -1e-45
    return scores.to(DEVICE)


def ragged(n: int, k: int, B: int = 1, T: int = 3) -> torch.Tensor:
    values = [n, k + 1, k, 0, 1, n - 1, k - 1]
    return torch.tensor([max(0, min(n, values[i % 7])) for i in range(B * T)], device=DEVICE).view(B, T)


KINDS = ["normal", "ties", "equal", "few", "clustered", "apart", "wide"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k, how", [
    (40, 7, Plan("rank", 64, 0)), (60, 17, Plan("descend", 64, 0)), (300, 7, Plan("descend", 64, 1)),
    (900, 8, Plan("descend", 64, 2)), (300, 7, Plan("collect", 64, 1)), (900, 8, Plan("collect", 64, 2)),
    (300, 7, Plan("filter", 32, 0)), (900, 8, Plan("filter", 64, 0)), (120, 7, Plan("winnow", 128, 0)),
    (300, 7, Plan("winnow", 64, 1)), (900, 7, Plan("winnow", 64, 2)), (900, 8, Plan("winnow", 128, 1))], ids=str)
def test_selection_is_exact(n, k, how, kind, monkeypatch):
    monkeypatch.setattr(triton_choose, "ROOM", 256)  # so that ties overflow it
    monkeypatch.setattr(triton_choose, "CHUNK", 256)
    scores, visible = rows_of(kind, n), ragged(n, k)
    hidden = scores.masked_fill(torch.arange(n, device=DEVICE) >= visible.unsqueeze(-1), NAN)
    for given, seen in ((scores, None), (hidden, visible)):
        out = torch.empty(1, 3, k, dtype=torch.int64, device=DEVICE)
        triton_choose.choose(how, given, n, k, seen, out)
        assert_selected(out, topk_entries(given, k, seen))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("k", [1, 5, 64, 65])
def test_selection_of_any_size(n, k):
    scores, visible = rows_of("ties", n, B=2, T=2), ragged(n, min(k, n), 2, 2)
    assert_selected(ours.topk_entries(scores, k), topk_entries(scores, k))
    assert_selected(ours.topk_entries(scores, k, visible), topk_entries(scores, k, visible))


@pytest.mark.parametrize("method, rows, n, k", [
    ("rank", 1, 2048, 512), ("rank", 1000, 60, 64), ("descend", 1, 4096, 512), ("descend", 8, 2048, 512),
    ("filter", 336, 32768, 512), ("descend", 255, 32768, 512), ("descend", 336, 32768, 1024), ("descend", 1056, 4096, 512),
    ("collect", 1, 4097, 512), ("collect", 1, 262144, 512), ("winnow", 8, 262144, 512), ("winnow", 16, 262144, 1024), ("descend", 17, 262144, 512),
    ("descend", 1, 32768, 32768), ("descend", 1, 1000000, 4096), ("collect", 1, 2097152, 64)])
def test_how_rows_are_searched(method, rows, n, k):
    how = triton_choose.plan(rows, n, k)
    assert how.method == method
    assert how.candidates <= triton_choose.MAX_CANDIDATES
    assert how.candidates >= 4 * k if method == "filter" else n <= how.candidates * 8**how.levels
    assert how.levels == 0 or how.candidates >= 8 * k
    assert method != "winnow" or how.candidates >= 16 * k


def test_what_the_selection_does_not_take():
    for n, k in ((40000, 4097), (2097153, 8)):
        with pytest.raises(UnsupportedInput):
            triton_choose.plan(1, n, k)
    with pytest.raises(UnsupportedInput):
        ours.topk_entries(torch.zeros(1, 1, 8, dtype=torch.bfloat16, device=DEVICE), 2)


def test_selection_takes_strides_and_infinities():
    scores = torch.full((3, 2, 90), NAN, device=DEVICE)
    scores[:, :, 7:57] = rows_of("ties", 50, 3, 2)
    scores[0, 0, 9], scores[1, 1, 30:40] = INF, -INF
    part = scores[:, :, 7:57]
    across = part.transpose(1, 2).contiguous().transpose(1, 2)
    for view in (part, part[:, 1:], part.transpose(0, 1), part[:1].expand(3, 2, 50), across):
        assert_selected(ours.topk_entries(view, 20), topk_entries(view, 20))


def test_nothing_visible():
    visible = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    for how in (Plan("rank", 32, 0), Plan("descend", 32, 0), Plan("collect", 64, 1), Plan("descend", 64, 1),
                Plan("filter", 32, 0), Plan("winnow", 64, 1)):
        n = 30 if how in (Plan("rank", 32, 0), Plan("descend", 32, 0)) else 99
        out = torch.empty(1, 2, 4, dtype=torch.int64, device=DEVICE)
        triton_choose.choose(how, torch.full((1, 2, n), NAN, device=DEVICE), n, 4, visible, out)
        assert (out == -1).all()


# Both in one ----------------------------------------------------------------------------------------------------------


def assert_select(q, w, k, visible, count):
    """Integers make every sum exact, so that both select the same entries."""
    wanted = reference.topk_entries(reference.index_scores(q, w, k, visible), count)
    assert_selected(ours.select_entries(q, w, k, visible, count), wanted)


@formats
@pytest.mark.parametrize("n", [1, 15, 16, 17, 90])
def test_select(n, form, like_a_gpu):
    assert_select(*case(B=2, T=5, n=n, form=form, integers=True, dtype=torch.bfloat16), 16)


@pytest.mark.parametrize("method, levels, n", [
    ("descend", 1, 300), ("descend", 2, 900), ("collect", 1, 300), ("collect", 2, 900), ("filter", 0, 300),
    ("winnow", 1, 300), ("winnow", 2, 900)])
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
    for how in (Plan("descend", 64, 1), Plan("collect", 64, 1), Plan("filter", 32, 0), Plan("winnow", 64, 1)):
        scores = ours.index_scores(q, w, k, visible)
        first, again = (torch.empty(1, 2, 8, dtype=torch.int64, device=DEVICE) for _ in range(2))
        triton_choose.choose(how, scores, 300, 8, visible, first)
        triton_choose.choose(how, scores, 300, 8, visible, again)
        assert torch.equal(first, again)
    assert torch.equal(scores, ours.index_scores(q, w, k, visible))


# At production shapes -------------------------------------------------------------------------------------------------


def flash(B, T, n, form, seed=0, capacity=None):
    """Queries and keys of V4-Flash, the keys as a cache of `capacity` holds them, NaN behind n."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn(B, T, 64, 128, device="cuda", generator=g).bfloat16()
    w = torch.randn(B, T, 64, device="cuda", generator=g) / 64
    k = torch.randn(B, n, 128, device="cuda", generator=g)
    if form:
        rows = pack(k, form, spare=((capacity or n) - n) // PAGE + 1)
        return q, w, rows._replace(count=capacity or n)
    held = torch.full((B, capacity or n, 128), NAN, device="cuda", dtype=torch.bfloat16)
    held[:, :n] = k
    return q, w, held


def best_of(scores, selected, k):
    """Whether a selection holds only entries at least as good as the k-th best, but for rounding, and as many as it should."""
    kth = scores.topk(k, -1).values[..., -1:]
    picked = scores.gather(-1, selected.clamp(min=0)).masked_fill(selected < 0, -INF)
    distinct = selected.sort(-1).values.diff(dim=-1)
    assert ((selected >= 0).sum(-1) == (scores > -INF).sum(-1).clamp(max=k)).all()
    assert ((distinct > 0) | (selected.sort(-1).values[..., 1:] < 0)).all()
    slack = 5e-5 * scores.masked_fill(scores == -INF, 0).abs().amax(-1, keepdim=True)
    assert ((picked >= kth - slack) | (selected < 0)).all()


@gpu
@formats
@pytest.mark.parametrize("B, T, n", [
    (1, 1, 2048), (8, 1, 2048), (1, 1, 32768), (8, 1, 32768), (1, 1, 262144), (3, 2, 5000), (2, 4, 30000), (1, 300, 8192)],
    ids=str)
def test_production_scores(B, T, n, form):
    q, w, k = flash(B, T, n, form, capacity=n + 640)
    visible = torch.randint(n - n // 8, n + 1, (B, T), device="cuda")
    visible[0, -1] = n
    wanted = reference.index_scores(q, w, k, visible)
    got = ours.index_scores(q, w, k, visible)
    assert_scores(got, wanted, 5e-5)
    for count in (512, 1024):
        best_of(wanted, ours.select_entries(q, w, k, visible, count), count)


@gpu
def test_production_audit_in_fp32():
    q, w, k = flash(1, 3, 5000, RowFormat.INDEX_FP4)
    visible = torch.tensor([[5000, 4000, 70]], device="cuda")
    assert_scores(ours.index_scores(q.float(), w, k, visible), reference.index_scores(q.float(), w, k, visible), 1e-6)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, n, k", [
    (1, 2048, 512), (8, 2048, 512), (1, 4096, 512), (1, 32768, 512), (300, 32768, 512), (1, 262144, 512), (8, 262144, 1024),
    (20, 262144, 1024), (1, 1000000, 1024), (2, 30000, 4096), (5000, 300, 64)], ids=str)
def test_production_selection(rows, n, k, kind):
    scores = rows_of(kind, n, 1, 1).repeat(1, rows, 1) if rows * n > 1 << 23 else rows_of(kind, n, 1, rows)
    visible = torch.randint(0, n + 1, (1, rows), device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    visible[0, -1] = n
    assert_selected(ours.topk_entries(scores, k), topk_entries(scores, k))
    assert_selected(ours.topk_entries(scores, k, visible), topk_entries(scores, k, visible))
    first = ours.topk_entries(scores, k, visible)
    assert all(torch.equal(first, ours.topk_entries(scores, k, visible)) for _ in range(20))


@gpu
@formats
@pytest.mark.parametrize("B, T, n", [(1, 1, 262144), (4, 1, 32768), (1, 1, 2048), (1, 500, 32768)], ids=str)
def test_a_graph_follows_what_is_visible(B, T, n, form):
    q, w, k = flash(B, T, n, form)
    visible = torch.full((B, T), n, device="cuda")
    ours.select_entries(q, w, k, visible, 512)
    ours.index_scores(q[:, :4], w[:, :4], k, visible[:, :4])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.select_entries(q, w, k, visible, 512)
        scores = ours.index_scores(q[:, :4], w[:, :4], k, visible[:, :4])
    for seen in (n, n // 2 + 3, 700, 513, 512, 60, 1, 0):
        visible.fill_(seen)
        graph.replay()
        assert torch.equal(out, ours.select_entries(q, w, k, visible, 512))
        assert torch.equal(scores, ours.index_scores(q[:, :4], w[:, :4], k, visible[:, :4]))


@gpu
@formats
def test_production_repeats_bit_for_bit(form):
    q, w, k = flash(2, 1, 262144, form)
    visible = torch.tensor([[262144], [200001]], device="cuda")
    scores, selected = ours.index_scores(q, w, k, visible), ours.select_entries(q, w, k, visible, 512)
    for _ in range(20):
        assert torch.equal(scores, ours.index_scores(q, w, k, visible))
        assert torch.equal(selected, ours.select_entries(q, w, k, visible, 512))


@gpu
def test_offsets_past_two_gib():
    """Batch rows and queries further apart than 2^31 elements."""
    q, w, k = flash(2, 1, 4200, None)
    far = torch.empty((1 << 31) + 4200 * 128 + 64, dtype=torch.bfloat16, device="cuda").as_strided(
        (2, 4200, 128), ((1 << 31) + 64, 128, 1))
    far.copy_(k)
    visible = torch.full((2, 1), 4200, device="cuda")
    assert_scores(ours.index_scores(q, w, far, visible), reference.index_scores(q, w, k, visible))
    rows = pack(k.float(), RowFormat.INDEX_FP4)
    apart = torch.empty((1 << 32) + rows.data[0].numel(), dtype=torch.uint8, device="cuda").as_strided(
        rows.data.shape, (1 << 32, rows.data.shape[2], 1))
    apart.copy_(rows.data)
    assert_scores(ours.index_scores(q, w, rows._replace(data=apart), visible), reference.index_scores(q, w, rows, visible))
    del far, apart
    scores = torch.empty((1 << 31) + 40000, device="cuda").as_strided((1, 2, 33000), (1 << 31, (1 << 31) + 64, 1))
    scores.copy_(rows_of("ties", 33000, 1, 2))
    assert_selected(ours.topk_entries(scores, 512), topk_entries(scores, 512))
