"""Section 1.8: what becomes of the residual streams, and the head."""

import torch

from dsv4.model.block import Block, HyperConnection
from dsv4.model.deepseek_v4 import Model
from dsv4.probes.faults import Site, mutation


@mutation("1.8", bugs=(), parts=("mHC comb", "streams"), probes=("mhc",))
def streams_collapsed_to_one(site: Site) -> None:
    """After each sublayer all streams become their mean: one residual stream, four times."""
    site.kernel(
        "mhc_post", lambda real: lambda *args: real(*args).mean(1, keepdim=True).expand_as(args[1]).contiguous()
    )


@mutation("1.8", bugs=(), parts=("mHC post",), probes=("mhc",))
def output_goes_to_one_stream(site: Site) -> None:
    """A sublayer's output is added to the first stream only."""
    site.kernel(
        "mhc_post",
        lambda real: (
            lambda out, streams, post, comb: real(
                out, streams, post * (torch.arange(post.shape[1], device=post.device) == 0), comb
            )
        ),
    )


@mutation("1.8", bugs=(), parts=("embedding",), probes=("mhc",))
def embedding_in_one_stream(site: Site) -> None:
    """The token's embedding starts the first stream, and the others start at zero."""
    real = Block.forward

    def start(self, streams, step, cache):
        if getattr(self, "first", False):
            streams = streams * (torch.arange(streams.shape[1], device=streams.device).view(1, -1, 1) == 0)
        return real(self, streams, step, cache)

    site.patch(Block, "forward", start)
    site.after_load(lambda subject: setattr(subject.model.layers[0], "first", True))


@mutation("1.8", bugs=(98,), parts=("ffn_norm",), probes=("moe_edges",))
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
    site.kernel(
        "mhc_head", lambda real: lambda streams, fn, scale, base, *rest: real(streams, fn, scale, 0 * base, *rest)
    )
