"""Section 1.12: pages, and prefixes that requests borrow."""

import torch

from dsv4.cache import prefixes
from dsv4.cache.layer import CompressorCache
from dsv4.cache.paged import PagedCache
from dsv4.cache.paged_view import PagedView
from dsv4.cache.paging import BLOCK, NOWHERE, PagePool
from dsv4.cache.prefixes import PrefixTree
from dsv4.probes.faults import Site, mutation

SECTION = "1.12", "Pages and borrowed prefixes"


def after_graft(site: Site, change) -> None:
    """change(cache, b, snapshot) follows each graft of row b."""
    real = site.patch(
        PagedCache, "graft", lambda cache, b, snapshot: (real(cache, b, snapshot), change(cache, b, snapshot))[0]
    )


def own_copies(cache: PagedCache, b: int, group: str, left_out: str) -> None:
    """Row b gets pages of its own in a group, each stream copied but the one that is left out."""
    for logical, old in list(cache._held[b].get(group, {}).items()):
        [page] = cache.pools[group].allocate(1, b)
        for layer in cache.layers:
            for stream, tensor in layer.tensors.items():
                if layer.groups[stream] == group and stream != left_out:
                    tensor[page] = tensor[old]
        cache._drop(group, old)
        cache._point(group, b, logical, page)


def not_carried(site: Site, group: str) -> None:
    """A graft leaves a group's pages out."""
    after_graft(site, lambda cache, b, snapshot: cache._release(group, b, list(cache._held[b].get(group, {}))))


@mutation("1.12", bugs=(134, 130), parts=("copy on write",), probes=("grafting",))
def borrowed_pages_written_in_place(site: Site) -> None:
    """A row writes the page that it finds in its table, whoever else holds it: no copy on write."""
    site.patch(PagePool, "writes_in_place", lambda pool, page, writer, row: True)


@mutation("1.12", bugs=(134,), parts=("copy on write",), probes=("grafting",))
def writer_of_a_page_may_change_its_prefix(site: Site) -> None:
    """The row that once wrote a page may write it again though others hold it: a donor that goes back overwrites the
    prefix."""

    def in_place(pool, page, writer, row):
        held = pool._held(page, "written")
        return held.refs == 1 or held.writer == writer

    site.patch(PagePool, "writes_in_place", in_place)


@mutation("1.12", bugs=(134,), parts=("copy on write",), probes=("grafting",))
def every_holder_may_write_behind_the_prefix(site: Site) -> None:
    """Rows behind the sealed ones are taken for nobody's: donor and borrowers write them in the same page."""
    site.patch(PagePool, "writes_in_place", lambda pool, page, writer, row: row >= pool._held(page, "written").sealed)


@mutation("1.12", bugs=(), parts=("graft, MTP window", "graft, entries"), probes=("grafting",))
def copy_of_a_page_begins_empty(site: Site) -> None:
    """The page that replaces a borrowed one is allocated and never filled: what it held of the prefix is gone."""

    def take(cache, name, b, logical, old):
        if old != NOWHERE:
            cache._drop(name, old)
        real(cache, name, b, logical, NOWHERE)

    real = site.patch(PagedCache, "_take", take)


@mutation("1.12", bugs=(), parts=("graft, index keys",), probes=("grafting",))
def copy_of_a_page_without_its_index_keys(site: Site) -> None:
    """Copy on write copies the first stream of a group; index keys, which share the table of entries, stay behind."""

    def init(cache, *args, **more):
        real(cache, *args, **more)
        of = cache._tensors["csa entries"]
        keys = [layer.tensors["index keys"] for layer in cache.layers if "index keys" in layer.tensors]
        cache._tensors["csa entries"] = [t for t in of if not any(t is k for k in keys)]

    real = site.patch(PagedCache, "__init__", init)


@mutation("1.12", bugs=(134,), parts=("copy on write, captured steps",), probes=("grafting",))
def captured_step_writes_windows_that_it_does_not_complete(site: Site) -> None:
    """A window without all its tokens leaves an entry of none: nobody sees it in the row's own pages, in a borrowed one
    it is another's."""
    real = site.patch(CompressorCache, "windows", lambda cache, *given: opened(real(cache, *given)))
    opened = lambda windows: windows._replace(live=torch.ones_like(windows.live))


@mutation("1.12", bugs=(), parts=("captured step on pages", "copy on write, captured steps"), probes=("grafting",))
def steps_of_several_rows_keep_the_tables_of_the_first(site: Site) -> None:
    """The tables that a captured step reads are copied when it is captured, and not when rows have got other pages."""

    def show(view, rows, tokens, mtp=False):
        real(view, rows, tokens, mtp)
        if view.batch > 1:
            for name, table in view.tables.items():
                table.physical.copy_(held.setdefault((id(view), name), table.physical.clone()))

    held: dict = {}
    real = site.patch(PagedView, "show", show)


@mutation("1.12", bugs=(), parts=("reference counts",), probes=("grafting",))
def pages_of_a_borrower_stay_pinned(site: Site) -> None:
    """A row that ends forgets its pages without letting go of those that others hold too: they never come free."""
    real = site.patch(PagePool, "drop", lambda pool, page: False if pool.state[page].refs > 1 else real(pool, page))


@mutation("1.12", bugs=(), parts=("reference counts",), probes=("grafting",))
def shared_page_dropped_twice(site: Site) -> None:
    """A borrower that ends lets go of a shared page twice: it comes free while the donor still reads it."""

    def drop(pool, page):
        return (
            real(pool, page) or pool.state[page].refs > 0 and pool.state[page].writer is not None and real(pool, page)
        )

    real = site.patch(PagePool, "drop", drop)


