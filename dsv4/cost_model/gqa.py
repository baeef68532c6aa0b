"""Decode attention of a GQA layer: the bytes that each policy reads, and how it runs.

Bytes a layer, by part: keys and values of the tokens that are kept (B·n·KV·D numbers each, n as `read_tokens`), the
summaries of the blocks that are scored (one vector a block and KV head for means, two for bounds), queries and outputs
(2·B·H·D), and lists of single tokens (4 B a token and KV head). Writes of the step's own token, lists of blocks and
their scores are left out.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv4.cost_model.regime import Way
from dsv4.cost_model.rows import Row, Run
from dsv4.cost_model.tier import HostWay
from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy, block_bounds, block_means, choose_blocks, page_bounds, sink_window
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import grouped_attention
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.numerics import Numerics

# the others do not take grouped heads
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Geometry:
    """Heads of one layer, and bytes of a number in the cache."""

    query_heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    itemsize: int = 2

    @classmethod
    def of(cls, config: GQAConfig, numerics: Numerics) -> "Geometry":
        """The geometry of a checkpoint, whose caches hold numbers in the dtype of activations."""
        return cls(config.num_attention_heads, config.num_key_value_heads, config.head_dim, numerics.cache.itemsize)

    def rows(self, batch: int, tokens: int) -> int:
        """Bytes of the keys (or of the values) of that many tokens."""
        return batch * tokens * self.kv_heads * self.head_dim * self.itemsize

    def cache(self, batch: int, tokens: int) -> int:
        """Bytes of keys and values."""
        return 2 * self.rows(batch, tokens)

    def ends(self, batch: int) -> int:
        """Bytes of queries and outputs."""
        return 2 * batch * self.query_heads * self.head_dim * self.itemsize


POLICIES = {
    "sink+window": sink_window,
    "page-16 bound": page_bounds,
    "block-128 bound": block_bounds,
    "block-128 mean": block_means,
}


def finding(policy: Policy) -> str | None:
    """Name of the price of finding in the cost model; None where nothing is searched."""
    return None if policy.selector is None else f"{policy.selector} of {policy.block}"


def blocks_of(policy: Policy, context: int) -> int:
    """The number of blocks of a text; the last may be partial."""
    return -(-context // policy.block)


def read_tokens(policy: Policy, context: int, layer: int = 0, layers: int = 1) -> int:
    """Tokens that the last token of a text of `context` tokens reads in the `layer`-th of the layers that choose; under
    a policy that chooses once, the next token, after a prompt of so many."""
    return policy.budget(layer, layers, context)


def searched(g: Geometry, policy: Policy, batch: int, context: int) -> int:
    """Blocks that a layer's step scores, over all rows and KV heads: the distant ones. Sinks and local blocks are kept
    without a score."""
    return (
        0
        if policy.selector is None
        else batch * g.kv_heads * max(0, blocks_of(policy, context) - policy.local - policy.sink)
    )


def summary_bytes(g: Geometry, policy: Policy, blocks: int) -> int:
    """Bytes of the summaries of that many blocks, over all rows and KV heads."""
    return {"bound": 2, "mean": 1, None: 0}[policy.selector] * blocks * g.head_dim * g.itemsize


def dense_parts(g: Geometry, batch: int, tokens: int) -> dict[str, int]:
    """Part → bytes of attention to the last `tokens` tokens."""
    return {"keys": g.rows(batch, tokens), "values": g.rows(batch, tokens), "queries and outputs": g.ends(batch)}


def policy_parts(
    g: Geometry, policy: Policy, batch: int, context: int, layer: int = 0, layers: int = 1
) -> dict[str, int]:
    """Part → bytes that a step of the `layer`-th of the layers that choose reads of a cache of `context` tokens a row,
    its own token included, and writes."""
    if policy.dense:
        return dense_parts(g, batch, context)
    tokens = read_tokens(policy, context, layer, layers)
    if policy.once:
        return dense_parts(g, batch, tokens) | {"token lists": 4 * batch * g.kv_heads * tokens}
    found = summary_bytes(g, policy, searched(g, policy, batch, context))
    return dense_parts(g, batch, tokens) | {"block summaries": found}


def policy_bytes(g: Geometry, policy: Policy, batch: int, context: int) -> int:
    return sum(policy_parts(g, policy, batch, context).values())


def held_bytes(g: Geometry, policy: Policy, batch: int, context: int) -> int:
    """Bytes of a layer's cache under a policy: all keys and values, and the summaries of all blocks."""
    return g.cache(batch, context) + summary_bytes(g, policy, batch * g.kv_heads * blocks_of(policy, context))


def host_way(g: Geometry, policy: Policy) -> HostWay:
    """The cache in host memory, as `dsv4.cache.host_tier` makes it: on the device summaries, staged blocks and slot
    tables, and two whole layers on their way. Of what a step chooses, its own token's block is on the device."""
    item = 2 * policy.block * g.head_dim * g.itemsize
    groups = lambda batch: batch * g.kv_heads

    def device(batch: int, context: int) -> int:
        blocks = blocks_of(policy, context)
        slots = max(policy.kept, min(2 * policy.kept, blocks))
        table = 16 * slots + 4 * blocks + 44
        return summary_bytes(g, policy, groups(batch) * blocks) + groups(batch) * ((slots + 1) * item + table)

    chosen = lambda batch, context: groups(batch) * (min(policy.kept, blocks_of(policy, context)) - 1) * item
    return HostWay(device, g.cache, chosen, g.cache)


