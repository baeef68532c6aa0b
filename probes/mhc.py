"""P16: hyper-connections layer by layer against the oracle, and how the streams grow. See mhc.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from probes.measure import agreeing, token_errors, tokens
from probes.oracle.blocks import sinkhorn
from probes.oracle.model import Oracle
from probes.probe import Probe
from probes.result import Check, Status, compare
from probes.subject import Subject

COLUMNS = "ends on a column step: a column sums to 1 − O(eps), found at most 1.2e-6 off in fp32; allowed 2e-6"


@dataclass(frozen=True)
class HyperConnections(Probe):
    """Each layer on the subject's own streams, so that a fault shows in its layer and not in all that follow."""

    name: ClassVar[str] = "mhc"
    title: ClassVar[str] = "hyper-connections mix as the definition does"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run"})

    def run(self, subject: Subject) -> list[Check]:
        config = subject.config
        oracle = Oracle.open(subject.files.path, simulate=subject.numerics.startswith("qat"), independent=False,
                             cache=None if "fp32" in subject.numerics else torch.bfloat16)
        ids = tokens(subject, 3 * config.sliding_window + 40, self.seed)
        seen = subject.run(ids, want=("streams",))
        streams = oracle.weights("embed.weight")[ids].unsqueeze(2).repeat(1, 1, config.hc_mult, 1)
        checks = []
        for layer in range(config.num_hidden_layers):
            wanted, found = oracle.block(layer, streams, ids)["streams"], seen.points[layer, "streams"]
            checks += [self._parity(subject, found, wanted, layer), self._growth(found, wanted, layer)]
            streams = found.double()
        errors = token_errors(seen.logits, oracle.head(streams))
        value, source, limit = agreeing(errors, subject.numerics)
        checks.append(compare("logits are the collapsed, normalised streams through the head", value, "<=", limit, source, errors.numel(),
                              where="head", part="head"))
        return checks + self._sinkhorn(subject, oracle)

    def _parity(self, subject: Subject, found: torch.Tensor, wanted: torch.Tensor, layer: int) -> Check:
        errors = token_errors(found, wanted)
        value, source, limit = agreeing(errors, subject.numerics)
        return compare("streams after the layer are the oracle's", value, "<=", limit, source, errors.numel(), where=f"layer {layer}",
                       part="streams")

    def _growth(self, found: torch.Tensor, wanted: torch.Tensor, layer: int) -> Check:
        """|X| as a ratio to the reference: large streams are no fault, other streams than the reference's are."""
        ratio = (found.double().norm() / wanted.double().norm()).item()
        return compare("|X| over the oracle's", abs(ratio - 1), "<=", 0.05, "known bugs, 0.7: growth is judged by its ratio to the "
                       "reference alone (a wrong Sinkhorn kernel gave 34)", found[..., 0, 0].numel(), where=f"layer {layer}", part="streams",
                       note=f"|X| rms {found.double().square().mean().sqrt().item():.3g}, ratio {ratio:.5f}")

    def _sinkhorn(self, subject: Subject, oracle: Oracle) -> list[Check]:
        """The subject's own operation, if it has one, on logits of several spreads; rows are reported, not judged."""
        if "kernels" not in subject.can:
            return []
        c, checks = subject.config, []
        d, n = c.hidden_size, c.hc_mult
        g = torch.Generator().manual_seed(self.seed)
        for spread in (0.5, 2.0, 8.0):
            streams, fn = torch.randn(64, n, d, generator=g), torch.randn(2 * n + n * n, n * d, generator=g) * (n * d) ** -0.5
            base = torch.randn(2 * n + n * n, generator=g)
            scale = torch.tensor([1.0, 1.0, spread])
            _, _, comb = subject.operations["mhc_pre"](streams, fn, scale, base, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
            x = streams.flatten(1).double()
            m = x @ fn.double().T / torch.sqrt((x * x).mean(-1, keepdim=True) + c.rms_norm_eps)
            wanted = sinkhorn((m[:, 2 * n:] * spread + base[2 * n:].double()).view(-1, n, n), c.hc_sinkhorn_iters, c.hc_eps)
            where = f"comb logits of spread {spread}"
            checks.append(compare("Sinkhorn in the reference's order", (comb.double() - wanted).abs().max().item(), "<=", 2e-5,
                                  "fp32 logits of size 20 carry 2e-6, times the slope of the iteration", comb.numel(), where=where,
                                  part="Sinkhorn"))
            checks.append(compare("columns sum to 1", (comb.double().sum(1) - 1).abs().max().item(), "<=", 2e-6, COLUMNS, comb.numel(),
                                  where=where, part="Sinkhorn"))
            rows = (comb.double().sum(2) - 1).abs().max().item()
            checks.append(Check("rows sum to 1 as far as 20 steps converge", Status.PASS, where=where, part="Sinkhorn", measured=rows,
                                source="reported, not judged: the reference itself leaves up to 8e-2", samples=comb.numel()))
        return checks


if __name__ == "__main__":
    from probes.main import main
    main(HyperConnections)
