"""Section 1.15: which blocks of a long cache a step reads: summaries, choice, gathered attention, what is said of
it."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4.kernels.block_choice import reference
from dsv4.model.gqa.attention import SelfAttention
from dsv4.probes.faults import Site, mutation

SECTION = "1.15", "Block gather-decode"

READING = dict(probes=("sparse_reading",), profile="qwen2")


def chooser(site: Site, change: Callable) -> None:
    """Blocks are chosen by change(real, q, kv_heads, low, high, mean, start, policy, by_importance)."""

    def choosing(real):
        return lambda q, kv_heads, low, high, mean, start, policy, by_importance=False: change(
            real, q, kv_heads, low, high, mean, start, policy, by_importance
        )

    site.kernel("choose_blocks", choosing)


def grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """q [B, T, H, D] as [B, T, KV, G, D]."""
    return q.unflatten(2, (kv_heads, -1))


# ---- choice -------------------------------------------------------------------------------


@mutation("1.15", bugs=(), parts=("one block off",), **READING)
def selector_off_by_one_block(site: Site) -> None:
    """Blocks are numbered from one where scores are read: the block after each of the best is kept."""
    late = lambda t: None if t is None else t.roll(1, 2)
    chooser(site, lambda real, q, KV, low, high, mean, *rest: real(q, KV, late(low), late(high), late(mean), *rest))


@mutation("1.15", bugs=(), parts=("sink block",), **READING)
def sink_block_lost(site: Site) -> None:
    """The first block is one like any other, and kept only if its score is among the best."""

    def change(real, q, KV, low, high, mean, start, policy, by_importance):
        policy = replace(policy, sink=0, topk=policy.topk + policy.sink) if policy.topk else policy
        return real(q, KV, low, high, mean, start, policy, by_importance)

    chooser(site, change)


@mutation("1.15", bugs=(), parts=("local blocks",), **READING)
def local_block_lost(site: Site) -> None:
    """Of the local blocks the one of the current position alone is always kept."""

    def change(real, q, KV, low, high, mean, start, policy, by_importance):
        policy = replace(policy, local=1, topk=policy.topk + policy.local - 1) if policy.topk else policy
        return real(q, KV, low, high, mean, start, policy, by_importance)

    chooser(site, change)


@mutation("1.15", bugs=(), parts=("local blocks", "keep-set, order"), **READING)
def local_blocks_counted_from_the_start_of_a_step(site: Site) -> None:
    """All tokens of a step get the keep-set of its first: after a border the block of the position itself is
    missing."""
    chooser(site, lambda real, q, *rest: real(q, *rest)[:, :1].expand(-1, q.shape[1], -1, -1).contiguous())


@mutation("1.15", bugs=(), parts=("bound over other channels",), **READING)
def bound_over_the_wrong_channels(site: Site) -> None:
    """Queries are multiplied with the minimum and maximum of the channel beside their own."""
    chooser(site, lambda real, q, *rest: real(q.roll(1, -1).contiguous(), *rest))


@mutation("1.15", bugs=(), parts=("bound over half the channels",), **READING)
def bound_over_half_the_channels(site: Site) -> None:
    """The bound sums the first half of the channels."""
    chooser(
        site,
        lambda real, q, *rest: real(
            torch.cat((q[..., : q.shape[-1] // 2], torch.zeros_like(q[..., q.shape[-1] // 2 :])), -1), *rest
        ),
    )


@mutation("1.15", bugs=(), parts=("exchanged minimum and maximum",), **READING)
def minimum_and_maximum_exchanged_in_the_choice(site: Site) -> None:
    """Positive channels of a query meet the minimum, negative ones the maximum: a lower bound."""
    chooser(site, lambda real, q, KV, low, high, *rest: real(q, KV, high, low, *rest))


@mutation("1.15", bugs=(), parts=("first query head",), **READING)
def first_head_chooses_for_its_group(site: Site) -> None:
    """The maximum over the query heads of a group is left out: the first one's bound counts."""

    def change(real, q, KV, *rest):
        heads = grouped(q, KV)
        return real(heads[..., :1, :].expand_as(heads).flatten(2, 3).contiguous(), KV, *rest)

    chooser(site, change)


