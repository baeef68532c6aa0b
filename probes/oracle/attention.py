"""An attention layer (§3), one function a step, in float64. B rows, T tokens from position 0, n entries, H heads of D
dims."""

import math
from dataclasses import dataclass

import torch

from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.config import OracleConfig
from dsv4.probes.oracle.formats import hadamard, simulate_fp4, simulate_fp8
from dsv4.probes.oracle.weights import Weights


@dataclass
class Layer:
    """One layer: its config, its weights by the name within the layer (prefix 'layers.3.'), and how numbers are
    rounded.

    ratio: its compress_ratio. simulate: the official quantisation simulation. cache: dtype in which window rows,
    entries and index keys are stored (None: as computed).
    """

    config: OracleConfig
    weights: Weights
    prefix: str
    ratio: int
    hashed: bool = False
    simulate: bool = False
    cache: torch.dtype | None = None

    def w(self, name: str) -> torch.Tensor:
        return self.weights(self.prefix + name)

    def linear(self, base: str, x: torch.Tensor, quantise: bool = True) -> torch.Tensor:
        """x [..., K] · Wᵀ → [..., O]. Simulated, FP8 and FP4 weights take x through FP8 in blocks of 128 (§3, in
        linears)."""
        if quantise and self.simulate and self.weights.quantised(self.prefix + base):
            x = simulate_fp8(x, 128)
        return x @ self.w(f"{base}.weight").T

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """x as the cache gives it back."""
        return x if self.cache is None else x.to(self.cache).double()

    @property
    def frequencies(self) -> torch.Tensor:
        return frequencies(self.config, self.ratio > 0)


