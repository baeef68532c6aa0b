"""P16: hyper-connections layer by layer against the oracle, and how the streams grow. See mhc.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes.blame.consult import left_of
from dsv4.probes.compare import agreeing, token_errors
from dsv4.probes.oracle import Oracle
from dsv4.probes.oracle.attention import rms
from dsv4.probes.oracle.blocks import collapse, hyper_post, sinkhorn
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.scenes import mixing
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.sublayers import WANT, Sublayers, missing, of_layer, run_all, taken_apart
from dsv4.probes.subject import Subject

COLUMNS = "ends on a column step: a column sums to 1 − O(eps), found at most 1.2e-6 off in fp32; allowed 2e-6"
FP32 = "fp32 rounding of short sums"
SINKHORN = "fp32 logits of size 20 carry 2e-6, times the slope of the iteration"
# Tokens, spread of the comb logits, hc_eps: kernels of their own serve one token and a few; an eps that is large enough
# to see
CASES = (
    (64, 0.5, None),
    (64, 2.0, None),
    (64, 8.0, None),
    (64, 2.0, 1e-2),
    (3, 2.0, 1e-2),
    (1, 2.0, 1e-2),
    (300, 2.0, None),
)


@dataclass(frozen=True)
class HyperConnections(Probe):
    """Each layer on the subject's own streams and sublayer outputs, so that no other part's fault shows here."""

    name: ClassVar[str] = "mhc"
    title: ClassVar[str] = "hyper-connections mix as the definition does"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run"})
    reads: ClassVar[frozenset[str]] = frozenset(WANT)

    def run(self, subject: Subject) -> list[Check]:
        oracle, capture, ids, first = run_all(subject, self.seed)
        parts = list(taken_apart(subject, oracle, capture, ids, first))
        checks = missing(subject, parts, "streams after the layer are the oracle's", "streams")
        for part in parts:
            checks += [self._input(subject, part), self._streams(subject, part), self._growth(part)]
        last = subject.config.num_hidden_layers - 1
        if (last, "streams") in capture.points and capture.logits is not None:
            checks.append(self._head(subject, oracle, capture.points[last, "streams"].double(), capture.logits))
        if "kernels" in subject.can:
            checks += [check for case in CASES for check in operations(subject, self.seed, *case)]
            matrices = lambda: mixing.runtime(subject, self.seed)
            checks += attempted_all("mixing matrices on prompts", "", mixing.PART, matrices)
        return checks

    def text(self, checks: list[Check]) -> str:
        return mixing.shown(checks)

    def _input(self, subject: Subject, part: Sublayers) -> Check:
        """What attention reads: the collapsed streams, normalised. (What the experts read is held by `moe_edges`.)"""
        found, wanted = part.seen["attn_in"], part.attn_in
        value, source, limit = agreeing(token_errors(found, wanted), subject.numerics)
        name, note = "mHC pre", ""
        if not value <= limit:
            # attn_in over the norm's weight is a combination of the streams: is it the right one, up to its length?
            weight = part.layer.w("attn_norm.weight")
            own, right = combination(found / weight, part.before), combination(wanted / weight, part.before)
            unit = lambda y: y / y.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            turned = token_errors(unit(own), unit(right)).median().item()
            name, note = (
                ("attn_norm" if turned <= limit else "mHC pre"),
                f"the combination of streams is off by {turned:.2g}",
            )
        return compare(
            "attention reads the collapsed, normalised streams",
            value,
            "<=",
            limit,
            source,
            found[..., 0].numel(),
            where=part.where,
            part=name,
            note=note,
        )

    def _streams(self, subject: Subject, part: Sublayers) -> Check:
        found = part.seen["streams"]
        value, source, limit = agreeing(token_errors(found, part.after), subject.numerics)
        name, note = ("streams", "") if value <= limit else blame(part)
        return compare(
            "streams after the layer are the oracle's",
            value,
            "<=",
            limit,
            source,
            found[..., 0, 0].numel(),
            where=part.where,
            part=name,
            note=note,
        )

    def _growth(self, part: Sublayers) -> Check:
        """|X| as a ratio to the reference: large streams are no fault, but streams unlike the reference's are."""
        found = part.seen["streams"]
        ratio = (found.norm() / part.after.norm()).item()
        return compare(
            "|X| over the oracle's",
            abs(ratio - 1),
            "<=",
            0.05,
            "known bugs, 0.7: growth is judged by its ratio to the reference alone (a wrong Sinkhorn kernel gave 34)",
            found[..., 0, 0].numel(),
            where=part.where,
            part="streams",
            note=f"|X| rms {found.square().mean().sqrt().item():.3g}, ratio {ratio:.5f}",
        )

    def _head(self, subject: Subject, oracle: Oracle, streams: torch.Tensor, logits: torch.Tensor) -> Check:
        wanted, c = oracle.head(streams), oracle.config
        value, source, limit = agreeing(token_errors(logits, wanted), subject.numerics)
        note = ""
        if not value <= limit:
            own = (oracle.weights(f"hc_head_{leaf}") for leaf in ("fn", "base", "scale"))
            weight, norm = oracle.weights(oracle.config.output_weight), oracle.weights("norm.weight")
            made = {
                "mean of the streams": rms(streams.mean(2), norm, c.rms_norm_eps) @ weight.T,
                "first stream": rms(streams[:, :, 0], norm, c.rms_norm_eps) @ weight.T,
                "final norm missing": collapse(c, streams, *own) @ weight.T,
            }
            errors = {name: token_errors(logits, form).median().item() for name, form in made.items()}
            note = left_of(errors, token_errors(logits, wanted).median().item())
        return compare(
            "logits are the collapsed, normalised streams through the head",
            value,
            "<=",
            limit,
            source,
            logits[..., 0].numel(),
            where="head",
            part="head",
            note=note,
        )


