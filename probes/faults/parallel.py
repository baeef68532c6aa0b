"""Sections 1.2, 1.5, 1.7, 1.9 and 1.11: several ranks that hold one model together."""

import torch
import torch.nn.functional as F

from dsv4.loaders.cuts import Cut
from dsv4.loaders.load import Inventory
from dsv4.model import together
from dsv4.model.attention import GroupedLinear, WindowAttention
from dsv4.model.moe import Experts, MoE, SharedExpert
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.vocabulary import Embedding
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.profile import RANKS as RAW

RANKS = dict(probes=("parallel",), profile="ranks")


def summed(site: Site, owner: type, total) -> None:
    """Where an `owner` sums x over ranks, total(ranks, x) is taken."""

    class Other(Ranks):
        def sum(self, x, dtype=None):
            found = x if self.size == 1 else total(Ranks(self.rank, self.size, self.group), x)
            return found.to(dtype or x.dtype)

    def forward(module, *args):
        kept = module.ranks
        module.ranks = Other(kept.rank, kept.size, kept.group)
        try:
            return real(module, *args)
        finally:
            module.ranks = kept

    real = site.patch(owner, "forward", forward)


def read(site: Site, ending: str, change) -> None:
    """What a rank reads of its part of tensors whose names end so is change(read, cut), where read(cut) reads a part
    and read(None) all."""

    def of(inventory, name, cut=None):
        if cut is None or not name.endswith(ending):
            return real(inventory, name, cut)
        return change(lambda part: real(inventory, name, part), cut)

    real = site.patch(Inventory, "read", of)


def loaded(site: Site, change) -> None:
    """change(ranks, model) of each rank after it is loaded."""

    def check(ranks, model):
        real(ranks, model)
        if ranks.size > 1:
            with torch.no_grad():
                change(ranks, model)

    real = site.patch(together, "check_whole", check)


def built(site: Site, owner: type, change) -> None:
    """change(module, ranks) of each `owner` of a rank after it is made."""

    def init(module, *args):
        real(module, *args)
        if isinstance(args[-1], Ranks) and args[-1].size > 1:
            change(module, args[-1])

    real = site.patch(owner, "__init__", init)


# ---- sums --------------------------------------------------------------------------------


@mutation("1.11", bugs=(), parts=("sum of attention",), **RANKS)
def attention_is_not_summed_over_ranks(site: Site) -> None:
    """Every rank goes on with what its own heads give."""
    summed(site, WindowAttention, lambda ranks, x: x)


@mutation("1.11", bugs=(), parts=("sum of MoE",), **RANKS)
def experts_are_not_summed_over_ranks(site: Site) -> None:
    """Every rank goes on with what its own experts give."""
    summed(site, MoE, lambda ranks, x: x)


@mutation("1.11", bugs=(), parts=("parallel, embedding",), **RANKS)
def the_embedding_is_not_summed_over_ranks(site: Site) -> None:
    """A token of another rank's part of the vocabulary enters as zeros."""
    summed(site, Embedding, lambda ranks, x: x)


@mutation("1.11", bugs=(), parts=("sum of attention",), **RANKS)
def attention_is_summed_over_ranks_twice(site: Site) -> None:
    """The sum over ranks is summed over ranks again: attention counts as often as there are ranks."""
    summed(site, WindowAttention, lambda ranks, x: ranks.sum(ranks.sum(x)))


@mutation("1.11", bugs=(), parts=("bits of attention", "bits of MoE"), **RANKS)
def each_rank_begins_a_sum_with_its_own_part(site: Site) -> None:
    """Sums over ranks are taken in another order on each, so their last bits differ."""

    def total(ranks, x):
        parts = list(ranks.gathered(x))
        return sum(parts[ranks.rank :] + parts[: ranks.rank], torch.zeros_like(x))

    for owner in (WindowAttention, MoE):
        summed(site, owner, total)


@mutation("1.11", bugs=(), parts=("sum of attention", "sum of MoE"), **RANKS)
def sums_read_what_other_ranks_gave_before(site: Site) -> None:
    """A rank adds to its part what the buffers of the others held after the exchange before: their flags are not waited
    for."""

    def total(ranks, x):
        now, held = ranks.gathered(x), ranks.group.__dict__.setdefault("held", {})
        before = held.get(x.shape, now)
        held[x.shape] = now
        return sum(x if r == ranks.rank else part for r, part in enumerate(before))

    for owner in (WindowAttention, MoE):
        summed(site, owner, total)


# ---- attention ---------------------------------------------------------------------------


@mutation("1.7", bugs=(103,), parts=("heads and sinks",), **RANKS)
def every_rank_has_the_sinks_of_the_first_heads(site: Site) -> None:
    """Heads of the ranks after the first get rank 0's sinks in their softmax."""
    read(site, "attn_sink", lambda part, cut: part(Cut(0, 0, cut.size, cut.whole)))