@mutation("1.12", bugs=(), parts=("reference counts",), probes=("grafting",))
def graft_without_a_hold(site: Site) -> None:
    """A graft points its table at the pages and does not count itself: they come free when the prefix is forgotten."""

    def graft(cache, b, snapshot):
        share = PagePool.share
        PagePool.share = lambda pool, page: None
        try:
            real(cache, b, snapshot)
        finally:
            PagePool.share = share

    real = site.patch(PagedCache, "graft", graft)


@mutation("1.12", bugs=(130,), parts=("graft length",), probes=("grafting",))
def graft_of_one_block_fewer(site: Site) -> None:
    """The walk through kept prefixes ends one block early: the last shared block is run again."""

    def walk(tree, ids):
        found = list(real(tree, ids))
        return iter(found[:-1] if len(found) > 1 else [])

    real = site.patch(PrefixTree, "_walk", walk)


@mutation("1.12", bugs=(130,), parts=("graft length",), probes=("grafting",))
def graft_leaves_no_token_to_run(site: Site) -> None:
    """A prompt of whole blocks is grafted to its last token: there is none left to take logits from."""
    site.patch(prefixes, "borrowable", lambda tokens: tokens // BLOCK * BLOCK)


@mutation("1.12", bugs=(130,), parts=("graft length", "graft, window rows"), probes=("grafting",))
def row_stands_a_block_behind_its_pages(site: Site) -> None:
    """The row's length is set to the block before the one whose pages it borrows."""

    def shorter(cache, b, snapshot):
        cache._main.now[b] = max(BLOCK, snapshot.length - BLOCK)

    after_graft(site, shorter)


@mutation("1.12", bugs=(130,), parts=("graft, window rows",), probes=("grafting",))
def window_not_carried_by_a_graft(site: Site) -> None:
    """Entries are shared and the window was of the request: a grafted row attends to no raw token of its prefix."""
    not_carried(site, "window")


@mutation("1.12", bugs=(130,), parts=("graft, compressor rows",), probes=("grafting",))
def overlap_rows_not_carried_by_a_graft(site: Site) -> None:
    """Prefixes end where windows do, so raw rows are left out: the first entry of CSA lacks the four tokens before its
    own."""
    not_carried(site, "csa raw rows")


@mutation("1.12", bugs=(130, 133), parts=("graft, compressor rows",), probes=("grafting",))
def raw_rows_of_the_rows_last_request(site: Site) -> None:
    """The page of raw rows that the batch row had before is kept: the overlap is that of the request before."""
    last: dict = {}

    def leave(cache, b):
        held = [
            t[p].clone()
            for p in list(cache._held[b].get("csa raw rows", {}).values())[-1:]
            for t in cache._tensors["csa raw rows"]
        ]
        last[id(cache), b] = held or last.get((id(cache), b), [])
        return real(cache, b)

    real = site.patch(PagedCache, "leave", leave)

    def stale(cache, b, snapshot):
        own_copies(cache, b, "csa raw rows", "")
        for page in cache._held[b].get("csa raw rows", {}).values():
            for tensor, rows in zip(cache._tensors["csa raw rows"], last.get((id(cache), b), [])):
                tensor[page] = rows

    after_graft(site, stale)


@mutation("1.12", bugs=(130,), parts=("graft, index keys",), probes=("grafting",))
def index_keys_not_carried_by_a_graft(site: Site) -> None:
    """A graft takes the entries of a prefix without the indexer's keys: it never selects one of them by what it
    holds."""
    after_graft(site, lambda cache, b, snapshot: own_copies(cache, b, "csa entries", "index keys"))


@mutation("1.12", bugs=(130,), parts=("graft, entries",), probes=("grafting",))
def entries_of_hca_not_carried_by_a_graft(site: Site) -> None:
    """Prefixes share the pages of CSA alone: HCA layers of a grafted row have nothing before their window."""
    not_carried(site, "hca entries")


@mutation("1.12", bugs=(130, 143), parts=("graft, MTP window",), probes=("grafting",))
def mtp_window_not_carried_by_a_graft(site: Site) -> None:
    """The MTP block's own pages are left out of a graft: drafts after it see no token of the prefix."""
    not_carried(site, "mtp window")


@mutation("1.12", bugs=(143,), parts=("graft, MTP window", "graft length"), probes=("grafting",))
def mtp_entry_of_the_donors_next_token(site: Site) -> None:
    """A prefix carries as many entries of the MTP block as tokens: the last was made of the token that the donor went
    on with."""

    def snapshot(cache, b, streams=None):
        found = real(cache, b, streams)
        found.mtp_length = found.length
        return found

    real = site.patch(PagedCache, "snapshot", snapshot)


@mutation("1.12", bugs=(), parts=("reference counts",), probes=("grafting",))
def free_list_names_a_page_twice(site: Site) -> None:
    """A page that comes free is put into the free list once for each stream of its group: two requests will get it."""

    def drop(pool, page):
        free = real(pool, page)
        if free and pool.name == "csa entries":
            pool.free.append(page)
        return free

    real = site.patch(PagePool, "drop", drop)


@mutation("1.12", bugs=(), parts=("reference counts", "copy on write"), probes=("grafting",))
def kept_prefix_holds_no_pages(site: Site) -> None:
    """A snapshot notes pages and does not hold them: when the donor ends, others write what it will be grafted from."""

    def snapshot(cache, b, streams=None):
        share = PagePool.share
        PagePool.share = lambda pool, page: None
        try:
            return real(cache, b, streams)
        finally:
            PagePool.share = share

    real = site.patch(PagedCache, "snapshot", snapshot)