@mutation("1.15", bugs=(), parts=("choice of another KV head",), **READING)
def choice_of_the_wrong_head(site: Site) -> None:
    """KV heads read the lists of their neighbours."""
    chooser(site, lambda real, *given: real(*given).roll(1, 2).contiguous())


@mutation("1.15", bugs=(), parts=("choice of the token before",), **READING)
def choice_of_the_token_before(site: Site) -> None:
    """In a step of several tokens each reads the distant blocks of the token before it."""

    def change(real, q, *rest):
        return real(torch.cat((q[:, :1], q[:, :-1]), 1), *rest)

    chooser(site, change)


@mutation("1.15", bugs=(), parts=("lowest scores",), **READING)
def lowest_scores_win(site: Site) -> None:
    """The comparison is inverted."""

    def change(real, q, KV, low, high, mean, *rest):
        if mean is not None:
            return real(q, KV, low, high, -mean, *rest)
        return inverted(q, KV, low, high, *rest)

    chooser(site, change)


def inverted(q, KV, low, high, start, policy, by_importance) -> torch.Tensor:
    """The keep-set of the lowest bounds."""
    if not policy.topk:
        return reference.choose_blocks(q, KV, low, high, None, start, policy, by_importance)
    real = reference.block_scores

    def scores(*given):
        found = real(*given)
        return torch.where(found == float("-inf"), found, -found)

    reference.block_scores = scores
    try:
        return reference.choose_blocks(q, KV, low, high, None, start, policy, by_importance)
    finally:
        reference.block_scores = real


@mutation("1.15", bugs=(), parts=("keep-set, ties",), **READING)
def equal_blocks_go_to_the_highest(site: Site) -> None:
    """Of equal scores the newest block is kept."""

    def change(real, *given):
        best = reference.topk_entries

        def highest(scores, k):
            picks = best(scores.flip(-1), k)
            return torch.where(picks < 0, -1, scores.shape[-1] - 1 - picks)

        reference.topk_entries = highest
        try:
            return reference.choose_blocks(*given)
        finally:
            reference.topk_entries = best

    chooser(site, change)


@mutation("1.15", bugs=(), parts=("keep-set, order", "distant blocks"), **READING)
def the_best_block_is_listed_twice(site: Site) -> None:
    """One list has a block twice, and another less."""

    def change(real, *given):
        out = real(*given)
        out[..., -1] = out[..., -2]
        return out

    chooser(site, change)


# ---- summaries ----------------------------------------------------------------------------


def summariser(site: Site, change: Callable) -> None:
    """Summaries are written by change(real, keys, start, tokens, low, high, mean, block)."""
    site.kernel("summarise_blocks", lambda real: lambda *given: change(real, *given))


@mutation("1.15", bugs=(), parts=("minimum and maximum exchanged",), **READING)
def minimum_and_maximum_exchanged_in_the_summaries(site: Site) -> None:
    """Each is written where the other belongs."""
    summariser(site, lambda real, keys, start, tokens, low, high, *rest: real(keys, start, tokens, high, low, *rest))


@mutation("1.15", bugs=(), parts=("without the last row",), **READING)
def summary_misses_the_last_row(site: Site) -> None:
    """A block is summarised before its newest key is in."""

    def change(real, keys, start, tokens, low, high, mean, block):
        before = keys.clone()
        for b, last in enumerate((start + tokens - 1).tolist()):
            if last % block:
                before[b, :, last] = before[b, :, last - 1]
        real(before, start, tokens, low, high, mean, block)

    summariser(site, change)


