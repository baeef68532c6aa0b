"""Section 1.13: what speculative decoding leaves behind: rows of rejected drafts, the MTP block after a pass,
lengths."""

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.layer import LayerCache
from dsv4.cache.rows import Entries, Tokens
from dsv4.engine.passes import Passes
from dsv4.probes.faults import Site, mutation
from dsv4.speculation.accept import Accepted
from dsv4.speculation.device_drafters import MTPDrafts
from dsv4.speculation.draft import MTPDrafter
from dsv4.speculation.rounds import Rounds

SECTION = "1.13", "Speculative decoding"


def kept_rows(site: Site, ring_of) -> None:
    """Rows of a ring of the main model that were written once are not written again by shorter steps: what was rejected
    stays."""

    def init(layer, spec, *args, **more):
        real(layer, spec, *args, **more)
        ring = None if spec.drafts else ring_of(layer)
        if ring is not None:
            ring.high = {}

    real = site.patch(LayerCache, "__init__", init)

    def extend(ring, step, values):
        if getattr(ring, "high", None) is None or not ring.rows.fits(step):
            return extended(ring, step, values)
        high = torch.tensor([[ring.high.get(b, 0)] for b in range(step.first, step.first + step.B)], device=step.device)
        old = (step.pos < high).flatten().unsqueeze(1)
        for b, start in enumerate(step.starts, step.first):
            ring.high[b] = max(ring.high.get(b, 0), start + step.T)
        return extended(
            ring, step, torch.where(old, ring.rows.fetch(ring.slots(step), values.dtype).to(values.dtype), values)
        )

    extended = site.patch(Tokens, "extend", extend)


# ---- what is forgotten --------------------------------------------------------------------


@mutation("1.13", bugs=(132,), parts=("after a pass, window rows",), probes=("speculation",))
def window_rows_of_rejected_drafts_stay(site: Site) -> None:
    """A rewind forgets all but the window: rows of rejected drafts are taken for those of the tokens that came
    instead."""
    kept_rows(site, lambda layer: layer.window)


@mutation("1.13", bugs=(132, 130), parts=("after a pass, compressor rows",), probes=("speculation",))
def main_raw_rows_of_rejected_drafts_stay(site: Site) -> None:
    """A rewind forgets all but the compressor's raw rows: the next entry pools rejected drafts."""
    kept_rows(site, lambda layer: layer.main and layer.main.raw)


@mutation("1.13", bugs=(132, 130), parts=("after a pass, the indexer's compressor rows",), probes=("speculation",))
def index_raw_rows_of_rejected_drafts_stay(site: Site) -> None:
    """A rewind forgets all but the raw rows of the indexer's compressor: the next key is of rejected drafts."""
    kept_rows(site, lambda layer: layer.index and layer.index.raw)


@mutation("1.13", bugs=(132,), parts=("after a pass, index keys",), probes=("speculation",))
def index_keys_of_rejected_drafts_stay(site: Site) -> None:
    """A key that was written once is not written again: after a rewind it is that of a window with rejected drafts."""

    def init(layer, *args, **more):
        real_init(layer, *args, **more)
        if layer.index is not None:
            layer.index.entries.once = set()

    real_init = site.patch(LayerCache, "__init__", init)

    def write(entries, step, values):
        if not hasattr(entries, "once") or entries.rows.packed:
            return real(entries, step, values)
        slots = entries.slots(step)
        fresh = torch.tensor([int(s) not in entries.once for s in slots], device=slots.device)
        entries.once.update(slots.tolist())
        entries.flat.index_copy_(0, slots[fresh], values.to(entries.flat.dtype)[fresh])

    real = site.patch(Entries, "write", write)


@mutation("1.13", bugs=(132, 143), parts=("after a pass, MTP window",), probes=("speculation",))
def guessed_entries_of_the_block_stay(site: Site) -> None:
    """Entries of chained drafts, made of the block's own streams, are not forgotten: the block goes on behind its
    guesses."""
    site.patch(Cache, "rewind_mtp", lambda cache, n: None)


