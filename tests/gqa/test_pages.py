"""A GQA model on pages equals the model on a contiguous cache, bit for bit; free pages are NaN and physically
shuffled."""

from dataclasses import replace

import pytest
import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.paged import new_paged_cache
from dsv4.cache.paging import pool_pages
from dsv4.cache.prefixes import PrefixTree
from dsv4.errors import OutOfPages, UnsupportedInput
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.choice import Attention
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation.captured import Captured
from tests.engine.conftest import paged, random_ids, same
from tests.gqa.tiles import Grown

BOUND = Policy("bound", "bound", 16, 1, 2, 3)
READINGS = {
    "all": Attention(),
    "bound": Attention(BOUND),
    "mean": Attention(Policy("mean", "mean", 32, 1, 1, 2)),
    "sink and window": Attention(Policy("window", None, 16, 1, 3)),
    "bound, until stable": Attention(BOUND, Termination(tile=64)),
    "all, until stable": Attention(termination=Termination(tile=64)),
}


def tokens(model, count: int, seed: int = 0) -> list[int]:
    return random_ids(model, count, seed=seed).tolist()


def append(model, cache, b: int, ids: list[int], prompt: bool | None = None) -> torch.Tensor:
    """Logits [len(ids), vocab] of more tokens of row b, which runs alone."""
    whole = torch.zeros(cache.batch, len(ids), dtype=torch.int64)
    whole[b] = torch.tensor(ids)
    return model.append(whole, cache, [len(ids) * (row == b) for row in range(cache.batch)], prompt=prompt)[b]


