"""A grafted request equals a cold one bit for bit, whatever becomes of the one it borrows from. Cold ones run on a
plain Cache."""

import pytest
import torch

from dsv4.cache.prefixes import PrefixTree
from dsv4.errors import InputError
from tests.engine.conftest import paged, prefill, random_ids, same

DECODED = 5


def continued(model, cache, ids: list[int], b: int = 0) -> torch.Tensor:
    """Logits of what row b lacks of `ids`: the prompt's last chunk, then the last DECODED tokens one at a time."""
    found = [prefill(model, cache, ids[:-DECODED], b)]
    found += [prefill(model, cache, ids[: len(ids) - DECODED + i + 1], b) for i in range(DECODED)]
    return torch.cat(found, 1)


def cold(model, ids: list[int]) -> torch.Tensor:
    """Logits of a request that runs alone from an empty plain cache, max_rewind 0."""
    return continued(model, model.new_cache(1, len(ids), 0), ids)


def tokens(model, count: int, seed: int = 0) -> list[int]:
    return random_ids(model, count, seed=seed).tolist()


@pytest.mark.parametrize(
    "residues",
    [(*range(1, 9), 15, 16, 17, 63, 64, 65, 126, 127, 128), pytest.param(range(1, 129), marks=pytest.mark.sweep)],
    ids=["some", "all"],
)
def test_every_residue_of_a_prompt_after_a_prefix_equals_cold(model, residues):
    ids = tokens(model, 128 + 128)
    plain, cache = model.new_cache(1, 300, 128), paged(model, 2, 300, max_rewind=0)
    tree = PrefixTree(cache)
    prefill(model, plain, ids[:128])
    prefill(model, cache, ids[:128], 0, tree.remember)
    for residue in residues:
        assert tree.graft(1, ids[: 128 + residue]) == 128
        assert same(prefill(model, plain, ids[: 128 + residue]), prefill(model, cache, ids[: 128 + residue], 1)), (
            residue
        )
        cache.leave(1)
        plain.rewind(residue)


@pytest.mark.few(prefix=[128, 256, 1024])
@pytest.mark.parametrize("prefix", range(128, 1025, 128))
def test_prefixes_of_1_to_8_blocks_equal_cold(model, prefix):
    cache = paged(model, 2, 1200, max_rewind=0, prefixes=9)
    tree, shared = PrefixTree(cache), tokens(model, prefix)
    prefill(model, cache, shared, 0, tree.remember)
    for residue, seed in ((1, 1), (65, 2)):
        ids = shared + tokens(model, residue + DECODED, seed)
        tree.ask(ids)
        assert tree.graft(1, ids) == prefix
        assert same(continued(model, cache, ids, 1), cold(model, ids))
        cache.leave(1)
    assert tree.hit_rate == 1.0


def test_grafts_in_every_cache_format_equal_cold(numeric_model):
    ids = tokens(numeric_model, 256 + 40)
    cache = paged(numeric_model, 2, 400, max_rewind=0, prefixes=3)
    tree = PrefixTree(cache)
    prefill(numeric_model, cache, ids[:256] + [5, 6, 7], 0, tree.remember)
    tree.graft(1, ids)
    assert cache.lengths == [259, 256]
    assert same(continued(numeric_model, cache, ids, 1), cold(numeric_model, ids))


@pytest.mark.parametrize("fate", ["goes on", "ends first", "is forgotten too", "goes back and writes anew"])
def test_grafts_equal_cold_whatever_becomes_of_the_donor(model, fate):
    shared = tokens(model, 384)
    mine, donors = shared + tokens(model, 50, 1), shared + tokens(model, 60, 2)
    cache = paged(model, 2, 600, max_rewind=64, prefixes=5)
    tree = PrefixTree(cache)
    prefill(model, cache, shared, 0, tree.remember)
    prefill(model, cache, mine[:128], 1)
    assert tree.graft(1, mine) == 256, "a row that began cold goes on from a longer prefix"
    prefill(model, cache, mine[:400], 1)  # the last shared page is half full: both write on in copies of their own
    if fate == "goes on":
        assert same(continued(model, cache, donors), cold(model, donors))
    elif fate == "goes back and writes anew":
        cache.rewind([40, 0])
        prefill(model, cache, shared[:344] + tokens(model, 60, 3))
    else:
        cache.leave(0)
        if fate == "is forgotten too":
            tree.clear()
    reference = model.new_cache(1, 600, 0)
    prefill(model, reference, mine[:400])
    assert same(continued(model, cache, mine, 1), continued(model, reference, mine))