@mutation("1.15", bugs=(), parts=("with rows that are not its own",), **READING)
def summary_keeps_a_rewound_row(site: Site) -> None:
    """Minimum and maximum of a begun block are carried on, not taken again: rows that were forgotten stay in them."""

    def change(real, keys, start, tokens, low, high, mean, block):
        held = [None if t is None else t.clone() for t in (low, high)]
        real(keys, start, tokens, low, high, mean, block)
        for b, first in enumerate(start.tolist()):
            for t, old, extreme in zip((low, high), held, (torch.minimum, torch.maximum)):
                if t is not None and first % block:
                    number = first // block
                    t[b, :, number] = extreme(t[b, :, number], old[b, :, number])

    summariser(site, change)


@mutation("1.15", bugs=(), parts=("block summaries",), **READING)
def mean_over_the_whole_block(site: Site) -> None:
    """The sum of a begun block is divided by the size of a block."""

    def change(real, keys, start, tokens, low, high, mean, block):
        real(keys, start, tokens, low, high, mean, block)
        if mean is not None:
            for b, end in enumerate((start + tokens).tolist()):
                if end % block:
                    mean[b, :, end // block] *= end % block / block

    summariser(site, change)


# ---- reading ------------------------------------------------------------------------------


@mutation("1.15", bugs=(), parts=("gathered attention",), **READING)
def gathered_blocks_without_a_mask(site: Site) -> None:
    """The last block is read to its end: rows that nobody wrote, or that were forgotten, are attended to."""

    def whole(real):
        def attend(q, keys, values, blocks, start, window, scale, block, *rule):
            return real(q, keys, values, blocks, start // block * block + block - 1, window, scale, block, *rule)

        return attend

    site.kernel("gather_attention", whole)


@mutation("1.15", bugs=(), parts=("gathered attention",), **READING)
def gathered_softmax_over_the_padding(site: Site) -> None:
    """Each slot of the list beyond a short row's blocks counts as keys of logit 0."""

    def padded(real):
        def attend(q, keys, values, blocks, *rest):
            out = real(q, keys, values, blocks, *rest)
            if isinstance(out, tuple):
                return out
            empty = (blocks < 0).sum(-1).repeat_interleave(q.shape[2] // keys.shape[1], -1).unsqueeze(-1)
            return torch.where(empty > 0, out * (1 - 0.02 * empty.to(out.dtype)), out)

        return attend

    site.kernel("gather_attention", padded)


@mutation("1.15", bugs=(), parts=("dense prefill",), **READING)
def prompts_read_sparsely(site: Site) -> None:
    """A prompt's tokens read the policy's blocks too: what they leave in the cache is no longer dense attention's."""

    def attend(self, q, keys, values, summaries, step):
        step.prompt = False
        return real(self, q, keys, values, summaries, step)

    real = site.patch(SelfAttention, "attend", attend)


@mutation("1.15", bugs=(), parts=("sparse reading",), **READING)
def steps_of_several_tokens_fall_back_to_dense(site: Site) -> None:
    """A step of more than one token reads everything, without a word."""

    def attend(self, q, keys, values, summaries, step):
        if step.T > 1:
            return self.op.grouped_attention(q, keys, values, step.start, self.window, self.scale)
        return real(self, q, keys, values, summaries, step)

    real = site.patch(SelfAttention, "attend", attend)


@mutation("1.15", bugs=(), parts=("counters of what was read",), **READING)
def sinks_not_counted_as_read(site: Site) -> None:
    """What a step says that it read leaves out its first block."""

    def path_at(self, end, prompt=False):
        path = real(self, end, prompt)
        return path | {"tokens": path["tokens"] - self.reading.policy.block} if "blocks" in path else path

    real = site.patch(SelfAttention, "path_at", path_at)


@mutation("1.15", bugs=(), parts=("sparse reading, captured step", "captured step"), **READING)
def captured_steps_choose_where_the_first_one_stood(site: Site) -> None:
    """The positions of the first captured step are baked in where blocks are chosen and read."""
    first = {}

    def attend(self, q, keys, values, summaries, step):
        if step.captured and not self.reading.policy.dense:
            step = copy.copy(step)
            step.start = first.setdefault(keys.data_ptr(), step.start.clone())
        return real(self, q, keys, values, summaries, step)

    real = site.patch(SelfAttention, "attend", attend)
