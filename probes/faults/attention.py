"""Section 1.7: attention core, sink, output projection."""

import torch

from dsv4.cache.layout import LatentLayout
from dsv4.cache.rows import Entries, Ring, Tokens
from dsv4.model.attention import GroupedLinear, WindowAttention
from dsv4.model.config import ModelConfig
from dsv4.probes.faults import Site, mutation

SECTION = "1.7", "Attention core, sink, output projection"

CORES = ("sparse_attention", "hca_attention")


def sinks(site: Site, change) -> None:
    """Both attention operations get change(sink [H], scale) for their sink."""
    for name in CORES:
        site.kernel(
            name,
            lambda real: (
                lambda q, w, wi, e, which, sink, scale, *rest: real(
                    q, w, wi, e, which, change(sink, scale), scale, *rest
                )
            ),
        )


def outputs(site: Site, change) -> None:
    """What attention gives, before it is rotated back, becomes change(o [N, H, D], the layer's attention)."""
    real = site.patch(WindowAttention, "_attend", lambda self, *args: change(real(self, *args), self))


def windows(site: Site, change) -> None:
    """Every layer keeps and reads change(W) tokens of window."""
    last = Tokens.last
    site.patch(
        LatentLayout, "window_rows", lambda layout, plan, held: Ring(held, change(layout.config.sliding_window) - 1)
    )
    site.patch(Tokens, "last", lambda self, step, window: last(self, step, change(window)))


# ---- the window ---------------------------------------------------------------------------


@mutation("1.7", bugs=(102,), parts=("window",), probes=("influence",))
def window_without_bound(site: Site) -> None:
    """The sliding window is wired into no mask: a prefill attends to every token before it."""
    last = Tokens.last
    site.patch(
        Tokens, "last", lambda self, step, window: last(self, step, window if any(step.starts) else max(window, step.T))
    )


@mutation("1.7", bugs=(), parts=("window",), probes=("influence",))
def window_twice_as_long(site: Site) -> None:
    """Every layer attends to 2 · W tokens."""
    windows(site, lambda W: 2 * W)


@mutation("1.7", bugs=(), parts=("window",), probes=("influence",))
def window_one_too_short(site: Site) -> None:
    """The window is [t − W + 2, t]: its oldest token is lost."""
    windows(site, lambda W: W - 1)


@mutation("1.7", bugs=(), parts=("window",), probes=("influence",))
def window_one_too_long(site: Site) -> None:
    """The window is [t − W, t]: one token too many."""
    windows(site, lambda W: W + 1)


@mutation("1.7", bugs=(109,), parts=("window", "caches"), probes=("influence", "schedules"))
def ring_without_room_for_the_step(site: Site) -> None:
    """The ring ignores how long the current step is: later tokens overwrite rows that earlier queries still need."""
    site.patch(Ring, "fits", lambda self, step: True)


@mutation("1.7", bugs=(109,), parts=("window",), probes=("influence", "schedules"))
def window_forgets_the_step_before(site: Site) -> None:
    """A query attends only to window tokens of its own step."""
    last = Tokens.last

    def own_step(self, step, window):
        t, back = torch.arange(step.T, device=step.device), torch.arange(1 - window, 1, device=step.device)
        first = (t.view(-1, 1) + back >= 0).repeat(step.B, 1)
        return torch.where(first, last(self, step, window), -1)

    site.patch(Tokens, "last", own_step)


@mutation("1.7", bugs=(), parts=("window",), probes=("influence",))
def window_dropped_beside_entries(site: Site) -> None:
    """Layers that compress attend to entries alone."""
    for name in CORES:
        site.kernel(
            name,
            lambda real: (
                lambda q, w, wi, e, which, *rest: real(
                    q,
                    w,
                    wi if which is None or not (e.numel() and bool((which > 0).any())) else torch.full_like(wi, -1),
                    e,
                    which,
                    *rest[:2],
                )
            ),
        )


@mutation("1.7", bugs=(), parts=("compressed entries",), probes=("influence",))
def recent_tokens_are_seen_once(site: Site) -> None:
    """Entries whose tokens are in the window as well are left out."""
    real = Entries.chosen

    def older(self, step, entry, op):
        return real(self, step, torch.where(4 * entry + 3 < step.pos.unsqueeze(-1) - 7, entry, -1), op)

    site.patch(Entries, "chosen", older)


