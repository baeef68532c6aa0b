"""Section 1.13: what speculative decoding decides: which drafts stay, where rows end, how many are drafted."""

import numpy as np
import torch

from dsv4.engine import acceptance
from dsv4.engine.state import Work
from dsv4.probes.faults import Site, mutation
from dsv4.speculation import choosing
from dsv4.speculation.accept import Accepted, draw
from dsv4.speculation.policy import Adaptive
from dsv4.speculation.policy_device import DeviceAdaptive, DeviceCostAware, DeviceStatic, KernelCostAware
from dsv4.speculation.rounds import Rounds


def greedy(site: Site, change) -> None:
    """Greedy acceptance of both decoders is change(what it gave, logits, drafts, sizes)."""
    for module in (acceptance, choosing):
        real = module.accept_greedy
        site.patch(
            module,
            "accept_greedy",
            lambda logits, drafts, sizes, real=real: change(real(logits, drafts, sizes), logits, drafts, sizes),
        )


def sampled(site: Site, change) -> None:
    """Rejection sampling of both decoders is change(what it was, its arguments)."""
    for module in (acceptance, choosing):
        real = module.accept_sampled
        site.patch(module, "accept_sampled", lambda *args, real=real: change(real, *args))


def of_rejected(found: Accepted, p, q, drafts, sizes, u_last, residual) -> Accepted:
    """The token after the kept drafts is drawn from residual(p, q) where a draft was rejected."""
    B, W = drafts.shape
    at, row = found.count.clamp(max=W - 1), torch.arange(B, device=drafts.device)
    q = torch.nn.functional.one_hot(drafts, p.shape[-1]).to(p.dtype) if q is None else q
    last, drawn = p[row, found.count], q[row, at]
    weights = torch.where((found.count < sizes).unsqueeze(1), residual(last, drawn), last)
    token = draw(weights, u_last).clamp(max=p.shape[-1] - 1).unsqueeze(1)
    return Accepted(found.count, found.tokens.scatter(1, found.count.unsqueeze(1), token))


# ---- which drafts stay --------------------------------------------------------------------


@mutation("1.13", bugs=(), parts=("greedy acceptance",), probes=("speculation",))
def drafts_compared_one_place_late(site: Site) -> None:
    """A draft is held against what the model chooses after it, not against what it chooses in its place."""

    def shifted(found, logits, drafts, sizes):
        good = found.tokens[:, 1:] == drafts
        within = torch.arange(drafts.shape[1], device=drafts.device) < sizes.unsqueeze(1)
        return Accepted((good & within).long().cumprod(1).sum(1), found.tokens)

    greedy(site, shifted)


@mutation("1.13", bugs=(), parts=("greedy acceptance",), probes=("speculation",))
def one_wrong_draft_stays(site: Site) -> None:
    """The count of accepted drafts includes the first wrong one."""
    greedy(site, lambda found, logits, drafts, sizes: Accepted(torch.minimum(found.count + 1, sizes), found.tokens))


@mutation("1.13", bugs=(), parts=("greedy acceptance",), probes=("speculation",))
def right_drafts_counted_beyond_a_wrong_one(site: Site) -> None:
    """All drafts that the model agrees with are counted, also those behind one that it does not."""

    def total(found, logits, drafts, sizes):
        within = torch.arange(drafts.shape[1], device=drafts.device) < sizes.unsqueeze(1)
        return Accepted(((found.tokens[:, :-1] == drafts) & within).sum(1), found.tokens)

    greedy(site, total)


@mutation("1.13", bugs=(), parts=("greedy acceptance",), probes=("speculation",))
def pads_of_a_ragged_batch_accepted(site: Site) -> None:
    """Drafts beyond a row's own size are compared too: a pad that the model happens to choose stays."""

    def padded(found, logits, drafts, sizes):
        return Accepted((found.tokens[:, :-1] == drafts).long().cumprod(1).sum(1), found.tokens)

    greedy(site, padded)


@mutation("1.13", bugs=(), parts=("bonus token",), probes=("speculation",))
def bonus_token_of_the_last_place(site: Site) -> None:
    """The token after the kept drafts is what the model chose after the last draft, wherever the first wrong one
    was."""

    def last(found, logits, drafts, sizes):
        return Accepted(found.count, found.tokens.scatter(1, found.count.unsqueeze(1), found.tokens[:, -1:]))

    greedy(site, last)


