"""Decode attention of DeepSeek-V4's layers: the bytes that a window, CSA and HCA read.

Bytes a layer of B rows of S tokens, by part: window B·min(W, S)·b rows of b bytes; entries of complete windows, of CSA
min(topk, ⌊S / 4⌋), of HCA ⌊S / 128⌋ of them; and where CSA has more than topk entries, so that there is a choice, their
index keys, its index queries, and 8 B a key for scores written and read; queries and outputs. Writes of the step's own
token, compressors' raw rows, head weights of the indexer, lists of entries and sinks are left out, because none grows
with the context.
"""

from dataclasses import dataclass

from dsv4.kernels.cache_rows import RowFormat, pack_layout
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerKind


@dataclass(frozen=True)
class LatentGeometry:
    """Sizes of one layer, V4-Flash's by default. row, key: bytes of a window row or entry, and of an index key, as
    cached; itemsize: of a number of queries and outputs."""

    heads: int = 64
    latent: int = 512
    row: int = 1024
    index_heads: int = 64
    index_dim: int = 128
    key: int = 68
    window: int = 128
    topk: int = 512
    itemsize: int = 2
    csa_ratio: int = 4
    hca_ratio: int = 128

    @classmethod
    def of(cls, config: ModelConfig, numerics: Numerics) -> "LatentGeometry":
        """The geometry of a checkpoint, with caches in the formats of `numerics`."""
        c, plain = config, numerics.cache.itemsize
        row = row_bytes(numerics.kv_rows, c.head_dim, c.qk_rope_head_dim, plain)
        key = row_bytes(numerics.index_rows, c.index_head_dim, 0, plain)
        ratios = {layer.kind: layer.ratio for layer in c.layers}
        return cls(
            c.num_attention_heads,
            c.head_dim,
            row,
            c.index_n_heads,
            c.index_head_dim,
            key,
            c.sliding_window,
            c.index_topk,
            numerics.activation.itemsize,
            ratios.get(LayerKind.CSA, cls.csa_ratio),
            ratios.get(LayerKind.HCA, cls.hca_ratio),
        )

    def ratio(self, kind: LayerKind) -> int:
        """Tokens an entry of a layer that compresses."""
        return self.csa_ratio if kind is LayerKind.CSA else self.hca_ratio

    def entries(self, kind: LayerKind, context: int) -> int:
        """Entries of a row that its last token attends to."""
        if kind is LayerKind.WINDOW:
            return 0
        seen = context // self.ratio(kind)
        return min(self.topk, seen) if kind is LayerKind.CSA else seen

    def scored(self, kind: LayerKind, context: int) -> int:
        """Index keys of a row that its last token is multiplied with: those of every entry, unless all entries are
        selected."""
        seen = context // self.csa_ratio
        return seen if kind is LayerKind.CSA and seen > self.topk else 0

    def parts(self, kind: LayerKind, batch: int, context: int) -> dict[str, int]:
        """Part → bytes that a layer's step reads of a cache of `context` tokens a row, its own token included, and
        writes."""
        parts = {
            "window": batch * min(self.window, context) * self.row,
            "queries and outputs": 2 * batch * self.heads * self.latent * self.itemsize,
        }
        if kind is not LayerKind.WINDOW:
            parts[f"{kind.value} entries"] = batch * self.entries(kind, context) * self.row
        keys = self.scored(kind, context)
        if keys:
            parts |= {
                "index keys": batch * keys * self.key,
                "index scores": batch * keys * 8,
                "index queries": batch * self.index_heads * self.index_dim * self.itemsize,
            }
        return parts


def row_bytes(format: RowFormat | None, width: int, rope: int, itemsize: int) -> int:
    """Bytes of one row of a cache; for packed rows payload and scales."""
    return width * itemsize if format is None else pack_layout(format, width, rope).row


def layer_parts(config: ModelConfig, numerics: Numerics, batch: int, context: int, policy=None) -> list[dict[str, int]]:
    """`parts` of each layer of the backbone. policy: none, because such a model has learnt what it reads."""
    geometry = LatentGeometry.of(config, numerics)
    return [geometry.parts(layer.kind, batch, context) for layer in config.layers]
