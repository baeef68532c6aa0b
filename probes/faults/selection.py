"""Section 1.6: top-k and sentinels: which entries a query selects. Masks are in masks.py."""

import torch

from dsv4.cache.rows import Entries
from dsv4.model.attention import LightningIndexer
from dsv4.probes.faults import Site, mutation

SECTION = "1.6", "Top-k, sentinels, masks"

STALE = 3  # an entry that a buffer nobody cleared still names


def gathered(site: Site, change) -> None:
    """entry int64 [B, T, K], on the way from the indexer to the rows that attention reads, becomes change(entry,
    step)."""
    real = Entries.chosen
    site.patch(Entries, "chosen", lambda self, step, entry, op: real(self, step, change(entry, step), op))


def picked(site: Site, change) -> None:
    """What the indexer returns becomes change(selection, step)."""
    real = LightningIndexer.forward
    site.patch(
        LightningIndexer, "forward", lambda self, x, qr, step, cache: change(real(self, x, qr, step, cache), step)
    )


# ---- sentinels ----------------------------------------------------------------------------


@mutation("1.6", bugs=(82,), parts=("absent keys",), probes=("influence",))
def missing_picks_read_entry_0(site: Site) -> None:
    """−1 is clamped to 0: a query that sees fewer than k entries attends to entry 0 once for each that is missing."""
    gathered(site, lambda entry, step: entry.clamp(min=0))


@mutation("1.6", bugs=(88,), parts=("absent keys",), probes=("influence",))
def stale_tail_is_gathered(site: Site) -> None:
    """The tail of the selection holds what an earlier step left there, and the gather does not mask it."""
    gathered(site, lambda entry, step: torch.where(entry < 0, min(STALE, max(step.max_visible(4) - 1, 0)), entry))


@mutation("1.6", bugs=(88,), parts=("selection",), probes=("edges", "index_oracle"))
def selection_buffer_is_never_cleared(site: Site) -> None:
    """The selection comes in a reused buffer: where fewer than k entries are visible, old picks stay behind the new
    ones."""
    site.kernel("topk_entries", lambda real: lambda scores, k: torch.where(real(scores, k) < 0, 0, real(scores, k)))


@mutation("1.6", bugs=(85,), parts=("absent keys", "sparse attention"), probes=("edges", "influence"))
def lanes_beyond_the_selection_are_read(site: Site) -> None:
    """With more than 64 queries, lanes beyond a query's own number of picks are read too."""

    def unbounded(real):
        def attend(q, window, index, entries, picks, *rest):
            if picks is not None and q.shape[0] > 64 and picks.shape[1]:
                picks = torch.where(picks < 0, picks.amax(-1, keepdim=True).clamp(min=0), picks)
            return real(q, window, index, entries, picks, *rest)

        return attend

    site.kernel("sparse_attention", unbounded)


@mutation("1.6", bugs=(96,), parts=("absent keys",), probes=("edges",))
def absent_rows_in_the_denominator(site: Site) -> None:
    """Rows of slot −1 are zeros and stay in the softmax: each adds exp(0) to the denominator."""

    def zeros_count(real):
        def attend(q, window, index, entries, picks, *rest):
            def padded(pool, rows):
                return torch.cat((pool, pool.new_zeros(1, pool.shape[1]))), torch.where(rows < 0, len(pool), rows)

            window, index = padded(window, index)
            entries, picks = (None, None) if picks is None else padded(entries, picks)
            return real(q, window, index, entries, picks, *rest)

        return attend

    site.kernel("sparse_attention", zeros_count)


@mutation("1.6", bugs=(92, 93), parts=("sparse attention", "absent keys"), probes=("edges",), numerics="native")
def masks_are_added_in_bf16(site: Site) -> None:
    """Two planes of finfo.min are added: −inf in bf16, and NaN for a query all of whose picks are masked."""

    def added(real):
        def attend(q, window, index, entries, picks, *rest):
            o = real(q, window, index, entries, picks, *rest)
            if picks is None or picks.shape[1] == 0:
                return o
            plane = (picks < 0).bfloat16() * torch.finfo(torch.bfloat16).min
            branch = torch.softmax(plane + plane, -1)  # of the entries alone, before it is merged with the window
            return torch.where(branch.isnan().any(-1).view(-1, 1, 1), float("nan"), o)

        return attend

    site.kernel("sparse_attention", added)


@mutation("1.6", bugs=(91,), parts=("HCA attention", "compressed entries"), probes=("edges",))
def no_mask_without_entries(site: Site) -> None:
    """With no entry yet the mask is None, and the layer that adds it fails."""

    def unmasked(real):
        def attend(q, window, index, entries, *rest):
            mask = None if entries.shape[1] == 0 else 0.0
            return real(q, window, index, entries, *rest) + mask

        return attend

    site.kernel("hca_attention", unmasked)