@mutation("1.13", bugs=(), parts=("bonus token",), probes=("speculation",))
def rejected_draft_given_out(site: Site) -> None:
    """In place of the first wrong draft comes the draft itself, not what the model chose."""

    def draft(found, logits, drafts, sizes):
        wide = torch.cat((drafts, found.tokens[:, -1:]), 1)
        return Accepted(found.count, torch.where((found.count < sizes).unsqueeze(1), wide, found.tokens))

    greedy(site, draft)


@mutation("1.13", bugs=(), parts=("rejection sampling",), probes=("speculation",))
def residual_not_clamped(site: Site) -> None:
    """The residual p − q keeps its negative parts: their sum runs down and up again, and tokens are drawn from that."""
    sampled(
        site,
        lambda real, p, q, drafts, sizes, u, u_last: of_rejected(
            real(p, q, drafts, sizes, u, u_last), p, q, drafts, sizes, u_last, lambda last, drawn: last - drawn
        ),
    )


@mutation("1.13", bugs=(), parts=("rejection sampling",), probes=("speculation",))
def rejected_place_drawn_from_the_target(site: Site) -> None:
    """After a rejection the token is drawn from p, not from the residual: what q prefers comes out too often."""
    sampled(
        site,
        lambda real, p, q, drafts, sizes, u, u_last: of_rejected(
            real(p, q, drafts, sizes, u, u_last), p, q, drafts, sizes, u_last, lambda last, drawn: last
        ),
    )


@mutation("1.13", bugs=(), parts=("rejection sampling",), probes=("speculation",))
def one_uniform_for_decision_and_draw(site: Site) -> None:
    """The number that rejected a draft also draws the token in its place."""
    sampled(
        site,
        lambda real, p, q, drafts, sizes, u, u_last: real(p, q, drafts, sizes, u, u[:, 0] if u.shape[1] else u_last),
    )


@mutation("1.13", bugs=(), parts=("rejection sampling",), probes=("speculation",))
def drafts_kept_by_the_inverse_ratio(site: Site) -> None:
    """A draft stays with probability q / p."""

    def inverse(real, p, q, drafts, sizes, u, u_last):
        W = drafts.shape[1]
        other = torch.ones_like(p[:, :W]) if q is None else q
        return real(torch.cat((other, p[:, W:]), 1), p[:, :W], drafts, sizes, u, u_last)

    sampled(site, inverse)


# ---- where rows end -----------------------------------------------------------------------


@mutation("1.13", bugs=(), parts=("stop id",), probes=("speculation",))
def stop_id_noticed_at_the_end_of_a_block(site: Site) -> None:
    """A row's tokens of a pass all come out; then it is seen that a stop id was among them."""

    def give(work, tokens):
        stops, work.stops = work.stops, frozenset()
        try:
            n = real(work, tokens)
        finally:
            work.stops = stops
        work.result.stop_reason = "eos" if stops & set(tokens) else work.result.stop_reason
        return n

    real = site.patch(Work, "give", give)


@mutation("1.13", bugs=(), parts=("stop id",), probes=("speculation",))
def stop_id_among_the_drafts_ends_a_row(site: Site) -> None:
    """A pass that drafts a stop id ends the row, though the draft does not stay."""

    def take(work, verdict, *rest):
        n = real(work, verdict, *rest)
        if work.active and work.stops & set(verdict.drafts):
            work.result.stop_reason = "eos"
        return n

    real = site.patch(Work, "take", take)


@mutation("1.13", bugs=(), parts=("stop id",), probes=("speculation",))
def stop_id_beyond_the_accepted_prefix_ends_a_row(site: Site) -> None:
    """What the model would choose after a wrong draft is looked through for stop ids as well."""

    def accept(found, *args):
        out = accepts(found, *args)
        found.seen = out[1]
        return out

    accepts = site.patch(Rounds, "_accept", accept)

    def record(found, *args):
        found.done |= (found.seen.unsqueeze(-1) == found.stops).flatten(1).any(1)
        real(found, *args)

    real = site.patch(Rounds, "_record", record)


