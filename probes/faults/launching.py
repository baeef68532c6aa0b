"""Section 1.13, continued: a batch whose pages were taken beforehand, and whose loop the device runs."""

from dataclasses import replace

import torch

from dsv4.cache.allotted import Allotted
from dsv4.probes.faults import Site, mutation
from dsv4.speculation import one_launch

OF_PAGES = dict(probes=("speculation",), parts=("one launch",))
OF_THE_LOOP = dict(probes=("speculation",), parts=("one launch",), backend="triton")


def of_the_kernel(site: Site, *changes: tuple[str, str]) -> None:
    """Change parts of the kernel that begins each turn of the loop, each found once."""
    source = one_launch.TURN.source
    for right, wrong in changes:
        assert source.count(right) == 1, f"the kernel has no single {right!r}"
        source = source.replace(right, wrong)
    site.patch(one_launch, "TURN", replace(one_launch.TURN, source=source))


# ---- pages --------------------------------------------------------------------------------


@mutation("1.13", bugs=(), **OF_PAGES)
def pages_of_one_row_serve_all(site: Site) -> None:
    """The table of a batch names the first row's pages for every row."""

    def allot(cache, tokens):
        real(cache, tokens)
        for table in cache.tables.values():
            table.physical.copy_(table.physical[:1].clone().expand_as(table.physical))

    real = site.patch(Allotted, "allot", allot)


@mutation("1.13", bugs=(), **OF_PAGES)
def pages_of_a_window_come_round_too_early(site: Site) -> None:
    """A row has half the pages that its window and a step need at once: what may still be read is overwritten."""

    def pages(cache, group, tokens):
        found = real(cache, group, tokens)
        return found if group.back is None else max(1, found // 2)

    real = site.patch(Allotted, "_pages", pages)


@mutation("1.13", bugs=(), probes=("speculation",), parts=("one launch, drafts under pressure",))
def pressure_is_not_computed_on_the_device(site: Site) -> None:
    """Pages were taken beforehand, so none is ever short: drafts are never capped."""
    site.patch(Allotted, "pressed", lambda cache, start, more, done: torch.zeros_like(done).any())


@mutation("1.13", bugs=(), probes=("speculation",), parts=("one launch, drafts under pressure",))
def pressure_counts_the_pages_that_were_taken_beforehand(site: Site) -> None:
    """A row counts with all pages that it may ever need: drafts are capped from the beginning."""

    def live(cache, tokens, done):
        # filled on the device: a capture refuses a copy from the host
        return {name: tokens.new_full(tokens.shape[:-1], pool.live) for name, pool in cache.whole.pools.items()}

    site.patch(Allotted, "live", live)


@mutation("1.13", bugs=(), probes=("speculation",), parts=("one launch, drafts under pressure",))
def pressure_is_computed_a_page_late(site: Site) -> None:
    """Only pages that are full count as live."""

    def live(cache, tokens, done):
        found = real(cache, tokens - 1, done)
        return {
            name: n if cache.whole.groups[name].back is not None else (n - (~done).sum(-1)) for name, n in found.items()
        }

    real = site.patch(Allotted, "live", live)


# ---- the loop of the device ---------------------------------------------------------------


@mutation("1.13", bugs=(), **OF_THE_LOOP)
def the_loop_ends_with_its_first_row(site: Site) -> None:
    """The device stops when one row is done; the others are cut off."""
    of_the_kernel(site, ("bool all = true;", "bool all = false;"), ("all = all && done[b];", "all = all || done[b];"))


@mutation("1.13", bugs=(), **OF_THE_LOOP)
def the_loop_takes_the_first_row_s_size(site: Site) -> None:
    """The round that runs is as wide as the first row wants: wider rows have fewer drafts than were decided."""
    of_the_kernel(site, ("drafts = sizes[b] > drafts ? sizes[b] : drafts;", "drafts = sizes[0];"))


@mutation("1.13", bugs=(), **OF_THE_LOOP)
def the_loop_publishes_the_record_before_the_last(site: Site) -> None:
    """The host reads, for each round, what the round before it did."""
    of_the_kernel(site, ("records[(ended - 1) % ring", "records[(ended + ring - 2) % ring"))


@mutation("1.13", bugs=(), **OF_THE_LOOP)
def the_loop_tells_of_a_round_too_early(site: Site) -> None:
    """The number that the host polls counts the round that begins, whose record has not come."""
    of_the_kernel(site, ("flags[0] = ended;", "flags[0] = ended + 1;"))
