"""Planted faults of compositions of selection, linear maps and hyper-connections."""

import torch

from dsv4.kernels.contract import doubles
from dsv4.kernels.fusions.exact import DEFINED
from dsv4.kernels.indexer.reference import topk_entries
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.composed_rows import inverse, part, same, without_eps, without_weight
from dsv4.probes.kernel_audit.plants.wrappers import after, changed, common, gates, replaced


def _scores(combine):
    """honest → `select_entries` of combine(products [B, T, H, n], weights [B, T, H, 1])."""

    def make(honest):
        def faulty(q, weights, keys, visible, k, rounded):
            dots = torch.einsum("bthd,bnd->bthn", q.float(), doubles(keys).float())
            scores = combine(dots, weights.unsqueeze(-1)).sum(2)
            hidden = torch.arange(scores.shape[-1], device=scores.device) >= visible.unsqueeze(-1)
            return topk_entries(scores.masked_fill(hidden, float("-inf")), k)

        return faulty

    return make


def _visible(change):
    return replaced(3, change)


def _until_page(visible):
    return visible // 64 * 64


def _entry_for_absent(result, *arguments):
    return result.clamp(min=0)


def _lengths_of_the_first_call(honest):
    """`visible` is taken from the first call of a shape."""
    kept = {}

    def faulty(q, weights, keys, visible, *others):
        return honest(q, weights, keys, kept.setdefault(tuple(visible.shape), visible.clone()), *others)

    return faulty


def _last_kept(result, *arguments):
    """The worst of the selected entries is replaced by none."""
    return torch.cat((result[..., :-1], torch.full_like(result[..., -1:], -1)), -1)


SELECT = {
    "no ReLU": (93, _scores(lambda dots, w: dots * w)),
    "ReLU after the weights": (93, _scores(lambda dots, w: (dots * w).relu())),
    "sizes of the weights": (93, _scores(lambda dots, w: dots.relu() * w.abs())),
    "the last entry is not visible": (48, _visible(lambda v: (v - 1).clamp(min=0))),
    "whole pages of entries alone": (26, _visible(_until_page)),
    "every token sees what the first one sees": (85, _visible(lambda v: v[:, :1].expand_as(v).contiguous())),
    "lengths of the row before": (73, _visible(lambda v: v.roll(1, 0))),
    "the kth entry is missing": (13, after(_last_kept)),
    "entry 0 where there is none": (23, after(_entry_for_absent)),
}


def _weight(number: int, change):
    """honest → the honest kernel with every weight of an argument through `change`."""
    one = lambda w: change(w) if isinstance(w, PackedWeight) else w
    return replaced(number, lambda a: one(a) if isinstance(a, PackedWeight) else tuple(map(one, a)))


def _rolled_scales(w: PackedWeight) -> PackedWeight:
    """Scales of the block of rows before."""
    if not _bytes(w):
        return w
    return w._replace(scale=w.scale.view(torch.uint8).roll(1, 0).contiguous().view(w.scale.dtype))


def _bytes(w: PackedWeight) -> bool:
    return w.scale is not None and w.scale.element_size() == 1


def _column_scales(w: PackedWeight) -> PackedWeight:
    """Scales of the block of columns before."""
    if not _bytes(w):
        return w
    return w._replace(scale=w.scale.view(torch.uint8).roll(1, 1).contiguous().view(w.scale.dtype))


def _nibbles(w: PackedWeight) -> PackedWeight:
    """The high nibble first."""
    return w._replace(weight=(w.weight >> 4) | (w.weight << 4)) if w.weight.dtype is torch.uint8 else w


def _without_global(w: PackedWeight) -> PackedWeight:
    if w.global_scale is None:
        return w
    return w._replace(global_scale=torch.ones_like(w.global_scale))


def _no_scales(w: PackedWeight) -> PackedWeight:
    """FP8 codes without their scales."""
    if w.format is not WeightFormat.FP8:
        return w
    return w._replace(scale=torch.full_like(w.scale.view(torch.uint8), 127).view(w.scale.dtype))


def _short(w: PackedWeight) -> PackedWeight:
    """The last 32 columns are skipped."""
    weight, columns = w.weight.clone(), 16 if w.weight.dtype is torch.uint8 else 32
    weight.view(torch.uint8)[..., -columns * weight.element_size() :] = 0
    return w._replace(weight=weight)