@mutation("1.13", bugs=(), parts=("stop id",), probes=("speculation",))
def stop_id_inside_a_round_is_passed_over(site: Site) -> None:
    """A round ends its row where its last token is a stop id: one inside the block goes by."""

    def a_round(found, D):
        found.ends = stops = found.stops.clone()
        found.stops.fill_(-1)
        real(found, D)
        found.stops.copy_(stops)

    real = site.patch(Rounds, "_round", a_round)

    def record(found, chosen, count):
        last = chosen.gather(1, (count - 1).clamp(min=0).unsqueeze(1))
        found.done |= ((last == found.ends).any(1)) & (count > 0)
        records(found, chosen, count)

    records = site.patch(Rounds, "_record", record)


# ---- how many are drafted -----------------------------------------------------------------


@mutation("1.13", bugs=(), parts=("device policy, mean",), probes=("speculation",))
def weights_of_the_mean_exchanged_on_the_device(site: Site) -> None:
    """The device gives the newest ratio the weight of all before it."""

    def init(device, *args):
        real(device, *args)
        device.weight, device.keep = device.keep, device.weight

    real = site.patch(DeviceAdaptive, "__init__", init)


@mutation("1.13", bugs=(), parts=("mean of the specification",), probes=("speculation",))
def weights_of_the_mean_exchanged_in_the_specification(site: Site) -> None:
    """Specification and device agree on the wrong mean: the newest ratio has the weight of all before it."""

    def init(policy, *args):
        real(policy, *args)
        policy.weight, policy.keep = policy.keep, policy.weight

    real = site.patch(Adaptive, "__init__", init)


@mutation("1.13", bugs=(), parts=("device policy, mean",), probes=("speculation",))
def rounds_without_drafts_count_as_rejections(site: Site) -> None:
    """Nothing drafted is taken for nothing accepted, against the policy: the mean of a row that rests falls."""

    def observe(device, accepted, proposed):
        device.mean.copy_(accepted.float() / proposed.clamp(min=1).float() * device.weight + device.mean * device.keep)

    site.patch(DeviceAdaptive, "observe", observe)


@mutation("1.13", bugs=(), parts=("device policy, mean",), probes=("speculation",))
def rounds_without_drafts_never_decay(site: Site) -> None:
    """A policy of the published rule keeps its mean on the device where nothing was drafted."""

    def observe(device, accepted, proposed):
        device.decays = False
        real(device, accepted, proposed)

    real = site.patch(DeviceAdaptive, "observe", observe)


@mutation("1.13", bugs=(), parts=("device policy, pressure cap",), probes=("speculation",))
def pressure_ignored_on_the_device(site: Site) -> None:
    """The captured policies draft as much when pages are short."""
    for kind in (DeviceStatic, DeviceAdaptive, DeviceCostAware, KernelCostAware):
        real = kind.choose
        site.patch(kind, "choose", lambda device, pressure, live=None, real=real: real(device, pressure & False, live))


@mutation("1.13", bugs=(), parts=("device policy, sizes",), probes=("speculation",))
def sizes_of_a_higher_mean_on_the_device(site: Site) -> None:
    """Thresholds are taken 0.2 too low on the device: rows draft more than their mean allows."""

    def choose(device, pressure, live=None):
        held = device.mean.clone()
        device.mean.copy_(held + np.float32(0.2))
        try:
            return real(device, pressure, live)
        finally:
            device.mean.copy_(held)

    real = site.patch(DeviceAdaptive, "choose", choose)


@mutation("1.13", bugs=(), parts=("device policy, sizes", "device policy, pressure cap"), probes=("speculation",))
def resting_rows_are_drafted_for(site: Site) -> None:
    """Rows that have ended get sizes as if they went on."""
    for kind in (DeviceStatic, DeviceAdaptive):
        real = kind.choose
        site.patch(kind, "choose", lambda device, pressure, live=None, real=real: real(device, pressure, None))


@mutation("1.13", bugs=(133,), parts=("device policy, mean",), probes=("speculation",))
def mean_survives_the_request(site: Site) -> None:
    """A row that begins another request keeps the mean of the one before."""
    site.patch(DeviceAdaptive, "reset", lambda device, fresh: None)
