"""Mixture of experts: router, routed experts, one shared expert."""

from typing import Any

import torch

from dsv4.kernels.collectives.unsummed import MERGED, Unsummed
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.quantize import PackedWeight
from dsv4.loaders.cuts import Cut
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear, Matrix, parameter
from dsv4.model.module import Module, fuses
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks


class Gate(Module):
    """Scores sqrt(softplus(W x)); experts by token id on hash layers, else by score + bias.

    weight [E, d]; bias fp32 [E] on scored layers; tid2eid int64 [vocab, k] on hash layers.
    """

    def __init__(self, config: ModelConfig, hashed: bool, dtype: torch.dtype, op):
        super().__init__()
        self.weight = parameter(config.n_routed_experts, config.hidden_size, dtype=dtype)
        self.bias = self.tid2eid = None
        if hashed:
            self.tid2eid = parameter(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
        else:
            self.bias = parameter(config.n_routed_experts)
        self.topk, self.factor, self.op = config.num_experts_per_tok, config.routed_scaling_factor, op

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, d], ids int64 [N] → expert indices int64 [N, k], routing weights fp32 [N, k]."""
        if self.tid2eid is not None:
            return self.op.route_hashed(x, self.weight, self.tid2eid, ids, self.factor)
        return self.op.route_scored(x, self.weight, self.bias, self.topk, self.factor)


class Experts(Module):
    """Routed experts, stacked: w13 [E, 2I, d] (gate rows, then up rows) and w2 [E, d, I]. Of several ranks each has
    whole blocks of every expert's width; or, by expert, equally many experts, its `part` of all. host: where they are
    held if that is in host memory, a `dsv4.model.host_experts.HostExperts`."""

    def __init__(self, config: ModelConfig, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__()
        E, I, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.part = ranks.even(E, "n_routed_experts") if ranks.by_expert else Cut(0, 0, E, E)
        width = Cut(0, 0, I, I) if ranks.by_expert else ranks.blocks(I, config.weight_block_size[0])
        self.w13 = Matrix((self.part.size, 2 * width.size, d), store("w1"), stacked=("w1", "w3"), cut=width)
        self.w2 = Matrix((self.part.size, d, width.size), store("w2"), stacked=("w2",), cut=width.columns)
        self.limit, self.op = config.swiglu_limit, op
        self.host: Any = None
        self.simulate = numerics.simulate and self.w13.quantised

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, d], indices int64 [N, k], weights fp32 [N, k] → fp32 [N, d], of this rank's part."""
        if not self.w13.weight.shape[1]:
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        indices, weights = self.local(indices, weights)
        indices, w13, w2 = self.stacks(indices)
        return self.op.experts(x, indices, weights, w13, w2, self.limit, self.simulate)

    def stacks(self, indices: torch.Tensor) -> tuple[torch.Tensor, PackedWeight, PackedWeight]:
        """Indices int64 [N, k] of experts → (numbers [N, k] in the stacks w13 and w2, w13, w2)."""
        return (indices, self.w13.packed(), self.w2.packed()) if self.host is None else self.host.stacks(indices)

    def local(self, indices: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers among this rank's experts, and weights. Another rank's expert becomes −1, which kernels skip; a
        user's kernel is not asked to, and gets one of these with weight 0."""
        if self.part.partial is None:
            return indices, weights
        E, own = self.part.size, indices - self.part.start
        mine = (own >= 0) & (own < E)
        skipped = own % E if "experts" in self.op.replaced else own.masked_fill(~mine, -1)
        return skipped, weights.masked_fill(~mine, 0.0)


class SharedExpert(Module):
    """The expert every token passes: same clamps, weight 1. w1 gate, w3 up [I, d]; w2 down [d, I]. Of several ranks
    each has whole blocks of its width, some perhaps none."""

    def __init__(self, config: ModelConfig, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__()
        mine, d = ranks.blocks(config.moe_intermediate_size, config.weight_block_size[0]), config.hidden_size
        self.w1 = Linear(mine.size, d, store("w1"), numerics, op, cut=mine)
        self.w3 = Linear(mine.size, d, store("w3"), numerics, op, cut=mine)
        self.w2 = Linear(d, mine.size, store("w2"), numerics, op, cut=mine.columns)
        self.limit, self.op = config.swiglu_limit, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, d] → fp32 [N, d], of this rank's width."""
        if not self.w1.weight.shape[0]:
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return self.op.shared_expert(
            x, self.w1.packed(), self.w3.packed(), self.w2.packed(), self.limit, self.w1.simulate
        )


class MoE(Module):
    """Sum of the routed experts and the shared one, and over ranks, in fp32, cast once."""

    def __init__(self, config: ModelConfig, hashed: bool, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__()
        self.ranks = ranks
        self.gate = Gate(config, hashed, store("gate").dtype, op)
        self.experts = Experts(config, numerics, lambda leaf: store(f"experts.{leaf}"), op, ranks)
        self.shared_experts = SharedExpert(config, numerics, lambda leaf: store(f"shared_experts.{leaf}"), op, ranks)
        self.op = op

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [N, d] (normalised), ids int64 [N] → [N, d] in x.dtype."""
        return self.ranks.sum(self.part(x, ids), x.dtype)

    def defers(self, x: torch.Tensor) -> bool:
        """Whether the sum of so many tokens can be left to the kernel that reads it: over ranks, or of one rank over
        the rows of experts."""
        if self.ranks.size > 1:
            return self.ranks.defers(x)
        return len(x) <= MERGED and fuses(self.op, "moe", self.experts, self.shared_experts)

    def deferred(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | Unsummed:
        """`forward`, summed by the kernel that reads it."""
        part = self.part(x, ids, combine=False)
        if self.ranks.size > 1:
            return self.ranks.deferred(part, x.dtype)
        return Unsummed(part, x.dtype, None) if isinstance(part, ExpertRows) else part.to(x.dtype)

    def part(self, x: torch.Tensor, ids: torch.Tensor, combine: bool = True) -> torch.Tensor | ExpertRows:
        """What this rank adds to the sum over ranks, [N, d]; without `combine` maybe as rows of experts."""
        indices, weights = self.gate(x, ids)
        routed, shared = self.experts, self.shared_experts
        if fuses(self.op, "moe", routed, shared) and routed.w13.weight.shape[1] and shared.w1.weight.shape[0]:
            matrices = shared.w1.packed(), shared.w3.packed(), shared.w2.packed()
            indices, weights = routed.local(indices, weights)
            indices, w13, w2 = routed.stacks(indices)
            return self.op.moe(
                x,
                indices,
                weights,
                w13,
                w2,
                matrices,
                routed.limit,
                routed.simulate,
                shared.w1.simulate,
                x.dtype if self.ranks.size == 1 else torch.float32,
                combine,
            )
        return routed(x, indices, weights) + shared(x)
