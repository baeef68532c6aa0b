"""Rewinds: served to the bit, or refused and nothing changed; whatever was appended, drafted or captured before."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dsv4 import load_model
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import RewindError
from dsv4.runtime.graph import DecodeGraph
from tests.conftest import TOLERANCE
from tests.engine.conftest import random_ids, same

CONTEXT = 96  # of windows of 8 tokens, and compression in fours


@pytest.fixture(scope="module", params=["plain", "packed"])
def small(request, brief_official):
    """A checkpoint with an MTP block, its caches in fp32 or in bytes."""
    if request.param == "plain":
        return load_model(brief_official, numerics="fp32", backend="cpu")
    return load_model(brief_official, numerics="qat", backend="cpu", cache="fp8", index_cache="fp4")


class Pair:
    """A cache of small rings beside one whose rings hold the whole context, so that no rewind can harm it. Every step
    runs on both. `texts` and `streams`: what each row holds, and the model's streams behind it."""

    def __init__(self, model, batch: int, max_rewind: int, seed: int):
        self.model, self.random = model, torch.Generator().manual_seed(seed)
        self.both = [model.new_cache(batch, CONTEXT, back) for back in (max_rewind, CONTEXT)]
        self.texts = [[] for _ in range(batch)]
        self.streams = [[] for _ in range(batch)]
        self.furthest = [0] * batch  # what rings were written to
        self.forgets = True

    lengths = property(lambda self: self.both[0].lengths)
    behind = property(lambda self: self.both[0].mtp_lengths)

    def append(self, counts: list[int], chunk: int | None) -> None:
        counts = [min(n, CONTEXT - length) for n, length in zip(counts, self.lengths)]
        if not any(counts):
            return
        ids = self.ids(len(counts), max(counts))
        found = [self.model.append(ids, c, counts, return_streams=True, chunk=chunk) for c in self.both]
        assert same(found[0][0], found[1][0])
        for b, n in enumerate(counts):
            self.texts[b] += ids[b, :n].tolist()
            self.streams[b] += list(found[0][1][b, :n])
        self.furthest = [max(a, b) for a, b in zip(self.furthest, self.lengths)]

    def draft(self, chained: int) -> None:
        """The MTP block follows all rows, then drafts from streams of its own (any numbers here), and forgets the
        drafts."""
        counts = [max(0, len(text) - 1 - n) for text, n in zip(self.texts, self.behind)]
        B, shape, dtype = len(counts), self.model.stream_shape, self.model.numerics.activation
        if any(counts):
            streams, ids = torch.zeros(B, max(counts), *shape, dtype=dtype), self.ids(B, max(counts))
            for b, (n, at) in enumerate(zip(counts, self.behind)):
                for i in range(n):
                    streams[b, i], ids[b, i] = self.streams[b][at + i], self.texts[b][at + i + 1]
            self._block(streams, ids, counts)
        for _ in range(min(chained, CONTEXT - max(self.behind))):
            streams = torch.randn(B, 1, *shape, generator=self.random).to(dtype)
            self._block(streams, self.ids(B, 1), [1] * B)
        if self.forgets:
            for cache in self.both:
                cache.rewind_mtp([n - max(0, len(text) - 1) for n, text in zip(cache.mtp_lengths, self.texts)])

    def rewind(self, counts: list[int]) -> bool:
        """Whether it was served: whether the document promises it."""
        counts = [min(n, length) for n, length in zip(counts, self.lengths)]
        before = self.lengths, self.behind
        back = self.both[0].max_rewind
        promised = all(
            n == length or length - n >= far - back for n, length, far in zip(counts, self.lengths, self.furthest)
        )
        if not promised:
            with pytest.raises(RewindError):
                self.both[0].rewind(counts)
            assert (self.lengths, self.behind) == before
            return False
        for cache in self.both:
            cache.rewind(counts)
        assert self.both[0].mtp_lengths == self.both[1].mtp_lengths
        for b, n in enumerate(counts):
            self.texts[b], self.streams[b] = (held[: len(held) - n] for held in (self.texts[b], self.streams[b]))
            self.furthest[b] *= bool(self.lengths[b])
        return True

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, self.model.config.vocab_size, shape, generator=self.random)

    def _block(self, streams, ids, counts) -> None:
        found = [self.model.mtp_logits(streams, ids, c, n_new=counts) for c in self.both]
        assert same(*found)


