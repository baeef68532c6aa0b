"""Section 1.18: what stands in staging slots, in host memory, and what is said of the traffic between them."""

from collections.abc import Callable

import torch

from dsv4.kernels.staging import SlotTable
from dsv4.probes.faults import Site, mutation

SECTION = "1.18", "Caches in host memory"

TIER = dict(probes=("host_tier",), profile="qwen2")


def fetcher(site: Site, change: Callable) -> None:
    """Items are staged by change(real, table, pools, wanted, start, unit, tail, run)."""
    site.kernel("fetch", lambda real: lambda *given: change(real, *given))


def never_forgotten(real, table, pools, wanted, start, unit, tail, run=0):
    """Items whose rows in host memory have changed stay what they were when they were staged."""
    begins = (start // unit).repeat_interleave(len(wanted) // len(start)).unsqueeze(1)
    tails, first = (wanted == begins) & tail, torch.arange(len(wanted), device=wanted.device).unsqueeze(1) * run
    out = real(
        table, pools, torch.where(tails, -1, wanted).to(wanted.dtype), torch.full_like(start, 1 << 30), 1, False, run
    )
    return torch.where(tails, table.held.shape[1] + first, out).to(wanted.dtype)


@mutation("1.18", bugs=(), parts=("rows of an older step",), **TIER)
def stale_staging_row(site: Site) -> None:
    """A block that was rewound over and written again is read as it was staged before."""
    fetcher(site, never_forgotten)


@mutation("1.18", bugs=(), parts=("rows of an older step",), probes=("host_tier",))
def stale_entries_after_a_rewind(site: Site) -> None:
    """Entries of CSA that were compressed again after a rewind are read as they were staged before."""
    fetcher(site, never_forgotten)


@mutation("1.18", bugs=(), parts=("slot table",), **TIER)
def slot_table_not_updated_on_eviction(site: Site) -> None:
    """A slot that gets another item still says that it holds the old one, which is then taken for a hit."""

    def change(real, table, *rest):
        held = table.held.clone()
        out = real(table, *rest)
        table.held.copy_(torch.where((held >= 0) & (table.held >= 0) & (held != table.held), held, table.held))
        return out

    fetcher(site, change)


@mutation("1.18", bugs=(), parts=("another KV head",), **TIER)
def staging_copies_the_wrong_head(site: Site) -> None:
    """Items are copied from the host memory of the KV head beside."""
    fetcher(
        site,
        lambda real, table, pools, *rest: real(
            table, tuple(pool._replace(host=pool.host.roll(1, 0)) for pool in pools), *rest
        ),
    )


@mutation("1.18", bugs=(), parts=("another row of the batch",), probes=("host_tier",))
def staging_copies_the_wrong_row(site: Site) -> None:
    """Entries of CSA are copied from the host memory of another row of the batch."""
    fetcher(
        site,
        lambda real, table, pools, *rest: real(
            table, tuple(pool._replace(host=pool.host.roll(1, 0)) for pool in pools), *rest
        ),
    )


@mutation("1.18", bugs=(), parts=("another block",), **TIER)
def staging_copies_the_block_before(site: Site) -> None:
    """Items are copied from one block early in host memory."""
    early = lambda host: torch.cat((host[:, :1], host[:, :-1]), 1)
    fetcher(
        site,
        lambda real, table, pools, *rest: real(
            table, tuple(pool._replace(host=early(pool.host)) for pool in pools), *rest
        ),
    )


@mutation("1.18", bugs=(), parts=("not copied",), **TIER)
def values_are_not_staged(site: Site) -> None:
    """Only the first pool is copied: keys, but not values."""
    fetcher(site, lambda real, table, pools, *rest: real(table, pools[:1], *rest))


@mutation("1.18", bugs=(), parts=("slot of another item",), **TIER)
def one_slot_for_two_items(site: Site) -> None:
    """A miss gets the slot of an item that the same step has found staged."""

    def change(real, table, pools, wanted, *rest):
        held = table.held.clone()
        out = real(table, pools, wanted, *rest)
        for g in range(len(held)):
            hits = [
                j
                for j, n in enumerate(wanted[g].tolist())
                if n >= 0 and n in held[g] and int(out[g, j]) < held.shape[1]
            ]
            misses = [
                j
                for j, n in enumerate(wanted[g].tolist())
                if n >= 0 and n not in held[g] and int(out[g, j]) < held.shape[1]
            ]
            if hits and misses:
                out[g, misses[-1]] = out[g, hits[0]]
        return out

    fetcher(site, change)


@mutation("1.18", bugs=(), parts=("rows of an older step",), **TIER)
def an_append_keeps_what_was_staged(site: Site) -> None:
    """Tokens that are appended over staged blocks do not drop them."""
    site.patch(SlotTable, "forget", lambda self, since=0: None)


@mutation("1.18", bugs=(), parts=("host tier, traffic",), **TIER)
def the_tail_is_counted_as_a_hit(site: Site) -> None:
    """The block of the current position, which is never fetched, counts as found."""

    def change(real, table, *rest):
        out = real(table, *rest)
        table.count[:, 0] += (out == table.held.shape[1]).sum(1)
        return out

    fetcher(site, change)


def written(site: Site, change: Callable) -> None:
    """Tokens are taken in by change(real, keys, values, host_keys, host_values, start, table, low, high, mean,
    block)."""
    site.kernel("write_back", lambda real: lambda *given: change(real, *given))


@mutation("1.18", bugs=(), parts=("rows in host memory",), **TIER)
def tokens_are_not_written_through(site: Site) -> None:
    """Values of new tokens stay in staging: host memory never gets them."""

    def change(real, keys, values, host_keys, host_values, *rest):
        before = host_values.clone()
        real(keys, values, host_keys, host_values, *rest)
        host_values.copy_(before)

    written(site, change)


@mutation("1.18", bugs=(), parts=("host tier, output", "host tier, summaries"), **TIER)
def tail_not_read_back_after_a_rewind(site: Site) -> None:
    """The tail slot is taken for the current block's, whatever block it held before."""

    def change(real, keys, values, host_keys, host_values, start, table, *rest):
        table.current.copy_((start // rest[-1]).repeat_interleave(keys.shape[1]))
        real(keys, values, host_keys, host_values, start, table, *rest)

    written(site, change)


@mutation("1.18", bugs=(), parts=("host tier, summaries",), **TIER)
def summaries_without_the_new_token(site: Site) -> None:
    """The tail's summaries are those of the tokens before."""

    def change(real, *given):
        held = [None if t is None else t.clone() for t in given[6:9]]
        real(*given)
        for t, old in zip(given[6:9], held):
            if t is not None:
                t.copy_(torch.where(given[4].view(-1, 1, 1, 1) % given[9] > 0, old, t))

    written(site, change)
