"""Planted faults of grouped-query attention, over all keys and over listed blocks."""

import math
from functools import partial

import torch

from dsv4.kernels.grouped_attention import exact
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.wrappers import common, gates, replaced


def _softmax(q, keys, values, seen, scale, mask=-math.inf, sums=None, subtract=True, base=1.0):
    """Attention with one thing changed: the mask, how sums are kept, the largest logit, the base."""
    KV = keys.shape[2]
    heads = q.float().unflatten(2, (KV, -1))
    logits = (heads @ keys.float().mT * scale * base).masked_fill(~seen.unsqueeze(3), mask)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30) if subtract else 0.0
    p = (logits - top).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-38)
    out = sums(p, values.float()) if sums else p @ values.float()
    return out.flatten(2, 3).to(q.dtype)


def _narrow(p, v):
    """Sums kept in bf16 from one 16 keys to the next."""
    out = 0.0
    for s in range(0, v.shape[-2], 16):
        out = (out + p[..., s : s + 16] @ v[..., s : s + 16, :]).bfloat16().float()
    return out


def _interleaved(q, keys, values, seen, scale):
    """Query head h reads KV head h mod KV."""
    KV = keys.shape[2]
    order = torch.arange(q.shape[2], device=q.device).view(-1, KV).T.flatten()
    out = torch.empty_like(q)
    out[:, :, order] = exact.honest(q[:, :, order], keys, values, seen, scale)
    return out


def _half_values(q, keys, values, seen, scale):
    half = values.clone()
    half[..., values.shape[-1] // 2 :] = 0
    return exact.honest(q, keys, half, seen, scale)


def _last_tile(q, keys, values, seen, scale):
    """Keys behind the last whole tile of 64 that is seen are skipped."""
    count = seen.sum(-1, keepdim=True)
    return exact.honest(q, keys, values, seen & (seen.cumsum(-1) <= (count // 64 * 64).clamp(min=1)), scale)


def _shared(whole) -> dict:
    """Faults of either form; `whole`: `exact.dense` or `exact.listed`."""
    computed = lambda compute: lambda honest: partial(whole, compute)
    return {
        "a mask of −1e4": (22, computed(partial(_softmax, mask=-1e4))),
        "sums in bf16": (50, computed(partial(_softmax, sums=_narrow))),
        "no largest logit subtracted": (47, computed(partial(_softmax, subtract=False))),
        "base 2 without the factor": (45, computed(partial(_softmax, base=math.log(2)))),
        "query head h reads KV head h mod KV": (61, computed(_interleaved)),
        "half of the values' columns": (49, computed(_half_values)),
        "whole tiles of 64 keys alone": (26, computed(_last_tile)),
    }


def _window(change):
    return replaced(4, lambda window: None if window is None else change(window))


def _start(number: int, change):
    return replaced(number, change)


def _lengths_of_the_first_call(number: int):
    def make(honest):
        kept = {}

        def faulty(*arguments):
            start = kept.setdefault(tuple(arguments[0].shape), arguments[number].clone())
            return honest(*arguments[:number], start, *arguments[number + 1 :])

        return faulty

    return make


def _behind_times_zero(honest):
    """Slots behind the last token are read and multiplied by 0: 0 · NaN is NaN."""

    def faulty(q, keys, values, *rest):
        start = next(a for a in rest if isinstance(a, torch.Tensor) and a.dim() == 1)
        behind = torch.arange(keys.shape[2], device=keys.device) >= (start + q.shape[1]).unsqueeze(1)
        leak = values.masked_fill(~behind.view(len(start), 1, -1, 1), 0).sum((1, 2, 3)) * 0
        return honest(q, keys, values, *rest) + leak.view(-1, 1, 1, 1).to(q.dtype)

    return faulty


def _first_position(honest):
    def faulty(q, keys, values, start, *rest):
        one = [honest(q[:, t : t + 1], keys, values, start, *rest) for t in range(q.shape[1])]
        return torch.cat(one, 1)

    return faulty


GROUPED = _shared(exact.dense) | {
    "the own key is not seen": (48, _start(3, lambda start: start - 1)),
    "the key behind the own one is seen": (48, _start(3, lambda start: start + 1)),
    "every row stands where the first one does": (73, _start(3, lambda start: start[:1].expand_as(start).contiguous())),
    "the window is one wider": (48, _window(lambda window: window + 1)),
    "the window is one narrower": (48, _window(lambda window: max(1, window - 1))),
    "the window is ignored": (27, _window(lambda window: None)),
    "lengths over 256 are cut": (27, _start(3, lambda start: start.clamp(max=255))),
    "every token of a row stands at its first": (85, _first_position),
}


def _blocks(change):
    return replaced(3, change)


def _until_hole(blocks):
    return torch.where((blocks < 0).cumsum(-1) > 0, -1, blocks)


def _first_head(blocks):
    return blocks[:, :, :1].expand_as(blocks).contiguous()


def _last_block(blocks):
    at = torch.where(blocks >= 0, torch.arange(blocks.shape[-1], device=blocks.device), -1).amax(-1, keepdim=True)
    return torch.where(torch.arange(blocks.shape[-1], device=blocks.device) == at, -1, blocks)


GATHER = _shared(exact.listed) | {
    "−1 is block 0": (23, _blocks(lambda blocks: blocks.clamp(min=0))),
    "the list ends at its first −1": (24, _blocks(_until_hole)),
    "the last listed block is skipped": (26, _blocks(_last_block)),
    "every KV head reads the list of the first": (61, _blocks(_first_head)),
    "every token reads the list of the row's last": (85, _blocks(lambda b: b[:, -1:].expand_as(b).contiguous())),
    "the own key is not seen": (48, _start(4, lambda start: start - 1)),
    "the key behind the own one is seen": (48, _start(4, lambda start: start + 1)),
    "the window is ignored": (27, lambda honest: lambda *a: honest(*a[:5], None, *a[6:])),
}
PLANTS = (
    *gates("grouped_attention", GROUPED),
    *common("grouped_attention", lower=(0, 1, 2)),
    Plant("positions of the first call of a shape", "grouped_attention", "state", 78, _lengths_of_the_first_call(3)),
    Plant("slots behind the last token times 0", "grouped_attention", "poison", 21, _behind_times_zero),
    *gates("gather_attention", GATHER),
    *common("gather_attention", lower=(0, 1, 2)),
    Plant("positions of the first call of a shape", "gather_attention", "calls", 78, _lengths_of_the_first_call(4)),
    Plant("slots behind the last token times 0", "gather_attention", "poison", 21, _behind_times_zero),
)
