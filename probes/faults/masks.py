"""Section 1.6: masks: which entries a query is shown."""

import torch

from dsv4.model.attention import CSAAttention, HCAAttention, WindowAttention
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.selection import gathered, picked


def visibility(site: Site, rule) -> None:
    """Query at pos int64 [B, T] sees rule(pos, ratio) entries, as far as there are any."""
    site.patch(Step, "visible", lambda self, ratio: rule(self.pos, ratio).clamp(0, self.max_visible(ratio)))


def over_the_window(attn: WindowAttention, x, qr, q, window, index, step: Step, cache) -> torch.Tensor:
    """Attention of any layer to its window alone, with the arguments of `_attend`."""
    return WindowAttention.attend(attn, q, window, index, None, step, cache)


def window_only(site: Site, when) -> None:
    """The compressed branch of both layer kinds is off in steps for which when(step)."""
    for kind in (CSAAttention, HCAAttention):

        def attend(self, x, qr, q, window, index, step, cache, real=kind._attend):
            o = real(self, x, qr, q, window, index, step, cache)  # the branch runs, and its part is masked off
            return over_the_window(self, x, qr, q, window, index, step, cache) if when(step) else o

        site.patch(kind, "_attend", attend)


def union_of(entry: torch.Tensor) -> torch.Tensor:
    """Picks of all queries of a row, for each of them: [B, T, n], −1 where an entry is picked by nobody."""
    n = int(entry.max()) + 1 if entry.numel() else 0
    taken = entry.new_zeros(len(entry), n + 1, dtype=torch.bool).scatter_(
        1, torch.where(entry < 0, n, entry).flatten(1), True
    )
    return (
        torch.where(taken[:, :n], torch.arange(n, device=entry.device), -1).unsqueeze(1).expand(-1, entry.shape[1], -1)
    )


@mutation("1.6", bugs=(83,), parts=("selection",), probes=("influence",))
def picks_are_visible_to_all_queries(site: Site) -> None:
    """The gathered rows of all queries are one list: each query attends to what any query picked, if it is visible."""

    def union(entry, step):
        shared = union_of(entry)
        return torch.where(shared < step.visible(4).unsqueeze(-1), shared, -1)

    gathered(site, union)


@mutation("1.6", bugs=(83,), parts=("causality",), probes=("influence",))
def picks_of_later_queries_are_visible(site: Site) -> None:
    """The mask is padded with 0 (open) over the gathered rows: a query attends to what later queries picked."""
    gathered(site, lambda entry, step: union_of(entry))


@mutation("1.6", bugs=(101,), parts=("causality",), probes=("influence",))
def every_entry_of_the_step_is_visible(site: Site) -> None:
    """Causality is lost: a query sees all entries that the last query of its step sees."""
    visibility(site, lambda pos, ratio: torch.full_like(pos, 1 << 40))


@mutation("1.6", bugs=(101,), parts=("causality",), probes=("influence",))
def causal_by_blocks_only(site: Site) -> None:
    """Causality holds between blocks of 64 queries and not within: a query sees what the last one of its block sees."""
    visibility(site, lambda pos, ratio: (pos // 64 + 1) * 64 // ratio)


@mutation("1.6", bugs=(90, 100), parts=("causality", "visibility"), probes=("influence", "index_oracle"))
def entry_visible_one_token_early(site: Site) -> None:
    """An entry is visible to the query before its last token."""
    visibility(site, lambda pos, ratio: (pos + 2) // ratio)


@mutation("1.6", bugs=(90, 100), parts=("visibility",), probes=("influence", "index_oracle"))
def entry_visible_one_token_late(site: Site) -> None:
    """An entry is not visible to the query at its own last token."""
    visibility(site, lambda pos, ratio: pos // ratio)


@mutation("1.6", bugs=(90,), parts=("visibility",), probes=("influence", "index_oracle"))
def newest_entry_is_hidden(site: Site) -> None:
    """An entry is visible only when the next one is complete."""
    visibility(site, lambda pos, ratio: (pos + 1) // ratio - 1)


@mutation("1.6", bugs=(89,), parts=("compressed entries",), probes=("influence",))
def entries_masked_off_in_prefill(site: Site) -> None:
    """A boolean mask is padded with zeros: no entry is visible in a step of several tokens."""
    window_only(site, lambda step: step.T > 1)


@mutation("1.6", bugs=(89,), parts=("compressed entries",), probes=("influence",))
def entries_masked_off_in_decode(site: Site) -> None:
    """A mask built for prefill shuts the branch off where a step has one token."""
    window_only(site, lambda step: step.T == 1)


@mutation("1.6", bugs=(89,), parts=("compressed entries",), probes=("influence",))
def entries_masked_off_after_the_first_step(site: Site) -> None:
    """The branch is on in the first step only: what a cache holds is never attended to."""
    window_only(site, lambda step: min(step.starts) > 0)


@mutation("1.6", bugs=(89,), parts=("selection",), probes=("influence",))
def only_entries_of_the_last_chunk(site: Site) -> None:
    """The selection can only name entries that begin in the chunk that is running."""
    picked(site, lambda picks, step: torch.where(picks >= (step.start // 4).view(-1, 1, 1), picks, -1))


@mutation("1.6", bugs=(101,), parts=("selection",), probes=("influence",))
def the_selected_are_masked_out(site: Site) -> None:
    """The mask is inverted: a query attends to every visible entry that it did not select."""

    def inverted(entry, step):
        everything = torch.arange(step.max_visible(4), device=entry.device).expand(*entry.shape[:2], -1)
        taken = (everything.unsqueeze(-1) == entry.unsqueeze(-2)).any(-1)
        return torch.where(taken | (everything >= step.visible(4).unsqueeze(-1)), -1, everything)

    gathered(site, inverted)
