"""Faults of the training backend alone, by section: whole sequences forward, and their derivatives."""

import torch
import torch.nn.functional as F

from dsv4.kernels.attention import training as attention
from dsv4.kernels.experts import training as experts
from dsv4.kernels.quantize import training as quantize
from dsv4.kernels.router import training as router
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation

OF_TRAINING = dict(probes=("training",), backend="training")


@mutation("1.9", bugs=(), parts=("experts", "shared_expert"), **OF_TRAINING)
def training_experts_without_their_clamp(site: Site) -> None:
    """The differentiable SwiGLU has no clamp: gate and up go on as far as they like."""
    real = experts._swiglu
    site.patch(experts, "_swiglu", lambda y, weight, limit: real(y, weight, float("inf")))


@mutation("1.9", bugs=(), parts=("route_scored", "route_hashed"), **OF_TRAINING)
def training_router_does_not_normalise(site: Site) -> None:
    """Training weighs experts by their scores, which are not divided by their sum."""
    site.patch(router, "_weights", lambda scores, indices, factor: scores.gather(1, indices) * factor)


@mutation("1.7", bugs=(105,), parts=("sparse_attention", "hca_attention"), **OF_TRAINING)
def training_attention_without_its_sink(site: Site) -> None:
    """Attention over whole sequences leaves the sink out of the denominator."""
    real = attention.masked_attention
    gone = lambda q, kv, entries, mask, sink, *rest: real(q, kv, entries, mask, sink - torch.inf, *rest)
    site.patch(attention, "masked_attention", gone)


@mutation("1.7", bugs=(), parts=("sparse_attention", "hca_attention"), **OF_TRAINING)
def training_mask_one_entry_off(site: Site) -> None:
    """Where every visible entry is read, a query of a whole sequence reads the successor of each that it should."""
    real = attention.masked_attention

    def late(q, kv, entries, mask, *rest):
        after = F.pad(entries, (0, 0, 0, 1))[:, 1:] if mask is None and entries.shape[1] else entries
        return real(q, kv, after, mask, *rest)

    site.patch(attention, "masked_attention", late)


@mutation("1.7", bugs=(), parts=("sparse_attention", "hca_attention"), **OF_TRAINING)
def training_window_one_token_short(site: Site) -> None:
    """The mask of the window is off by one: a query misses the oldest token that it should see."""
    real = attention.masked_attention
    site.patch(
        attention,
        "masked_attention",
        lambda q, kv, e, m, s, scale, window, ratio: real(q, kv, e, m, s, scale, window - 1, ratio),
    )


@mutation("1.3", bugs=(), parts=("rotation", "attention core"), **OF_TRAINING)
def training_output_not_rotated_back(site: Site) -> None:
    """The inverse rotation of the attention's output is missing over whole sequences."""
    real = Step.inverse_cis
    site.patch(Step, "inverse_cis", lambda step, base: torch.ones_like(real(step, base)))


@mutation("1.9", bugs=(), parts=("derivative by x",), **OF_TRAINING)
def training_experts_pass_back_one_slot_only(site: Site) -> None:
    """The way back of the experts' input takes the gradient of a token's first expert, not the sum of all."""

    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).view(-1, ctx.k, grad.shape[1])[:, 0], None, None, None

    site.patch(experts._Spread, "backward", staticmethod(backward))


@mutation("1.2", bugs=(), parts=("simulate_fp8_blocks", "simulate_fp4_blocks"), **OF_TRAINING)
def training_simulation_has_no_derivative(site: Site) -> None:
    """Rounding to FP8 and FP4 is differentiated as what it is: its gradient is 0, and nothing before it learns."""
    flat = lambda x, rounding, *args: rounding(x.detach(), *args) + 0 * x
    site.patch(quantize, "straight_through", flat)


@mutation("1.2", bugs=(), parts=("rms_norm",), **OF_TRAINING)
def training_norm_takes_its_statistic_for_constant(site: Site) -> None:
    """The norm's derivative leaves out that the mean square depends on x."""

    def rms_norm(x, weight, eps):
        y = x * torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + eps)
        return (y if weight is None else y * weight).to(x.dtype)

    site.kernel_on("rms_norm", "training", rms_norm)