def test_a_prefix_survives_a_donor_that_went_back_below_its_end(model):
    shared = tokens(model, 256)
    cache, mine = paged(model, 2, 600, max_rewind=64, prefixes=5), shared + tokens(model, 20, 1)
    tree = PrefixTree(cache)
    prefill(model, cache, shared, 0, tree.remember)
    cache.rewind([50, 0])
    anew = shared[:206] + tokens(model, 80, 4)
    prefill(model, cache, anew, 0)
    assert tree.graft(1, mine) == 256
    assert same(continued(model, cache, mine, 1), cold(model, mine))


def test_a_graft_of_the_mtp_block_equals_cold(model):
    """Drafting follows one token behind, so that a prefix ends before the entry which needs the token after it."""
    shared, tail = tokens(model, 256), tokens(model, 30, 1)

    def run(cache, b, ids, streams=None, snapshots=None):
        """Prefill row b of a batch of one drafting row; MTP logits of the last piece. streams: at the last token
        before, if any."""
        while (start := cache.lengths[b]) < len(ids):
            n = min(len(ids), (start // 128 + 1) * 128) - start
            chunk = torch.tensor([ids[start : start + n]])
            _, fresh = model.append(chunk, cache, return_streams=True)
            behind = fresh if streams is None else torch.cat((streams.view(1, 1, *fresh.shape[2:]), fresh), 1)
            found = model.mtp_logits(behind[:, :-1], torch.tensor([ids[cache.mtp_lengths[b] + 1 : start + n]]), cache)
            streams = fresh[0, -1]
            if snapshots is not None and (start + n) % 128 == 0:
                snapshots.append(cache.snapshot(b, streams))
        return found

    expected = run(model.new_cache(1, 400, 0), 0, shared + tail)
    cache, snapshots = paged(model, 1, 400, max_rewind=0, prefixes=3), []
    run(cache, 0, shared + tokens(model, 9, 2), snapshots=snapshots)
    cache.leave(0)
    cache.graft(0, snapshots[-1])
    assert cache.lengths == [256] and cache.mtp_lengths == [255]
    assert same(run(cache, 0, shared + tail, snapshots[-1].streams), expected)


def test_the_entry_that_needs_the_token_after_a_prefix_is_the_graft_s_own(model):
    ids, (mine, donors) = random_ids(model, 1, 128), (5, 6)
    drafted, plain, cache = [], model.new_cache(1, 300, 8), paged(model, 2, 300, max_rewind=8)
    _, streams = model.append(ids, plain, return_streams=True)
    for token in (donors, mine):  # the plain cache drafts for one, goes back, and drafts for the other
        model.mtp_logits(streams, torch.cat((ids[:, 1:], torch.tensor([[token]])), 1), plain)
        plain.rewind_mtp(1)
        drafted.append(model.mtp_logits(streams[:, -1:], torch.tensor([[token]]), plain))
        plain.rewind_mtp(128)
    both = torch.cat((streams, streams))
    model.append(ids.expand(2, -1), cache, n_new=[128, 0])
    model.mtp_logits(both, torch.cat((ids[:, 1:], torch.tensor([[donors]])), 1).expand(2, -1), cache)
    cache.leave(1)
    cache.graft(1, cache.snapshot(0))
    assert cache.mtp_lengths == [128, 127]
    cache.rewind_mtp([1, 0])
    found = model.mtp_logits(both[:, -1:], torch.tensor([[donors], [mine]]), cache)
    torch.testing.assert_close(found, torch.cat(drafted), rtol=0, atol=2e-4)  # two rows at once here
    assert not same(found[:1], found[1:])


def test_only_equal_ids_are_a_prefix_and_one_token_is_left_to_run(model):
    ids = tokens(model, 384)
    cache = paged(model, 2, 600, max_rewind=0, prefixes=5)
    tree = PrefixTree(cache)
    prefill(model, cache, ids, 0, tree.remember)
    for asked, length in [
        (ids, 256),
        (ids + [3], 384),
        (ids[:256] + [7] + ids[257:], 256),
        (ids[:255] + [(ids[255] + 1) % 512] + ids[256:], 128),
    ]:
        assert tree.graft(1, asked) == length
        cache.leave(1)
    assert tree.graft(0, ids + [3]) == 0 and cache.lengths == [384, 0], "it holds as much already"
    tree.forget(next(node for node in tree.kept if node.snapshot.length == 384))
    assert tree.graft(0, ids + [3]) == 0 and cache.lengths == [384, 0], "it holds more already"
    assert tree.graft(1, [(ids[0] + 1) % 512] + ids[1:]) == 0 and tree.graft(1, ids[:128]) == 0
    assert tree.hit_tokens == 256 + 384 + 256 + 128


def test_pages_are_unpinned_when_the_last_borrower_ends(model):
    ids = tokens(model, 256)
    cache = paged(model, 3, 400, max_rewind=0, prefixes=3)
    tree = PrefixTree(cache)
    prefill(model, cache, ids[:128], 0, tree.remember)
    for b in (1, 2):
        tree.graft(b, ids)
    assert (
        cache.pools["csa entries"].state[1:].count(None) == 0
        and max(p.refs for p in cache.pools["csa entries"].state) == 4
    )
    tree.clear()
    for b in (0, 1):
        cache.leave(b)
    assert all(pool.shared == 0 for pool in cache.pools.values()) and cache.pools["csa entries"].live == 1
    cache.leave(2)
    assert all(pool.live == 0 for pool in cache.pools.values())


def test_the_least_recently_used_prefix_goes_when_pages_are_short(model):
    cache = paged(
        model,
        2,
        300,
        max_rewind=0,
        pages={
            "window": 12,
            "mtp window": 1,
            "csa raw rows": 80,
            "csa entries": 3,
            "hca raw rows": 12,
            "hca entries": 8,
        },
    )
    tree, prompts = PrefixTree(cache), [tokens(model, 129, seed) for seed in range(4)]
    for ids in prompts[:3]:
        prefill(model, cache, ids, 0, tree.remember)
        cache.leave(0)
    assert tree.graft(0, prompts[0]) == 128  # used again: the second is the oldest now
    cache.leave(0)
    prefill(model, cache, prompts[3], 0)
    assert [(tree.graft(1, ids), cache.leave(1))[0] for ids in prompts[:3]] == [128, 0, 128]
    assert tree.dropped == 1


def test_a_prefix_whose_pages_all_run_is_not_dropped_because_that_frees_nothing(model):
    cache = paged(
        model,
        2,
        300,
        max_rewind=0,
        pages={
            "window": 12,
            "mtp window": 1,
            "csa raw rows": 80,
            "csa entries": 2,
            "hca raw rows": 12,
            "hca entries": 8,
        },
    )
    tree, (runs, ended, comes) = PrefixTree(cache), [tokens(model, 129, seed) for seed in range(3)]
    prefill(model, cache, runs, 0, tree.remember)
    prefill(model, cache, ended, 1, tree.remember)
    cache.leave(1)
    prefill(model, cache, comes, 1)
    cache.leave(1)
    assert tree.dropped == 1 and tree.graft(1, runs) == 128


def test_rows_that_cannot_be_grafted_or_held_are_named(model):
    cache = paged(model, 2, 300, max_rewind=8)
    prefill(model, cache, tokens(model, 128))
    snapshot = cache.snapshot(0)
    with pytest.raises(InputError, match="row 0 holds 128 tokens; only an empty row can be grafted"):
        cache.graft(0, snapshot)
    prefill(model, cache, tokens(model, 130))
    with pytest.raises(InputError, match="row 0 holds 130 tokens; a prefix ends at a multiple of 128"):
        cache.snapshot(0)
    cache.rewind([2, 0])
    cache.speculate(0)
    with pytest.raises(InputError, match="some of them drafts"):
        cache.snapshot(0)
