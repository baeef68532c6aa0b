"""The losses of one batch, through the model's own modules."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dsv4.cache.layer import CompressorCache
from dsv4.cache.sequence import compressor_of, drafts, whole
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, to_float
from dsv4.model.attention import CSAAttention
from dsv4.model.deepseek_v4 import Model
from dsv4.model.moe import Gate
from dsv4.model.step import Step
from scripts.training.architecture import shipped_forms
from scripts.training.state import is_matrix


@dataclass(frozen=True)
class Wanted:
    """What to train in a batch. `sparse`: attend to the indexer's selection instead of to every visible entry; `chunk`:
    queries of each row whose index scores are trained; weights of the losses. `gather` weighs −log of the share of the
    dense attention's mass that the selection holds: attending sparsely leaves free what the others' logits are, and
    without it the dense attention of a sparsely trained model is spread over thousands of entries that were never of
    use."""

    sparse: bool
    chunk: int = 128
    mtp: float = 0.4
    indexer: float = 1.0
    gather: float = 0.0


class Trainee(nn.Module):
    """Wraps the model so that one call computes everything that needs exchanged (cast, rounded) parameters."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        self.topk, self.forms = (
            model.config.index_topk,
            {f"model.{name}": form for name, form in shipped_forms(model).items()},
        )
        self.inputs: dict[CSAAttention, torch.Tensor] = {}
        self.chosen: list[tuple[str, torch.Tensor]] = []
        for name, module in model.named_modules():
            if isinstance(module, CSAAttention):
                module.register_forward_pre_hook(lambda m, args: self.inputs.__setitem__(m, args[0].detach()))
            if isinstance(module, Gate):
                module.register_forward_hook(lambda m, args, out, name=name: self.chosen.append((name, out[0])))

    def forward(self, ids: torch.Tensor, weight: torch.Tensor, wanted: Wanted, at: int) -> dict[str, torch.Tensor]:
        """ids int64 [B, T + 2], weight fp32 [B, T + 2] of predicting each token; `at`: first query of the indexer's
        chunk.

        Returns the losses as scalars: `next`, `draft`, `indexer`, `kept` (mass of the dense attention over entries that
        the selection holds), and `total`.
        """
        model, B, T = self.model, ids.shape[0], ids.shape[1] - 2
        self.inputs.clear(), self.chosen.clear()
        layers = [block.attn for block in model.layers if isinstance(block.attn, CSAAttention)]
        for attn in layers:
            attn.indexer.topk = self.topk if wanted.sparse else 1 << 30
        streams, step, sequences = whole(model, ids[:, :T])
        head = lambda features, target, w: cross_entropy(model.head(features), target.flatten(), w.flatten())
        out = {"next": head(model.features(streams), ids[:, 1 : T + 1], weight[:, 1 : T + 1])}
        features = drafts(model, streams.detach() if wanted.mtp == 0 else streams, ids[:, 1 : T + 1], step, sequences)
        out["draft"] = head(features, ids[:, 2:], weight[:, 2:])
        parts = [self._indexer(attn, step, at, min(wanted.chunk, T - at)) for attn in layers]
        parts = parts or [[torch.zeros((), device=ids.device)] * 3]  # an ablation without CSA layers
        out["indexer"], out["kept"], out["gather"] = (torch.stack(part).mean() for part in zip(*parts))
        out["total"] = (
            out["next"]
            + wanted.mtp * out["draft"]
            + wanted.indexer * out["indexer"]
            + (wanted.gather * out["gather"] if wanted.gather else 0.0)
        )
        return out

    def _indexer(self, attn: CSAAttention, step: Step, at: int, chunk: int):
        """For queries at … at + chunk of every row: (KL of the attention mass over entries from the softmax of the
        index scores, share of the mass that the best `topk` scores hold, −log of that share).

        The mass is that of this layer's dense attention, summed over heads. The KL's gradient reaches the indexer
        alone, that of the last the attention's own matrices alone.
        """
        x = self.inputs[attn].view(step.B, step.T, -1)
        sub = Step(step.ids.view(step.B, step.T)[:, at : at + chunk], 0, [at] * step.B, step.frequencies)
        xs = x[:, at : at + chunk].reshape(sub.N, -1)
        qr, q = attn.queries(xs, sub)
        main, index = (compressor_of(attn.spec, width) for width in (attn.D, attn.indexer.D))
        attn.compressor(x.flatten(0, 1), step, main)
        attn.indexer.compressor(x.flatten(0, 1), step, index)
        mass = self._mass(attn, x, q, main.entries.rows.buffer, step, sub)
        scores = attn.indexer.scores(xs, qr.detach(), sub, _Holding(index))
        target = mass.detach()
        log = torch.log_softmax(scores, -1).masked_fill(target == 0, 0.0)
        kl = torch.xlogy(target, target).sum(-1) - (target * log).sum(-1)
        seen = target.sum(-1) > 0
        picks = torch.topk(scores.detach(), min(self.topk, scores.shape[-1]), dim=-1).indices
        kept = mass.gather(-1, picks).sum(-1)
        mean = lambda value: (value * seen).sum() / seen.sum().clamp(min=1)
        return mean(kl), mean(kept.detach()), mean(-torch.log(kept + 1e-6))

    def cast(self, parameters: dict[str, torch.Tensor], simulate: bool) -> dict[str, torch.Tensor]:
        """What the forward takes for the fp32 parameters (see `cast` of this file)."""
        return cast(parameters, self.forms, simulate)

    def _mass(self, attn, x, q, entries, step: Step, sub: Step) -> torch.Tensor:
        """Attention mass over entries visible to the chunk, normalised: fp32 [B, C, n], 0 where invisible."""
        first = max(0, sub.starts[0] - attn.W + 1)
        stop = sub.starts[0] + sub.T
        near_step = Step(step.ids.view(step.B, step.T)[:, first:stop], 0, [first] * step.B, step.frequencies)
        kv = attn.latent(x[:, first:stop].reshape(near_step.N, -1), near_step).view(step.B, -1, attn.D)
        q = q.view(sub.B, sub.T, attn.H, attn.D)
        n = sub.max_visible(attn.ratio)
        t, j = sub.pos[0], near_step.pos[0]
        near = torch.einsum("bthd,bkd->bthk", q, kv).float() * attn.scale
        band = (j <= t[:, None]) & (j > t[:, None] - attn.W)
        near = near.masked_fill(~band[None, :, None], float("-inf"))
        far = torch.einsum("bthd,bkd->bthk", q, entries[:, :n].to(q.dtype)).float() * attn.scale
        seen = torch.arange(n, device=x.device) < sub.visible(attn.ratio)[..., None]
        far = far.masked_fill(~seen.unsqueeze(2), float("-inf"))
        sink = attn.attn_sink.view(1, 1, -1).expand(sub.B, sub.T, -1)
        lse = torch.logaddexp(torch.logaddexp(near.logsumexp(-1), far.logsumexp(-1)), sink)
        mass = torch.exp(far - lse.unsqueeze(-1)).sum(2)
        return mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)


