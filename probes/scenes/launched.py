"""A batch of requests on pages that were taken beforehand, in one launch where the device has such loops."""

from collections.abc import Iterator

import torch

from dsv4.cache.allotted import Allotted
from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache, new_paged_cache
from dsv4.cache.paged_view import PagedView
from dsv4.cache.paging import PageGroup
from dsv4.model.causal import captures
from dsv4.probes.compare import tokens
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.subject import Subject
from dsv4.runtime.conditional import missing
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.one_launch import OneLaunch
from dsv4.speculation.policy import Adaptive, Policy, Static
from dsv4.speculation.policy_device import on_device
from dsv4.speculation.rounds import Rounds

NEW = (10, 18)  # tokens of each row: the first ends while the other goes on
CAP = 2  # drafts of a pass under pressure, at most
PART, CAPPED = "one launch", "one launch, drafts under pressure"


def launched(subject: Subject, drafts: int, seed: int) -> Iterator[Check]:
    """Two rows; the first begins another page of the pool whose pages fill first, and the windows of both come round to
    pages that they had before. The other side runs on rings. Where rounds are captured, kernels of rings sum in another
    order: there it is the rounds that the host launches, on pages that the pools gave out by their own rule."""
    model = subject.model
    name, group = min(growing(model), key=lambda found: found[1].rows * found[1].tokens)
    span = group.rows * group.tokens
    lengths, reach = [span - 5, 6], span + max(NEW) + drafts
    if reach > subject.config.max_position_embeddings:
        why = f"{reach} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
        yield vacuous("rounds on pages taken beforehand", why, part=PART)
        return
    rows = tokens(subject, max(lengths), seed, rows=2)
    ids = [row[:n].tolist() for row, n in zip(rows, lengths)]
    loops = captures(model) and not missing(model.device)
    kind, where = (OneLaunch, "one launch") if loops else (Rounds, "pages taken beforehand")
    there = given(model, reach, drafts) if loops else model.new_cache(2, reach, drafts + 1)
    there.piece = Allotted.piece  # prompts run in the same pieces: products of other shapes sum in another order
    wanted = rounds(subject, Rounds, there, ids, drafts, Adaptive())
    found = rounds(subject, kind, pages(model, reach, drafts, {}), ids, drafts, Adaptive())
    yield from alike(wanted, found, where)
    cache = pages(model, reach, drafts, {name: 3})  # the first row comes to need two, the other one
    yield from capped(rounds(subject, kind, cache, ids, drafts, Static(drafts)), cache, where)


def growing(model) -> list[tuple[str, PageGroup]]:
    """Groups of pages of which a row holds more the longer it is."""
    return [(name, group) for name, group in model.page_layout().groups.items() if group.back is None and not group.mtp]


def pages(model, reach: int, drafts: int, of: dict[str, int]) -> Allotted:
    """Two rows with pages for `reach` tokens; pools of four times as many, or of as many as stated."""
    every = {name: 4 * pool.pages for name, pool in new_paged_cache(model, 2, reach, max_rewind=drafts).pools.items()}
    cache = Allotted(new_paged_cache(model, 2, reach, max_rewind=drafts + 1, pages=every | of, poison=True), 2)
    cache.allot([reach, reach if not of else max(NEW) + 2 * drafts + 8])
    return cache


def given(model, reach: int, drafts: int) -> PagedView:
    """Two rows with pages for `reach` tokens, each a page of its own: none comes round again."""
    every = {name: 2 * -(-reach // (g.rows * g.tokens)) for name, g in model.page_layout().groups.items()}
    cache = PagedView(new_paged_cache(model, 2, reach, max_rewind=drafts + 1, pages=every, poison=True), 2)
    for mtp in (False, True):
        cache.show([0, 1], reach, mtp)
    return cache


def rounds(subject: Subject, kind, cache: Cache, ids: list[list[int]], drafts: int, policy: Policy) -> Rounds:
    """Rounds of these prompts that have run to the end."""
    found = kind(
        subject.model,
        cache,
        drafts,
        *primed(subject.model, cache, ids),
        [n - 1 for n in NEW],
        (),
        on_device(policy, len(ids), subject.model.device),
        ahead=1,
    )
    found.prepare()
    found.run()
    return found


def alike(wanted: Rounds, found: Rounds, where: str) -> Iterator[Check]:
    """Tokens, and what was drafted and accepted of each row in each round: the same steps on the same numbers."""
    why = "the same graphs, or the same steps, in the same order on the same numbers"
    count = lambda r: [row[:n] for row, n in zip(r.out.tolist(), r.known.written)]
    off = [b for b, (a, o) in enumerate(zip(count(wanted), count(found))) if a != o]
    yield compare("rows with other tokens", len(off), "==", 0, why, 2, unit="rows", where=where, part=f"{PART}, tokens")
    off = [b for b, (a, o) in enumerate(zip(wanted.history(), found.history())) if a != o]
    name = "rows whose rounds drafted or accepted otherwise"
    yield compare(name, len(off), "==", 0, why, 2, unit="rows", where=where, part=f"{PART}, sizes")
    if isinstance(found, OneLaunch):
        yield compare("launches", found.launches, "==", 1, "one a batch", 1, unit="launches", where=where, part=PART)


def capped(found: Rounds, cache: Allotted, where: str) -> Iterator[Check]:
    """Sizes against what pools hold when rows take pages as they grow."""
    drafted, _, count = found.log[: found.known.rounds].cpu().unbind(1)
    began = torch.tensor(cache.lengths) - count.sum(0)
    over = under = seen = 0
    whole, sizes = cache.whole, {name: pool.pages for name, pool in cache.whole.pools.items()}
    pool = PagedCache(whole.layout, 2, whole.max_context, sizes, cache.max_rewind)
    for r in range(len(drafted)):
        ran = count[:r].sum(0)
        lengths, left = (began + ran).tolist(), (torch.tensor(NEW) - 1 - ran).tolist()
        pressed = taken(pool, [n if k else 0 for n, k in zip(lengths, left)])
        seen += pressed
        for size, k in zip(drafted[r].tolist(), left):
            most = max(0, min(found.most, k - 1))
            over += pressed and size > CAP
            under += not pressed and size < most
    name, why = "rows that drafted more than 2 tokens under pressure", "the cap while over 85 % of a pool is live"
    yield compare(name, over, "==", 0, why, max(seen, 1), unit="rows", where=where, part=CAPPED)
    name, why = "rows that drafted less though there was no pressure", "the policy's size, within what is left"
    yield compare(name, under, "==", 0, why, len(drafted) * 2, unit="rows", where=where, part=CAPPED)
    name, why = "rounds under pressure", "the first row's last page is taken halfway"
    if seen:
        yield compare(name, seen, ">=", 1, why, len(drafted), unit="rounds", where=where, part=CAPPED)
    else:  # so many drafts were accepted that the first row ended in the round that took its last page
        yield vacuous(name, "none began after the first row's last page was taken", part=CAPPED)


def taken(pool: PagedCache, lengths: list[int]) -> bool:
    """Whether the pools are under pressure when rows of these lengths hold their pages and room for one token more."""
    for b, n in enumerate(lengths):
        for held in (pool._main, pool._mtp):
            held.now[b] = held.high[b] = held.low[b] = n
        if not n:
            pool.leave(b)
        for mtp in (False, True) if n else ():
            pool.make_room(slice(b, b + 1), 1, mtp)
    return pool.under_pressure
