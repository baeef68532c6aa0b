"""The oracle's modules as functions that stand in for a subject's own."""

import torch

from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle.attention import Layer, rms
from dsv4.probes.oracle.blocks import collapse, expert, hyper_post, hyper_pre, moe, router

LINEARS = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "attn.indexer.wq_b", "attn.indexer.weights_proj")
NORMS = ("attn_norm", "ffn_norm", "attn.q_norm", "attn.kv_norm")


class Reference:
    """The oracle's modules as functions of what a subject hands them: x [T, ...] of one row, any dtype in, float64
    out."""

    def __init__(self, layer: Layer, ids: torch.Tensor):
        self.layer, self.ids = layer, ids

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[0])

    def leaf(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A matrix or a norm on x [T, K]."""
        if name in LINEARS:
            return self.layer.linear(name, x.double(), quantise=name != "attn.indexer.weights_proj")
        return rms(x.double(), self.layer.w(f"{name}.weight"), self.layer.config.rms_norm_eps)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """wo_a on x [T, G, K] → [T, G, R]."""
        rows = self.layer.w("attn.wo_a.weight").chunk(x.shape[1])
        return torch.stack([x[:, g].double() @ w.T for g, w in enumerate(rows)], 1)

    def queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qr, q = steps.queries(self.layer, x.double()[None], self.positions(x))
        return qr[0], q[0]

    def latent(self, x: torch.Tensor) -> torch.Tensor:
        return steps.window_rows(self.layer, x.double()[None], self.positions(x))[0]

    def entries(self, x: torch.Tensor) -> torch.Tensor:
        return steps.main_kv(self.layer, steps.compress(self.layer, x.double()[None], "attn.compressor"))[0]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return steps.index_keys(self.layer, x.double()[None])[0]

    def scores(self, x: torch.Tensor, qr: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """x [T, d], qr [T, q_lora_rank], keys [n, Di] → [T, n], −inf where invisible."""
        positions = self.positions(x)
        q = steps.index_queries(self.layer, qr.double()[None], positions)
        w = steps.index_weights(self.layer, x.double()[None])
        return steps.index_scores(q, w, keys.double()[None], positions, self.layer.ratio)[0]

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        return steps.select(scores.double(), self.layer.config.index_topk)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        return steps.attention_layer(self.layer, x.double()[None])["attn_out"][0]

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [...] → [..., R/2] by the layer's own frequencies."""
        return positions.double().unsqueeze(-1) * self.layer.frequencies

    def gate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts, weights = router(self.layer, x.double()[None], self.ids)
        return experts[0], weights[0]

    def experts(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts on x [T, d], as a subject's own router chose and weighed them [T, k]."""
        x, weights, out = x.double(), weights.double(), torch.zeros(x.shape, dtype=torch.float64)
        for e in indices.unique().tolist():
            token, slot = torch.nonzero(indices == e, as_tuple=True)
            out[token] += expert(self.layer, f"ffn.experts.{e}", x[token], weights[token, slot].unsqueeze(-1))
        return out

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        return expert(self.layer, "ffn.shared_experts", x.double(), 1.0)

    def ffn(self, x: torch.Tensor) -> torch.Tensor:
        return moe(self.layer, x.double()[None], self.ids)[0]

    def head(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """hc_head on streams [T, S, d], norm or head on [T, d]."""
        w, c = self.layer.weights, self.layer.config
        if name == "hc_head":
            return collapse(c, x.double()[None], w("hc_head_fn"), w("hc_head_base"), w("hc_head_scale"))[0]
        return (
            rms(x.double(), w("norm.weight"), c.rms_norm_eps) if name == "norm" else x.double() @ w(c.output_weight).T
        )

    def before(self, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hc_attn or hc_ffn on streams [T, S, d] → sublayer input, post, C."""
        return tuple(v[0] for v in hyper_pre(self.layer, streams.double()[None], name))

    def after(self, out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
        return hyper_post(out.double()[None], streams.double()[None], post.double()[None], C.double()[None])[0]


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The last dims of x [..., D] rotated by angles [..., R/2] (broadcastable), in neighbouring pairs; float64."""
    x, R = x.double(), 2 * angles.shape[-1]
    pairs = torch.view_as_complex(x[..., -R:].unflatten(-1, (-1, 2)).contiguous())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((x[..., :-R], torch.view_as_real(pairs).flatten(-2)), -1)
