"""Section 1.11: MTP, parallelism, and the harness itself."""

import torch

from dsv4.cache.cache import Cache
from dsv4.model.deepseek_v4 import Model
from dsv4.probes.catalogue import isolation, rollback, schedules
from dsv4.probes.faults import Site, mutation

SECTION = "1.11", "MTP, parallelism, the harness"


def of_the_block(site: Site, change) -> None:
    """change(MTP block, model) once it is loaded."""
    site.after_load(lambda subject: change(subject.model.mtp[0], subject.model))


@mutation("1.11", bugs=(142,), parts=("MTP streams",), probes=("rollback",), profile="layer1")
def mtp_rotates_like_layer_1(site: Site) -> None:
    """The draft block borrows layer 1, which is a window layer on Flash only: here it rotates with
    compress_rope_theta."""
    of_the_block(site, lambda block, model: setattr(block.attn, "base", model.layers[1].attn.base))


@mutation("1.11", bugs=(143,), parts=("MTP streams",), probes=("rollback",))
def mtp_takes_one_stream_for_all(site: Site) -> None:
    """h_proj is given the first stream four times instead of each stream."""

    def change(block, model):
        real = block.forward
        block.forward = lambda streams, *rest: real(streams[:, :1].expand_as(streams).contiguous(), *rest)

    of_the_block(site, change)


@mutation("1.11", bugs=(143,), parts=("MTP streams",), probes=("rollback",))
def mtp_without_hnorm(site: Site) -> None:
    """The streams enter h_proj as they are, without hnorm."""
    of_the_block(site, lambda block, model: setattr(block.hnorm, "forward", lambda streams: streams))


@mutation("1.11", bugs=(143,), parts=("MTP streams",), probes=("rollback",))
def mtp_norms_exchanged(site: Site) -> None:
    """enorm and hnorm, alike in shape, are exchanged where they are applied."""

    def change(block, model):
        block.enorm.forward, block.hnorm.forward = block.hnorm.forward, block.enorm.forward

    of_the_block(site, change)


@mutation("1.11", bugs=(148,), parts=("MTP head",), probes=("rollback",))
def mtp_head_after_the_models_norm(site: Site) -> None:
    """Drafts pass the main model's final norm instead of the block's own before the shared head."""
    of_the_block(site, lambda block, model: setattr(block.norm, "forward", model.norm.forward))


@mutation("1.11", bugs=(115, 143), parts=("MTP head",), probes=("rollback",))
def mtp_streams_averaged(site: Site) -> None:
    """The block's streams are averaged before its norm instead of collapsed by its own hc_head."""
    of_the_block(site, lambda block, model: setattr(block.hc_head, "forward", lambda streams: streams.mean(1)))


@mutation("1.11", bugs=(146,), parts=("MTP streams",), probes=("rollback",))
def mtp_embeds_the_current_token(site: Site) -> None:
    """The ids that are handed over are taken for those of this position: the block embeds the token at t, not at t +
    1."""

    def drafted(model, streams, ids, *rest, **more):
        return real(model, streams, ids.roll(1, 1), *rest, **more)

    real = site.patch(Model, "mtp_logits", drafted)


@mutation("1.11", bugs=(143,), parts=("MTP cache",), probes=("rollback",))
def mtp_cache_is_not_caught_up(site: Site) -> None:
    """The block's catch-up is a no-op: its cache stays at the length it had, and each draft overwrites the last."""

    def drafted(model, streams, ids, cache=None, *rest, **more):
        out = real(model, streams, ids, cache, *rest, **more)
        if cache is not None:
            cache.rewind_mtp(min(1, min(cache.mtp_lengths)))
        return out

    real = site.patch(Model, "mtp_logits", drafted)


@mutation("1.11", bugs=(143, 132), parts=("MTP cache",), probes=("rollback",))
def mtp_cache_is_not_rewound(site: Site) -> None:
    """Rejected tokens are forgotten by the main model's cache alone: the block goes on behind its own rejected
    drafts."""

    def rewind(cache, n):
        held = cache.mtp_lengths
        real(cache, n)
        cache._mtp.now[:] = held

    real = site.patch(Cache, "rewind", rewind)


@mutation("1.11", bugs=(143,), parts=("main model after drafts", "MTP cache"), probes=("rollback",))
def mtp_writes_into_the_first_layers_cache(site: Site) -> None:
    """The block was given the cache of layer 0, another window layer: drafting overwrites the main model's window."""
    real = site.patch(
        Cache,
        "__init__",
        lambda cache, *args, **more: (
            real(cache, *args, **more),
            setattr(cache, "mtp_layers", cache.layers[: len(cache.mtp_layers)]),
        )[0],
    )


@mutation("1.11", bugs=(143,), parts=("rewinding", "rewind"), probes=("rollback",))
def one_rejected_token_is_kept(site: Site) -> None:
    """The accepted length is counted with the rejected token: each rewind forgets one too few."""

    def rewind(cache, n):
        counts = [n] * cache.batch if isinstance(n, int) else n
        real(cache, [max(0, count - 1) for count in counts])

    real = site.patch(Cache, "rewind", rewind)


@mutation("1.11", bugs=(144,), parts=("hash table", "token ids"), probes=("moe_edges",))
def second_stage_without_ids(site: Site) -> None:
    """A pipeline hands on streams but no token ids: hash layers of later stages route every token as id 0."""

    def change(subject):
        for block in list(subject.model.layers)[1:]:
            block.ffn.forward = lambda x, ids, real=block.ffn.forward: real(x, torch.zeros_like(ids))

    site.after_load(change)


@mutation("1.11", bugs=(145,), parts=("shared expert", "shared experts"), probes=("moe_edges",))
def replicated_shared_expert_summed_over_ranks(site: Site) -> None:
    """Each of two ranks holds the whole shared expert, and the sum over ranks counts it twice."""

    def change(subject):
        for block in subject.model.layers:
            shared = block.ffn.shared_experts
            shared.forward = lambda x, real=shared.forward: 2 * real(x)

    site.after_load(change)


@mutation("1.11", bugs=(145,), parts=("head",), probes=("mhc",))
def vocabulary_shards_in_another_order(site: Site) -> None:
    """The logits of two ranks' vocabulary shards are joined in the order of arrival: the second first."""

    def change(subject):
        head = subject.model.head
        head.forward = lambda y, real=head.forward: torch.cat(real(y).chunk(2, -1)[::-1], -1)

    site.after_load(change)


@mutation("1.11", bugs=(146,), parts=("harness",), probes=("schedules",))
def harness_shifts_twice(site: Site) -> None:
    """The harness shifts a run that is shifted already, so it compares unrelated tokens."""
    for module in (isolation, rollback, schedules):
        real = site.patch(module, "token_errors", lambda found, wanted: real(found.roll(1, 1), wanted))


@mutation("1.11", bugs=(148,), parts=("harness",), probes=("schedules",))
def harness_compares_zeros(site: Site) -> None:
    """The harness pads both sides with zeros where the values were: everything agrees with everything."""
    for module in (isolation, rollback, schedules):
        real = site.patch(module, "token_errors", lambda found, wanted: real(found * 0, wanted * 0))