def read(model, cache, b: int, ids: list[int], remember=None) -> torch.Tensor:
    """As `Grown.read` of row b."""
    while (start := cache.lengths[b]) < len(ids):
        found = append(model, cache, b, ids[start : (start // 128 + 1) * 128], prompt=True)
        if remember is not None and cache.lengths[b] % 128 == 0:
            remember(b, ids[: cache.lengths[b]])
    return found


def continued(model, cache, b: int, ids: list[int], last: int = 5) -> torch.Tensor:
    """Logits of what row b lacks of a prompt, and of its last tokens, decoded one by one."""
    found = [read(model, cache, b, ids[:-last])]
    return torch.cat(found + [append(model, cache, b, [token]) for token in ids[-last:]])


def cold(model, ids: list[int], last: int = 5) -> torch.Tensor:
    row = Grown(model)
    found = [row.read(ids[:-last])]
    return torch.cat(found + [row.append([token]) for token in ids[-last:]])


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_pieces_of_all_sizes_and_rewinds_equal_a_contiguous_cache(model, reading):
    """Across ends of tiles and windows, twice back over one, beside a row that rests on other pages."""
    model.attention = reading
    plain, cache, ids = Grown(model), paged(model, 2, 420, max_rewind=24), tokens(model, 420)
    append(model, cache, 1, ids[100:250])
    for piece in (100, 60, 3, 1, 92, -7, 1, 6, 1, 1, -2, 9, 125, -20, -4, 1, 24, 1):
        if piece < 0:
            plain.rewind(-piece)
            cache.rewind([-piece, 0])
            continue
        now = ids[plain.length : plain.length + piece]
        found = append(model, cache, 0, now)
        assert not found.isnan().any(), "a page that was free was read"
        assert same(found, plain.append(now, prompt=piece > 16)), plain.length
        assert cache.lengths == [plain.length, 150]


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_several_rows_of_a_step_equal_a_contiguous_cache(model, reading):
    """Within one tile, where both have as many slots; and captured, where both are as large as they may become."""
    model.attention = reading
    ids, plain, cache = random_ids(model, 3, 128), model.new_cache(3, 128), paged(model, 3, 128, max_rewind=8)
    for counts in ((40, 17, 100), (1, 0, 1), (5, 3, 7), (1, 1, 1)):
        part = torch.stack(
            [torch.nn.functional.pad(row, (0, 8))[n : n + max(counts)] for row, n in zip(ids, plain.lengths)]
        )
        assert same(*(model.append(part, c, list(counts)) for c in (plain, cache)))
    plain, cache = model.new_cache(3, 400), paged(model, 3, 400, max_rewind=8)
    for found in (plain, cache):
        for b, n in enumerate((250, 128, 5)):
            read(model, found, b, tokens(model, n, b))
    for b in range(3):  # pieces of the prompts were rounded as their slots were
        fill(plain, b, cache, b)
    graphs = [DecodeGraph(model, found, 2) for found in (plain, cache)]
    for i in range(6):
        cache.make_room(slice(0, 3), 2)
        assert same(*(graph.step(random_ids(model, 3, 2, seed=i)) for graph in graphs))


def fill(plain, row: int, cache, b: int) -> None:
    """A row of a contiguous cache gets what pages hold of row b, tile by tile."""
    for layer, pages in zip(plain.layers, cache.layers):
        for name, pool in pages.tensors.items():
            rows = pool.shape[2]
            for logical, page in enumerate(pages.table.physical[b, : -(-cache.lengths[b] // 128)].tolist()):
                layer.tensors[name][row, :, logical * rows : (logical + 1) * rows] = pool[page] if page else 0


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_a_captured_row_on_pages_has_the_bits_of_a_row_alone(model, reading, width):
    """Three rows by turns, with a rewind between. On a CPU the step runs as it is, uncaptured."""
    model.attention = READINGS[reading]
    pages, ids, alone = paged(model, 3, 320, max_rewind=8), random_ids(model, 3, 320), []
    for b, n in enumerate((130, 5, 250)):
        read(model, pages, b, ids[b, :n].tolist())
        alone.append(model.new_cache(1, 320))
        alone[b]._main.advance(slice(0, 1), n)
        fill(alone[b], 0, pages, b)
    verify, graphs = Captured(model, pages), [DecodeGraph(model, cache, width) for cache in alone]
    for b in (0, 1, 2, 2, 0, 1, 1, 2, 2):
        now = pages.lengths[b]
        logits, streams = verify(ids[:, now : now + width], [width * (row == b) for row in range(3)], True)
        assert same(graphs[b].step(ids[b : b + 1, now : now + width])[0], logits[b]) and same(
            graphs[b].streams, streams[b]
        )
        back = int(width > 1)
        pages.rewind([back * (row == b) for row in range(3)]), alone[b].rewind(back)
        assert pages.lengths[b] == alone[b].lengths[0]


def test_pages_behind_the_window_are_given_back_and_all_others_stay(models):
    model = models("some windows")  # of 40 tokens
    cache, live = paged(model, 1, 512, max_rewind=0), []
    for start in range(0, 500, 50):
        append(model, cache, 0, tokens(model, 50, start))
        live.append((cache.pools["tokens"].live, cache.pools["window"].live))
    assert live == [(1, 1), (1, 1), (2, 2), (2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (4, 2), (4, 1)]
    cache.leave(0)
    assert not any(pool.live for pool in cache.pools.values())


def test_a_page_stays_until_the_window_has_left_its_last_token(models):
    """Single steps, without room to rewind, past every place where windows of 24 and 40 tokens leave a page."""
    for name in ("windows", "some windows"):
        model = models(name)
        plain, cache, ids = Grown(model), paged(model, 1, 300, max_rewind=0), tokens(model, 300)
        assert same(read(model, cache, 0, ids[:145]), plain.read(ids[:145]))
        for token in ids[145:172]:
            assert same(append(model, cache, 0, [token]), plain.append([token])), plain.length
        assert cache.pools["window"].live == 1


@pytest.mark.parametrize("reading", ["all", "bound"])
@pytest.mark.parametrize("prefix", [128, 256])
def test_grafts_equal_cold_at_lengths_around_tiles(model, reading, prefix):
    model.attention = READINGS[reading]
    cache, shared = paged(model, 2, 420, max_rewind=8, prefixes=4), tokens(model, prefix)
    tree = PrefixTree(cache)
    read(model, cache, 0, shared + tokens(model, 9, 7), tree.remember)
    for more in (6, 7, 127, 128, 129, 133):
        ids = shared + tokens(model, more, more)
        assert tree.graft(1, ids) == prefix
        assert same(continued(model, cache, 1, ids), cold(model, ids)), more
        cache.leave(1)


@pytest.mark.parametrize("fate", ["goes on", "ends first", "goes back and writes anew"])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_grafts_equal_cold_whatever_becomes_of_the_donor(model, reading, fate):
    model.attention = READINGS[reading]
    shared, (mine, donors, late) = tokens(model, 256), (tokens(model, 40, seed) for seed in (1, 2, 3))
    cache = paged(model, 3, 420, max_rewind=64, prefixes=5)
    tree = PrefixTree(cache)
    read(model, cache, 0, shared, tree.remember)
    assert tree.graft(1, shared + mine) == 256
    read(model, cache, 1, shared + mine[:3])
    if fate == "goes on":
        assert same(continued(model, cache, 0, shared + donors), cold(model, shared + donors))
    elif fate == "goes back and writes anew":
        held = {name: dict(pages) for name, pages in cache._held[0].items()}
        cache.rewind([50, 0, 0])
        anew, row = shared[:206] + tokens(model, 90, 4), Grown(model)
        row.read(shared), row.rewind(50)
        assert same(read(model, cache, 0, anew), row.read(anew)), "it goes on from what it has kept"
        assert any(cache._held[0][name][1] != pages[1] for name, pages in held.items()), (
            "the page of tokens 128 … 255 is a copy"
        )
    else:
        cache.leave(0)
        tree.clear()
        read(model, cache, 0, tokens(model, 300, 5))
    row = Grown(model)
    row.read(shared + mine[:3])
    assert same(
        continued(model, cache, 1, shared + mine),
        torch.cat([row.read(shared + mine[:-5]), *(row.append([t]) for t in mine[-5:])]),
    )
    if fate != "ends first":
        assert tree.graft(2, shared + late) == 256
        assert same(continued(model, cache, 2, shared + late), cold(model, shared + late)), (
            "the kept prefix is as it was"
        )


def test_pages_are_unpinned_when_the_last_borrower_ends(model):
    ids, cache = tokens(model, 200), paged(model, 3, 300, max_rewind=0, prefixes=2)
    tree = PrefixTree(cache)
    read(model, cache, 0, ids[:128], tree.remember)
    for b in (1, 2):
        tree.graft(b, ids)
    pools = cache.pools.values()
    assert all(max(page.refs for page in pool.state) == 4 for pool in pools)
    tree.clear()
    for b in (0, 1):
        cache.leave(b)
    assert all(pool.shared == 0 and pool.live == 1 for pool in pools)
    cache.leave(2)
    assert all(pool.live == 0 for pool in pools)


def test_drafts_are_discarded_with_their_pages(models):
    model = models("some windows")
    plain, cache, ids = Grown(model), paged(model, 1, 300, max_rewind=80), tokens(model, 300)
    assert same(read(model, cache, 0, ids[:100]), plain.read(ids[:100]))
    cache.speculate(0)
    append(model, cache, 0, tokens(model, 60, 9))
    assert [pool.drafts for pool in cache.pools.values()] == [1, 1]
    cache.discard(0)
    assert cache.lengths == [100] and [pool.live for pool in cache.pools.values()] == [1, 1]
    assert same(append(model, cache, 0, ids[100:160]), plain.append(ids[100:160], prompt=True))


def test_what_runs_out_of_pages_has_run_nothing(models):
    model = models("dense")
    cache = paged(model, 2, 512, max_rewind=0, pages={"tokens": 3})
    read(model, cache, 0, tokens(model, 200))
    read(model, cache, 1, tokens(model, 100, 1))
    with pytest.raises(OutOfPages, match="need 1 pages of tokens, 0 of 3 are free; end or evict a request"):
        append(model, cache, 1, tokens(model, 40, 2))
    assert cache.lengths == [200, 100] and cache.pools["tokens"].live == 3


def test_the_bytes_are_those_of_the_plan(models):
    """Pages of keys, values and, where a policy searches, summaries, in layers without a window."""
    model = models("some windows")
    model.attention = READINGS["bound"]
    cache = new_paged_cache(model, 1, 512, pages={"tokens": 4, "window": 2})
    model.attention = Attention()
    full, sliding = (
        [layer for layer in cache.layers if layer.table.group.name == name] for name in ("tokens", "window")
    )
    c = model.config
    tile = c.num_key_value_heads * c.head_dim * 128 * 4
    assert len(full) == 1 and len(sliding) == 2
    assert (
        cache.nbytes
        == 5 * tile * (2 + 2 / 16) + 2 * 3 * tile * 2
        == sum(s.nbytes for layer in cache.plan for s in layer.streams)
    )


def test_windows_take_no_more_pages_than_a_row_has_tokens(models):
    groups = models("windows").page_layout().groups
    wide = {"window": replace(groups["window"], back=4095)}
    assert pool_pages(wide, 8, 8 * 300, prefixes=64, context=300) == {"window": 8 * 3 + 64 * 2}
    assert pool_pages(wide, 8, 8 << 20, prefixes=64, context=1 << 20) == {"window": 8 * 34 + 64 * 2}


def test_what_pages_cannot_be_made_for_is_refused_in_one_line(models, monkeypatch):
    model = models("dense")
    monkeypatch.setattr(model, "kv_memory", HostMemory())
    with pytest.raises(UnsupportedInput, match="host memory was asked for; load without kv_memory"):
        new_paged_cache(model, 1, 128)