@mutation("1.7", bugs=(), parts=("parallel, queries",), **RANKS)
def queries_of_a_rank_begin_a_head_late(site: Site) -> None:
    """A rank's rows of wq_b begin one head after its first, while sinks and groups are those of its heads."""
    heads = RAW["num_attention_heads"]
    late = lambda rows, cut: rows.roll(-cut.whole // heads, 0).narrow(0, cut.start, cut.size).contiguous()
    read(site, "attn.wq_b.weight", lambda part, cut: late(part(None), cut))


@mutation("1.7", bugs=(), parts=("parallel, groups",), **RANKS)
def a_rank_has_its_groups_in_reverse_order(site: Site) -> None:
    """What wo_a makes of a rank's groups of heads meets the columns of wo_b that belong to other groups."""

    def forward(linear, x):
        found = real(linear, x)
        return found if linear.cut is None else found.flip(1)

    real = site.patch(GroupedLinear, "forward", forward)


@mutation("1.7", bugs=(), parts=("parallel, output projection",), **RANKS)
def columns_of_wo_b_are_dealt_out_in_turn(site: Site) -> None:
    """Rank r of n has the columns r, r + n, r + 2n … of wo_b, and not those of its groups."""
    read(site, "attn.wo_b.weight", lambda part, cut: part(None)[:, cut.start // cut.size :: cut.whole // cut.size])


@mutation("1.2", bugs=(), parts=("parallel, queries", "parallel, output projection"), **RANKS)
def scales_of_a_cut_block_are_the_first_ones(site: Site) -> None:
    """A rank decodes its part of an FP8 matrix by the scales of the matrix's first blocks."""
    read(site, ".scale", lambda part, cut: part(Cut(cut.axis, 0, cut.size, cut.whole)))


# ---- experts -----------------------------------------------------------------------------


@mutation("1.9", bugs=(), parts=("parallel, routed experts",), **RANKS)
def a_ranks_experts_are_counted_from_one_later(site: Site) -> None:
    """A rank takes its experts for those that begin one number later."""
    real = site.patch(
        Experts,
        "local",
        lambda experts, indices, *rest: real(experts, indices - int(experts.part.partial is not None), *rest),
    )


@mutation("1.9", bugs=(), parts=("parallel, routed experts",), **RANKS)
def experts_of_other_ranks_are_not_masked(site: Site) -> None:
    """Where a token goes to another rank's expert, a rank runs one of its own in its place, with that one's weight."""

    def local(experts, indices, weights):
        own = real(experts, indices, weights)[0]
        return torch.where(own < 0, (indices - experts.part.start) % experts.part.size, own), weights

    real = site.patch(Experts, "local", local)


@mutation("1.9", bugs=(), parts=("parallel, shared expert",), **RANKS)
def every_rank_counts_the_shared_expert(site: Site) -> None:
    """The shared expert is on every rank whole, and its result is summed over ranks."""
    real = site.patch(SharedExpert, "__init__", lambda expert, *args: real(expert, *args[:-1], ALONE))


@mutation("1.9", bugs=(), parts=("parallel, routed experts",), **RANKS)
def experts_of_one_rank_are_clamped_otherwise(site: Site) -> None:
    """Rank 1 runs its routed experts with twice the swiglu_limit."""
    built(site, Experts, lambda experts, ranks: setattr(experts, "limit", experts.limit * (1 + (ranks.rank == 1))))


@mutation("1.9", bugs=(), parts=("parallel, router",), **RANKS)
def the_routed_scaling_factor_is_shared_out(site: Site) -> None:
    """Routing weights are divided by the number of ranks, as if every rank had all experts."""

    def change(ranks, model):
        for block in (*model.layers, *model.mtp):
            block.ffn.gate.factor /= ranks.size

    loaded(site, change)


@mutation("1.9", bugs=(145,), parts=("parallel, ledger",), **RANKS)
def two_ranks_hold_the_same_experts(site: Site) -> None:
    """Rank 1 holds rank 0's experts, its own are on no rank, and no rank compares what others hold."""

    def even(ranks, n, what, per=1):
        given = Ranks(0, ranks.size) if ranks.rank == 1 and what == "n_routed_experts" else ranks
        return real(given, n, what, per)

    real = site.patch(Ranks, "even", even)
    site.patch(together, "check_whole", lambda ranks, model: None)


def _first(part, cut):
    """What rank 0 holds, on every rank."""
    return part(Cut(cut.axis, 0, cut.size, cut.whole))


@mutation("1.9", bugs=(), parts=("routed experts", "shared expert"), **RANKS)
def columns_of_w2_are_another_ranks(site: Site) -> None:
    """Experts cut by width end in rank 0's columns of w2 on every rank."""
    read(site, ".w2.weight", _first)


@mutation("1.2", bugs=(), parts=("routed experts", "shared expert"), **RANKS)
def scales_of_w2_are_another_ranks(site: Site) -> None:
    """Experts cut by width decode their columns of w2 by the scales of rank 0's."""
    read(site, ".w2.scale", _first)


@mutation("1.9", bugs=(), parts=("routed experts", "shared expert"), **RANKS)
def the_up_half_begins_at_another_rows(site: Site) -> None:
    """A rank's rows of w3 are rank 0's, while those of w1 are its own."""
    read(site, ".w3.weight", _first)


# ---- the vocabulary ----------------------------------------------------------------------


@mutation("1.11", bugs=(), parts=("parallel, head", "parallel, greedy text"), **RANKS)
def padding_of_the_last_shard_wins(site: Site) -> None:
    """The shard that is not full is padded before its first logit, with a large number, which then wins the argmax."""

    def joined(ranks, x, n):
        if ranks.size == 1:
            return x
        room = -(-n // ranks.size)
        return real(ranks, F.pad(x, (room - x.shape[1], 0), value=1e4), n)

    real = site.patch(Ranks, "joined", joined)


@mutation("1.11", bugs=(), parts=("parallel, greedy text",), **RANKS)
def padding_of_the_last_shard_is_chosen(site: Site) -> None:
    """Where ranks choose among their best tokens, the shard that is not full is padded before its first logit, with a
    large number."""

    def argmax(ranks, own, n):
        room = -(-n // ranks.size)
        return real(ranks, F.pad(own, (room - own.shape[-1], 0), value=1e4), n)

    real = site.patch(Ranks, "argmax", argmax)


@mutation("1.11", bugs=(), parts=("parallel, embedding",), **RANKS)
def tokens_of_another_part_are_not_masked(site: Site) -> None:
    """For a token of another rank's part of the vocabulary a rank adds its own nearest row to the embedding."""

    def forward(embedding, ids):
        if embedding.ranks.size == 1:
            return real(embedding, ids)
        own = (ids - embedding.part.start).clamp(0, embedding.part.size - 1)
        return embedding.ranks.sum(F.embedding(own, embedding.weight))

    real = site.patch(Embedding, "forward", forward)


@mutation("1.11", bugs=(), parts=("bits of head", "bits of logits"), **RANKS)
def each_rank_joins_its_own_logits_first(site: Site) -> None:
    """A rank puts its own part of the vocabulary first, so ranks have different logits of one token."""

    def joined(ranks, x, n):
        found = real(ranks, x, n)
        return found.roll(-ranks.slots(n).start, 1)

    real = site.patch(Ranks, "joined", joined)


@mutation("1.5", bugs=(), parts=("selection",), **RANKS)
def selections_of_ranks_are_joined_in_reverse(site: Site) -> None:
    """Tokens of a prompt get the entries that ranks selected for others, because parts are joined from the last on."""
    real = site.patch(Ranks, "stacked", lambda ranks, x, n: real(ranks, x.flip(0), n).flip(0))


@mutation("1.5", bugs=(), parts=("bits of selection",), **RANKS)
def a_rank_keeps_to_its_own_selection(site: Site) -> None:
    """Ranks do not exchange what they selected: each has nothing for the tokens of the others."""

    def stacked(ranks, x, n):
        found, part = torch.full_like(real(ranks, x, n), -1), ranks.slots(n)
        found[part.start : part.stop] = x[: part.size]
        return found

    real = site.patch(Ranks, "stacked", stacked)


# ---- ranks that are not alike ------------------------------------------------------------


@mutation("1.11", bugs=(), parts=("replicated norms",), **RANKS)
def a_replicated_norm_differs_on_one_rank(site: Site) -> None:
    """Rank 1 multiplies by other weights of a norm than the others."""
    loaded(site, lambda ranks, model: model.layers[1].attn_norm.weight.mul_(1 + 0.01 * (ranks.rank == 1)))


@mutation("1.9", bugs=(6,), parts=("bits of router",), **RANKS)
def ranks_after_the_first_route_without_bias(site: Site) -> None:
    """The router's bias is zero on every rank but the first: ranks choose other experts for the same token."""

    def change(ranks, model):
        for block in (*model.layers, *model.mtp):
            if block.ffn.gate.bias is not None and ranks.rank:
                block.ffn.gate.bias.zero_()

    loaded(site, change)


@mutation("1.11", bugs=(), parts=("tokens of ranks",), **RANKS)
def one_rank_is_given_another_token(site: Site) -> None:
    """Rank 1 runs the token after the one that the others run."""

    def forward(embedding, ids):
        moved = embedding.ranks.rank == 1
        return real(embedding, (ids + moved) % embedding.part.whole)

    real = site.patch(Embedding, "forward", forward)