@dataclass
class _Holding:
    """A layer cache with index keys only."""

    index: CompressorCache


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted mean in nats: logits fp32 [N, vocab], target int64 [N], weight fp32 [N]."""
    loss = F.cross_entropy(logits, target, reduction="none")
    return (loss * weight).sum() / weight.sum().clamp(min=1)


def cast(
    parameters: dict[str, torch.Tensor], forms: dict[str, WeightFormat], simulate: bool
) -> dict[str, torch.Tensor]:
    """What the forward takes for the fp32 parameters: matrices in bf16, rounded to what will be stored when `simulate`.

    The rounding has the gradient of the identity.
    """
    out = {}
    for name, p in parameters.items():
        if simulate and forms[name] is not WeightFormat.DENSE:
            with torch.no_grad():
                change = stored(p, forms[name]) - p
            p = p + change
        out[name] = in_bf16(name, p)
    return out


def in_bf16(name: str, p: torch.Tensor) -> torch.Tensor:
    """A parameter as the forward takes it: matrices in bf16, everything else as it is."""
    return p.to(torch.bfloat16) if is_matrix(name, p) else p


def stored(p: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """The fp32 values that a matrix (or stack) has after being stored in `form`."""
    quantise = quantize_fp8 if form is WeightFormat.FP8 else quantize_mxfp4
    return to_float(PackedWeight(form, *quantise(p.flatten(0, -2)))).view(p.shape)
