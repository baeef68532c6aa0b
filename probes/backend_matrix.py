"""P10: every operation of the subject's backend against the reference, at the model's own widths. See backend_matrix.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.operations import OPERATIONS
from kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4
from probes.probe import Probe
from probes.result import Check, Status, compare
from probes.subject import Subject

FP32 = "two fp32 implementations that sum in another order"


@dataclass(frozen=True)
class BackendMatrix(Probe):
    """What is the reference itself is listed, not compared: it would prove nothing."""

    name: ClassVar[str] = "backend_matrix"
    title: ClassVar[str] = "operations of the backend equal the reference"
    needs: ClassVar[frozenset[str]] = frozenset({"kernels"})

    def run(self, subject: Subject) -> list[Check]:
        checks = []
        for name, op in OPERATIONS.items():
            mine, reference = subject.operations[name], op.implementations["reference"]
            if mine is reference:
                checks.append(Check(name, Status.PASS, "the reference itself", name, samples=1, source="nothing to compare"))
                continue
            for tokens in (1, 2, 9):
                for label, arguments in self._cases(name, subject.config, tokens):
                    checks.append(self._compare(name, mine, reference, label, arguments))
        return checks

    def _compare(self, name: str, mine, reference, label: str, arguments) -> Check:
        copies = [[own(a) if isinstance(a, torch.Tensor) else a for a in arguments] for _ in range(2)]
        found, wanted = mine(*copies[0]), reference(*copies[1])
        found, wanted = ((v,) if isinstance(v, torch.Tensor) else v for v in (found, wanted))
        error, count = 0.0, 0
        for a, b in zip(found, wanted, strict=True):
            count += b.numel()
            if not b.is_floating_point():
                error = max(error, float((a.sort(-1).values != b.sort(-1).values).sum()))
                continue
            if not torch.equal(torch.isinf(a), torch.isinf(b)) or torch.isnan(a).any():
                error = float("inf")
            a, b = (torch.where(torch.isinf(v), 0, v).double() for v in (a, b))
            error = max(error, ((a - b).norm() / b.norm().clamp(min=1e-12)).item())
        return compare(name, error, "<=", 1e-5, FP32, count, where=label, part=name)

    def _cases(self, name: str, c, N: int) -> list[tuple[str, list]]:
        """(label, arguments) of an operation at the widths of config c, for N tokens."""
        g = torch.Generator().manual_seed(self.seed + N)
        rand = lambda *shape: torch.randn(*shape, generator=g)
        d, n, H, D, W = c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim, c.sliding_window
        E, k, I, label = c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size, f"{N} tokens"
        hc = [rand(N, n, d), rand(2 * n + n * n, n * d) * (n * d) ** -0.5, torch.tensor([0.7, 1.3, 2.0]), rand(2 * n + n * n)]
        match name:
            case "mhc_pre":
                return [(label, [*hc, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps])]
            case "mhc_post":
                return [(label, [rand(N, d), rand(N, n, d), torch.rand(N, n, generator=g), torch.rand(N, n, n, generator=g)])]
            case "mhc_head":
                return [(label, [hc[0], hc[1][:n], hc[2][:1], hc[3][:n], c.hc_eps, c.rms_norm_eps])]
            case "rms_norm":
                return [(label, [rand(N, d), rand(d), c.rms_norm_eps]),
                        (f"{label}, no weight", [rand(N, H, D), None, c.rms_norm_eps])]
            case "route_scored":
                return [(label, [rand(N, d), rand(E, d) * d**-0.5, rand(E), k, c.routed_scaling_factor])]
            case "route_hashed":
                table = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(5)])
                return [(label, [rand(N, d), rand(E, d) * d**-0.5, table, torch.arange(N) % 5, c.routed_scaling_factor])]
            case "index_scores":
                shape = (1, N, c.index_n_heads, c.index_head_dim)
                visible = torch.arange(100 - N, 100).view(1, N) + 1
                return [(label, [rand(*shape), rand(*shape[:3]), rand(1, 100, shape[-1]), visible])]
            case "topk_entries":
                return [(f"{label}, {m} entries", [rand(1, N, m), c.index_topk]) for m in (c.index_topk - 1, 8 * c.index_topk)]
            case "sparse_attention":
                near, far = torch.randint(0, 50, (N, W), generator=g), torch.randint(0, 90, (N, 17), generator=g)
                arguments = [rand(N, H, D), rand(50, D), near, rand(90, D), far, rand(H), D**-0.5]
                return [(f"{label}, complete={full}", [*arguments, full]) for full in (False, True)]
            case "hca_attention":
                near, seen = torch.randint(0, 50, (N, W), generator=g), torch.full((1, N), 33)
                tail = [rand(H), D**-0.5]
                one = [rand(1, N, H, D), rand(50, D), near, rand(1, 33, D), seen, *tail]
                two = [rand(2, N, H, D), rand(50, D), near.repeat(2, 1), rand(2, 90, D)[:, :33], seen.repeat(2, 1), *tail]
                return [(f"{label}, complete={full}", [*one, full]) for full in (False, True)] + [
                    (f"{label}, two rows of longer buffers", [*two, True])]
            case "experts":
                indices = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(N)])
                w13, w2, routing = rand(E, 2 * I, d) * d**-0.5, rand(E, d, I) * I**-0.5, torch.rand(N, k, generator=g)
                stacked = lambda w: (t.view(E, -1, t.shape[-1]) for t in quantize_mxfp4(w.flatten(0, 1)))
                pack = lambda w: PackedWeight(WeightFormat.MXFP4, *stacked(w))
                dense = lambda w: PackedWeight(WeightFormat.DENSE, w)
                return [(f"{label}, {how}", [rand(N, d), indices, routing, f(w13), f(w2), c.swiglu_limit, False])
                        for how, f in (("dense", dense), ("mxfp4", pack))]
            case "linear":
                w = rand(2 * d, d) * d**-0.5
                return [(f"{label}, fp8", [rand(N, d), PackedWeight(WeightFormat.FP8, *quantize_fp8(w)), False])]
        return []


def own(a: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of `a`, which an implementation must not ignore, in memory of its own."""
    held = a.new_zeros(1 + sum((extent - 1) * stride for extent, stride in zip(a.shape, a.stride()))) if a.numel() else a
    return held.as_strided(a.shape, a.stride()).copy_(a) if a.numel() else a.clone()


if __name__ == "__main__":
    from probes.main import main
    main(BackendMatrix)
