"""Section 1.8: the weights of hyper-connections (mHC). What becomes of the streams is in streams.py."""

import torch

from dsv4.probes.faults import Site, mutation

SECTION = "1.8", "Hyper-connections"

SINKHORN = ("Sinkhorn", "mHC comb")


def mixing(site: Site, iterate=None, weights=None, statistics=None) -> None:
    """mhc_pre by another iteration(logits, iters, eps), weights(m, scale, base, n, eps) → pre, post, logits, or
    statistics."""

    def connect(real):
        def mhc_pre(streams, fn, scale, base, iters, eps, norm_eps):
            n = streams.shape[1]
            m = (statistics or plain_statistics)(streams, fn, norm_eps)
            pre, post, logits = (weights or plain_weights)(m, scale, base, n, eps)
            y = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
            return y, post, (iterate or plain_sinkhorn)(logits, iters, eps)

        return mhc_pre

    site.kernel("mhc_pre", connect)


def plain_statistics(streams, fn, norm_eps):
    x = streams.flatten(1).float()
    return x @ fn.T * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)


def plain_weights(m, scale, base, n, eps):
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    return pre, post, (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))


def rows(C, eps):
    return C / (C.sum(-1, keepdim=True) + eps)


def columns(C, eps):
    return C / (C.sum(-2, keepdim=True) + eps)


def plain_sinkhorn(logits, iters, eps):
    C = columns(torch.softmax(logits, -1) + eps, eps)
    for _ in range(iters - 1):
        C = columns(rows(C, eps), eps)
    return C


# ---- comb ---------------------------------------------------------------------------------


@mutation("1.8", bugs=(111,), parts=("mHC comb",), probes=("mhc",))
def comb_transposed(site: Site) -> None:
    """Streams are mixed by C instead of Cᵀ: the sum runs over the second index."""
    site.kernel(
        "mhc_post", lambda real: lambda out, streams, post, comb: real(out, streams, post, comb.transpose(1, 2))
    )


@mutation("1.8", bugs=(111,), parts=SINKHORN, probes=("mhc",))
def comb_logits_transposed(site: Site) -> None:
    """The sixteen logits fill the matrix column by column."""
    mixing(site, iterate=lambda logits, iters, eps: plain_sinkhorn(logits.transpose(1, 2), iters, eps))


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_rows_first(site: Site) -> None:
    """After the softmax each round normalises columns, then rows, and ends on rows."""

    def iterate(logits, iters, eps):
        C = torch.softmax(logits, -1) + eps
        for _ in range(iters):
            C = rows(columns(C, eps), eps)
        return C

    mixing(site, iterate=iterate)


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_starts_with_columns_of_exp(site: Site) -> None:
    """The softmax before the iteration is missing: the matrix starts as exp(logits)."""

    def iterate(logits, iters, eps):
        C = columns(torch.exp(logits - logits.amax((-1, -2), keepdim=True)) + eps, eps)
        for _ in range(iters - 1):
            C = columns(rows(C, eps), eps)
        return C

    mixing(site, iterate=iterate)


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_of_a_softmax_over_columns(site: Site) -> None:
    """The softmax runs over the first index."""
    mixing(site, iterate=lambda logits, iters, eps: plain_sinkhorn(torch.log(torch.softmax(logits, -2)), iters, eps))


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_without_eps(site: Site) -> None:
    """Neither the softmax nor the denominators have eps."""
    mixing(site, iterate=lambda logits, iters, eps: plain_sinkhorn(logits, iters, 0.0))


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_eps_after_the_softmax_missing(site: Site) -> None:
    """Denominators have eps, the softmax does not."""

    def iterate(logits, iters, eps):
        C = columns(torch.softmax(logits, -1), eps)
        for _ in range(iters - 1):
            C = columns(rows(C, eps), eps)
        return C

    mixing(site, iterate=iterate)


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_one_round_fewer(site: Site) -> None:
    """19 rounds count the first column step as one, and 18 follow it."""
    mixing(site, iterate=lambda logits, iters, eps: plain_sinkhorn(logits, iters - 1, eps))


@mutation("1.8", bugs=(114,), parts=SINKHORN, probes=("mhc",))
def sinkhorn_three_rounds(site: Site) -> None:
    """The number of iterations is not that of the config."""
    mixing(site, iterate=lambda logits, iters, eps: plain_sinkhorn(logits, 3, eps))


@mutation("1.8", bugs=(114,), parts=("columns of the mixing matrices",), probes=("mhc",))
def sinkhorn_ends_on_rows(site: Site) -> None:
    """Rows are normalised once more after the last column step: rows sum to 1, and columns as far as the iteration has
    converged."""
    mixing(site, iterate=lambda logits, iters, eps: rows(plain_sinkhorn(logits, iters, eps), eps))


@mutation("1.8", bugs=(114,), parts=("mixing matrices are what",), probes=("mhc",))
def one_round_fewer_in_one_layer(site: Site) -> None:
    """The connection of the experts of layer 1 runs one iteration less than the config says."""

    def fewer(subject) -> None:
        subject.model.layers[1].hc_ffn.iters -= 1

    site.after_load(fewer)