class Inputs:
    """Queries of every layer; the distinct caches and their summaries, which layers use by their number."""

    def __init__(
        self,
        g: Geometry,
        batch: int,
        context: int,
        layers: int,
        distinct: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
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

    def summaries(self, block: int, selector: str | None) -> list[tuple]:
        """For each distinct cache the (low, high, mean) of its blocks, [B, KV, S / block, D]; None if the selector
        reads none. They are part of a cache, so they are made before the step, not in it."""
        if (block, selector) not in self._summaries:
            blocks = [k.unflatten(2, (-1, block)) for k in self.keys]
            self._summaries[block, selector] = [
                (b.amin(3), b.amax(3), None) if selector == "bound" else (None, None, b.mean(3) if selector else None)
                for b in blocks
            ]
        return self._summaries[block, selector]


class GQA:
    """Rows of dense attention (every SDPA backend, and on a GPU this project's) and of each policy, on one backend."""

    name = "GQA"

    def __init__(self, geometry: Geometry, policies: Mapping[str, Policy], device: torch.device):
        self.geometry, self.policies, self.device = geometry, policies, device
        self.backend = "triton" if device.type == "cuda" else "reference"
        self.dtype = {2: torch.bfloat16, 4: torch.float32}[geometry.itemsize]

    def document(self) -> dict:
        return {
            "kind": "gqa",
            "geometry": asdict(self.geometry),
            "policies": [asdict(p) for p in self.policies.values()],
        }

    def dense_bytes(self, batch: int, context: int) -> int:
        return sum(dense_parts(self.geometry, batch, context).values())

    def cache_bytes(self, batch: int, context: int) -> int:
        return self.geometry.cache(batch, context)

    def ways(self) -> tuple[Way, list[Way]]:
        """Dense attention and the policies, as the cost model sees them."""
        ways = [
            Way(
                p.name,
                partial(policy_bytes, self.geometry, p),
                finding(p),
                p.tokens,
                partial(searched, self.geometry, p),
                partial(held_bytes, self.geometry, p),
                host_way(self.geometry, p),
            )
            for p in self.policies.values()
        ]
        return Way("dense", self.dense_bytes, held=self.geometry.cache), ways

    def inputs(self, batch: int, context: int, layers: int, distinct: int) -> Inputs:
        return Inputs(self.geometry, batch, context, layers, distinct, self.device, self.dtype)

    def rows(self, batch: int, context: int) -> list[Row]:
        if context % 128:
            raise InputError(
                f"a context of {context} tokens cannot be measured; expected a multiple of 128, as caches are"
            )
        g, shape = self.geometry, (batch, context)
        rows = [Row("dense", *shape, self.dense_bytes(*shape), True, make=self._dense)]
        return rows + [
            Row(
                p.name,
                *shape,
                policy_bytes(g, p, *shape),
                False,
                finding(p),
                searched(g, p, *shape),
                partial(self._sparse, p),
            )
            for p in self.policies.values()
            if p.tokens < context
        ]

    def _dense(self, inputs: Inputs) -> dict[str, Run]:
        if self.device.type != "cuda":
            return {"SDPA": lambda i: attend(*inputs.layer(i))}
        return {f"SDPA {name}": partial(_with_backend, inputs, backend) for name, backend in BACKENDS.items()} | {
            self.backend: partial(self._whole, inputs)
        }

    def _whole(self, inputs: Inputs, i: int):
        q, keys, values = inputs.layer(i)
        return grouped_attention(
            q.transpose(1, 2), keys, values, inputs.start, None, self.geometry.head_dim**-0.5, backend=self.backend
        )

    def _sparse(self, policy: Policy, inputs: Inputs) -> dict[str, Run]:
        inputs.summaries(policy.block, policy.selector)
        return {self.backend: partial(self.read_kept, policy, inputs)}

    def read_kept(self, policy: Policy, inputs: Inputs, i: int) -> torch.Tensor:
        """One layer's step [B, 1, H, D]: it chooses its blocks and reads them."""
        (q, keys, values), summaries = (
            inputs.layer(i),
            inputs.summaries(policy.block, policy.selector)[i % inputs.distinct],
        )
        q = q.transpose(1, 2)
        kept = choose_blocks(q, self.geometry.kv_heads, *summaries, inputs.start, policy, backend=self.backend)
        return gather_attention(
            q, keys, values, kept, inputs.start, None, self.geometry.head_dim**-0.5, policy.block, backend=self.backend
        )


def attend(q, keys, values):
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def _with_backend(inputs: Inputs, backend: SDPBackend, i: int):
    with sdpa_kernel([backend]):
        return attend(*inputs.layer(i))


def layer_parts(
    config: GQAConfig, numerics: Numerics, batch: int, context: int, policy: Policy
) -> list[dict[str, int]]:
    """Part → bytes of each layer. One with a window reads just that, whatever the policy."""
    g, layers = Geometry.of(config, numerics), config.windows.count(None)
    place = itertools.count()
    return [
        policy_parts(g, policy, batch, context, next(place), layers)
        if window is None
        else dense_parts(g, batch, min(window, context))
        for window in config.windows
    ]
