"""`filter_rows`: the k best of a row in the order of the row, whether it is held at once, listed, or searched in
memory."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.kernels.indexer import topk_entries, triton_choose, triton_filter
from dsv4.kernels.indexer.triton_choose import Plan
from tests.kernels.test_triton_indexer import poison  # noqa: F401  (a fixture)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
K, LISTED = 40, 512


def row(kind: str, n: int, k: int, g: torch.Generator) -> torch.Tensor:
    scores = torch.randn(n, generator=g)
    match kind:
        case "up" | "down":
            scores = scores.sort(descending=kind == "down").values
        case "all equal":
            scores.fill_(2.5)
        case "two values":
            scores = (scores > 1).float()
        case "ties at the k-th":  # of a list, which the sample's bound lies below
            scores[torch.randperm(n, generator=g)[: 2 * k]] = 4.0
            scores[torch.randperm(n, generator=g)[: k // 2]] = 5.0
        case "infinite":
            scores[::7], scores[3::50] = -INF, INF
        case "mostly −inf":
            scores[torch.randperm(n, generator=g)[: n - k // 2]] = -INF
        case "some NaN":
            scores[torch.randperm(n, generator=g)[: min(n, k) // 2]] = NAN
        case "all NaN":
            scores.fill_(NAN)
        case "every 128th" | "every 4th" | "every 32nd":
            scores[:: int("".join(filter(str.isdigit, kind)))] += 9
        case "one cluster":
            scores[n // 2 : n // 2 + 3 * k] += 9
        case "unsampled":  # all but a part that no sample of the rest tells of
            scores[n - n // 16 :] += 9
        case "both zeros":
            scores = torch.where(scores > 0, 0.0, -0.0)
        case "wide":
            scores = torch.randint(-(2**31), 2**31 - 1, (n,), generator=g).int().view(torch.float32).nan_to_num(0.0)
    return scores


KINDS = (
    *("normal", "up", "down", "all equal", "two values", "ties at the k-th", "infinite", "mostly −inf", "some NaN"),
    *("all NaN", "every 128th", "every 4th", "every 32nd", "one cluster", "unsampled", "both zeros", "wide"),
)


def chosen(scores: torch.Tensor, k: int, visible: torch.Tensor | None, scored: bool = True) -> torch.Tensor:
    """By `filter_rows`: int64 [B, T, k]."""
    B, T, n = scores.shape
    out = torch.empty(B, T, k, dtype=torch.int64, device=DEVICE)
    triton_choose.choose(Plan("filter", LISTED, 0), scores.to(DEVICE), n, k, visible, out, scored=scored)
    return out


def in_order(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of a row by the reference, in the order of the row; −1 stays where −inf was chosen, and last."""
    bits = (scores + 0.0).view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    best = torch.sort(key, descending=True, stable=True).indices[:k].sort().values
    best = torch.where(scores[best] == -INF, -1, best)
    return torch.cat([best, torch.full((k - len(best),), -1)])


@pytest.mark.few(each=lambda p: p["kind"])
@pytest.mark.parametrize("n", [300, 512, 515, 1537, 2050])
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_in_the_order_of_the_row(kind, n):
    g = torch.Generator().manual_seed(n)
    scores = torch.stack([row(kind, n, K, g) for _ in range(4)])
    seen = torch.tensor([n, n - 1, K, K + 1])
    hidden = torch.where(torch.arange(n) < seen[:, None], scores, NAN)
    got = chosen(hidden[None], K, seen[None].to(DEVICE))[0].cpu()
    for r in range(4):
        assert got[r].tolist() == in_order(scores[r, : seen[r]], K).tolist(), seen[r]
    assert torch.equal(chosen(scores[None, :1], K, None)[0].cpu(), in_order(scores[0], K)[None])
    assert torch.equal(got[0].sort().values, topk_entries(scores[:1], K)[0].sort().values)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 1400), st.integers(1, 128), st.sampled_from(KINDS), st.integers(0, 2**31), st.data())
def test_any_size_and_number(n, k, kind, seed, data):
    k = min(k, n)
    g = torch.Generator().manual_seed(seed)
    scores, seen = row(kind, n, k, g), data.draw(st.integers(0, n))
    got = chosen(scores[None, None], k, torch.tensor([[seen]], device=DEVICE))[0, 0].cpu()
    assert got.tolist() == in_order(scores[:seen], k).tolist()


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls in the interpreter")
@pytest.mark.parametrize(
    "kind, n, searched",
    [("normal", 500, 0), ("normal", 2050, 0), ("up", 2050, 0), ("every 32nd", 2050, 0), ("all equal", 2050, 1)],
)
def test_only_rows_of_many_ties_are_searched_in_memory(kind, n, searched):
    scores = row(kind, n, K, torch.Generator().manual_seed(3))
    with patch.object(triton_filter, "_search", wraps=triton_filter._search) as search:
        chosen(scores[None, None], K, None)
    assert search.call_count == searched


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls in the interpreter")
def test_a_sample_that_promises_too_much_is_asked_again():
    """Seventy entries are better than all others and all in the sample, so its first bound is one that they alone
    reach."""
    n, k, parts = 2050, 128, LISTED // 4
    part, groups = torch.arange(18), n // 4
    group = part * groups // parts + ((part * 40503 & 0xFFFF) * (groups // parts) >> 16)
    scores = torch.randn(n, generator=torch.Generator().manual_seed(1))
    scores[(group[:, None] * 4 + torch.arange(4)).flatten()[:70]] += 9
    with (
        patch.object(triton_filter, "_groups", wraps=triton_filter._groups) as listed,
        patch.object(triton_filter, "_search", wraps=triton_filter._search) as searched,
    ):
        got = chosen(scores[None, None], k, None)[0, 0]
    assert torch.equal(got, in_order(scores, k))
    assert (listed.call_count, searched.call_count) == (2, 0)


@pytest.mark.skipif(DEVICE == "cuda", reason="sees calls in the interpreter")
@pytest.mark.parametrize("kind", ["all equal", "unsampled", "every 4th"])
def test_no_more_groups_are_listed_than_there_is_room_for(kind):
    scores = row(kind, 6001, K, torch.Generator().manual_seed(5))
    with patch.object(triton_filter, "_list_groups", wraps=triton_filter._list_groups) as listed:
        got = chosen(scores[None, None], K, None)[0, 0]
    assert torch.equal(got, in_order(scores, K))
    assert max(int(call.args[5].handle.data.item()) for call in listed.call_args_list) + 128 <= LISTED


@pytest.mark.parametrize("n, width, whole", [(701, 704, True), (700, 700, True), (701, 701, False), (701, 703, False)])
def test_groups_of_four_are_read_whole_where_rows_are_wide_enough(n, width, whole):
    held = torch.full((3, width), NAN)
    held[:, :n] = torch.stack([row("normal", n, K, torch.Generator().manual_seed(r)) for r in range(3)])
    launched, kernel = [], triton_choose.filter_rows

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **options: (launched.append(args), kernel[grid](*args, **options))

    seen, out = (n, n - 2, 100), torch.empty(1, 3, K, dtype=torch.int64, device=DEVICE)
    with patch.object(triton_choose, "filter_rows", Recorded()):
        visible = torch.tensor([seen], device=DEVICE)
        triton_choose.choose(Plan("filter", LISTED, 0), held[None].to(DEVICE), n, K, visible, out)
    names = [p.name for p in kernel.params] if hasattr(kernel, "params") else kernel.arg_names
    assert launched[0][names.index("PADDED")] is whole
    for r, end in enumerate(seen):
        assert out[0, r].tolist() == in_order(held[r, :end], K).tolist()
