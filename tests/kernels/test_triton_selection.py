"""Selection of the best entries against the reference: exact, for every way in which rows are searched."""

import pytest
import torch

from dsv4.kernels.cache_rows import KEY_FORMATS
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions import compositions
from dsv4.kernels.fusions.exact import DEFINED
from dsv4.kernels.indexer import topk_entries, triton_choose
from dsv4.kernels.indexer import triton as ours
from dsv4.kernels.indexer.triton_choose import Plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
FORMATS = [None, *KEY_FORMATS]
from tests.kernels.test_triton_indexer import assert_selected, poison  # noqa: F401  (fixtures)


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
            scores[..., n // 3 : n // 3 + 60] += 10
        case "apart":  # at most one of the best in eight entries
            scores = -1 - scores.abs() - 100 * (torch.arange(n) % 8 > 0)
        case "wide":  # every exponent and sign
            scores = torch.randint(-(2**31), 2**31 - 1, scores.shape, generator=g).int().view(torch.float32)
            scores[scores.isnan()] = -1e-45
    return scores.to(DEVICE)


def ragged(n: int, k: int, B: int = 1, T: int = 3) -> torch.Tensor:
    values = [n, k + 1, k, 0, 1, n - 1, k - 1]
    return torch.tensor([max(0, min(n, values[i % 7])) for i in range(B * T)], device=DEVICE).view(B, T)


KINDS = ["normal", "ties", "equal", "few", "clustered", "apart", "wide"]


@pytest.mark.few(each=lambda p: (p["how"].method, p["how"].levels))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "n, k, how",
    [
        (40, 7, Plan("rank", 64, 0)),
        (60, 17, Plan("descend", 64, 0)),
        (300, 7, Plan("descend", 64, 1)),
        (900, 8, Plan("descend", 64, 2)),
        (300, 7, Plan("collect", 64, 1)),
        (900, 8, Plan("collect", 64, 2)),
        (300, 7, Plan("filter", 512, 0)),
        (900, 8, Plan("filter", 512, 0)),
        (900, 7, Plan("collect", 128, 1)),
    ],
    ids=str,
)
def test_selection_is_exact(n, k, how, kind, monkeypatch):
    monkeypatch.setattr(triton_choose, "ROOM", 16)  # so that ties overflow it
    monkeypatch.setattr(triton_choose, "CHUNK", 256)
    scores, visible = rows_of(kind, n), ragged(n, k)
    hidden = scores.masked_fill(torch.arange(n, device=DEVICE) >= visible.unsqueeze(-1), NAN)
    for given, seen in ((scores, None), (hidden, visible)):
        out = torch.empty(1, 3, k, dtype=torch.int64, device=DEVICE)
        triton_choose.choose(how, given, n, k, seen, out)
        assert_selected(out, topk_entries(given, k, seen))


@pytest.mark.parametrize(
    "n, how", [(300, Plan("filter", 512, 0)), (60, Plan("descend", 64, 0)), (300, Plan("descend", 64, 1))], ids=str
)
def test_rows_that_see_at_most_k_need_no_scores_where_they_are_many(n, how):
    k = 7
    visible, out = (
        torch.tensor([[0, 1, k, k + 1]], device=DEVICE),
        torch.empty(1, 4, k, dtype=torch.int64, device=DEVICE),
    )
    scores = rows_of("normal", n, 1, 4)
    scores[:, :3] = float("-inf")
    triton_choose.choose(how, scores, n, k, visible, out, scored=not how.by_number)
    wanted = torch.where(torch.arange(k) < visible[0, :3, None].cpu(), torch.arange(k), -1)
    assert how.by_number and torch.equal(out[0, :3].cpu(), wanted)
    assert_selected(out[:, 3:], topk_entries(scores[:, 3:], k, visible[:, 3:]))