@mutation("1.8", bugs=(113,), parts=SINKHORN, probes=("mhc",))
def comb_is_not_normalised(site: Site) -> None:
    """A fused kernel leaves the last division out: streams grow from layer to layer."""

    def iterate(logits, iters, eps):
        C = rows(plain_sinkhorn(logits, iters - 1, eps), eps)
        return C * C.sum(-2, keepdim=True) * 1.4

    mixing(site, iterate=iterate)


@mutation("1.8", bugs=(), parts=("mHC comb",), probes=("mhc",))
def streams_are_not_mixed(site: Site) -> None:
    """Every stream keeps to itself: comb is the identity."""
    site.kernel(
        "mhc_post",
        lambda real: (
            lambda out, streams, post, comb: real(
                out, streams, post, torch.eye(comb.shape[-1], device=comb.device).expand_as(comb)
            )
        ),
    )


# ---- pre and post -------------------------------------------------------------------------


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post"), probes=("mhc",))
def pre_and_post_swapped(site: Site) -> None:
    """The first four mixes are taken for post, the next four for pre."""

    def swapped(m, scale, base, n, eps):
        order = torch.tensor([*range(n, 2 * n), *range(n), *range(2 * n, m.shape[1])], device=m.device)
        return plain_weights(m[:, order], scale, base[order], n, eps)

    mixing(site, weights=swapped)


@mutation("1.8", bugs=(), parts=("mHC post",), probes=("mhc",))
def post_without_its_factor_2(site: Site) -> None:
    """post is σ(m·scale + base), half of what it should be."""

    def half(m, scale, base, n, eps):
        pre, post, logits = plain_weights(m, scale, base, n, eps)
        return pre, post / 2, logits

    mixing(site, weights=half)


@mutation("1.8", bugs=(), parts=("mHC pre",), probes=("mhc",))
def pre_with_a_factor_2(site: Site) -> None:
    """pre has the factor 2 that belongs to post."""

    def doubled(m, scale, base, n, eps):
        pre, post, logits = plain_weights(m, scale, base, n, eps)
        return 2 * pre, post, logits

    mixing(site, weights=doubled)


@mutation("1.8", bugs=(), parts=("mHC pre",), probes=("mhc",))
def pre_softmaxed(site: Site) -> None:
    """pre is a softmax over the streams instead of a sigmoid of each."""

    def soft(m, scale, base, n, eps):
        pre, post, logits = plain_weights(m, scale, base, n, eps)
        return torch.softmax(m[:, :n] * scale[0] + base[:n], -1) + eps, post, logits

    mixing(site, weights=soft)


@mutation("1.8", bugs=(114,), parts=("mHC pre",), probes=("mhc",))
def pre_without_eps(site: Site) -> None:
    """hc_eps is missing in pre."""
    mixing(site, weights=lambda m, scale, base, n, eps: plain_weights(m, scale, base, n, 0.0))


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post", "mHC comb"), probes=("mhc",))
def base_ignored(site: Site) -> None:
    """The mixes are not offset: base is loaded and unused."""
    mixing(site, weights=lambda m, scale, base, n, eps: plain_weights(m, scale, 0 * base, n, eps))


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC comb"), probes=("mhc",))
def scales_in_another_order(site: Site) -> None:
    """The scales of pre and of comb are exchanged."""
    mixing(site, weights=lambda m, scale, base, n, eps: plain_weights(m, scale.flip(0), base, n, eps))


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post", "mHC comb"), probes=("mhc",))
def statistics_not_normalised(site: Site) -> None:
    """The mixes are not divided by the RMS of the streams."""
    mixing(site, statistics=lambda streams, fn, eps: streams.flatten(1).float() @ fn.T)


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post", "mHC comb"), probes=("mhc",))
def statistics_normalised_stream_by_stream(site: Site) -> None:
    """The RMS is taken over each stream alone instead of all four together."""

    def each(streams, fn, norm_eps):
        x = streams.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)).flatten(1) @ fn.T

    mixing(site, statistics=each)


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post", "mHC comb", "Sinkhorn"), probes=("mhc",))
def hyper_connections_in_bf16(site: Site) -> None:
    """The mixes are computed in bf16 instead of fp32."""

    def rounded(streams, fn, norm_eps):
        return plain_statistics(streams.bfloat16(), fn.bfloat16().float(), norm_eps).bfloat16().float()

    mixing(site, statistics=rounded)


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post", "mHC comb"), probes=("mhc", "load_ledger"))
def connections_of_attention_and_ffn_swapped(site: Site) -> None:
    """Both sublayers of a block use each other's hyper-connection."""

    def swap(subject):
        for block in subject.model.layers:
            block.hc_attn, block.hc_ffn = block.hc_ffn, block.hc_attn

    site.after_load(swap)


@mutation("1.8", bugs=(98,), parts=("mHC pre", "mHC post", "mHC comb"), probes=("mhc", "schedules"))
def wrong_at_many_tokens(site: Site) -> None:
    """A kernel for many tokens mixes those beyond the first 256 of a step by the weights of token 255."""

    def tiled(real):
        def mhc_pre(streams, *rest):
            y, post, comb = real(streams, *rest)
            if len(y) > 256:
                y, post, comb = y.clone(), post.clone(), comb.clone()
                post[256:], comb[256:] = post[255], comb[255]
            return y, post, comb

        return mhc_pre

    site.kernel("mhc_pre", tiled)
