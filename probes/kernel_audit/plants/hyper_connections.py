"""Planted faults of hyper-connections: of gates, Sinkhorn's iteration, comb and the products of fn."""

from functools import partial

import torch

from dsv4.kernels.hyper_connections import reference
from dsv4.probes.kernel_audit.plants.wrappers import after, changed, common, gates, replaced


def _columns(logits, iters, eps, columns_first=True, softmax_eps=True, axis=-1):
    """Sinkhorn's iteration with one thing changed."""
    C = torch.softmax(logits, axis) + (eps if softmax_eps else 0)
    first, second = (-2, -1) if columns_first else (-1, -2)
    for step in range(2 * iters - 1):
        C = C / (C.sum(second if step % 2 else first, keepdim=True) + eps)
    return C


def _pre(statistics=reference.stream_statistics, sinkhorn=reference.sinkhorn, gate_eps=True, swapped=False):
    """honest → `mhc_pre` by its formula with one part changed."""

    def faulty(streams, fn, scale, base, iters, eps, norm_eps):
        n = streams.shape[1]
        m = statistics(streams, fn, norm_eps)
        pre, post, _ = reference.mix(m, scale, base, n, 1, eps if gate_eps else 0.0)
        if swapped:
            pre, post = post / 2 + eps, 2 * pre
        comb = sinkhorn((m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)), iters, eps)
        return reference.collapse(streams, pre), post, comb

    return lambda honest: faulty


def _head(statistics=reference.stream_statistics, gate_eps=True):
    def faulty(streams, fn, scale, base, eps, norm_eps):
        weights = torch.sigmoid(statistics(streams, fn, norm_eps) * scale + base) + (eps if gate_eps else 0)
        return reference.collapse(streams, weights)

    return lambda honest: faulty


def _narrow_inputs(streams, fn, norm_eps):
    return reference.stream_statistics(streams.bfloat16(), fn.bfloat16().float(), norm_eps)


def _narrow_sums(streams, fn, norm_eps):
    """Sums of products kept in bf16 from one 64 columns to the next."""
    x, total = streams.flatten(1).float(), 0.0
    for s in range(0, x.shape[1], 64):
        total = (total + x[:, s : s + 64] @ fn[:, s : s + 64].T).bfloat16().float()
    return total * (x.square().mean(-1, keepdim=True) + norm_eps).rsqrt()


def _eps_outside(streams, fn, norm_eps):
    x = streams.flatten(1).float()
    return (x @ fn.T) / (x.square().mean(-1, keepdim=True).sqrt() + norm_eps)


def _without_eps(streams, fn, norm_eps):
    return reference.stream_statistics(streams, fn, 1e-30)


def _first_stream(streams, fn, norm_eps):
    x = streams.flatten(1).float()
    return (x @ fn.T) * (streams[:, 0].float().square().mean(-1, keepdim=True) + norm_eps).rsqrt()


def _last_columns_skipped(streams, fn, norm_eps):
    return reference.stream_statistics(streams, torch.cat((fn[:, :-64], torch.zeros_like(fn[:, -64:])), 1), norm_eps)


STATISTICS = {  # name → (entry of the catalogue, statistics)
    "bf16 inputs of the products with fn": (90, _narrow_inputs),
    "products with fn summed in bf16": (50, _narrow_sums),
    "norm_eps outside of the root": (89, _eps_outside),
    "no norm_eps": (89, _without_eps),
    "the mean square of the first stream alone": (89, _first_stream),
    "the last 64 columns of fn are skipped": (26, _last_columns_skipped),
}


def _transposed(result, *arguments):
    return *result[:-1], result[-1].transpose(-1, -2)


PRE = {
    "the factor 2 of post is missing": (89, after(lambda r, *a: (r[0], r[1] / 2, r[2]))),
    "one Sinkhorn iteration fewer": (89, changed(lambda *a: (*a[:4], max(1, a[4] - 1), *a[5:]))),
    "one Sinkhorn iteration more": (89, changed(lambda *a: (*a[:4], a[4] + 1, *a[5:]))),
    "rows before columns": (89, _pre(sinkhorn=partial(_columns, columns_first=False))),
    "the softmax of comb over old streams": (89, _pre(sinkhorn=partial(_columns, axis=-2))),
    "comb is transposed": (88, after(_transposed)),
    "no eps on the gates": (89, _pre(gate_eps=False)),
    "pre and post are swapped": (89, _pre(swapped=True)),
    "the scale of comb is that of post": (89, replaced(2, lambda s: s[[0, 1, 1]])),
} | {name: (entry, _pre(statistics)) for name, (entry, statistics) in STATISTICS.items()}
HEAD = {
    "no eps on the gates": (89, _head(gate_eps=False)),
    "the gates have a factor 2": (89, after(lambda r, *a: 2 * r)),
} | {name: (entry, _head(statistics)) for name, (entry, statistics) in STATISTICS.items()}


def _narrow_merge(out, streams, post, comb):
    """Products rounded to bf16 before they are added."""
    mixed = torch.bmm(comb.transpose(1, 2), streams.float()).bfloat16().float()
    spread = (post.unsqueeze(-1) * out.unsqueeze(1).float()).bfloat16().float()
    return (mixed + spread).to(streams.dtype)


POST = {
    "comb is transposed": (88, replaced(3, lambda comb: comb.transpose(-1, -2).contiguous())),
    "post has another factor 2": (89, replaced(2, lambda post: 2 * post)),
    "the output is added to the first stream alone": (
        89,
        replaced(2, lambda post: post * (torch.arange(post.shape[1], device=post.device) == 0)),
    ),
    "products rounded to bf16 before they are added": (50, lambda honest: _narrow_merge),
    "weights in bf16": (14, changed(lambda out, streams, post, comb: (out, streams, post, comb.bfloat16().float()))),
    "post of the token before": (73, replaced(2, lambda post: post.roll(1, 0))),
}
PLANTS = (
    *gates("mhc_pre", PRE),
    *common("mhc_pre"),
    *gates("mhc_post", POST),
    *common("mhc_post", first=1, lower=(0, 1)),
    *gates("mhc_head", HEAD),
    *common("mhc_head"),
)
