"""Captured steps of rows that borrow one prefix: of one row, and of several together."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache
from dsv4.cache.paging import BLOCK
from dsv4.cache.prefixes import PrefixTree
from dsv4.model.cut_values import whole
from dsv4.probes.compare import agreeing, token_errors, tokens
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.cache_contents import Rows, differing, rows_checks, summary, visible
from dsv4.probes.scenes.grafted_rows import Going
from dsv4.probes.subject import Subject
from dsv4.speculation.captured import Captured

AHEAD = (21, 0, 0, 6)  # tokens of each of four rows behind the prefix, when steps begin: two have not left it
# tokens that each row runs; together where several do
PASSES = ((0, 2, 0, 0), (0, 1, 3, 0), (1, 1, 1, 1), (4, 0, 2, 0), (0, 0, 1, 0), (2, 5, 1, 3))
PART = "captured step on pages"
STAYS = "steps append: what rows held before stays, in whoever's pages it lies"


def stepping(subject: Subject, cache: PagedCache, plain: Cache | None, prefix: list[int], seed: int) -> Iterator[Check]:
    """Of a prefix that ends within a page of entries: a step of two tokens completes none, and the entry that it does
    not complete would lie where the donor has one. Held against `append` on a plain cache, where there is one."""
    B, tree = cache.batch, PrefixTree(cache)
    own = tokens(subject, cache.max_context, seed + 1, rows=B).tolist()
    ids = [prefix[:BLOCK] + row[: cache.max_context - BLOCK] for row in own]
    for b, ahead in enumerate(AHEAD):
        for held in (cache, plain):
            if held is not None:
                going = Going(subject, held, b, ids[b])
                going.follows = False  # the block's pages are the other scenarios'
                if b and held is cache:
                    tree.graft(b, ids[b])
                going.prefill(BLOCK + ahead, tree if held is cache and not b else None)
    verify, changed, errors, pairs = Captured(subject.model, cache), [], [], []
    for number, counts in enumerate(PASSES):
        lengths = cache.lengths
        before = rows_of(subject, cache, lengths)
        part = torch.tensor(
            [[*row[n : n + count], *row[: max(counts) - count]] for row, n, count in zip(ids, lengths, counts)]
        )
        said, _ = verify(part, list(counts), False)
        said = whole(said).cpu()
        cache.rewind(0)  # pages that were taken for tokens that do not count go
        changed += [
            (f"pass {number}, row {b}", *both) for b, both in enumerate(zip(rows_of(subject, cache, lengths), before))
        ]
        if plain is not None:
            want = subject.model.append(part, plain, n_new=list(counts)).cpu()
            errors += [
                token_errors(said[b : b + 1, :n], want[b : b + 1, :n]).flatten() for b, n in enumerate(counts) if n
            ]
            now = zip(rows_of(subject, cache, cache.lengths), rows_of(subject, plain, cache.lengths), before, counts)
            pairs += [
                (f"pass {number}, row {b}", written(mine, old, n), written(theirs, old, n))
                for b, (mine, theirs, old, n) in enumerate(now)
                if n
            ]
    yield untouched(changed)
    if plain is not None:
        value, source, limit = agreeing(torch.cat(errors), subject.numerics)
        yield compare(
            "logits of captured steps on borrowed pages are those of append",
            value,
            "<=",
            limit,
            source,
            sum(map(len, errors)),
            where="captured steps",
            part=PART,
        )
        yield from rows_checks(
            "rows that captured steps write to borrowed pages are those of append",
            "captured steps",
            PART,
            subject,
            pairs,
            False,
        )


def rows_of(subject: Subject, cache: Cache, lengths: list[int]) -> list[Rows]:
    """What each row of the batch may read from `lengths` tokens on."""
    return [visible(subject, cache, b, n) for b, n in enumerate(lengths)]


def written(rows: Rows, before: Rows, tokens: int) -> Rows:
    """The rows of so many new tokens, and of the entries that they completed."""
    new = {
        at: len(held.raw) - len(before[at].raw) if at[1] in ("entries", "index keys") else tokens
        for at, held in rows.items()
    }
    return {at: replace(held, raw=held.raw[-new[at] :]) for at, held in rows.items() if new[at] and len(held.raw)}


def untouched(changed: list[tuple[str, Rows, Rows]]) -> Check:
    """Whether steps, of whichever rows, left what every row could read before."""
    bad = [(when, differing(after, before)) for when, after, before in changed if differing(after, before)]
    return compare(
        "captured steps change nothing that a row may read",
        sum(sum(d.values()) for _, d in bad),
        "==",
        0,
        STAYS,
        sum(len(held.raw) for _, _, before in changed for held in before.values()),
        unit="rows",
        where="captured steps",
        part="copy on write, captured steps",
        note=f"{bad[0][0]}: {summary(bad[0][1])}" if bad else "",
    )