@pytest.mark.parametrize(
    "n, how",
    [
        (40, Plan("rank", 64, 0)),
        (60, Plan("descend", 64, 0)),
        (900, Plan("descend", 64, 2)),
        (300, Plan("collect", 64, 1)),
        (300, Plan("filter", 512, 0)),
        (900, Plan("filter", 512, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["normal", "few", "equal"])
def test_entries_may_be_rows_of_a_pool(n, how, kind, monkeypatch):
    """Of the fifth batch row on, beyond 2^31; in the order of entries. Equal scores overflow the room of a part."""
    monkeypatch.setattr(triton_choose, "ROOM", 16)
    k, first, run, visible = 7, 4, 1 << 30, ragged(n, 7, 2, 3)
    scores, scored = rows_of(kind, n, 2, 3), not how.by_number
    entry, rows = (torch.empty(2, 3, k, dtype=torch.int64, device=DEVICE) for _ in range(2))
    triton_choose.choose(how, scores, n, k, visible, entry, None, scored)
    triton_choose.choose(how, scores, n, k, visible, rows, None, scored, run, first)
    base = (first + torch.arange(2, device=DEVICE)).view(2, 1, 1) * run
    assert torch.equal(rows, torch.where(entry < 0, -1, entry + base)) and bool((entry < 0).any())


@pytest.mark.parametrize("n", [5, 300])
@pytest.mark.parametrize("rows", [2, 6])
def test_selected_rows_of_batch_rows_that_are_scored_apart(n, rows, monkeypatch):
    """The definition's, for every entry and for the best, of all rows at once and of two at a time."""
    monkeypatch.setattr(ours, "SCRATCH_BYTES", 4 * rows * ours._width(n))
    g = torch.Generator().manual_seed(n)
    q, weights, keys = (torch.randint(-2, 3, s, generator=g).float() for s in ((3, 2, 4, 16), (3, 2, 4), (3, n, 16)))
    given = *(t.to(DEVICE) for t in (q, weights, keys)), ragged(n, 8, 3, 2), 8, False
    rows, entry = ours.select_entries(*given, 1000), ours.select_entries(*given)
    assert torch.equal(rows, compositions.chosen_rows(None, entry, 1000).view_as(entry))
    assert_selected(rows, DEFINED.select_entries(*given, 1000))


LONG_ROWS = [
    ("normal", 262144, 512),
    ("normal", 262144, 1),
    ("wide", 262144, 1024),
    ("clustered", 1 << 20, 512),
    ("normal", 262144, 2048),
    ("ties", 262144, 512),
    ("few", 262144, 2048),
    ("normal", 20000, 512),
]


@pytest.mark.parametrize("kind, n, k", LONG_ROWS, ids=str)
def test_long_rows_of_decoding(kind, n, k):
    """Best first, but where too many entries are as good as the bound: then the first program searches the row, which
    finds the same set."""
    how = triton_choose.plan(2, n, k)
    assert how.method == "collect"
    scores = rows_of(kind, n, 2, 1)
    scores[0, 0, [5, n // 2, n - 3]] = torch.tensor([NAN, INF, -INF], device=DEVICE)
    visible = torch.tensor([[n], [k // 2 + 700]], device=DEVICE)  # the second row is much shorter
    out = torch.empty(2, 1, k, dtype=torch.int64, device=DEVICE)
    triton_choose.choose(how, scores, n, k, visible, out)
    hidden = scores.masked_fill(torch.arange(n, device=DEVICE) >= visible.unsqueeze(-1), -INF)
    wanted = topk_entries(hidden, k)
    assert_selected(out, wanted)
    assert kind in ("ties", "few") or torch.equal(out, wanted)


def test_parts_with_exactly_as_many_as_there_is_room_for(monkeypatch):
    """Each of 16 parts finds `ROOM` entries, which are ranked, or one finds one more, and the row is searched."""
    n, k, room = 2048, 8, 8
    monkeypatch.setattr(triton_choose, "ROOM", room)
    good = torch.arange(room * triton_choose.PARTS * 8, device=DEVICE) % 8 == 0  # one in each group of eight
    for extra in (0, 1):
        scores = torch.zeros(1, 1, n, device=DEVICE)
        scores[0, 0, : len(good)][good] = 1.0
        scores[0, 0, 1 : 1 + extra] = 1.0
        scores[0, 0, 8 * triton_choose.PARTS * (room - 1)] = 2.0  # the last that the first part finds
        out = torch.empty(1, 1, k, dtype=torch.int64, device=DEVICE)
        triton_choose.choose(Plan("collect", 512, 1), scores, n, k, None, out)
        assert_selected(out, topk_entries(scores, k))


def test_the_last_thread_of_a_part_counts():
    """All entries reach the bound. The best is the last of the first part: 16 groups of eight, one for each thread."""
    scores, best = torch.ones(1, 1, 2048, device=DEVICE), 15 * 8 * triton_choose.PARTS + 7
    scores[0, 0, best] = 2.0
    out = torch.empty(1, 1, 8, dtype=torch.int64, device=DEVICE)
    triton_choose.choose(Plan("collect", 512, 1), scores, 2048, 8, None, out)
    assert out.flatten().tolist() == [best, *range(7)]


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("k", [1, 5, 64, 65])
def test_selection_of_any_size(n, k):
    scores, visible = rows_of("ties", n, B=2, T=2), ragged(n, min(k, n), 2, 2)
    assert_selected(ours.topk_entries(scores, k), topk_entries(scores, k))
    assert_selected(ours.topk_entries(scores, k, visible), topk_entries(scores, k, visible))


@pytest.mark.parametrize(
    "method, rows, n, k",
    [
        ("rank", 1, 2048, 512),
        ("rank", 1000, 60, 64),
        ("descend", 1, 4096, 512),
        ("descend", 8, 2048, 512),
        ("filter", 336, 32768, 512),
        ("descend", 255, 32768, 512),
        ("descend", 336, 32768, 1024),
        ("filter", 1056, 4096, 512),
        ("filter", 8192, 2048, 512),
        ("filter", 256, 2097152, 64),
        ("collect", 1, 4097, 512),
        ("collect", 1, 262144, 512),
        ("collect", 8, 262144, 512),
        ("collect", 16, 262144, 1024),
        ("collect", 2, 1048576, 2048),
        ("descend", 2, 1048576, 2049),
        ("descend", 17, 262144, 512),
        ("descend", 1, 32768, 32768),
        ("descend", 1, 1000000, 4096),
        ("collect", 1, 2097152, 64),
    ],
)
def test_how_rows_are_searched(method, rows, n, k):
    how = triton_choose.plan(rows, n, k)
    assert how.method == method
    assert how.candidates <= triton_choose.MAX_CANDIDATES
    assert how.candidates >= max(512, 4 * k) if method == "filter" else n <= how.candidates * 8**how.levels
    assert how.levels == 0 or how.candidates >= 8 * k
    assert method != "collect" or how.levels > 0


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
    for how in (
        Plan("rank", 32, 0),
        Plan("descend", 32, 0),
        Plan("collect", 64, 1),
        Plan("descend", 64, 1),
        Plan("filter", 512, 0),
    ):
        n = 30 if how in (Plan("rank", 32, 0), Plan("descend", 32, 0)) else 99
        out = torch.empty(1, 2, 4, dtype=torch.int64, device=DEVICE)
        triton_choose.choose(how, torch.full((1, 2, n), NAN, device=DEVICE), n, 4, visible, out)
        assert (out == -1).all()


# Both in one ----------------------------------------------------------------------------------------------------------
