"""Section 1.8: hyper-connections (mHC)."""

import torch

from dsv4.block import Block
from dsv4.hyper_connections import HyperConnection
from dsv4.model import Model
from probes.mutations import Site, mutation

SINKHORN = ("Sinkhorn", "mHC comb")


def mixing(site: Site, iterate=None, weights=None, statistics=None) -> None:
    """mhc_pre with another iteration(logits, iters, eps), weights(m, scale, base, n, eps) → pre, post, logits, or statistics."""
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
    post = 2 * torch.sigmoid(m[:, n:2 * n] * scale[1] + base[n:2 * n])
    return pre, post, (m[:, 2 * n:] * scale[2] + base[2 * n:]).unflatten(-1, (n, n))


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
    site.kernel("mhc_post", lambda real: lambda out, streams, post, comb: real(out, streams, post, comb.transpose(1, 2)))


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
    mixing(site, iterate=lambda logits, iters, eps: plain_sinkhorn(
        torch.log(torch.softmax(logits, -2)), iters, eps))


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
    site.kernel("mhc_post", lambda real: lambda out, streams, post, comb: real(
        out, streams, post, torch.eye(comb.shape[-1]).expand_as(comb)))


# ---- pre and post -------------------------------------------------------------------------


@mutation("1.8", bugs=(), parts=("mHC pre", "mHC post"), probes=("mhc",))
def pre_and_post_swapped(site: Site) -> None:
    """The first four mixes are taken for post, the next four for pre."""
    def swapped(m, scale, base, n, eps):
        order = torch.cat((torch.arange(n, 2 * n), torch.arange(n), torch.arange(2 * n, m.shape[1])))
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


# ---- streams ------------------------------------------------------------------------------


@mutation("1.8", bugs=(), parts=("mHC comb", "streams"), probes=("mhc",))
def streams_collapsed_to_one(site: Site) -> None:
    """After each sublayer all streams become their mean: one residual stream, four times."""
    site.kernel("mhc_post", lambda real: lambda *args: real(*args).mean(1, keepdim=True).expand_as(args[1]).contiguous())


@mutation("1.8", bugs=(), parts=("mHC post",), probes=("mhc",))
def output_goes_to_one_stream(site: Site) -> None:
    """A sublayer's output is added to the first stream only."""
    site.kernel("mhc_post", lambda real: lambda out, streams, post, comb: real(
        out, streams, post * (torch.arange(post.shape[1]) == 0), comb))


@mutation("1.8", bugs=(), parts=("embedding",), probes=("mhc",))
def embedding_in_one_stream(site: Site) -> None:
    """The token's embedding starts the first stream, and the others start at zero."""
    real = Block.forward

    def start(self, streams, step, cache):
        if getattr(self, "first", False):
            streams = streams * (torch.arange(streams.shape[1]).view(1, -1, 1) == 0)
        return real(self, streams, step, cache)
    site.patch(Block, "forward", start)
    site.after_load(lambda subject: setattr(subject.model.layers[0], "first", True))


@mutation("1.8", bugs=(98,), parts=("ffn_norm", "experts"), probes=("moe_edges",))
def ffn_norm_twice(site: Site) -> None:
    """The input of the experts is normalised again."""
    def again(subject):
        for block in subject.model.layers:
            norm = block.ffn_norm
            norm.forward = lambda x, norm=norm: type(norm).forward(norm, type(norm).forward(norm, x))
    site.after_load(again)


@mutation("1.8", bugs=(), parts=("mHC pre", "attn_norm"), probes=("mhc",))
def input_is_the_mean_of_the_streams(site: Site) -> None:
    """Sublayers read the mean of the streams: pre is loaded and unused."""
    def mean(self, streams):
        y, post, comb = real(self, streams)
        return streams.float().mean(1).to(y.dtype), post, comb
    real = site.patch(HyperConnection, "forward", mean)


# ---- the head -----------------------------------------------------------------------------


@mutation("1.8", bugs=(115,), parts=("head",), probes=("mhc",))
def head_is_a_mean_pool(site: Site) -> None:
    """Streams are averaged before the final norm: the learned collapse is missing."""
    site.kernel("mhc_head", lambda real: lambda streams, *rest: streams.float().mean(1).to(streams.dtype))


@mutation("1.8", bugs=(), parts=("head",), probes=("mhc",))
def head_takes_the_first_stream(site: Site) -> None:
    """Only the first stream reaches the final norm."""
    site.kernel("mhc_head", lambda real: lambda streams, *rest: streams[:, 0])


@mutation("1.8", bugs=(116,), parts=("head", "final norm"), probes=("mhc",))
def final_norm_skipped(site: Site) -> None:
    """The collapsed streams reach the head without a norm."""
    site.patch(Model, "features", lambda self, streams: self.hc_head(streams))


@mutation("1.8", bugs=(116,), parts=("head", "final norm"), probes=("mhc",))
def norm_before_the_collapse(site: Site) -> None:
    """Each stream is normalised, and their collapse is not."""
    site.patch(Model, "features", lambda self, streams: self.hc_head(self.norm(streams.flatten(0, 1)).view_as(streams)))


@mutation("1.8", bugs=(), parts=("head",), probes=("mhc",))
def head_base_ignored(site: Site) -> None:
    """The collapse's base is loaded and unused."""
    site.kernel("mhc_head", lambda real: lambda streams, fn, scale, base, *rest: real(streams, fn, scale, 0 * base, *rest))
