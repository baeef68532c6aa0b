"""Planted faults of what surrounds grouped attention: choice and summaries of blocks, rotation into the cache."""

from dataclasses import replace as with_fields

import torch

from dsv4.kernels.rotary_rows.reference import rotate_halves
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.wrappers import after, changed, coarse, common, gates, in_place, replaced

# ---- choose_blocks: q, kv_heads, low, high, mean, start, policy, by_importance -----------------


def _policy(**changes):
    """honest → the honest kernel with fields of the policy changed, in results as wide as those of the policy."""

    def make(honest):
        def faulty(*arguments):
            policy = arguments[6]
            other = with_fields(policy, **{k: change(policy) for k, change in changes.items()})
            found = honest(*arguments[:6], other, *arguments[7:])
            return torch.nn.functional.pad(found, (0, policy.kept - found.shape[-1]), value=-1)

        return faulty

    return make


def _as_mean(honest):
    """Blocks by the middle of their bounds."""

    def faulty(q, kv_heads, low, high, mean, start, policy, by_importance):
        if policy.selector == "bound":
            middle = (low.float() + high.float()) / 2
            low = high = middle.to(low.dtype)
        return honest(q, kv_heads, low, high, mean, start, policy, by_importance)

    return faulty


def _first_head(honest):
    """Scores of the first query head of each group."""

    def faulty(q, kv_heads, *rest):
        one = q.unflatten(2, (kv_heads, -1))[:, :, :, :1].expand(-1, -1, -1, q.shape[2] // kv_heads, -1)
        return honest(one.flatten(2, 3).contiguous(), kv_heads, *rest)

    return faulty


def _any_order(honest):
    def faulty(*arguments):
        return honest(*arguments).flip(-1)

    return faulty


CHOOSE = {
    "the last distant block is missing": (
        13,
        after(lambda r, *a: torch.cat((r[..., :-1], -torch.ones_like(r[..., -1:])), -1)),
    ),
    "one local block more, one distant less": (48, _policy(local=lambda p: p.local + 1)),
    "blocks by the middle of their bounds": (52, _as_mean),
    "bounds are swapped": (53, changed(lambda q, n, low, high, *rest: (q, n, high, low, *rest))),
    "scores of the first head of a group": (61, _first_head),
    "the block of the token before": (48, replaced(5, lambda start: (start - 1).clamp(min=0))),
    "every row stands where the first one does": (73, replaced(5, lambda s: s[:1].expand_as(s).contiguous())),
    "blocks in reverse": (33, _any_order),
    "block 0 where there is none": (23, after(lambda r, *a: r.clamp(min=0))),
}

# ---- summarise_blocks: keys, start, tokens, low, high, mean, block ------------------------------


def _whole_blocks(honest):
    """Every key of a touched block counts, also those behind the last new one."""

    def faulty(keys, start, tokens, low, high, mean, block):
        end = (start + tokens + block - 1) // block * block
        first = start // block * block
        for b in range(len(start)):
            honest(
                keys[b : b + 1],
                first[b : b + 1],
                int(end[b] - first[b]),
                low[b : b + 1],
                high[b : b + 1],
                mean[b : b + 1],
                block,
            )

    return faulty


def _new_keys_alone(honest):
    """Of a block that goes on only the new keys count."""

    def faulty(keys, start, tokens, low, high, mean, block):
        for b, s in enumerate(start.tolist()):
            known = keys[b : b + 1].clone()
            known[:, :, s // block * block : s] = known[:, :, s : s + 1]
            honest(known, start[b : b + 1], tokens, low[b : b + 1], high[b : b + 1], mean[b : b + 1], block)

    return faulty


def _first_block_alone(honest):
    """Steps that go over the end of a block summarise the first one."""

    def faulty(keys, start, tokens, low, high, mean, block):
        for b, s in enumerate(start.tolist()):
            inside = min(tokens, block - s % block)
            honest(keys[b : b + 1], start[b : b + 1], inside, low[b : b + 1], high[b : b + 1], mean[b : b + 1], block)

    return faulty


def _mean_over_block(honest):
    """The sum is divided by the size of the block, not by its keys so far."""

    def faulty(keys, start, tokens, low, high, mean, block):
        honest(keys, start, tokens, low, high, mean, block)
        for b, s in enumerate(start.tolist()):
            last = (s + tokens - 1) // block
            mean[b, :, last] *= (s + tokens - last * block) / block

    return faulty


def _from_zero(honest):
    """The largest key is at least 0."""

    def faulty(*arguments):
        honest(*arguments)
        arguments[4].clamp_(min=0)

    return faulty


def _narrow_mean(honest):
    """The mean of 8 parts, each rounded to bf16."""

    def faulty(keys, start, tokens, low, high, mean, block):
        honest(keys, start, tokens, low, high, mean, block)
        for b, s in enumerate(start.tolist()):
            for number in range(s // block, (s + tokens - 1) // block + 1):
                rows = keys[b, :, number * block : min(number * block + block, s + tokens)].float()
                total = torch.zeros_like(rows[:, 0])
                for row in rows.unbind(1):
                    total = (total + row).bfloat16().float()
                mean[b, :, number] = (total / rows.shape[1]).to(mean.dtype)

    return faulty


SUMMARISE = {
    "keys behind the last new one count": (21, _whole_blocks),
    "only new keys count": (86, _new_keys_alone),
    "the second block of a step is left out": (26, _first_block_alone),
    "the mean over a whole block": (57, _mean_over_block),
    "the largest key is at least 0": (12, _from_zero),
    "sums in bf16": (50, _narrow_mean),
    "bounds are swapped": (53, changed(lambda k, s, t, low, high, *rest: (k, s, t, high, low, *rest))),
}

# ---- rotary_rows: q, k, v, biases, cis, keys, values, start -------------------------------------


def _interleaved(honest):
    """Columns 2i and 2i + 1 turn together."""

    def faulty(q, k, v, biases, cis, keys, values, start):
        D, B, T = keys.shape[-1], len(start), len(q) // len(start)
        order = torch.arange(D).view(-1, 2).T.flatten()
        mixed = lambda t: t.unflatten(-1, (-1, D))[..., order].flatten(-2)
        given = None if biases is None else (*map(mixed, biases[:2]), biases[2])
        out = honest(mixed(q), mixed(k), v, given, cis, keys, values, start)
        for n in range(B * T):
            at = n // T, slice(None), int(start[n // T]) + n % T
            keys[at] = keys[at][..., order.argsort()]
        return out[..., order.argsort()]

    return faulty


def _biases_after(honest):
    """Biases are added after the rotation."""

    def faulty(q, k, v, biases, cis, keys, values, start):
        out = honest(q, k, v, biases and (0 * biases[0], 0 * biases[1], biases[2]), cis, keys, values, start)
        return out if biases is None else out + biases[0].view(out.shape[2:])

    return faulty


def _values_too(honest):
    """Values are rotated as keys are."""

    def faulty(q, k, v, biases, cis, keys, values, start):
        D = keys.shape[-1]
        turned = rotate_halves(v.view(len(v), -1, D), cis).flatten(1).to(v.dtype)
        return honest(q, k, turned, biases, cis, keys, values, start)

    return faulty


ROTARY = {
    "columns 2i and 2i + 1 turn together": (91, _interleaved),
    "the other direction": (91, replaced(4, lambda cis: cis.conj().resolve_conj())),
    "the position of the token before": (91, replaced(4, lambda cis: cis.roll(1, 0))),
    "biases are left out": (89, replaced(3, lambda biases: None)),
    "biases are added after the rotation": (89, _biases_after),
    "values are rotated": (91, _values_too),
    "rows one position further": (94, replaced(7, lambda start: (start - 1) % 21)),
    "keys and values are swapped": (94, changed(lambda *a: (*a[:5], a[6], a[5], a[7]))),
    "every row stands where the first one does": (73, replaced(7, lambda s: s[:1].expand_as(s).contiguous())),
    "inputs in a lower precision": (14, changed(lambda *a: (*map(coarse, a[:3]), *a[3:]))),
    "zeros": (12, after(lambda r, *a: torch.zeros_like(r))),
}
PLANTS = (
    *gates("choose_blocks", CHOOSE),
    *(p for p in common("choose_blocks") if p.name == "zeros" or p.clause in ("inputs", "layout", "calls")),
    *gates("summarise_blocks", SUMMARISE),
    *(p for p in in_place("summarise_blocks", (3, 4, 5)) if p.name != "the last row is not stored"),
    *gates("rotary_rows", ROTARY),
    *(p for p in in_place("rotary_rows", (5, 6)) if p.clause == "guard"),
    Plant("k is overwritten", "rotary_rows", "inputs", 65, after(lambda r, *a: (a[1].mul_(2), r)[1])),
)
