"""Decode attention of a GQA layer: what each policy reads, and how it is run.

Bytes a layer: keys and values of the tokens that are kept, the summaries of all blocks where blocks are searched (one vector a block
and KV head for means, two for bounds), queries and outputs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv4.bill.regime import Way
from dsv4.bill.rows import Row, Run
from dsv4.errors import BackendUnavailable, InputError

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


@dataclass(frozen=True)
class Geometry:
    """Heads of one layer, and bytes of a number in the cache."""

    query_heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    itemsize: int = 2

    def cache(self, batch: int, tokens: int) -> int:
        return 2 * batch * tokens * self.kv_heads * self.head_dim * self.itemsize

    def ends(self, batch: int) -> int:
        """Queries and outputs."""
        return 2 * batch * self.query_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Policy:
    """What a step keeps: `tokens` in whole blocks: the first block, the newest, and the best of the others by `selector` (None: none).

    finding: the name of its price in the bill.
    """

    name: str
    tokens: int = 4096
    block: int = 128
    selector: str | None = "bound"

    @property
    def finding(self) -> str | None:
        return None if self.selector is None else f"{self.selector} of {self.block}"

    def bytes(self, g: Geometry, batch: int, context: int) -> int:
        vectors = {"bound": 2, "mean": 1, None: 0}[self.selector] * -(-context // self.block)
        return g.cache(batch, min(self.tokens, context)) + batch * vectors * g.kv_heads * g.head_dim * g.itemsize + g.ends(batch)


POLICIES = {p.name: p for p in (Policy("sink+window", selector=None), Policy("page-16 bound", block=16), Policy("block-128 bound"),
                                Policy("block-128 mean", selector="mean"))}
LOCAL = 2  # blocks: that of the current position and the one before it


class Inputs:
    """Queries of every layer; caches and summaries of the distinct ones, at which a layer looks by its number."""

    def __init__(self, g: Geometry, batch: int, context: int, layers: int, distinct: int, device: torch.device, dtype: torch.dtype):
        make = torch.Generator(device=device).manual_seed(batch * 1000 + context)
        normal = lambda *shape: torch.randn(*shape, generator=make, device=device, dtype=dtype)
        self.batch, self.context, self.geometry, self.distinct = batch, context, g, distinct
        self.queries = [normal(batch, g.query_heads, 1, g.head_dim) for _ in range(layers)]
        self.keys = [normal(batch, g.kv_heads, context, g.head_dim) for _ in range(distinct)]
        self.values = [normal(batch, g.kv_heads, context, g.head_dim) for _ in range(distinct)]
        self.start = torch.full((batch,), context - 1, dtype=torch.int64, device=device)
        self._summaries: dict[tuple, list] = {}

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [B, H, 1, D], keys and values [B, KV, S, D] of layer i."""
        return self.queries[i], self.keys[i % self.distinct], self.values[i % self.distinct]

    def summaries(self, block: int, selector: str) -> list[tuple[torch.Tensor, ...]]:
        """For each distinct cache: (low, high) of its blocks, or (mean,), [B, KV, S / block, D]. Part of the cache, so made beforehand."""
        if (block, selector) not in self._summaries:
            blocks = [k.unflatten(2, (-1, block)) for k in self.keys]
            self._summaries[block, selector] = [(b.amin(3), b.amax(3)) if selector == "bound" else (b.mean(3),) for b in blocks]
        return self._summaries[block, selector]

    def extremes(self, block: int) -> list[torch.Tensor]:
        """[high; low] side by side, as one product takes them: [B, KV, S / block, 2·D]."""
        if (block, "both") not in self._summaries:
            self._summaries[block, "both"] = [torch.cat((high, low), -1) for low, high in self.summaries(block, "bound")]
        return self._summaries[block, "both"]


