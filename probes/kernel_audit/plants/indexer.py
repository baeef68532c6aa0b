"""Planted faults of the indexer: scores, lengths, selection."""

import torch

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.contract import doubles
from dsv4.probes.kernel_audit.plant import Plant


def scored(formula):
    """honest → scores by `formula(q, weights, keys fp32 [B, n, D])`, −inf from visible on."""

    def make(honest):
        def faulty(q, weights, keys, visible):
            scores = formula(q.float(), weights, doubles(keys).float())
            entry = torch.arange(scores.shape[-1], device=scores.device)
            return scores.masked_fill(entry >= visible.unsqueeze(-1), float("-inf"))

        return faulty

    return make


def dots(q, keys):
    return torch.einsum("bthd,bnd->bthn", q, keys)


def visibly(change):
    """honest → with other lengths."""
    return lambda honest: lambda q, weights, keys, visible: honest(q, weights, keys, change(visible, keys))


def count_of(keys) -> int:
    return keys.count if isinstance(keys, PackedRows) else keys.shape[1]


def relu_after(q, weights, keys):
    return torch.einsum("bth,bthn->btn", weights, dots(q, keys)).relu()


def no_relu(q, weights, keys):
    return torch.einsum("bth,bthn->btn", weights, dots(q, keys))


def signless(q, weights, keys):
    return torch.einsum("bth,bthn->btn", weights.abs(), dots(q, keys).relu())


def last_head_missing(q, weights, keys):
    return torch.einsum("bth,bthn->btn", weights[:, :, :-1], dots(q, keys).relu()[:, :, :-1])


def swapped_heads(q, weights, keys):
    return torch.einsum("bth,bthn->btn", weights.roll(1, 2), dots(q, keys).relu())


def rounded_often(q, weights, keys):
    d = dots(q, keys).to(torch.float8_e4m3fn).float().relu()
    return torch.einsum("bth,bthn->btn", weights, d)


def one_scale_a_page(honest):
    """Each page uses the scales of its first key."""

    def faulty(q, weights, keys, visible):
        if not isinstance(keys, PackedRows):
            return honest(q, weights, keys, visible)
        wrong = keys._replace(data=keys.data.clone())
        wrong.scales[:] = wrong.scales[..., :1, :]
        return honest(q, weights, wrong, visible)

    return faulty


def high_nibble_first(honest):
    """FP4 codes are taken from the other half of each byte."""

    def faulty(q, weights, keys, visible):
        if not isinstance(keys, PackedRows) or keys.format.value != "fp4 index keys":
            return honest(q, weights, keys, visible)
        wrong = keys._replace(data=keys.data.clone())
        payload = wrong.payload
        payload[:] = (payload << 4) | (payload >> 4)
        return honest(q, weights, wrong, visible)

    return faulty


def clears_behind(honest):
    """Keys behind the longest length are zeroed in place, so that nothing masks them."""

    def faulty(q, weights, keys, visible):
        if not isinstance(keys, PackedRows):
            hidden = torch.arange(keys.shape[1], device=keys.device) >= visible.amax(1, keepdim=True)
            keys.masked_fill_(hidden.unsqueeze(-1), 0)
        return honest(q, weights, keys, visible)

    return faulty


def times_zero(honest):
    """Keys behind a length are multiplied by zero, which NaN survives."""

    def faulty(q, weights, keys, visible):
        scores = honest(q, weights, keys, visible)
        last = 0 * doubles(keys).float().sum((1, 2)).view(-1, 1, 1)
        return torch.where(scores == float("-inf"), scores, scores + last)

    return faulty


def first_length(honest):
    """Every row of the batch has the first row's length."""
    return lambda q, weights, keys, visible: honest(q, weights, keys, visible[:1].expand_as(visible))