FORMATS = {  # name → (entry of the catalogue, change of a weight)
    "scales of the rows before": (53, _rolled_scales),
    "scales of the columns before": (53, _column_scales),
    "the high nibble first": (56, _nibbles),
    "NVFP4 without its global scale": (52, _without_global),
    "FP8 codes without scales": (52, _no_scales),
    "the last 32 columns are skipped": (26, _short),
}


def _results(change):
    return after(lambda result, *arguments: change(result))


LINEARS = {name: (entry, _weight(3, change)) for name, (entry, change) in FORMATS.items()} | {
    "no norm": (89, part("linears", rms_norm=same)),
    "no weight of the norm": (89, part("linears", rms_norm=without_weight)),
    "no eps of the norm": (89, part("linears", rms_norm=without_eps)),
    "simulate is ignored": (95, replaced(4, lambda simulate: (False,) * len(simulate))),
    "every input is quantised": (95, part("linears", rms_norm=lambda *a: _fp8(DEFINED.rms_norm(*a)))),
    "the second result rounded to bf16": (14, _results(lambda r: (r[0], r[1].bfloat16().float(), r[2]))),
    "the norm even where there is none": (
        89,
        changed(lambda x, n, *rest: (x, torch.ones_like(x[0]) if n is None else n, *rest)),
    ),
}


def _fp8(x):
    return DEFINED.simulate_fp8_blocks(x, 128)


def _other_group(honest):
    """Each group of heads meets the rows of the next group."""

    def faulty(o, cis, w, groups):
        N, H, D = o.shape
        return honest(o.view(N, groups, -1, D).roll(1, 1).reshape(N, H, D), cis, w, groups)

    return faulty


PROJECT = {name: (entry, _weight(2, change)) for name, (entry, change) in FORMATS.items()} | {
    "no rotation": (91, part("project_heads", rotate=same)),
    "the other direction": (91, part("project_heads", rotate=inverse)),
    "the position of the token before": (91, replaced(1, lambda cis: cis.roll(1, 0))),
    "rows of another group": (53, _other_group),
    "the last head is skipped": (26, replaced(0, lambda o: torch.cat((o[:, :-1], torch.zeros_like(o[:, -1:])), 1))),
}


def _transposed(result, *arguments):
    return *result[:-1], result[-1].transpose(-1, -2)


def _old_streams(honest):
    """Gates of the streams before the merge."""

    def faulty(out, streams, post, comb, *rest):
        new, *_ = honest(out, streams, post, comb, *rest)
        form = DEFINED.mhc_pre_norm if len(rest) == 8 else _headed
        found = form(streams, *rest)
        return new, *(found if isinstance(found, tuple) else (found,))

    return faulty


def _headed(streams, fn, scale, base, eps, norm_eps, weight, rms_eps):
    return DEFINED.rms_norm(DEFINED.mhc_head(streams, fn, scale, base, eps, norm_eps), weight, rms_eps)


def _norms(name: str) -> dict:
    return {
        "no weight of the norm": (89, part(name, rms_norm=without_weight)),
        "no norm of the input": (89, part(name, rms_norm=same)),
    }


COMB = {
    "the new comb is transposed": (88, after(_transposed)),
    "the factor 2 of post is missing": (89, after(lambda r, *a: (*r[:-2], r[-2] / 2, r[-1]))),
}
MERGED = {
    "comb is transposed": (88, replaced(3, lambda comb: comb.transpose(-1, -2).contiguous())),
    "gates of the old streams": (89, _old_streams),
    "the sublayer's output is left out": (89, replaced(2, torch.zeros_like)),
}
ITERATIONS = {
    "one Sinkhorn iteration fewer": (89, changed(lambda *a: (*a[:-5], max(1, a[-5] - 1), *a[-4:]))),
}
PLANTS = (
    *gates("select_entries", SELECT),
    *(p for p in common("select_entries", lower=(0,)) if p.entry != 67 and p.name != "a neighbour's row is read"),
    Plant("visible entries of the first call of a shape", "select_entries", "batch", 78, _lengths_of_the_first_call),
    *gates("linears", LINEARS),
    *common("linears"),
    *gates("project_heads", PROJECT),
    *common("project_heads", kept=1),
    *gates("mhc_pre_norm", COMB | _norms("mhc_pre_norm")),
    *common("mhc_pre_norm"),
    *gates("mhc_post_pre_norm", COMB | MERGED | _norms("mhc_post_pre_norm")),
    *common("mhc_post_pre_norm", first=1, lower=(0, 1)),
    *gates("mhc_post_head_norm", MERGED | _norms("mhc_post_head_norm")),
    *common("mhc_post_head_norm", first=1, lower=(0, 1)),
)