class GQA:
    """Rows of dense attention and of each policy, by plain torch; triton: by the triton backend too."""

    name = "GQA"

    def __init__(self, geometry: Geometry, policies: Mapping[str, Policy], device: torch.device, triton: bool):
        self.geometry, self.policies, self.device, self.triton = geometry, policies, device, triton
        self.dtype = {2: torch.bfloat16, 4: torch.float32}[geometry.itemsize]

    def document(self) -> dict:
        return {"kind": "gqa", "geometry": asdict(self.geometry), "policies": [asdict(p) for p in self.policies.values()]}

    def dense_bytes(self, batch: int, context: int) -> int:
        return self.geometry.cache(batch, context) + self.geometry.ends(batch)

    def cache_bytes(self, batch: int, context: int) -> int:
        return self.geometry.cache(batch, context)

    def ways(self) -> tuple[Way, list[Way]]:
        """Dense attention and the policies, as the bill sees them."""
        ways = [Way(p.name, partial(p.bytes, self.geometry), p.finding, p.tokens) for p in self.policies.values()]
        return Way("dense", self.dense_bytes), ways

    def inputs(self, batch: int, context: int, layers: int, distinct: int) -> Inputs:
        return Inputs(self.geometry, batch, context, layers, distinct, self.device, self.dtype)

    def rows(self, batch: int, context: int) -> list[Row]:
        if context % 128:
            raise InputError(f"a context of {context} tokens cannot be measured; expected a multiple of 128, as caches are")
        rows = [Row("dense", batch, context, self.dense_bytes(batch, context), True, None, self._dense)]
        return rows + [Row(p.name, batch, context, p.bytes(self.geometry, batch, context), False, p.finding, partial(self._sparse, p))
                       for p in self.policies.values() if p.tokens < context]

    def _dense(self, inputs: Inputs) -> dict[str, Run]:
        runs: dict[str, Run] = {"SDPA": lambda i: attend(*inputs.layer(i))}
        if self.device.type == "cuda":
            runs = {f"SDPA {name}": partial(_with_backend, inputs, backend) for name, backend in BACKENDS.items()}
        return runs | (_triton_dense(inputs) if self.triton else {})

    def _sparse(self, policy: Policy, inputs: Inputs) -> dict[str, Run]:
        if policy.selector is not None:  # made with the cache, not in a step
            inputs.extremes(policy.block) if policy.selector == "bound" else inputs.summaries(policy.block, policy.selector)
        return {"torch": lambda i: read_kept(inputs, policy, i)} | (_triton_sparse(inputs, policy) if self.triton else {})


def attend(q, keys, values):
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def _with_backend(inputs: Inputs, backend: SDPBackend, i: int):
    with sdpa_kernel([backend]):
        return attend(*inputs.layer(i))


def scores_of_blocks(q, summaries) -> torch.Tensor:
    """Scores of all blocks for q [B, H, 1, D], [B, KV, N]. With means [B, KV, N, D]: the group's mean query · mean. With [high; low]
    [B, KV, N, 2·D]: max over the heads of a group of Σ_d max(q·low, q·high), which no q·k of the block exceeds, as one product."""
    heads = q.squeeze(2).unflatten(1, (summaries.shape[1], -1))  # [B, KV, G, D]
    if summaries.shape[-1] == q.shape[-1]:
        return (heads.mean(2, keepdim=True) @ summaries.mT).squeeze(2)
    return (torch.cat((heads.relu(), -(-heads).relu()), -1) @ summaries.mT).amax(2)


def read_kept(inputs: Inputs, policy: Policy, i: int) -> torch.Tensor:
    """One layer by plain torch: the blocks that count are gathered, and attended densely."""
    (q, keys, values), block, kept = inputs.layer(i), policy.block, policy.tokens // policy.block
    if policy.selector is None:
        near = slice(inputs.context - policy.tokens + block, None)
        return attend(q, *(torch.cat((t[:, :, :block], t[:, :, near]), 2) for t in (keys, values)))
    of = inputs.extremes(block) if policy.selector == "bound" else [mean for mean, in inputs.summaries(block, "mean")]
    scores = scores_of_blocks(q, of[i % inputs.distinct])
    scores[..., :1], scores[..., -LOCAL:] = torch.inf, torch.inf
    best = scores.topk(kept, -1).indices.sort(-1).values.unsqueeze(-1)
    rows = (best * block + torch.arange(block, device=q.device)).flatten(2).unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
    return attend(q, keys.gather(2, rows), values.gather(2, rows))


def _triton_dense(inputs: Inputs) -> dict[str, Run]:
    try:
        from kernels.grouped_attention import grouped_attention
    except ImportError:
        raise BackendUnavailable("kernels.grouped_attention is not in this build; measure without --triton") from None
    scale = inputs.geometry.head_dim ** -0.5

    def run(i):
        q, keys, values = inputs.layer(i)
        return grouped_attention(q.transpose(1, 2), keys, values, inputs.start, None, scale, backend="triton")
    return {"triton": run}


def _triton_sparse(inputs: Inputs, policy: Policy) -> dict[str, Run]:
    try:
        from kernels.block_choice import Policy as Choice
        from kernels.block_choice import choose_blocks
        from kernels.gather_attention import gather_attention
    except ImportError:
        raise BackendUnavailable("kernels.block_choice and kernels.gather_attention are not in this build; "
                                 "measure without --triton") from None
    blocks, found = policy.tokens // policy.block, policy.selector is not None
    choice = Choice(policy.name, policy.selector, policy.block, 1, LOCAL if found else blocks - 1, blocks - 1 - LOCAL if found else 0)
    scale = inputs.geometry.head_dim ** -0.5

    def run(i):
        q, keys, values = inputs.layer(i)
        q, summaries = q.transpose(1, 2), [None, None, None]
        if found:
            mine = inputs.summaries(policy.block, policy.selector)[i % inputs.distinct]
            summaries = [*mine, None] if policy.selector == "bound" else [None, None, *mine]
        kept = choose_blocks(q, inputs.geometry.kv_heads, *summaries, inputs.start, choice, backend="triton")
        return gather_attention(q, keys, values, kept, inputs.start, None, scale, policy.block, backend="triton")
    return {"triton": run}