SIZES = st.sampled_from([0, 1, 2, 5, 6, 24])
MOVE = st.one_of(
    st.tuples(st.just("append"), st.tuples(SIZES, SIZES), st.sampled_from([None, 1, 7])),
    st.tuples(st.just("draft"), st.integers(0, MAX_DRAFTS)),
    st.tuples(st.just("rewind"), st.tuples(st.integers(0, 6), st.integers(0, 6))),
)


def some(examples: int):
    """Decorator: so many lists of moves."""
    of = settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    moves = st.lists(MOVE, min_size=3, max_size=6)
    return lambda test: of(given(moves=moves, max_rewind=st.sampled_from([0, 1, 4]))(test))


@some(3)
def test_any_rewind_within_max_rewind_is_served_to_the_bit_and_no_other(small, moves, max_rewind):
    moved(small, moves, max_rewind)


@pytest.mark.sweep  # the same of more lists
@some(8)
def test_any_rewind_is_served_to_the_bit_of_more_moves(small, moves, max_rewind):
    moved(small, moves, max_rewind)


def moved(small, moves, max_rewind) -> None:
    """Make the moves; both caches say the same throughout."""
    pair = Pair(small, 2, max_rewind, len(moves))
    pair.append([20, 13], None)
    for name, *how in moves:
        getattr(pair, name)(*(list(h) if isinstance(h, tuple) else h for h in how))
    pair.draft(0)
    pair.append([2, 2], None)
    if small.numerics.name == "fp32" and max(pair.lengths) < CONTEXT:  # and equal to rows that never went back
        found = small.append(ids := pair.ids(2, 1), pair.both[0])
        for b, text in enumerate(pair.texts):
            fresh = small(torch.tensor([text + ids[b].tolist()]))
            assert (found[b, 0] - fresh[0, -1]).abs().max() < TOLERANCE


def test_a_rewind_after_chained_drafts_is_served(small):
    pair = Pair(small, 2, 8, 0)
    pair.append([20, 20], None)
    pair.draft(MAX_DRAFTS)
    assert pair.behind == [19, 19] and pair.rewind([8, 8]) and pair.lengths == [12, 12] and pair.behind == [11, 11]
    pair.append([3, 1], None)
    pair.draft(3)


def test_a_rewind_that_the_block_cannot_follow_changes_nothing(small):
    """More chained drafts than its ring has room for: the main model alone could go back."""
    pair = Pair(small, 2, 2, 0)
    pair.append([20, 20], None)
    pair.forgets = False
    pair.draft(MAX_DRAFTS + 4)
    with pytest.raises(RewindError, match="filled to 31 tokens"):
        pair.both[0].rewind([0, 2])
    with pytest.raises(RewindError):
        pair.both[0].rewind_mtp([1, 15])
    assert pair.lengths == [20, 20] and pair.behind == [31, 31]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_that_rests_beside_captured_steps_is_rewound_as_far_as_its_ring_holds(small, tokens):
    """A captured step writes its tokens to rows that rest too, over the oldest rows of their rings."""
    ids, back = random_ids(small, 2, 40), 4
    small_ring, whole = (small.new_cache(2, 64, n) for n in (back, 64))
    for cache in (small_ring, whole):
        small.append(ids[:, :21], cache)
        DecodeGraph(small, cache, tokens).step(ids[:, 21 : 21 + tokens], active=[False, True])
    most = back - tokens
    with pytest.raises(RewindError, match="row 0 was filled to"):
        small_ring.rewind([most + 1, 0])
    assert small_ring.lengths == [21, 21 + tokens]
    for cache in (small_ring, whole):
        cache.rewind([most, 0])
    follow = ids[:, 21 - most : 30 - most]
    assert same(*(small.append(follow, cache, [9, 0]) for cache in (small_ring, whole)))
