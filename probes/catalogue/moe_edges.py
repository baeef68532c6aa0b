"""P13: the router and the experts, layer by layer and with extreme numbers. See moe_edges.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.probes.blame import by_layer
from dsv4.probes.blame.by_layer import FACTOR, LEAST, dtype_of, ffn_points, rounded, undecided
from dsv4.probes.blame.consult import culprit
from dsv4.probes.compare import agreeing, token_errors, tokens
from dsv4.probes.oracle.blocks import moe
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.scenes.moe_mistakes import blame
from dsv4.probes.scenes.sublayers import WANT, Sublayers, missing, run_all, taken_apart
from dsv4.probes.subject import Subject

LOGITS = (-200.0, -88.8, -17.0, -16.6, -1.0, 0.0, 1.0, 20.0, 88.8, 200.0)
FP32 = "fp32 rounding of a quotient of square roots, 1e-5"


@dataclass(frozen=True)
class MoEEdges(Probe):
    """Every layer's experts on the subject's own streams; operations of its backend, one token and several."""

    name: ClassVar[str] = "moe_edges"
    title: ClassVar[str] = "routing and experts, and their edges"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run"})
    reads: ClassVar[frozenset[str]] = frozenset(WANT)

    def run(self, subject: Subject) -> list[Check]:
        oracle, capture, ids, first = run_all(subject, self.seed)
        parts = list(taken_apart(subject, oracle, capture, ids, first))
        checks = missing(subject, parts, "ffn_out is the oracle's", "experts")
        checks += [self._layer(subject, part) for part in parts]
        for rows in (1, 7) if "kernels" in subject.can else ():
            checks += [self._weights(subject, rows), self._bias(subject, rows)]
            checks += [self._clamps(subject, rows, shared) for shared in (False, True)]
        return checks + [self._ids(subject, -1), self._ids(subject, subject.config.vocab_size)]

    def _layer(self, subject: Subject, part: Sublayers) -> Check:
        """The experts' output from the subject's own streams and attention output; if it is wrong, the cause."""
        found, wanted = part.seen["ffn_out"], moe(part.layer, part.ffn_in, part.ids)
        value, source, limit = self._error(subject, part, found, wanted)
        name, note = "experts", ""
        if not value <= limit:
            name, note = blame(part, wanted)
            name, note = (name == "experts" and culprit(subject, part.i, "ffn_out")) or (name, note)
        return compare(
            "ffn_out is the oracle's",
            value,
            "<=",
            limit,
            source,
            found[..., 0].numel(),
            where=part.where,
            part=name,
            chance=1.0,
            note=note,
        )

    def _error(
        self, subject: Subject, part: Sublayers, found: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[float, str, float]:
        """(error, where its limit comes from, limit). In fp32 the limit is what rounding to fp32 does to the oracle's
        own experts, times a factor; tokens whose choice of experts rounding may change are left out."""
        if dtype_of(subject.numerics) is not torch.float32 or subject.numerics.startswith("qat"):
            return agreeing(token_errors(found, wanted), subject.numerics)
        exact = ffn_points(part.layer, part.between, part.ids, {})
        noisy = ffn_points(rounded(part.layer, subject.numerics), part.between, part.ids, {})
        factor = FACTOR[torch.float32]
        keep = ~undecided(exact, noisy, part.layer.config.num_experts_per_tok, factor)
        keep = keep.expand(found.shape[:2]) if keep.numel() == 1 else keep
        noise = by_layer.far(noisy["ffn_out"], wanted, keep).max().item()
        value = by_layer.far(found, wanted, keep).max().item()
        source = f"{factor:g} times what rounding to fp32 does to the oracle ({noise:.1g}), at least {LEAST:g}"
        return value, source, max(factor * noise, LEAST)

    def _weights(self, subject: Subject, rows: int) -> Check:
        """sqrt(softplus) neither vanishes below −17 nor overflows above 88; the weights of the chosen sum to the
        factor."""
        E, factor = len(LOGITS), subject.config.routed_scaling_factor
        weight, x = torch.tensor(LOGITS).view(E, 1).repeat(1, 4) / 4, torch.ones(rows, 4)
        table = torch.arange(E).repeat(2, 1)[:, [0, 2, 5, 9]]
        _, found = subject.operations["route_hashed"](x, weight, table, torch.zeros(rows, dtype=torch.int64), factor)
        z = torch.tensor(LOGITS, dtype=torch.float64)[[0, 2, 5, 9]]
        scores = torch.sqrt(torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0))
        wanted = scores / scores.sum() * factor
        error = (
            torch.nan_to_num((found.double() - wanted).abs() / wanted.clamp(min=1e-37), nan=float("inf")).max().item()
        )
        return compare(
            "weights of the chosen experts",
            error,
            "<=",
            1e-4,
            f"{FP32}; logits −200 … 200",
            found.numel(),
            where=f"{rows} tokens, hash",
            part="router",
        )

    def _bias(self, subject: Subject, rows: int) -> Check:
        """A bias that reverses the order changes which experts are chosen and not their weights."""
        g, factor = torch.Generator().manual_seed(self.seed), subject.config.routed_scaling_factor
        weight, x = torch.randn(8, 16, generator=g), torch.randn(rows, 16, generator=g)
        bias = torch.linspace(-40, 40, 8)
        indices, found = subject.operations["route_scored"](x, weight, bias, 2, factor)
        z = x.double() @ weight.double().T
        scores = torch.sqrt(torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0))
        picked = scores.gather(1, indices)
        error = (found.double() - picked / picked.sum(1, keepdim=True) * factor).abs().max().item()
        if not bool((indices.sort(1).values == torch.tensor([6, 7])).all()):
            error = float("inf")
        return compare(
            "the bias selects and does not weigh",
            error,
            "<=",
            1e-5,
            FP32,
            found.numel(),
            where=f"{rows} tokens, scored",
            part="router",
        )

    def _clamps(self, subject: Subject, rows: int, shared: bool) -> Check:
        """Gate clamped above, value on both sides, before the product: inputs that cross ±limit."""
        limit, d, I = subject.config.swiglu_limit, 8, 6
        g = torch.Generator().manual_seed(self.seed + 1)
        w1, w3, w2 = torch.randn(I, d, generator=g), torch.randn(I, d, generator=g), torch.randn(d, I, generator=g)
        x = torch.randn(rows, d, generator=g) * limit
        dense = lambda w: PackedWeight(WeightFormat.DENSE, w)
        if shared:
            found = subject.operations["shared_expert"](x, dense(w1), dense(w3), dense(w2), limit, False)
        else:
            stack = dense(torch.cat((w1, w3)).unsqueeze(0)), dense(w2.unsqueeze(0))
            one = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
            found = subject.operations["experts"](x, *one, *stack, limit, False)
        gate, up = (x.double() @ w1.double().T).clamp(max=limit), (x.double() @ w3.double().T).clamp(-limit, limit)
        wanted = (gate * torch.sigmoid(gate) * up) @ w2.double().T
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        crossed = int(((x.double() @ w3.double().T).abs() > limit).sum())
        return compare(
            "clamps of the experts",
            error,
            "<=",
            1e-5,
            "fp32 rounding of a short sum",
            crossed,
            where=f"{rows} tokens, {'shared' if shared else 'routed'}",
            part="experts",
            note=f"{crossed} values beyond ±{limit:g}",
        )

    def _ids(self, subject: Subject, bad: int) -> Check:
        """A token id outside of every table is refused, not read as another one."""
        ids = tokens(subject, 4, self.seed)
        ids[0, 2] = bad
        where, about = (
            f"token id {bad}",
            dict(part="token ids", samples=1, source="hash layers look experts up by token id"),
        )
        if bad < 0 and "batch" in subject.can:  # such ids are padding to a subject that takes ragged rows
            ids[0, 2:] = bad
            finite = torch.isfinite(subject.run(ids).logits[:, :2]).all().item()
            return Check("padding is not run", Status.PASS if finite else Status.FAIL, where=where, **about)
        try:
            subject.run(ids)
        except Exception as error:  # however an implementation refuses
            note = (str(error).splitlines() or [""])[0][:80]
            return Check("an id outside the vocabulary is refused", Status.PASS, where=where, note=note, **about)
        return Check("an id outside the vocabulary is refused", Status.FAIL, where=where, note="it ran", **about)


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(MoEEdges)