def rms(x: torch.Tensor, w: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm (§3): w · x / √(mean(x²) + eps) over the last axis of x [..., D], w [D] or None for none."""
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if w is None else w * y


def frequencies(config: OracleConfig, compressed: bool) -> torch.Tensor:
    """f [R/2] of the R rotated dims (§3, RoPE); layers that compress have a θ of their own and its scaling."""
    return (config.compress if compressed else config.main).frequencies(config.qk_rope_head_dim)


def rotate(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """RoPE (§3) of the last 2·len(freqs) dims of x [..., T, D] at positions [T], in interleaved pairs (2i, 2i + 1)."""
    angle = positions.double().unsqueeze(-1) * freqs * (-1 if inverse else 1)  # [T, R/2]
    R = 2 * len(freqs)
    still, turned = x[..., : x.shape[-1] - R], x[..., x.shape[-1] - R :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    out = torch.empty_like(turned)
    out[..., 0::2] = a * angle.cos() - b * angle.sin()
    out[..., 1::2] = a * angle.sin() + b * angle.cos()
    return torch.cat((still, out), -1)


def rotate_heads(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """`rotate` of x [B, T, H, D]."""
    return rotate(x.transpose(1, 2), positions, freqs, inverse).transpose(1, 2)


def queries(layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, d] → qr = q_norm(wq_a x) [B, T, q_lora_rank], q = RoPE(rms(wq_b qr) per head) [B, T, H, D] (§3,
    Attention)."""
    c = layer.config
    qr = rms(layer.linear("attn.wq_a", x), layer.w("attn.q_norm.weight"), c.rms_norm_eps)
    q = layer.linear("attn.wq_b", qr).unflatten(-1, (c.num_attention_heads, c.head_dim))
    return qr, rotate_heads(rms(q, None, c.rms_norm_eps), positions, layer.frequencies)


def window_rows(layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [B, T, d] → kv = RoPE(kv_norm(wkv x)) [B, T, D], as the cache holds it (§3, Attention)."""
    kv = rms(layer.linear("attn.wkv", x), layer.w("attn.kv_norm.weight"), layer.config.rms_norm_eps)
    return main_kv(layer, rotate(kv, positions, layer.frequencies))


def main_kv(layer: Layer, kv: torch.Tensor) -> torch.Tensor:
    """kv [..., D] through FP8 in blocks of 64 but for its rotated dims, if simulated; then as stored."""
    return layer.store(simulate_fp8(kv, 64, layer.config.qk_rope_head_dim) if layer.simulate else kv)


def pool(x, wkv, wgate, ape, ratio: int, overlap: bool) -> torch.Tensor:
    """Compressor (§3) before its norm: x [B, T, d] → [B, T // ratio, D].

    wkv, wgate [c·D, d]; ape [ratio, c·D]; c = 2 with overlap, else 1. Entry w is, per channel, the softmax-weighted sum
    over the tokens of window w, by columns [D:] with overlap, and then also over those of window w − 1, by columns
    [:D].
    """
    T, D = x.shape[1], wkv.shape[0] // (2 if overlap else 1)
    kv, score = x @ wkv.T, x @ wgate.T + ape[torch.arange(T) % ratio]
    entries = x.new_empty(x.shape[0], T // ratio, D)
    for w in range(T // ratio):
        tokens = slice(w * ratio, (w + 1) * ratio)
        values, gates = kv[:, tokens, -D:], score[:, tokens, -D:]
        if overlap and w > 0:
            before = slice((w - 1) * ratio, w * ratio)
            values, gates = torch.cat((kv[:, before, :D], values), 1), torch.cat((score[:, before, :D], gates), 1)
        entries[:, w] = (torch.softmax(gates, 1) * values).sum(1)
    return entries


def compress(layer: Layer, x: torch.Tensor, name: str) -> torch.Tensor:
    """x [B, T, d] → entries [B, n, D] of the compressor called `name`: pooled, normed, rotated at position ratio·w
    (§3)."""
    w = lambda leaf: layer.w(f"{name}.{leaf}")
    pooled = pool(x, w("wkv.weight"), w("wgate.weight"), w("ape"), layer.ratio, overlap=layer.ratio == kinds.CSA)
    entries = rms(pooled, w("norm.weight"), layer.config.rms_norm_eps)
    return rotate(entries, layer.ratio * torch.arange(entries.shape[1]), layer.frequencies)


def index_form(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Index queries or keys [..., Di]: through Hadamard and FP4 in blocks of 32, if simulated (§3, Compressor and
    Indexer)."""
    return simulate_fp4(hadamard(x), 32) if layer.simulate else x


def index_keys(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, d] → [B, n, Di], as the cache holds them (§3, Compressor)."""
    return layer.store(index_form(layer, compress(layer, x, "attn.indexer.compressor")))


def index_queries(layer: Layer, qr: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """qr [B, T, q_lora_rank] → [B, T, Hi, Di], rotated (§3, Indexer)."""
    q = layer.linear("attn.indexer.wq_b", qr).unflatten(-1, (layer.config.index_n_heads, layer.config.index_head_dim))
    return index_form(layer, rotate_heads(q, positions, layer.frequencies))


def index_weights(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, d] → [B, T, Hi]: weights_proj(x) · Di^−0.5 · Hi^−0.5 (§3, Indexer)."""
    c = layer.config
    return layer.linear("attn.indexer.weights_proj", x) * c.index_head_dim**-0.5 * c.index_n_heads**-0.5


def visible(positions: torch.Tensor, n: int, ratio: int) -> torch.Tensor:
    """bool [T, n]: the query at t sees entry w iff w < ⌊(t + 1) / ratio⌋ (§3, Visibility)."""
    return torch.arange(n) < ((positions + 1) // ratio).unsqueeze(-1)


def index_scores(
    q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, ratio: int
) -> torch.Tensor:
    """score(t, e) = Σ_h w_h · relu(q_h · k_e) (§3, Indexer): q [B, T, Hi, Di], w [B, T, Hi], keys [B, n, Di] → [B, T,
    n].

    −inf where the entry is invisible.
    """
    scores = torch.zeros(*q.shape[:2], keys.shape[1], dtype=torch.float64)
    for h in range(q.shape[2]):
        scores += w[:, :, h, None] * torch.relu(q[:, :, h] @ keys.transpose(1, 2))
    return scores.masked_fill(~visible(positions, keys.shape[1], ratio), -math.inf)


def select(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The min(k, n) best of scores [B, T, n], best first, the lowest entry first among equals; int64, −1 for −inf (§3,
    §6)."""
    best, entry = torch.sort(scores, dim=-1, descending=True, stable=True)
    k = min(k, scores.shape[-1])
    return entry[..., :k].masked_fill(best[..., :k] == -math.inf, -1)


def chosen(selection: torch.Tensor, n: int) -> torch.Tensor:
    """selection int64 [B, T, k], −1 for none → bool [B, T, n]."""
    wanted = torch.zeros(*selection.shape[:2], n + 1, dtype=torch.bool)
    wanted.scatter_(-1, torch.where(selection < 0, n, selection), True)
    return wanted[..., :n]


def attention(
    q, kv, entries, selection, sink, window: int, ratio: int, at=None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Attention with one shared latent as key and value, and a sink (§3, Attention).

    q [B, Q, H, D] at positions at [Q], every one if None; kv [B, T, D], of which t sees the last `window` up to itself;
    entries [B, n, D]; selection int64 [B, Q, k] or None for every visible one; sink [H]. Returns o [B, Q, H, D], still
    rotated, and the masses 'window' [B, Q, H], 'entries' [B, Q, H, n] and 'sink' [B, Q, H], which add up to 1.
    """
    B, Q, H, D = q.shape
    T, n, keys = kv.shape[1], entries.shape[1], torch.cat((kv, entries), 1)
    positions, j = torch.arange(T) if at is None else at, torch.arange(T)
    o, near, far = torch.empty_like(q), q.new_empty(B, Q, H), q.new_empty(B, Q, H, n)
    for i in torch.arange(Q).split(256):
        t = positions[i]
        raw = (j <= t.unsqueeze(-1)) & (j > t.unsqueeze(-1) - window)
        seen = visible(t, n, ratio) if ratio else torch.ones(len(t), 0, dtype=torch.bool)
        seen = seen.expand(B, -1, -1) if selection is None else chosen(selection[:, i], n)
        seen = torch.cat((raw.expand(B, -1, -1), seen), -1)  # [B, i, T + n]
        for h in range(H):
            logits = (q[:, i, h] @ keys.transpose(1, 2) * D**-0.5).masked_fill(~seen, -math.inf)
            m = logits.amax(-1, keepdim=True).clamp(min=-500)  # of a query without any key
            e = torch.exp(logits - m)
            p = e / (e.sum(-1, keepdim=True) + torch.exp(sink[h] - m))
            o[:, i, h], near[:, i, h], far[:, i, h] = p @ keys, p[..., :T].sum(-1), p[..., T:]
    return o, {"window": near, "entries": far, "sink": 1 - near - far.sum(-1)}


def output(layer: Layer, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """o [B, T, H, D] → [B, T, d]: rotated back, each group of heads by its rows of wo_a, concatenated, wo_b (§3,
    Attention).

    wo_a is never given quantised activations.
    """
    c, wo_a = layer.config, layer.w("attn.wo_a.weight")
    groups = rotate_heads(o, positions, layer.frequencies, inverse=True).flatten(2).chunk(c.o_groups, -1)
    z = [group @ wo_a[g * c.o_lora_rank : (g + 1) * c.o_lora_rank].T for g, group in enumerate(groups)]
    return layer.linear("attn.wo_b", torch.cat(z, -1))


def attention_layer(layer: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """attn_in [B, T, d] → every point of attention by the names of `dsv4.probes.subject.POINTS`, and 'masses.*' of
    `attention`."""
    c, positions = layer.config, torch.arange(x.shape[1])
    qr, q = queries(layer, x, positions)
    found = {"attn_in": x, "q_after_rope": q, "kv_window": window_rows(layer, x, positions)}
    entries, selection = x.new_empty(x.shape[0], 0, c.head_dim), None
    if layer.ratio:
        entries = found["compressed_kv"] = main_kv(layer, compress(layer, x, "attn.compressor"))
    if layer.ratio == kinds.CSA:
        keys = found["index_keys"] = index_keys(layer, x)
        scores = found["index_scores"] = index_scores(
            index_queries(layer, qr, positions), index_weights(layer, x), keys, positions, layer.ratio
        )
        selection = found["selection"] = select(scores, c.index_topk)
    o, masses = attention(
        q, found["kv_window"], entries, selection, layer.w("attn.attn_sink"), c.sliding_window, layer.ratio
    )
    return found | {f"masses.{k}": v for k, v in masses.items()} | {"attn_out": output(layer, o, positions)}