@mutation("1.7", bugs=(108,), parts=("rows of the batch", "batching"), probes=("influence", "isolation"))
def rows_addressed_without_their_stride(site: Site) -> None:
    """Entries are read by a flat number that ignores how far apart the rows of a batch lie."""

    def packed(self, step, entry, op):
        n = step.max_visible(self.ratio)  # as if the pool held nothing beyond
        return self.flat, torch.where(entry < 0, -1, entry + (step.row * (n - n // 2)).unsqueeze(-1)).flatten(0, 1)

    site.patch(Entries, "chosen", packed)


# ---- sinks --------------------------------------------------------------------------------


@mutation("1.7", bugs=(105, 106), parts=("sink",), probes=("influence",))
def sink_ignored(site: Site) -> None:
    """Sinks are loaded and not in the softmax."""
    sinks(site, lambda sink, scale: torch.full_like(sink, float("-inf")))


@mutation("1.7", bugs=(), parts=("sink",), probes=("influence",))
def sink_counted_twice(site: Site) -> None:
    """Window and entries bring the sink each, and merging them counts it twice."""
    sinks(site, lambda sink, scale: sink + torch.tensor(2.0).log())


@mutation("1.7", bugs=(), parts=("sink",), probes=("influence",))
def sink_scaled_like_a_score(site: Site) -> None:
    """The sink is multiplied by the softmax scale."""
    sinks(site, lambda sink, scale: sink * scale)


@mutation("1.7", bugs=(), parts=("sink",), probes=("influence",))
def sink_of_the_next_head(site: Site) -> None:
    """Each head has its neighbour's sink."""
    sinks(site, lambda sink, scale: sink.roll(1))


@mutation("1.7", bugs=(104,), parts=("sink",), probes=("influence", "load_ledger"))
def sinks_of_the_first_shard(site: Site) -> None:
    """Sinks are not sharded: the second half of the heads uses those of the first."""

    def repeat(subject):
        for block in subject.model.layers:
            half = block.attn.H // 2
            block.attn.attn_sink.data[half:] = block.attn.attn_sink.data[:half].clone()

    site.after_load(repeat)


@mutation("1.7", bugs=(), parts=("sink",), probes=("influence", "load_ledger"))
def sinks_shared_across_layers(site: Site) -> None:
    """All layers use the sinks of the first."""

    def share(subject):
        for block in subject.model.layers[1:]:
            block.attn.attn_sink.data = subject.model.layers[0].attn.attn_sink.data

    site.after_load(share)


@mutation("1.7", bugs=(106,), parts=("sink",), probes=("edges", "influence"))
def sink_dropped_with_one_query(site: Site) -> None:
    """The interface that decode calls has no argument for sinks, and they vanish there."""
    for name in CORES:
        site.kernel(
            name,
            lambda real: (
                lambda q, w, wi, e, which, sink, *rest: real(
                    q, w, wi, e, which, sink - (1e4 if len(wi) == 1 else 0), *rest
                )
            ),
        )


@mutation("1.7", bugs=(), parts=("sink", "sparse attention", "HCA attention"), probes=("edges", "influence"))
def sink_has_a_value(site: Site) -> None:
    """The sink is a key with a value, that of the first row of the pool."""
    for name in CORES:

        def valued(real):
            def attend(q, w, wi, e, which, sink, *rest):
                o, without = real(q, w, wi, e, which, sink, *rest), real(q, w, wi, e, which, sink - 1e4, *rest)
                mass = 1 - (o * without).sum(-1, keepdim=True) / (without * without).sum(-1, keepdim=True).clamp(
                    min=1e-30
                )
                return o + mass * w[0].nan_to_num()

            return attend

        site.kernel(name, valued)


# ---- queries, keys, values ----------------------------------------------------------------


@mutation("1.7", bugs=(41,), parts=("softmax scale",), probes=("influence",))
def softmax_scale_of_unrotated_dims(site: Site) -> None:
    """Scores are divided by the root of the dims that are not rotated."""
    site.patch(ModelConfig, "softmax_scale", property(lambda self: (self.head_dim - self.qk_rope_head_dim) ** -0.5))


@mutation("1.7", bugs=(41,), parts=("softmax scale",), probes=("influence",))
def softmax_scale_with_mscale(site: Site) -> None:
    """Scores carry the squared mscale of YaRN, 1.277 for a factor of 16."""
    site.patch(ModelConfig, "softmax_scale", property(lambda self: 1.277**2 * self.head_dim**-0.5))


@mutation("1.7", bugs=(), parts=("queries",), probes=("rope",))
def heads_in_another_order(site: Site) -> None:
    """Rows of wq_b are split into heads the wrong way round: dim by dim instead of head by head."""
    real = WindowAttention.queries

    def interleaved(self, x, step):
        qr = self.q_norm(self.wq_a(x))
        q = self.op.rms_norm(self.wq_b(qr).view(step.N, self.D, self.H).transpose(1, 2).contiguous(), None, self.eps)
        return real(self, x, step)[0], self.op.rotate(q, step.cis(self.base).unsqueeze(1))

    site.patch(WindowAttention, "queries", interleaved)


@mutation("1.7", bugs=(), parts=("queries",), probes=("rope",))
def query_norm_missing(site: Site) -> None:
    """Low-rank queries are not normalised: q_norm is loaded and unused."""

    def bare(subject):
        for block in subject.model.layers:
            block.attn.q_norm.forward = lambda x: x

    site.after_load(bare)


@mutation("1.7", bugs=(), parts=("queries",), probes=("rope",))
def head_norm_missing(site: Site) -> None:
    """The weightless RMS norm of each head's query is left out."""
    site.kernel("rms_norm", lambda real: lambda x, w, eps: x if w is None else real(x, w, eps))


@mutation("1.7", bugs=(), parts=("window rows",), probes=("rope",))
def latent_norm_missing(site: Site) -> None:
    """Window rows are not normalised: kv_norm is loaded and unused."""

    def bare(subject):
        for block in subject.model.layers:
            block.attn.kv_norm.forward = lambda x: x

    site.after_load(bare)


@mutation("1.7", bugs=(), parts=("values",), probes=("influence",))
def values_without_rotated_dims(site: Site) -> None:
    """Only the dims that are not rotated serve as value, as where key and value are two things."""
    outputs(site, lambda o, attn: torch.cat((o[..., : -attn.rope], torch.zeros_like(o[..., -attn.rope :])), -1))


@mutation("1.7", bugs=(), parts=("sparse attention", "HCA attention"), probes=("edges",))
def attention_in_bf16(site: Site) -> None:
    """Queries and keys are rounded to bf16 before their product, in numerics that promise fp32."""
    for name in CORES:
        site.kernel(
            name,
            lambda real: (
                lambda q, w, wi, e, *rest: real(
                    q.bfloat16().to(q.dtype),
                    w.bfloat16().to(w.dtype),
                    wi,
                    e if e is None else e.bfloat16().to(e.dtype),
                    *rest,
                )
            ),
        )


# ---- output projection --------------------------------------------------------------------


@mutation("1.7", bugs=(110,), parts=("output projection",), probes=("influence",))
def output_groups_in_reverse(site: Site) -> None:
    """Groups of heads meet each other's rows of wo_a."""
    real = GroupedLinear.forward
    site.patch(GroupedLinear, "forward", lambda self, x: real(self, x.flip(1)))


@mutation("1.7", bugs=(110,), parts=("output projection",), probes=("influence",))
def heads_dealt_out_to_groups(site: Site) -> None:
    """A split over heads breaks the reshape before wo_a: every second head goes to each group, not eight in a row."""

    def dealt(o, attn):
        return o.unflatten(1, (-1, attn.groups)).transpose(1, 2).flatten(1, 2).contiguous()

    outputs(site, dealt)


@mutation("1.7", bugs=(110,), parts=("output projection",), probes=("influence",))
def group_outputs_interleaved(site: Site) -> None:
    """What wo_a gives is concatenated rank by rank instead of group by group."""
    real = GroupedLinear.forward
    site.patch(GroupedLinear, "forward", lambda self, x: real(self, x).transpose(1, 2).contiguous())


@mutation("1.7", bugs=(110,), parts=("output projection",), probes=("influence",))
def one_group_lost(site: Site) -> None:
    """The last group's part is not summed into the output."""
    real = GroupedLinear.forward

    def lost(self, x):
        z = real(self, x).clone()
        z[:, -1] = 0
        return z

    site.patch(GroupedLinear, "forward", lost)
