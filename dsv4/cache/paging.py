"""Pages of a pool: which are held, which may be written, which may be freed.

A pool is bookkeeping on the host; the buffers are elsewhere (`dsv4.cache.paged`). One pool serves all streams whose
rows are addressed alike: physical page 7 of the pool is page 7 of each layer's buffer. No row owns page 0: a step
writes there for rows that do not exist, and nothing reads it.

- A page is held by one or more holders (`refs`); it is free when the last one releases it.
- A page has one writer, a batch row. Rows below its seal belong to a prefix that others may hold and never change. Only
  the writer reads rows above it, so the next request of the same batch row may write them too.
- A draft page holds tokens that are not accepted yet. It can be discarded at once; a committed page cannot: its holders
  must release it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsv4.cache.streams import CHAINED
from dsv4.errors import OutOfPages, PageError

NOWHERE = 0
# tokens: prefixes end at multiples of it, where HCA has no open window, CSA reads its overlap only, and a page of keys
# is full
BLOCK = 128
PRESSURE_PERCENT = 85


def under_pressure(live_pages, pages: int, percent: int = PRESSURE_PERCENT):
    """Whether more than `percent` % of the pages are live: in integers, so that ints and int64 tensors agree at the
    boundary."""
    return live_pages * 100 > pages * percent


@dataclass(frozen=True)
class PageGroup:
    """Streams that share page tables: `rows` rows a page, one row every `tokens` tokens.

    A step that starts at position p reads tokens from p // align · align − back on; back None: everything.
    """

    name: str
    rows: int
    tokens: int = 1
    back: int | None = None
    align: int = 1
    mtp: bool = False

    def needed(self, position: int) -> int:
        """First token position that a step starting at `position` may read."""
        return 0 if self.back is None else max(0, position // self.align * self.align - self.back)

    def at_once(self, rewind: int, step: int) -> int:
        """Pages of a stream with `back` that a row needs at once, while steps of up to `step` tokens run and `rewind`
        tokens may be taken back."""
        assert self.back is not None, "a stream that is read whole grows with the context"
        return -(-(self.back + self.align - 1 + rewind + step) // self.rows) + 1

    def pages(self, first: int, end: int) -> range:
        """Logical pages of the rows of tokens `first` … `end` − 1; of entries, of those whose last token is among
        them."""
        low, high = first // self.tokens, end // self.tokens
        return range(low // self.rows, -(-high // self.rows) if high > low else low // self.rows)


def pool_pages(
    groups: Mapping[str, PageGroup],
    batch: int,
    tokens: int,
    max_rewind: int = 0,
    chunk: int = BLOCK,
    prefixes: int = 0,
    context: int | None = None,
) -> dict[str, int]:
    """Pages of each group so that `batch` rows run steps of up to `chunk` tokens beside `prefixes` snapshots, `tokens`
    tokens in all. Groups that grow with the context get pages for the tokens. The others get pages for what each row
    and snapshot reads; snapshots of one prompt are a BLOCK apart, and each counts what the one before does not hold.
    context: tokens of one row at most, if that is known."""
    found = {}
    for name, g in groups.items():
        if g.back is None:
            found[name] = -(-tokens // (g.rows * g.tokens)) + batch
        else:
            whole = -(-(tokens if context is None else context) // g.rows)
            own = g.at_once(max_rewind + CHAINED * g.mtp, chunk)
            kept = min(-(-g.back // g.rows), -(-BLOCK // g.rows)) + 1
            found[name] = batch * min(own, whole) + prefixes * min(kept, whole)
    return found


@dataclass
class Page:
    """State of one physical page. writer: the batch row that may write it (None: no row); sealed: rows from its start
    that never change."""

    refs: int = 0
    writer: int | None = None
    sealed: int = 0
    draft: bool = False


@dataclass
class PagePool:
    """`pages` physical pages, numbered from 1. The caller chooses the numbers of writers and holders."""

    name: str
    pages: int
    peak: int = 0
    state: list[Page] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self):
        self.state = [Page() for _ in range(self.pages + 1)]
        self.free = list(range(self.pages, 0, -1))

    def allocate(self, count: int, writer: int, draft: bool = False) -> list[int]:
        """`count` free pages, held once, by `writer`. Raises OutOfPages, and then changes nothing."""
        if count > len(self.free):
            raise OutOfPages(
                f"{count} pages of {self.name} are needed, {len(self.free)} of {self.pages} are free; end or evict a "
                "request, or make the pool larger"
            )
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.state[page] = Page(1, writer, 0, draft)
        self.peak = max(self.peak, self.live)
        return taken

    def share(self, page: int) -> None:
        """Add a holder. Raises PageError for a page that is free or a draft: drafts may be dropped, so no other row may
        use them."""
        held = self._held(page, "shared")
        if held.draft:
            raise PageError(f"page {page} of {self.name} is a draft and was to be shared; commit it first")
        held.refs += 1

    def drop(self, page: int) -> bool:
        """Remove a holder; returns whether the page is free now. Raises PageError for a page that is free already."""
        held = self._held(page, "freed")
        held.refs -= 1
        if held.refs:
            return False
        self.state[page] = Page()
        self.free.append(page)
        return True

    def discard(self, page: int) -> None:
        """Free a draft page. Raises PageError for a committed one."""
        if not self._held(page, "discarded").draft:
            raise PageError(
                f"page {page} of {self.name} is committed and was to be discarded; its holders must drop it"
            )
        self.drop(page)

    def commit(self, page: int) -> None:
        """Accept the page's tokens."""
        self._held(page, "committed").draft = False

    def seal(self, page: int, rows: int) -> None:
        """Mark the first `rows` rows of the page as part of a prefix that others may hold."""
        held = self._held(page, "sealed")
        held.sealed = max(held.sealed, rows)

    def writes_in_place(self, page: int, writer: int, row: int) -> bool:
        """Whether `writer`, a holder, may write the page from row `row` on; else it must write a copy. Sole holders may
        always."""
        held = self._held(page, "written")
        return held.refs == 1 or (held.writer == writer and row >= held.sealed)

    def claim(self, page: int, writer: int, row: int) -> None:
        """Called before `writer` writes from row `row` on. Raises PageError if it may not."""
        if not self.writes_in_place(page, writer, row):
            raise PageError(
                f"page {page} of {self.name} was to be written from row {row}, which others hold; write a copy"
            )
        held = self.state[page]
        held.writer, held.sealed = writer, min(held.sealed, row) if held.refs == 1 else held.sealed

    def _held(self, page: int, verb: str) -> Page:
        if not 0 < page <= self.pages or self.state[page].refs == 0:
            raise PageError(
                f"page {page} of {self.name} was to be {verb}, but nobody holds it; this is a fault of the engine"
            )
        return self.state[page]

    # ---- figures -------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return self.pages - len(self.free)

    @property
    def shared(self) -> int:
        """Pages with more than one holder."""
        return sum(p.refs > 1 for p in self.state)

    @property
    def drafts(self) -> int:
        return sum(p.draft for p in self.state)

    @property
    def pressure(self) -> float:
        """Share of pages that are live."""
        return self.live / self.pages

    @property
    def under_pressure(self) -> bool:
        return under_pressure(self.live, self.pages)