@mutation("1.13", bugs=(), parts=("after a pass, window rows",), probes=("speculation",))
def one_rejected_draft_stays_in_the_cache(site: Site) -> None:
    """A pass rewinds one draft fewer than it rejects: what follows stands behind a token that never came out."""

    def hold(passes, streams, came, back):
        real(passes, streams, came, [max(0, n - 1) for n in back])

    real = site.patch(Passes, "_hold", hold)


# ---- the MTP block after a pass -----------------------------------------------------------


@mutation("1.13", bugs=(143,), parts=("after a round, MTP window",), probes=("speculation",))
def block_follows_a_round_by_its_own_streams(site: Site) -> None:
    """After verification the block's entries are made of the streams that it had drafted with, not of the model's."""

    def update(found, streams, chosen, *rest):
        own = found.chained.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1).flatten(0, 1)
        real(found, own.to(streams.dtype).contiguous(), chosen, *rest)

    real = site.patch(MTPDrafts, "update", update)


@mutation("1.13", bugs=(143,), parts=("after a pass, MTP window",), probes=("speculation",))
def block_follows_a_pass_by_its_own_streams(site: Site) -> None:
    """Final tokens go through the block with the streams that it had fed back while drafting, not with the model's."""

    def own(drafter, streams, tokens, counts):
        held = getattr(drafter, "_own", None)
        real(drafter, streams if held is None else held.expand_as(streams), tokens, counts)

    real = site.patch(MTPDrafter, "commit", own)

    def begin(drafter, *args):
        begun(drafter, *args)
        run = drafter._run  # captured or not

        def noted(*args):
            logits, streams = run(*args)
            drafter._own = streams[:, -1:]
            return logits, streams

        drafter._run = noted

    begun = site.patch(MTPDrafter, "begin", begin)


@mutation("1.13", bugs=(143,), parts=("after a pass, MTP window",), probes=("speculation",))
def streams_of_a_pass_one_token_late(site: Site) -> None:
    """The block gets the streams of the token that it embeds, not of the one before."""

    def late(drafter, streams, tokens, counts):
        real(drafter, torch.cat((streams[:, 1:], streams[:, -1:]), 1), tokens, counts)

    real = site.patch(MTPDrafter, "commit", late)


@mutation("1.13", bugs=(143,), parts=("after a round, MTP window",), probes=("speculation",))
def block_never_follows_rounds_without_drafts(site: Site) -> None:
    """Tokens of rounds that drafted nothing never go through the block: its window has a hole where they were."""
    site.patch(MTPDrafts, "catch_up", lambda found, width, start: None)


@mutation("1.13", bugs=(), parts=("after a round, next drafts",), probes=("speculation",))
def block_follows_a_round_without_drafts_one_token_late(site: Site) -> None:
    """What was kept of such rounds goes to the place behind its own."""

    def late(found, width, start):
        found.kept -= 1
        real(found, width, start)
        found.kept += 1

    real = site.patch(MTPDrafts, "catch_up", late)


@mutation("1.13", bugs=(143,), parts=("after a round, next drafts",), probes=("speculation",))
def chain_begins_at_the_last_verified_place(site: Site) -> None:
    """The next drafts go on from the block's streams after the last draft, not after the last token that counts."""

    def update(found, streams, chosen, count, start):
        real(found, streams, chosen, count, start)
        features = found.features.clone()
        real(found, streams, chosen, torch.full_like(count, chosen.shape[1]), start)
        found.features.copy_(features)

    real = site.patch(MTPDrafts, "update", update)


@mutation("1.13", bugs=(), parts=("after a round, window rows",), probes=("speculation",))
def a_round_moves_on_by_all_its_drafts(site: Site) -> None:
    """The start on the device moves on by what was drafted, not by what was accepted."""

    def a_round(found, D):
        begun = found.start.clone()
        real(found, D)
        found.start.copy_(torch.where(found.start > begun, begun + D + 1, found.start))

    real = site.patch(Rounds, "_round", a_round)


@mutation("1.13", bugs=(), parts=("accepted drafts", "after a round, window rows"), probes=("speculation",))
def a_round_keeps_what_all_rows_keep(site: Site) -> None:
    """Every row moves on by as many drafts as the row that accepts least."""

    def accept(found, logits, drafts, proposed):
        count, tokens = real(found, logits, drafts, proposed)
        return Accepted(count.amin().expand_as(count), tokens)

    real = site.patch(Rounds, "_accept", accept)