# ---- whose fault --------------------------------------------------------------------------


def combination(y: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """The part of y [B, T, d] that is a combination of streams [B, T, S, d]."""
    basis = streams.transpose(-1, -2)
    return (basis @ (torch.linalg.pinv(basis, rtol=1e-9) @ y.unsqueeze(-1))).squeeze(-1)


def blame(part: Sublayers) -> tuple[str, str]:
    """(part, why). Each new stream is a sum of the experts' output, attention's output and the old streams: with which
    weights?

    The subject's are found token by token by least squares, and compared with the oracle's: post of the experts; comb
    of attention times that of the experts, by what it makes of the old streams.
    """
    found, sources = part.seen["streams"], torch.stack((part.seen["ffn_out"], part.seen["attn_out"]), 2)
    single = part.before * (torch.arange(part.before.shape[2]) == 0).view(1, 1, -1, 1)
    if part.i == 0 and token_errors(found, of_layer(part.layer, 0, part.ids, part.seen, single).after).median() < 1e-2:
        return "embedding", "as if the embedding started one stream only"
    basis = torch.cat((sources, part.before), 2).transpose(-1, -2)  # [B, T, d, 2 + S]
    weights = torch.linalg.pinv(basis, rtol=1e-9) @ found.transpose(-1, -2)  # [B, T, 2 + S, S]
    away = (found - part.after).norm(dim=-1).mean()
    explained = (found - (basis @ weights).transpose(-1, -2)).norm(dim=-1).mean() / away
    spread = (weights[..., 0, :] - part.post[1]).abs() * sources[:, :, 0].norm(dim=-1, keepdim=True)
    mixed = (part.comb[0] @ part.comb[1]).transpose(-1, -2) @ part.before
    kept = (weights[..., 2:, :].transpose(-1, -2) @ part.before - mixed).norm(dim=-1)
    shares = {"mHC post": (spread.mean() / away).item(), "mHC comb": (kept.mean() / away).item()}
    guilty = [name for name, share in shares.items() if share > 0.3]
    note = "; ".join(f"{name} accounts for {share:.0%} of the difference" for name, share in shares.items())
    if explained > 0.5 or not guilty:
        return "streams", f"no weights of outputs and streams explain them; {note}"
    return " and ".join(guilty), note


# ---- operations ---------------------------------------------------------------------------


def operations(subject: Subject, seed: int, N: int, spread: float, eps: float | None) -> list[Check]:
    """The subject's own operations on random streams; Sinkhorn's rows are reported, not judged."""
    c, g = subject.config, torch.Generator().manual_seed(seed)
    d, n, eps = c.hidden_size, c.hc_mult, c.hc_eps if eps is None else eps
    streams, out = torch.randn(N, n, d, generator=g), torch.randn(N, d, generator=g)
    fn = torch.randn(2 * n + n * n, n * d, generator=g) * (n * d) ** -0.5
    base, scale = torch.randn(2 * n + n * n, generator=g), torch.tensor([0.7, 1.3, spread])
    y, post, comb = subject.operations["mhc_pre"](streams, fn, scale, base, c.hc_sinkhorn_iters, eps, c.rms_norm_eps)
    x = streams.double()
    m = x.flatten(1) @ fn.double().T / torch.sqrt(x.flatten(1).square().mean(-1, keepdim=True) + c.rms_norm_eps)
    part = lambda i, rows: m[:, rows] * scale[i].double() + base[rows].double()
    pre = torch.sigmoid(part(0, slice(n))) + eps
    right = 2 * torch.sigmoid(part(1, slice(n, 2 * n)))
    wanted = sinkhorn(part(2, slice(2 * n, None)).view(-1, n, n), c.hc_sinkhorn_iters, eps)
    where = f"{N} tokens, comb logits of spread {spread}, eps {eps:g}"
    held = lambda name, value, limit, source, what: compare(name, value, "<=", limit, source, N, where=where, part=what)
    apart = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    mixed = subject.operations["mhc_post"]
    old = hyper_post(0 * out.double()[None], x[None], right[None], wanted[None])[0]
    new, weights = right.unsqueeze(-1) * out.double().unsqueeze(1), (right.float(), wanted.float())
    turned = (comb.double() - wanted).abs().max().item()
    checks = [
        held("sublayer input", apart(y, (pre.unsqueeze(-1) * x).sum(1)), 1e-5, FP32, "mHC pre"),
        held("weights of the output", apart(post, right), 1e-5, FP32, "mHC post"),
        held("Sinkhorn in the reference's order", turned, 2e-5, SINKHORN, "Sinkhorn"),
        held(
            "old streams are mixed over the first index",
            apart(mixed(0 * out, streams, *weights), old),
            1e-5,
            FP32,
            "mHC comb",
        ),
        held(
            "output is spread over the streams", apart(mixed(out, 0 * streams, *weights), new), 1e-5, FP32, "mHC post"
        ),
        held("collapse before the head", _collapsed(subject, streams, fn[:n], base[:n], eps), 1e-5, FP32, "head"),
    ]
    if eps == c.hc_eps:
        checks.append(
            held("columns sum to 1", (comb.double().sum(1) - 1).abs().max().item(), 2e-6, COLUMNS, "Sinkhorn")
        )
    rows = (comb.double().sum(2) - 1).abs().max().item()
    return checks + [
        Check(
            "rows sum to 1 as far as the steps converge",
            Status.PASS,
            where=where,
            part="Sinkhorn",
            measured=rows,
            samples=comb.numel(),
            source="reported, not judged: the reference itself leaves up to 8e-2",
        )
    ]


def _collapsed(subject: Subject, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, eps: float) -> float:
    """Relative error of the head's collapse."""
    c, x = subject.config, streams.double()
    found = subject.operations["mhc_head"](streams, fn, torch.tensor([1.3]), base, eps, c.rms_norm_eps).double()
    m = x.flatten(1) @ fn.double().T / torch.sqrt(x.flatten(1).square().mean(-1, keepdim=True) + c.rms_norm_eps)
    pre = torch.sigmoid(m * torch.tensor([1.3]).double() + base.double()) + eps
    wanted = (pre.unsqueeze(-1) * x).sum(1)
    return ((found - wanted).norm() / wanted.norm()).item()


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(HyperConnections)
