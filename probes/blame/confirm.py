"""Confirming a cause: the module behind a difference is swapped for the oracle's, and the difference must vanish."""

from dataclasses import dataclass, field, replace

import torch

from dsv4.errors import Dsv4Error
from dsv4.probes.blame.bisect import LAST, Bisection, block_of
from dsv4.probes.blame.by_layer import Accumulated, Difference, differences, far
from dsv4.probes.blame.causes import INSIDE, MODULES, explanations, official
from dsv4.probes.blame.swaps import supports, swapped
from dsv4.probes.subject import POINTS

SCALES = ("scale", "weight_scale", "weight_scale_2", "input_scale")
MOST_TENSORS = 64  # of a module, whose values are compared with the file's


@dataclass
class Verdict:
    """The first difference, and the result of the swaps.

    module: official name, '' if none fits; why: a mistake that explains the values; confirmed: the swap made it vanish;
    after:
    by label ('layer 4', 'logits'): accumulated difference before, after the swap, and its floor.
    """

    first: Difference
    module: str = ""
    why: str = ""
    confirmed: bool = False
    tried: list[str] = field(default_factory=list)
    after: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    note: str = ""


class Confirmation:
    """From the first difference of a pass to its cause."""

    def __init__(self, found: Bisection):
        self.pass_, self.subject, self.reference, self.oracle, self.ids = (
            found,
            found.subject,
            found.reference,
            found.oracle,
            found.ids,
        )

    def verdict(self) -> Verdict:
        """Of a pass that found something."""
        first, before, points = self.pass_.fault
        verdict = Verdict(first)
        if first.layer < 0:
            self._confirm_head(verdict)
            return self._with_tensors(verdict)
        verdict.why = self._why(first, before, points)
        verdict.module = self._likely(first)
        if "block" not in self.subject.can:
            verdict.note = "not confirmed: a recorded run cannot be changed"
        elif before is None or self.reference.recorded:
            verdict.note = "not confirmed: the streams before the layer are unknown"
        else:
            self._confirm(verdict, before)
        return self._with_tensors(verdict)

    def _with_tensors(self, verdict: Verdict) -> Verdict:
        wrong = self._tensors(verdict.module) if verdict.module else []
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            verdict.why = f"the values held are not the file's: {', '.join(wrong[:3])}{more}"
        return verdict

    def _likely(self, first: Difference) -> str:
        """Without a swap: the coarsest module that the point names."""
        names = {
            "attn_in": "hc_attn",
            "q_after_rope": "attn.queries",
            "kv_window": "attn.latent",
            "index_scores": "attn.indexer",
            "attn_out": "attn",
            "ffn_out": "ffn",
        }
        return official(first.layer, names.get(first.point, MODULES[first.point][0]))

    def _why(self, first: Difference, before, points: dict) -> str:
        """The known mistake that gives the subject's values, if one does."""
        if first.point not in points or first.point == "selection" or self.reference.other is not None:
            return ""
        found = explanations(self.oracle.layer(first.layer), first.point, before, self.ids, points)
        left = {words: far(points[first.point], value, first.kept).mean().item() for words, value in found.items()}
        best = min(left, key=left.get, default=None)
        enough = max(first.factor * first.noise.mean().item(), 0.1 * first.errors.mean().item())
        return best if best is not None and left[best] <= enough else ""

    def _tensors(self, module: str) -> list[str]:
        """Tensors of the module that the subject holds differently from the file."""
        names = [n for n in self.subject.files.sources if n == module or n.startswith((f"{module}.", f"{module}_"))]
        wrong = []
        for name in (n for n in names[:MOST_TENSORS] if not n.endswith(SCALES)):
            try:
                held = self.subject.weight(name)
            except (Dsv4Error, NotImplementedError):
                continue
            held, wanted = held.double().flatten(), self.oracle.weights(name).double().flatten()
            if held.shape != wanted.shape or not torch.allclose(held, wanted, 2**-8, 1e-6):
                wrong.append(name)
        return wrong

    def _confirm(self, verdict: Verdict, before: torch.Tensor) -> None:
        first, partly = verdict.first, ""
        unswapped = self._again(first.layer, before)
        if not any(d.found and d.point == first.point for d in unswapped):
            if first.layer == 0 and first.point == "attn_in":  # the block was run on the oracle's own embedding
                verdict.module, verdict.confirmed = "embed", True
                return self._downstream(verdict, "embed")
            verdict.note = "not confirmed: the layer alone does not show it on the same streams"
            return
        wrong = {d.point for d in unswapped if d.found}
        for module in MODULES[first.point]:
            if not supports(self.subject, module) or module == "embed":
                continue
            with swapped(self.subject, first.layer, module, self.oracle.layer(first.layer), self.ids):
                left = {d.point for d in self._again(first.layer, before) if d.found} - set(INSIDE.get(module, ()))
            said = f"still {', '.join(p for p in POINTS if p in left)}" if left else "vanishes"
            verdict.tried.append(f"{official(first.layer, module)}: {said}")
            if not left:
                verdict.module, verdict.confirmed = official(first.layer, module), True
                return self._downstream(verdict, module)
            partly = partly or (module if first.point not in left and left < wrong else "")
        if partly:
            verdict.module, verdict.confirmed = official(first.layer, partly), True
            verdict.note = "the layer has further differences, which this swap leaves"
            return self._downstream(verdict, partly)
        verdict.note = "not confirmed: no swap of one module makes the difference vanish"

    def _confirm_head(self, verdict: Verdict) -> None:
        """The three modules after the last layer, on whole runs: there is no smaller one."""
        own, verdict.module = self.pass_.before[:, -LAST:].double(), "head"
        wanted = self.pass_.end(own)
        for module in MODULES["logits"]:
            if supports(self.subject, module):
                with swapped(self.subject, 0, module, self.oracle.layer(0), self.ids):
                    logits = self.subject.stream(self.ids, (), lambda i, points: None)
                now = replace(verdict.first, errors=far(logits[:, -LAST:], wanted))
                verdict.tried.append(f"{module}: " + ("still logits" if now.found else "vanishes"))
                if not now.found:
                    verdict.module, verdict.confirmed = module, True
                    verdict.after["logits"] = (verdict.first.at(0.5)[0], *now.at(0.5))
                    return
        verdict.note = "not confirmed: no swap of hc_head, norm or head makes the difference vanish"

    def _again(self, i: int, before: torch.Tensor) -> list[Difference]:
        """Run the layer alone again, in its current state."""
        points = block_of(self.subject, i, before, self.ids)
        exact, noisy = self.pass_.pair(i, before, points)
        return differences(i, points, exact, noisy, self.oracle.config, self.subject.numerics)

    def _downstream(self, verdict: Verdict, module: str) -> None:
        """A whole run with the module swapped: the accumulated difference of every layer from there on."""
        i, numerics = verdict.first.layer, self.subject.numerics

        def see(j: int, points: dict) -> None:
            known = {layer.index: layer.accumulated for layer in self.pass_.layers}.get(j)
            if j >= i and known is not None:
                wanted, noise = torch.load(self.pass_.file(j))
                now = Accumulated(j, "streams", far(points["streams"], wanted), noise.double(), numerics)
                verdict.after[f"layer {j}"] = (known.at(0.5)[0], *now.at(0.5))

        with swapped(self.subject, i, module, self.oracle.layer(i), self.ids):
            logits = self.subject.stream(self.ids, ("streams",), see)
        if self.pass_.logits is not None:
            now = Accumulated(
                -1, "logits", far(logits[:, -LAST:], self.pass_.wanted_logits), self.pass_.logits.noise, numerics
            )
            verdict.after["logits"] = (self.pass_.logits.at(0.5)[0], *now.at(0.5))
        others = [layer.index for layer in self.pass_.layers if layer.index > i and any(d.found for d in layer.found)]
        partly = bool(verdict.note)
        left = [label for label, (_, after, floor) in verdict.after.items() if after > floor]
        if left and others:
            verdict.note += ("; " if partly else "") + f"what is left after it begins in layer {others[0]}"
        elif left and not partly:
            verdict.confirmed = False
            verdict.note = f"not confirmed: after the swap {left[0]} still differs, and no other layer does by itself"
