"""A cache whose batch rows take pages from common pools as they grow, share pages of common prefixes, and free them.

Layers use it like the result of the model's `new_cache`: the same rows at the same positions, found through page
tables. The model's `Layout` says which streams there are, in which groups of pages. Only the ownership of memory
differs:

- `make_room` takes pages before a step and gives back window and raw pages that lie behind all that may be read again.
- `snapshot` holds the pages of a row's prefix; `graft` starts another row from them. Nothing is copied then: a row that
  comes to write a page that others hold gets a copy of it first, which is exact because it is made of bytes.
- `speculate` … `commit` marks tokens as drafts: their pages can be discarded at once. `fits` says whether pages are
  free for them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND, Cache
from dsv4.cache.layout import Layout
from dsv4.cache.page_tables import PageTable
from dsv4.cache.paging import BLOCK, NOWHERE, PagePool, pool_pages, under_pressure
from dsv4.cache.streams import zeros
from dsv4.errors import CapacityError, InputError, OutOfPages, UnsupportedInput
from dsv4.model.arguments import check_sizes
from dsv4.model.causal import capacity


@dataclass(eq=False)
class Snapshot:
    """Pages that a row starting at `length` tokens reads: group → logical page → physical page, each held once.

    mtp_length: entries of the MTP block; at most length − 1, because the last one needs the next token.
    streams [1, n, d]: of the main model at the last token, from which that entry is computed (None if nothing drafts).
    """

    length: int
    mtp_length: int
    pages: dict[str, dict[int, int]]
    streams: torch.Tensor | None = None


class PagedCache(Cache):
    """Rows of up to `max_context` tokens in pools of `pages` pages (group name → count, see `pool_pages`), laid out as
    `layout` says.

    on_shortage(group name, pages short, pages that would be copied because others hold them too), if set, is called
    before a step is refused and may drop snapshots. poison:
    fill pages with NaN when they become free, so that whatever is read too late is seen. reach: tokens of a row that
    tables have room for; a captured step of several rows writes up to there, what does not count included.
    """

    def __init__(
        self,
        layout: Layout,
        batch: int,
        max_context: int,
        pages: dict[str, int],
        max_rewind: int = 0,
        device: torch.device = torch.device("cpu"),
        poison: bool = False,
        reach: int | None = None,
    ):
        self._settle(layout, batch, max_context, max_rewind, [device])
        self.poison, self.groups = poison, layout.groups
        self.reach = self.max_context if reach is None else reach
        if not self.max_context <= self.reach <= layout.positions:
            raise InputError(
                f"the tables of a paged cache have room for {self.reach} tokens a row; expected max_context "
                f"{self.max_context} … {layout.positions}"
            )
        if set(pages) != set(self.groups) or min(pages.values()) < 1:
            raise InputError(
                f"pages are given for {sorted(pages.items())}; expected at least one for each of {sorted(self.groups)}"
            )
        self.pools = {name: PagePool(name, pages[name]) for name in self.groups}
        self.tables = {name: PageTable(g, self.batch, self.reach, device) for name, g in self.groups.items()}
        self.plan = layout.paged_plan(pages)
        self._allocate(device)
        self._held: list[dict[str, dict[int, int]]] = [{name: {} for name in self.groups} for _ in range(self.batch)]
        self._accepted: list[int | None] = [None] * self.batch  # tokens that are not drafts, of rows that draft
        # the position of a row's memory of chunked prefill, and its chunking: see `GroupedCache`
        self.remembered: list[tuple | None] = [None] * self.batch
        self.on_shortage: Callable[[str, int, list[int]], None] | None = None

    def _allocate(self, device: torch.device) -> None:
        try:
            layers = [
                self.layout.paged(p, self.tables, {s.name: zeros(s, device) for s in p.streams}) for p in self.plan
            ]
        except (RuntimeError, MemoryError) as error:
            wanted = sum(s.nbytes for p in self.plan for s in p.streams)
            raise CapacityError(
                f"the pools need {wanted} bytes, and they could not be allocated ({str(error).splitlines()[0]}); ask "
                "for fewer pages"
            ) from error
        self.layers, self.mtp_layers = layers[: self.layout.backbone], layers[self.layout.backbone :]
        self._tensors: dict[str, list[torch.Tensor]] = {name: [] for name in self.groups}
        for layer in layers:
            for stream, group in layer.groups.items():
                self._tensors[group].append(layer.tensors[stream])
        if self.poison:
            for name, pool in self.pools.items():
                self._spoil(name, slice(0, pool.pages + 1))

    def place(self, step, op) -> None:
        """Does nothing: layers find rows of pools through tables, as they are when a replay runs."""

    # ---- room ----------------------------------------------------------------------------

    def make_room(self, rows: slice, tokens: int, mtp: bool = False) -> None:
        """Pages for `tokens` more tokens of each of `rows`; gives back those behind what they may read.

        Raises OutOfPages when a pool has too few, even after `on_shortage`; no row has then taken any.
        """
        lengths = self._mtp if mtp else self._main
        if self.poison:
            for name in self.groups:
                self._spoil(name, NOWHERE)
        groups = [name for name, group in self.groups.items() if group.mtp is mtp]
        for name in groups:
            for b in range(rows.start, rows.stop):
                needed = self.groups[name].needed(max(0, lengths.high[b] - lengths.max_rewind))
                self._give_back(name, b, needed)

        def missing(name: str) -> list[tuple[int, int, int]]:
            of = range(rows.start, rows.stop)
            return [page for b in of for page in self._lacking(name, b, lengths.now[b], lengths.now[b] + tokens)]

        for name in groups:
            lacking = missing(name)
            short = len(lacking) - len(self.pools[name].free)
            if short > 0 and self.on_shortage is not None:
                self.on_shortage(name, short, [old for *_, old in lacking if old != NOWHERE])
        # check again: a page of a dropped snapshot may now be a row's own, which is not copied
        wanted = {name: missing(name) for name in groups}
        for name, lacking in wanted.items():
            if len(lacking) > len(self.pools[name].free):
                raise OutOfPages(
                    f"{tokens} tokens for rows {rows.start} … {rows.stop - 1} need {len(lacking)} pages of {name}, "
                    f"{len(self.pools[name].free)} of {self.pools[name].pages} are free; end or evict a request, or "
                    "make the pool larger"
                )
        for name, lacking in wanted.items():
            for b, logical, old in lacking:
                self._take(name, b, logical, old)

    def fits(self, rows: Iterable[int], tokens: int, mtp: bool = False) -> bool:
        """Whether `tokens` more tokens of each of `rows` have room on their own pages and free ones, that is whether
        `make_room` succeeds without `on_shortage`. Takes no pages, but frees those behind what the rows may read."""
        lengths, lacking = self._mtp if mtp else self._main, dict.fromkeys(self.groups, 0)
        for b in rows:
            for name, group in self.groups.items():
                if group.mtp is mtp:
                    self._give_back(name, b, group.needed(max(0, lengths.high[b] - lengths.max_rewind)))
                    lacking[name] += sum(
                        not own for *_, own in self._touched(name, b, lengths.now[b], lengths.now[b] + tokens)
                    )
        return all(n <= len(self.pools[name].free) for name, n in lacking.items())

    def _lacking(self, name: str, b: int, first: int, end: int) -> list[tuple[int, int, int]]:
        """(row, logical page, page to copy or NOWHERE) for each page that row b needs to write tokens first … end −
        1."""
        found = []
        for logical, page, row, own in self._touched(name, b, first, end):
            if own:
                self.pools[name].claim(page, b, row)
            else:
                found.append((b, logical, page))
        return found

    def _touched(self, name: str, b: int, first: int, end: int):
        """(logical page, page or NOWHERE, first row written, whether row b may write it in place) of tokens first … end
        − 1."""
        group, pool, held = self.groups[name], self.pools[name], self._held[b][name]
        for logical in group.pages(first, end):
            page, row = held.get(logical, NOWHERE), max(0, first // group.tokens - logical * group.rows)
            yield logical, page, row, page != NOWHERE and pool.writes_in_place(page, b, row)

    def _take(self, name: str, b: int, logical: int, old: int) -> None:
        [page] = self.pools[name].allocate(1, b, draft=self._accepted[b] is not None and old == NOWHERE)
        if old != NOWHERE:
            for tensor in self._tensors[name]:
                tensor[page] = tensor[old]
            self._drop(name, old)
        self._point(name, b, logical, page)

    def _point(self, name: str, b: int, logical: int, page: int) -> None:
        if page == NOWHERE:
            del self._held[b][name][logical]
        else:
            self._held[b][name][logical] = page
        self.tables[name].point(b, logical, page)

    def _give_back(self, name: str, b: int, needed: int) -> None:
        """Free row b's pages that end before token `needed`."""
        if needed:
            span, held = self.groups[name].rows * self.groups[name].tokens, self._held[b][name]
            self._release(name, b, [logical for logical in held if (logical + 1) * span <= needed])

    def _release(self, name: str, b: int, logical_pages: list[int]) -> None:
        for logical in logical_pages:
            page = self._held[b][name][logical]
            self._point(name, b, logical, NOWHERE)
            self._drop(name, page)

    def _drop(self, name: str, page: int) -> None:
        if self.pools[name].drop(page) and self.poison:
            self._spoil(name, page)

    def _spoil(self, name: str, pages: int | slice) -> None:
        for tensor in self._tensors[name]:
            tensor[pages] = float("nan") if tensor.is_floating_point() else 255  # NaN of E4M3, E8M0, bf16 and fp32

    # ---- rows ----------------------------------------------------------------------------

    def rewind(self, n: int | list[int]) -> None:
        """Rewind as `Cache.rewind` does; pages that hold only dropped tokens are free at once."""
        super().rewind(n)
        self._trim()

    def rewind_mtp(self, n: int | list[int]) -> None:
        super().rewind_mtp(n)
        self._trim()

    def reset(self) -> None:
        super().reset()
        self._trim()

    def leave(self, b: int) -> None:
        """The request in row b has ended: its pages are freed, and the row is empty."""
        for lengths in (self._main, self._mtp):
            lengths.now[b] = lengths.high[b] = lengths.low[b] = 0
        self._accepted[b] = None
        self._trim()

    def _trim(self) -> None:
        held = zip(self.remembered, self._main.now)
        self.remembered = [memory if memory is None or memory[0] == now else None for memory, now in held]
        for b in range(self.batch):
            for name, group in self.groups.items():
                length = (self._mtp if group.mtp else self._main).now[b]
                end = -(-(length // group.tokens) // group.rows)
                self._release(name, b, [logical for logical in self._held[b][name] if logical >= end])

    # ---- drafts --------------------------------------------------------------------------

    def speculate(self, b: int, final: int = 0) -> None:
        """Tokens appended to row b after the next `final` ones are drafts, until `commit` or `discard`, and so are the
        pages taken from now on."""
        self._accepted[b] = self._main.now[b] + final

    def commit(self, b: int) -> None:
        """Accept every token that row b holds; rewind the others first."""
        self._accepted[b] = None
        for name, held in self._held[b].items():
            for page in held.values():
                self.pools[name].commit(page)

    def discard(self, b: int) -> None:
        """Drop the drafts of row b and free their pages. Raises RewindError if they are more than max_rewind."""
        if self._accepted[b] is None:
            return
        counts = [0] * self.batch
        counts[b] = max(0, self._main.now[b] - self._accepted[b])
        super().rewind(counts)
        for name, pool in self.pools.items():
            for logical, page in list(self._held[b][name].items()):
                if pool.state[page].draft:
                    self._point(name, b, logical, NOWHERE)
                    pool.discard(page)
                    if self.poison:
                        self._spoil(name, page)
        self.commit(b)

    # ---- prefixes ------------------------------------------------------------------------

    def snapshot(self, b: int, streams: torch.Tensor | None = None) -> Snapshot:
        """Hold the pages of row b's tokens, so that other rows can start from them: none of these tokens changes any
        more.

        Raises InputError unless the row holds a multiple of BLOCK tokens, none of them drafts.
        """
        length = self._main.now[b]
        if length == 0 or length % BLOCK or self._accepted[b] is not None:
            raise InputError(
                f"row {b} holds {length} tokens{'' if self._accepted[b] is None else ', some of them drafts'}; a "
                f"prefix ends at a multiple of {BLOCK} accepted tokens"
            )
        found = Snapshot(length, min(self._mtp.now[b], length - 1), {}, streams)
        for name, group in self.groups.items():
            end = found.mtp_length if group.mtp else length
            held, pool = self._held[b][name], self.pools[name]
            found.pages[name] = {logical: held[logical] for logical in group.pages(group.needed(end), end)}
            for logical, page in found.pages[name].items():
                pool.share(page)
                pool.seal(page, min(group.rows, end // group.tokens - logical * group.rows))
        return found

    def graft(self, b: int, snapshot: Snapshot) -> None:
        """Row b, which must be empty, continues from `snapshot`. Raises InputError if it holds tokens, ContextOverrun
        never: a snapshot of this cache fits its rows."""
        if self._main.now[b] or self._mtp.now[b]:
            raise InputError(f"row {b} holds {self._main.now[b]} tokens; only an empty row can be grafted")
        for lengths, n in ((self._main, snapshot.length), (self._mtp, snapshot.mtp_length)):
            lengths.now[b] = lengths.high[b] = lengths.low[b] = n
        for name, pages in snapshot.pages.items():
            for logical, page in pages.items():
                self.pools[name].share(page)
                self._point(name, b, logical, page)

    def drop(self, snapshot: Snapshot) -> None:
        """Release a snapshot's pages; rows that were grafted from it keep theirs."""
        for name, pages in snapshot.pages.items():
            for page in pages.values():
                self._drop(name, page)
        snapshot.pages = {}

    def running_pages(self, name: str) -> set[int]:
        """Pages of a pool that rows hold."""
        return {page for held in self._held for page in held[name].values()}

    # ---- figures -------------------------------------------------------------------------

    @property
    def under_pressure(self) -> bool:
        """Whether rows hold more than 85 % of the pages of some pool. Pages of prefixes that no row uses do not count:
        they can be had."""
        return any(under_pressure(len(self.running_pages(name)), pool.pages) for name, pool in self.pools.items())

    def figures(self) -> dict[str, dict]:
        """Of each pool: pages, live, shared and draft pages, the most that were live, pressure (live share), and
        fragmentation: the share of rows of live pages that hold nothing."""
        found = {}
        for name, pool in self.pools.items():
            group, filled = self.groups[name], [page.sealed for page in pool.state]
            for b, held in enumerate(self._held):
                rows = (self._mtp if group.mtp else self._main).now[b] // group.tokens
                for logical, page in held[name].items():
                    filled[page] = max(filled[page], min(group.rows, rows - logical * group.rows))
            room = pool.live * group.rows
            found[name] = {
                "pages": pool.pages,
                "live": pool.live,
                "shared": pool.shared,
                "drafts": pool.drafts,
                "peak": pool.peak,
                "pressure": pool.pressure,
                "fragmentation": 1 - sum(filled) / room if room else 0.0,
            }
        return found


def new_paged_cache(
    model,
    batch: int,
    max_context: int,
    tokens: int | None = None,
    max_rewind: int = DEFAULT_MAX_REWIND,
    prefixes: int = 0,
    pages: dict[str, int] | None = None,
    poison: bool = False,
) -> PagedCache:
    """A paged cache for `model`: pools for `tokens` tokens in all (default: every row full), or of `pages` pages.

    Raises UnsupportedInput when the model's layers are spread over devices or its caches are to be in host memory,
    InputError where it chooses what it reads by a prompt's queries.
    """
    if model.layer_devices is not None:
        raise UnsupportedInput("a paged cache is on one device; load without --device-map")
    if model.kv_memory is not None:
        raise UnsupportedInput(
            "the pages of a paged cache are on the device, and host memory was asked for; load without kv_memory"
        )
    batch, max_context, max_rewind = check_sizes(batch=batch, max_context=max_context, max_rewind=max_rewind)
    layout, reach = model.page_layout(), capacity(model, max_context)
    pages = pages or pool_pages(layout.groups, batch, tokens or batch * reach, max_rewind, model.chunk, prefixes, reach)
    return PagedCache(layout, batch, max_context, pages, max_rewind, model.device, poison, reach)