@mutation("1.6", bugs=(91,), parts=("selection", "compressed entries"), probes=("influence", "index_oracle"))
def few_entries_select_none(site: Site) -> None:
    """With no more entries than k the scoring is skipped, and with it the selection."""
    picked(site, lambda picks, step: torch.full_like(picks, -1) if step.max_visible(4) <= 6 else picks)


# ---- top-k --------------------------------------------------------------------------------


@mutation("1.6", bugs=(99,), parts=("selection",), probes=("edges",))
def ties_go_to_the_highest_entry(site: Site) -> None:
    """Among equal scores the highest entry wins."""

    def highest(real):
        def select(scores, k):
            picks = real(scores.flip(-1), k)
            return torch.where(picks < 0, -1, scores.shape[-1] - 1 - picks)

        return select

    site.kernel("topk_entries", highest)


@mutation("1.6", bugs=(99,), parts=("selection", "determinism"), probes=("edges",))
def ties_fall_by_chance(site: Site) -> None:
    """Among equal scores whichever thread comes first wins."""

    def racing(real):
        def select(scores, k):
            order = torch.randperm(scores.shape[-1], device=scores.device)
            picks = real(scores[..., order], k)
            return torch.where(picks < 0, -1, order[picks.clamp(min=0)]) if len(order) else picks

        return select

    site.kernel("topk_entries", racing)


@mutation("1.6", bugs=(95,), parts=("selection",), probes=("edges",))
def top_k_ends_at_a_width(site: Site) -> None:
    """The selection looks at 32,768 entries, as many as its scratch memory holds, and at none beyond."""
    site.kernel("topk_entries", lambda real: lambda scores, k: real(scores[..., : 1 << 15], k))


@mutation("1.6", bugs=(95,), parts=("selection",), probes=("edges",))
def at_most_512_picks(site: Site) -> None:
    """The sort is 512 wide: a larger k selects 512 entries and fills up with −1."""

    def narrow(real):
        def select(scores, k):
            picks = real(scores, k)
            picks[..., 512:] = -1
            return picks

        return select

    site.kernel("topk_entries", narrow)


@mutation("1.6", bugs=(87,), parts=("selection",), probes=("edges",))
def nan_scores_select_garbage(site: Site) -> None:
    """A NaN among the scores is never inserted: its lane gives what the memory held before."""

    def uninitialised(real):
        def select(scores, k):
            picks = real(scores, k)
            lost = scores.isnan().any(-1, keepdim=True) & (
                torch.arange(picks.shape[-1], device=picks.device) == picks.shape[-1] - 1
            )
            return torch.where(lost, 0x5F5F5F5F, picks)

        return select

    site.kernel("topk_entries", uninitialised)


@mutation("1.6", bugs=(82,), parts=("selection",), probes=("edges", "index_oracle"))
def an_entry_is_picked_twice(site: Site) -> None:
    """Picks come unsorted and with a duplicate: the best entry also takes the last lane."""

    def duplicated(real):
        def select(scores, k):
            picks = real(scores, k)
            return torch.cat((picks[..., :-1], picks[..., :1]), -1).flip(-1)

        return select

    site.kernel("topk_entries", duplicated)


@mutation("1.6", bugs=(101,), parts=("selection",), probes=("edges", "index_oracle"))
def the_worst_entries_win(site: Site) -> None:
    """The comparison is inverted: the k lowest scores are selected."""

    def lowest(real):
        def select(scores, k):
            return real(torch.where(scores == float("-inf"), scores, -scores), k)

        return select

    site.kernel("topk_entries", lowest)


# ---- whose selection ----------------------------------------------------------------------


@mutation("1.6", bugs=(98,), parts=("selection",), probes=("influence",))
def selection_of_the_query_before(site: Site) -> None:
    """The buffer of picks is read one query off: each attends to what the query before it selected."""
    gathered(site, lambda entry, step: entry.roll(1, 1))


@mutation("1.6", bugs=(98,), parts=("selection",), probes=("influence",))
def selection_of_another_row(site: Site) -> None:
    """In a batch, the buffer of picks is read one row off."""
    gathered(site, lambda entry, step: entry.roll(1, 0))


@mutation("1.6", bugs=(97,), parts=("rows of the batch", "batching"), probes=("influence", "isolation"))
def entries_of_the_first_row(site: Site) -> None:
    """In a batch, every row reads the entries of the first."""

    def first(self, step, entry, op):
        return self.flat, entry.flatten(0, 1)

    site.patch(Entries, "chosen", first)


@mutation("1.6", bugs=(88,), parts=("selection",), probes=("index_oracle",))
def selection_of_the_layer_before(site: Site) -> None:
    """Layers share the buffer of picks, and the second CSA layer finds it filled."""

    def shared(subject):
        indexers = [layer.attn.indexer for layer in subject.model.layers if hasattr(layer.attn, "indexer")]
        indexers[1].forward = lambda x, qr, step, cache: type(indexers[0]).forward(indexers[0], x, qr, step, cache)

    site.after_load(shared)