SCORES = {
    "ReLU after the sum over heads": ("gate", 93, scored(relu_after)),
    "no ReLU": ("gate", 93, scored(no_relu)),
    "weights without their sign": ("gate", 93, scored(signless)),
    "the last head is missing": ("gate", 53, scored(last_head_missing)),
    "weights of the next head": ("gate", 53, scored(swapped_heads)),
    "products rounded to FP8": ("gate", 14, scored(rounded_often)),
    "one entry too many": ("gate", 48, visibly(lambda v, k: (v + 1).clamp(max=count_of(k)))),
    "one entry too few": ("gate", 48, visibly(lambda v, k: (v - 1).clamp(min=0))),
    "lengths in whole pages": ("gate", 26, visibly(lambda v, k: v // 64 * 64)),
    "drafts use the first token's length": ("gate", 85, visibly(lambda v, k: v[:, :1].expand_as(v))),
    "drafts beyond four are not masked": (
        "gate",
        85,
        visibly(lambda v, k: torch.where(torch.arange(v.shape[1]) < 4, v, v[:, :1])),
    ),
    "every row has the first row's length": ("gate", 73, first_length),
    "a page uses one scale": ("gate", 53, one_scale_a_page),
    "high nibble first": ("gate", 56, high_nibble_first),
    "keys behind a length times zero": ("poison", 21, times_zero),
    "keys behind a length are cleared": ("inputs", 65, clears_behind),
}


def selected(change):
    """honest → with other scores."""
    return lambda honest: lambda scores, k, visible: honest(change(scores), k, visible)


def few_bits(scores):
    """The top 16 bits alone: a histogram of one pass."""
    return (scores.view(torch.int32) & ~0xFFFF).view(torch.float32)


def without_last(honest):
    """The kth pick is dropped where all k are there."""

    def faulty(scores, k, visible):
        picks = honest(scores, k, visible).clone()
        picks[..., -1] = torch.where((picks >= 0).all(-1), -1, picks[..., -1])
        return picks

    return faulty


def twice(honest):
    """The best entry is picked twice, instead of the kth."""

    def faulty(scores, k, visible):
        picks = honest(scores, k, visible).clone()
        picks[..., -1] = picks[..., 0]
        return picks

    return faulty


def absent_is_zero(honest):
    """Entry 0 stands for none."""
    return lambda scores, k, visible: honest(scores, k, visible).clamp(min=0)


def highest_wins(honest):
    """Among equal scores the highest entry wins."""

    def faulty(scores, k, visible):
        n = scores.shape[-1]
        hidden = torch.arange(n, device=scores.device) >= visible.unsqueeze(-1)
        picks = honest(scores.masked_fill(hidden, float("-inf")).flip(-1), k, torch.full_like(visible, n))
        return torch.where(picks < 0, picks, n - 1 - picks)

    return faulty


def ignores_visible(honest):
    """Scores behind the length are read too."""
    return lambda scores, k, visible: honest(scores, k, torch.full_like(visible, scores.shape[-1]))


def negative_zero(scores):
    return torch.where(scores == 0, torch.where(torch.signbit(scores), -1e-30, 1e-30), scores)


def tie_list(honest):
    """At most eight entries that equal the kth are kept in a list."""

    def faulty(scores, k, visible):
        picks = honest(scores, k, visible).clone()
        values = scores.gather(-1, picks.clamp(min=0))
        lowest = values.masked_fill(picks < 0, float("inf")).amin(-1, keepdim=True)
        ties = (values == lowest) & (picks >= 0)
        return picks.masked_fill(ties & (ties.cumsum(-1) > 8), -1)

    return faulty


ENTRIES = {
    "the kth is dropped": ("gate", 26, without_last),
    "the best twice": ("gate", 34, twice),
    "no pick is entry 0": ("gate", 37, absent_is_zero),
    "16 bits of a score": ("gate", 32, selected(few_bits)),
    "the highest of equals": ("gate", 33, highest_wins),
    "−0 is less than +0": ("gate", 32, selected(negative_zero)),
    "a list of eight ties": ("gate", 32, tie_list),
    "the worst instead of the best": ("gate", 13, selected(lambda s: torch.where(s.isinf(), s, -s))),
    "scores behind the length are read": ("poison", 21, ignores_visible),
}
PLANTS = tuple(Plant(name, "index_scores", *rest) for name, rest in SCORES.items()) + tuple(
    Plant(name, "topk_entries", *rest) for name, rest in ENTRIES.items()
)
