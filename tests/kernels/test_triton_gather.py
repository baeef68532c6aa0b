"""Triton's grouped attention, block summaries, block choice and gather attention against the references and against
fp64."""

import pytest
import torch

from dsv4.kernels.block_choice import Policy, block_scores, choose_blocks, sink_window
from dsv4.kernels.block_choice import triton as choice
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import Termination, grouped_attention, traversals, triton_decode
from dsv4.kernels.grouped_attention import triton as grouped
from tests.kernels.gqa_inputs import (
    DEVICE,
    NAN,
    cache,
    close,
    concentrated,
    newest_first,
    randn,
    terminated,
    written_out,
)
from tests.kernels.test_triton_attention import poison  # noqa: F401 (a fixture: fresh buffers hold NaN)


@pytest.fixture
def splits(request, monkeypatch):
    """So many splits, whatever the GPU."""
    whole = triton_decode.plan
    monkeypatch.setattr(triton_decode, "plan", lambda *shape: (whole(*shape)[0], min(request.param, shape[1])))


def listed(B, T, KV, n, end, block, seed=0):
    """Blocks in any order, each at most once, −1 anywhere, those behind the last token among them; the first KV head
    sees nothing."""
    g, out = torch.Generator().manual_seed(seed), torch.full((B, T, KV, n), -1)
    for b in range(B):
        for t in range(T):
            for kv in range(1, KV):
                some = torch.randperm(int(end[b]) // block + 2, generator=g)[:n]
                out[b, t, kv, torch.randperm(n, generator=g)[: len(some)]] = some
    out[torch.rand(out.shape, generator=g) < 0.2] = -1
    return out.int().to(DEVICE)


# Dense
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
@pytest.mark.parametrize("window", [None, 1, 130, 300], ids=lambda w: f"window {w}")
@pytest.mark.parametrize("H,KV,D", [(7, 1, 64), (4, 4, 16), (6, 2, 24)], ids=str)
def test_decode(splits, H, KV, D, window):
    q, keys, values, start = cache(2, 1, H, KV, 512, D, [400, 127])
    args = q, keys, values, start, window, 0.3
    close(grouped_attention(*args, backend="triton"), written_out(*args))


@pytest.mark.parametrize("splits", [2], indirect=True)
@pytest.mark.parametrize("start", [0, 1, 126, 127, 128, 129, 255], ids=lambda n: f"at {n}")
def test_decode_at_the_borders_of_units(splits, start):
    q, keys, values, start = cache(1, 1, 4, 2, 256, 16, [start])
    close(
        grouped_attention(q, keys, values, start, None, 0.3, backend="triton"),
        written_out(q, keys, values, start, None, 0.3),
    )


@pytest.mark.parametrize("splits", [70], indirect=True)
def test_more_splits_than_the_merge_takes_at_a_time(splits):
    q, keys, values, start = cache(1, 1, 2, 1, 72 * 128, 16, [72 * 128 - 3])
    q = q * torch.tensor([1.0, 40.0], device=DEVICE).view(1, 1, 2, 1)
    keys = keys * torch.linspace(4, 0.1, 72 * 128, device=DEVICE).view(1, 1, -1, 1)
    args = q, keys, values, start, None, 0.3
    plain = grouped_attention(*args, backend="triton")
    close(plain, written_out(*args), 1e-4)
    out, read = grouped_attention(*args, Termination(tau=0), backend="triton")
    assert torch.equal(out, plain) and read.item() == 72


def test_tokens_of_a_row_have_the_bits_that_each_has_alone(monkeypatch):
    """As many splits for a pass over several tokens as for the steps that it stands for."""
    monkeypatch.setattr(triton_decode, "processors", lambda device: 6)
    q, keys, values, start = cache(1, 3, 4, 2, 512, 16, [382])
    alone = [grouped_attention(q[:, t : t + 1], keys, values, start + t, None, 0.3, backend="triton") for t in range(3)]
    together = grouped_attention(q, keys, values, start, None, 0.3, backend="triton")
    assert torch.equal(together, torch.cat(alone, 1))
    close(together, written_out(q, keys, values, start, None, 0.3))


@pytest.mark.parametrize("T,start", [(17, [600, 0]), (70, [31, 64])], ids=str)
@pytest.mark.parametrize("window", [None, 1, 40, 100], ids=lambda w: f"window {w}")
def test_prefill(T, start, window):
    q, keys, values, start = cache(2, T, 3, 1, 640, 24, start)
    args = q, keys, values, start, window, 0.3
    close(grouped_attention(*args, backend="triton"), grouped_attention(*args))


def test_bf16_and_strides():
    q, keys, values, start = cache(2, 20, 6, 2, 256, 64, [130, 20], dtype=torch.bfloat16)
    for T in (1, 20):
        some = q.transpose(1, 2).contiguous().transpose(1, 2)[:, :T]
        got = grouped_attention(some, keys, values, start, None, 0.125, backend="triton")
        assert got.dtype is torch.bfloat16
        close(got.float(), grouped_attention(some.float(), keys, values, start, None, 0.125), 4e-3)


def test_a_graph_would_see_the_present_length():
    """A launch is repeated with other numbers in `start`: what lies behind is never read."""
    q, keys, values, start = cache(1, 1, 4, 2, 512, 16, [500])
    whole, rest = keys.clone(), values.clone()
    for p in (0, 127, 128, 300):
        keys.copy_(whole), values.copy_(rest)
        keys[:, :, p + 1 :], values[:, :, p + 1 :] = NAN, NAN
        start.fill_(p)
        close(
            grouped_attention(q, keys, values, start, None, 0.3, backend="triton"),
            written_out(q, keys, values, start, None, 0.3),
        )


# Kept blocks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
@pytest.mark.parametrize("block,n", [(128, 3), (16, 21), (64, 4), (256, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 150], ids=lambda w: f"window {w}")
def test_kept_blocks(splits, block, n, window):
    B, T, H, KV, D = 2, 2, 6, 2, 24
    q, keys, values, start = cache(B, T, H, KV, 512, D, [380, 127])
    blocks = listed(B, T, KV, n, [382, 129], block)
    got = gather_attention(q, keys, values, blocks, start, window, 0.3, block, backend="triton")
    close(got, written_out(q, keys, values, start, window, 0.3, blocks, block))
    assert torch.equal(got[:, :, :3], torch.zeros_like(got[:, :, :3]))  # no key is kept


def test_no_block_at_all():
    q, keys, values, start = cache(1, 1, 4, 2, 128, 16, [100])
    for n in (0, 3):
        blocks = torch.full((1, 1, 2, n), -1, dtype=torch.int32, device=DEVICE)
        assert torch.equal(
            gather_attention(q, keys, values, blocks, start, None, 0.3, 128, backend="triton"), torch.zeros_like(q)
        )


# Termination
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [dict(), dict(scale=False, phi=1e-6), dict(direction=False), dict(persistence=False)], ids=str
)
def test_dense_termination(rule):
    args, made = concentrated(), Termination(tile=64, splits=1, **rule)
    out, read = grouped_attention(*args, None, 1.0, made, backend="triton")
    tiles = {(0, 0, 0): newest_first(1000, 64)}
    wanted, count = terminated(*args, tiles, None, 1.0, made.tau, made.phi, made.wait, made.scale, made.direction)
    assert torch.equal(read, count)
    close(out, wanted)


@pytest.mark.parametrize("many", [2, 3])
def test_splits_terminate_by_themselves(many):
    args, rule = concentrated(), Termination(tile=64, splits=many, patience=2)
    out, read = grouped_attention(*args, None, 1.0, rule, backend="triton")
    wanted, count = grouped_attention(*args, None, 1.0, rule)
    assert torch.equal(read, count) and read.item() < 16
    close(out, wanted)


@pytest.mark.parametrize("block,tile", [(128, 128), (16, 64), (64, 128), (128, 64)], ids=str)
def test_termination_by_a_list(block, tile):
    q, keys, values, start = concentrated()
    per, order = max(1, 128 // block), [0, -1, 5, 7, 6, -1, 4, -1, 3, 1, 2]
    blocks = torch.tensor(
        [-1 if i < 0 else i * per + j for i in order for j in range(per)], dtype=torch.int32, device=DEVICE
    )
    args = (
        q,
        keys,
        values,
        blocks.view(1, 1, 1, -1),
        start,
        None,
        1.0,
        block,
        Termination(patience=2, tile=tile, splits=1),
    )
    out, read = gather_attention(*args, backend="triton")
    wanted, count = gather_attention(*args)
    assert torch.equal(read, count) and read.item() < 8 * 128 // tile
    close(out, wanted)


@pytest.mark.parametrize("patience", [1, 5], ids=lambda p: f"patience {p}")
@pytest.mark.parametrize("splits", [1, 3], indirect=True)
def test_never_stopping_has_the_bits_of_attention_without_it(splits, patience):
    """Of four tiles: a rule of patience 1 probes, one of 5 has nothing to decide and counts."""
    never, args = Termination(tau=0, patience=patience), (*cache(2, 2, 6, 2, 512, 24, [400, 77]), None, 0.3)
    out, read = grouped_attention(*args, never, backend="triton")
    assert torch.equal(out, grouped_attention(*args, backend="triton")) and read[:, :, 1].tolist() == [[4, 4], [1, 1]]
    blocks = listed(2, 2, 2, 4, [402, 79], 128)
    args = *args[:3], blocks, *args[3:], 128
    assert torch.equal(gather_attention(*args, never, backend="triton")[0], gather_attention(*args, backend="triton"))


@pytest.mark.parametrize("listing", [False, True], ids=["dense", "by a list"])
def test_a_traversal_may_be_given_tiles_enough_to_stop(listing, monkeypatch):
    """The launch has a processor for each of the row's eight tiles. So nothing can stop, unless the rule asks for
    longer traversals."""
    monkeypatch.setattr(triton_decode, "processors", lambda device: 64)
    q, keys, values, start = concentrated()
    blocks = torch.tensor([0, 7, 6, 5, 4, 3, 2, 1], dtype=torch.int32, device=DEVICE).view(1, 1, 1, -1)
    call = gather_attention if listing else grouped_attention
    args = (q, keys, values, *([blocks] if listing else []), start, None, 1.0, *([128] if listing else []))
    read = lambda **rule: call(*args, Termination(patience=1, **rule), backend="triton")
    assert read()[1].item() == 8 and torch.equal(read()[0], call(*args, backend="triton"))  # eight traversals of a tile
    for least, splits in ((1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (100, 1)):
        out, count = read(least=least)
        wanted, tiles = read(splits=splits)
        assert torch.equal(out, wanted) and torch.equal(count, tiles), least
        assert traversals("triton", count, 1024, 32, torch.float32, Termination(least=least)) == splits
    assert read(least=8)[1].item() == 6  # the second head has seen all that it looks at
    assert traversals("triton", count, 1024, 32, torch.float32, Termination()) == 8


# Summaries and choice
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("start,tokens", [([0, 127], 1), ([100, 3], 150)], ids=str)
def test_summaries(block, start, tokens):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        _, keys, _, begin = cache(2, tokens, 2, 2, 256, 24, start, dtype=dtype)
        both = [
            [torch.full((2, 2, 256 // block, 24), 7.0, device=DEVICE, dtype=dtype) for _ in range(3)] for _ in range(2)
        ]
        for held, backend in zip(both, ("reference", "triton")):
            summarise_blocks(keys, begin, tokens, *held, block, backend=backend)
        assert torch.equal(both[0][0], both[1][0]) and torch.equal(both[0][1], both[1][1])
        close(both[1][2], both[0][2], tolerance)
    alone = torch.full((2, 2, 256 // block, 24), 7.0, device=DEVICE)
    summarise_blocks(keys, begin, tokens, None, None, alone, block, backend="triton")
    close(alone, both[0][2], 4e-3)
    summarise_blocks(keys, begin, tokens, both[1][0].zero_(), both[1][1].zero_(), None, block, backend="triton")
    last = (start[0] + tokens - 1) // block
    assert torch.equal(both[1][0][0, :, last], both[0][0][0, :, last])


def whole(*shape, seed):
    """Small whole numbers: scores are exact in any order of sums, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def choice_inputs(B, T, H, KV, N, D, start):
    low, high = whole(B, KV, N, D, seed=1), whole(B, KV, N, D, seed=2)
    return (
        whole(B, T, H, D, seed=3),
        torch.minimum(low, high),
        torch.maximum(low, high),
        low + high,
        torch.tensor(start, device=DEVICE),
    )


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("selector", ["bound", "mean"])
def test_choice_has_the_references_blocks(selector, block):
    """Ties, none or few distant blocks, at the borders of blocks, and a cache that is longer than any row; poison
    behind."""
    B, H, KV, N, D = 4, 6 if selector == "bound" else 8, 2, 100, 8  # a mean over 4 heads is exact
    q, low, high, mean, start = choice_inputs(B, 2, H, KV, N, D, [0, 4 * block - 2, 90 * block + 1, 30 * block - 1])
    for b in range(B):
        for t in (low, high, mean):
            t[b, :, int(start[b] + 1) // block + 1 :] = NAN
    for sink, local, k in ((1, 2, 5), (0, 1, 1), (3, 4, 33), (1, 1, 99)):
        policy = Policy("p", selector, block, sink, local, k)
        for by_importance in (False, True):
            args = q, KV, low, high, mean, start, policy, by_importance
            assert torch.equal(choose_blocks(*args, backend="triton"), choose_blocks(*args))
    scores = block_scores(q, low, high, mean, start, policy, backend="triton")
    assert torch.equal(scores, block_scores(q, low, high, mean, start, policy))


def test_choice_among_more_blocks_than_one_program_holds(monkeypatch):
    monkeypatch.setattr(choice, "HELD", 64)
    q, low, high, mean, start = choice_inputs(3, 1, 4, 2, 100, 8, [0, 16 * 90 + 3, 16 * 20])
    for by_importance in (False, True):
        args = q, 2, low, high, mean, start, Policy("p", "bound", 16, 2, 3, 20), by_importance
        assert torch.equal(choose_blocks(*args, backend="triton"), choose_blocks(*args))


@pytest.mark.parametrize("held", [64, 8192], ids=["searched by the indexer", "one program"])
def test_many_kept_blocks_are_ordered_by_several_programs(monkeypatch, held):
    """Each places 16 of them; some scores are equal, rows have fewer blocks than are kept, and one has no distant
    block."""
    for name, value in (("HELD", held), ("ALONE", 8), ("PLACED", 16), ("COMPARED", 16)):
        monkeypatch.setattr(choice, name, value)
    q, low, high, mean, start = choice_inputs(4, 1, 4, 2, 100, 8, [0, 16 * 90 + 3, 16 * 30, 16 * 99])
    for summary in (low, high, mean):
        summary[:, :, 40:60] = summary[:, :, 41:42]
    for by_importance in (False, True):
        for policy in (Policy("p", "bound", 16, 2, 3, 50), Policy("p", "mean", 16, 0, 1, 33)):
            args = q, 2, low, high, mean, start, policy, by_importance
            assert torch.equal(choose_blocks(*args, backend="triton"), choose_blocks(*args))


def test_sink_and_window_need_no_summaries():
    start = torch.tensor([0, 130, 3000], device=DEVICE)
    for by_importance in (False, True):
        args = randn(3, 2, 4, 8), 2, None, None, None, start, sink_window(640), by_importance
        assert torch.equal(choose_blocks(*args, backend="triton"), choose_blocks(*args))


# What is not taken
# --------------------------------------------------------------------------------------------------


def test_what_is_not_taken_is_named():
    q, keys, values, start = cache(1, 1, 4, 2, 128, 16, [100])
    dense = lambda *args, **kw: grouped_attention(*args, None, 0.3, backend="triton", **kw)
    for args, message in (
        ((q, keys.transpose(2, 3).contiguous().transpose(2, 3), values, start), "contiguous"),
        ((q, keys, values, start.int()), "int64"),
        ((q[:, :, :3], keys, values, start), "3 query heads"),
        ((q.half(), keys, values, start), "float16"),
        ((q, keys[:, :1], values, start), "keys and values"),
    ):
        with pytest.raises(UnsupportedInput, match=message):
            dense(*args)
    with pytest.raises(UnsupportedInput, match="17"):
        dense(randn(1, 17, 4, 16), keys, values, start, termination=Termination())
    with pytest.raises(UnsupportedInput, match="window of 0"):
        grouped_attention(q, keys, values, start, 0, 0.3, backend="triton")
    blocks = torch.zeros(1, 1, 2, 1, dtype=torch.int32, device=DEVICE)
    for args, message in (
        ((blocks.long(), start, None, 0.3, 128), "int32"),
        ((blocks[:, :, :1], start, None, 0.3, 128), "int32"),
        ((blocks, start, None, 0.3, 48), "48 tokens"),
    ):
        with pytest.raises(UnsupportedInput, match=message):
            gather_attention(q, keys, values, *args, backend="triton")
    low = randn(1, 2, 1, 16)
    with pytest.raises(UnsupportedInput, match="only one"):
        summarise_blocks(keys, start, 1, low, None, None, 128, backend="triton")
    with pytest.raises(UnsupportedInput, match="not given"):
        choose_blocks(q, 2, None, None, low, start, Policy("p", "bound", 128, 1, 1, 1), backend="triton")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_plans_fill_the_gpu_and_no_more(capability):
    for rows in (1, 4, 8, 32, 64, 300):
        for units in (1, 32, 64, 8192):
            tile, splits = triton_decode.plan(rows, units, 128, False, capability, 132)
            assert 1 <= splits <= units and (splits == 1 or rows * splits <= 132 * tile.programs)
            assert triton_decode.UNIT % tile.keys == 0
    assert triton_decode.plan(8, 8192, 128, False, capability, 132)[1] > 8
    assert all(size > 0 for size in grouped.prefill_shape(128, False, capability))
