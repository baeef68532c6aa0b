"""Section 1.13: the pass that verifies drafts unless something else is asked for, and the batch engine's passes."""

import torch

from dsv4.cache.paged import PagedCache
from dsv4.engine.acceptance import Drawn
from dsv4.engine.batch import BatchEngine
from dsv4.engine.passes import Passes
from dsv4.probes.faults import Site, mutation
from dsv4.speculation import verify
from dsv4.speculation.draft import MTPDrafter


def of_default(site: Site, change) -> None:
    """change(logits [B, W, vocab], counts) of every pass that `verify.default` runs, by whichever way; those that ask
    for a way by itself get it as it is."""
    for name in ("SingleSteps", "Append", "Captured"):  # where `default` takes them from
        real = getattr(verify, name)

        class Changed(real):
            def __call__(self, ids, counts, want_streams, real=real):
                logits, streams = real.__call__(self, ids, counts, want_streams)
                return change(logits, counts), streams

        site.patch(verify, name, Changed)


# ---- the default verification -------------------------------------------------------------


# only a host backend promises single steps: on a GPU this patch changes nothing
@mutation(
    "1.13", bugs=(141,), parts=("verification, logits",), probes=("verification",), numerics="native", backend="cpu"
)
def verification_as_one_append(site: Site) -> None:
    """A pass is one append where single steps are promised: sums run in another order, and a choice may differ."""
    site.patch(verify, "HOST", ())


@mutation("1.13", bugs=(141,), parts=("verification, logits of the place before",), probes=("verification",))
def verified_one_place_late(site: Site) -> None:
    """Each draft is judged by the logits of the place before its own; the first place is right."""

    def late(logits, counts):
        return torch.cat((logits[:, :1], logits[:, :-1]), 1)

    of_default(site, late)


@mutation("1.13", bugs=(141,), parts=("verification, the draft's own logits",), probes=("verification",))
def drafts_judge_themselves(site: Site) -> None:
    """A draft is compared with the drafting model's own logits, which chose it: all of them stay."""
    said: list[torch.Tensor] = []

    def begin(drafter, prompts, model, cache, choose):
        def noted(logits, rows):
            said.append(logits.clone())
            return choose(logits, rows)

        begun(drafter, prompts, model, cache, noted)

    begun = site.patch(MTPDrafter, "begin", begin)

    def own(logits, counts):
        logits = logits.clone()
        for place, drafted in enumerate(said[: logits.shape[1] - 1]):
            if len(drafted) == len(logits):
                logits[:, place] = drafted.to(logits)
        said.clear()
        return logits

    of_default(site, own)


@mutation("1.13", bugs=(141, 143), parts=("verification, logits", "verification, text"), probes=("verification",))
def a_pass_as_wide_as_a_block_is_cut(site: Site) -> None:
    """A pass of exactly 4 drafts, the compression ratio, loses its last place: it repeats the logits before. Texts go
    wrong at that depth alone."""

    def cut(logits, counts):
        if max(counts) != 5:
            return logits
        return torch.cat((logits[:, :4], logits[:, 3:4], logits[:, 5:]), 1)

    of_default(site, cut)


# ---- passes of the batch engine -----------------------------------------------------------


def rewinds(site: Site, change) -> None:
    """What `_hold` makes the cache forget becomes change(counts)."""

    def hold(passes, streams, came, back):
        held(passes, streams, came, change(back))

    held = site.patch(Passes, "_hold", hold)


@mutation("1.13", bugs=(141,), parts=("engine rewind",), probes=("engine_drafts",))
def engine_rewinds_at_most_one(site: Site) -> None:
    """The engine forgets one rejected draft at most: the others stay, and what follows stands behind them."""
    rewinds(site, lambda counts: [min(1, n) for n in counts])


@mutation("1.13", bugs=(141,), parts=("engine rewind",), probes=("engine_drafts",))
def engine_rewinds_one_too_few(site: Site) -> None:
    """The engine forgets one draft fewer than it rejects."""
    rewinds(site, lambda counts: [max(0, n - 1) for n in counts])


@mutation("1.13", bugs=(136, 141), parts=("engine rewind, of another row",), probes=("engine_drafts",))
def engine_rewinds_another_row(site: Site) -> None:
    """The drafts that one row rejects are forgotten in the row behind it."""
    rewinds(site, lambda counts: counts[-1:] + counts[:-1])


@mutation("1.13", bugs=(143,), parts=("engine, MTP window",), probes=("engine_drafts",))
def engine_forgets_to_rewind_the_block(site: Site) -> None:
    """On pages the entries that the MTP block makes of its own guesses are not forgotten after drafting."""
    site.patch(PagedCache, "rewind_mtp", lambda cache, n: None)


@mutation("1.13", bugs=(141,), parts=("engine, bonus token",), probes=("engine_drafts",))
def engine_takes_the_bonus_token_of_the_last_draft(site: Site) -> None:
    """Where all drafts stay, the token behind them is that of the logits before the last draft."""

    def accept(drawn, work, logits, drafts):
        if drafts:
            best, values = list(logits.best), logits.values.clone()
            best[len(drafts)], values[len(drafts)] = best[len(drafts) - 1], values[len(drafts) - 1]
            logits = logits._replace(best=best, values=values)
        return real(drawn, work, logits, drafts)

    real = site.patch(Drawn, "accept", accept)


@mutation("1.13", bugs=(141, 134), parts=("engine, after a cancelled row",), probes=("engine_drafts",))
def a_cancelled_row_keeps_its_drafts(site: Site) -> None:
    """A row that is cancelled within a pass forgets its accepted tokens, not the drafts that are not judged yet: the
    next request of that row stands behind them."""

    def cancel(engine, id):
        work = next((w for w in engine.running if w.request.id == id), None)
        row = None if work is None else work.row
        final = None if row is None else engine.cache._accepted[row]
        left = 0 if final is None else engine.cache.lengths[row] - final
        real(engine, id)
        if left > 0:
            engine.cache._main.now[row] = left

    real = site.patch(BatchEngine, "cancel", cancel)


# ---- depth ----------------------------------------------------------------------------------


@mutation("1.13", bugs=(141, 143), parts=("draft depth",), probes=("draft_depth",))
def drafts_as_deep_as_the_window_leave_one_entry(site: Site) -> None:
    """Drafting 7 tokens or more, as deep as the window, forgets one entry of the block too few."""

    def draft(drafter, sizes):
        cache = drafter._cache
        real = cache.rewind_mtp
        cache.rewind_mtp = lambda counts: real([n - (n >= 6) for n in counts])
        try:
            return drafted(drafter, sizes)
        finally:
            del cache.rewind_mtp

    drafted = site.patch(MTPDrafter, "draft", draft)


@mutation("1.13", bugs=(141,), parts=("draft depth, acceptance by position",), probes=("draft_depth",))
def the_last_draft_of_a_block_never_stays(site: Site) -> None:
    """A pass of exactly 4 drafts, the compression ratio, rejects the last of them: texts are right, and slow."""

    def cut(logits, counts):
        if max(counts) == 5:
            logits = logits.clone()
            logits[:, 3] = logits[:, 3].roll(1, -1)
        return logits

    of_default(site, cut)
