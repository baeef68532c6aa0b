"""Bookkeeping of pages: nothing is lost, freed twice, or owned twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4.cache.paging import NOWHERE, PageGroup, PagePool
from dsv4.errors import OutOfPages, PageError

PAGES, ROWS = 7, 8


class Holders(RuleBasedStateMachine):
    """Holders take, share, seal, write and drop pages; beside the pool a plain list of (holder, page) says what must be
    so."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool("pages", PAGES)
        self.holds: list[tuple[int, int]] = []
        self.draft, self.writer, self.sealed, self.next = set(), {}, {}, 0

    def pick(self, data):
        return data.draw(st.sampled_from(self.holds))

    @rule(count=st.integers(0, 4), draft=st.booleans())
    def allocate(self, count, draft):
        free = PAGES - len({p for _, p in self.holds})
        self.next += 1
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages of pages are needed, {free} of {PAGES} are free"):
                self.pool.allocate(count, self.next, draft)
            return
        taken = self.pool.allocate(count, self.next, draft)
        assert len(set(taken)) == count and NOWHERE not in taken
        assert not set(taken) & {p for _, p in self.holds}, "a page that somebody holds was given away"
        self.holds += [(self.next, p) for p in taken]
        self.draft |= set(taken) if draft else set()
        self.writer |= dict.fromkeys(taken, self.next)
        self.sealed |= dict.fromkeys(taken, 0)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data):
        _, page = self.pick(data)
        if page in self.draft:
            with pytest.raises(PageError, match="is a draft and was to be shared"):
                self.pool.share(page)
            return
        self.next += 1
        self.pool.share(page)
        self.holds.append((self.next, page))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def drop(self, data):
        holder, page = self.pick(data)
        self.holds.remove((holder, page))
        last = page not in {p for _, p in self.holds}
        assert self.pool.drop(page) is last
        if last:
            self.draft.discard(page)
            with pytest.raises(PageError, match="nobody holds it"):
                self.pool.drop(page)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def discard(self, data):
        holder, page = self.pick(data)
        if page not in self.draft:
            with pytest.raises(PageError, match="is committed and was to be discarded"):
                self.pool.discard(page)
            return
        self.pool.discard(page)
        self.holds.remove((holder, page))
        self.draft.remove(page)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def commit(self, data):
        _, page = self.pick(data)
        self.pool.commit(page)
        self.draft.discard(page)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), rows=st.integers(0, ROWS))
    def seal(self, data, rows):
        _, page = self.pick(data)
        self.pool.seal(page, rows)
        self.sealed[page] = max(self.sealed[page], rows)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), row=st.integers(0, ROWS - 1))
    def write(self, data, row):
        holder, page = self.pick(data)
        alone = sum(p == page for _, p in self.holds) == 1
        if not alone and (self.writer[page] != holder or row < self.sealed[page]):
            with pytest.raises(PageError, match="which others hold; write a copy"):
                self.pool.claim(page, holder, row)
            return
        self.pool.claim(page, holder, row)
        self.writer[page] = holder
        if alone:
            self.sealed[page] = min(self.sealed[page], row)

    @invariant()
    def counts_add_up(self):
        held = [p for _, p in self.holds]
        assert self.pool.live == len(set(held)) and len(self.pool.free) + self.pool.live == PAGES
        assert sorted(self.pool.free + list(set(held))) == list(range(1, PAGES + 1)), "a page is lost, or free and held"
        assert [p.refs for p in self.pool.state] == [held.count(i) for i in range(PAGES + 1)]
        assert self.pool.drafts == len(self.draft) and self.pool.shared == sum(held.count(p) > 1 for p in set(held))
        assert self.pool.under_pressure == (self.pool.live / PAGES > 0.85) and self.pool.peak >= self.pool.live


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("page", [0, 3, 8, -1])
def test_pages_that_nobody_holds_are_named(page):
    pool = PagePool("entries", PAGES)
    pool.allocate(2, 1)
    for act in (pool.share, pool.drop, pool.discard, pool.commit):
        with pytest.raises(PageError, match=f"page {page} of entries .* nobody holds it"):
            act(page)


@pytest.mark.parametrize(
    "group,first,end,pages",
    [
        (PageGroup("raw", 8), 0, 8, [0]),
        (PageGroup("raw", 8), 7, 9, [0, 1]),
        (PageGroup("raw", 8), 8, 8, []),
        (PageGroup("entries", 64, tokens=4), 0, 3, []),
        (PageGroup("entries", 64, tokens=4), 0, 4, [0]),
        (PageGroup("entries", 64, tokens=4), 252, 256, [0]),
        (PageGroup("entries", 64, tokens=4), 255, 260, [0, 1]),
    ],
)
def test_pages_of_tokens_are_those_whose_rows_they_complete(group, first, end, pages):
    assert list(group.pages(first, end)) == pages


def test_what_a_step_needs_behind_it():
    window, overlap = PageGroup("window", 64, back=127), PageGroup("csa", 8, back=4, align=4)
    hca = PageGroup("hca", 32, back=0, align=128)
    assert [window.needed(p) for p in (0, 100, 128, 1000)] == [0, 0, 1, 873]
    assert [overlap.needed(p) for p in (0, 3, 4, 127, 128)] == [0, 0, 0, 120, 124]
    assert [hca.needed(p) for p in (0, 127, 128, 300)] == [0, 0, 128, 256]
    assert PageGroup("entries", 64, tokens=4).needed(10**6) == 0
