"""Decode attention of a CSA layer, compared with dense attention to the uncompressed latent. The indexer is the price
of finding.

Bytes a layer, S tokens of context and N = ⌊S / 4⌋ entries: dense B·(S·1024 + 131072); CSA as `dsv4.cost_model.latent`
has it, with V4-Flash's sizes B·(K·1024 + 131072) with K = min(512, N) + min(128, S) rows, and, where N > 512 so that
there is a choice, for the index B·(N·b + 16384), b = 68 (FP4), 132 (FP8) or 256 (bf16) bytes a key, and 8·N for scores
written and read.
"""

from collections.abc import Mapping

import torch

from dsv4.cost_model.latent import LatentGeometry
from dsv4.cost_model.regime import Way
from dsv4.cost_model.rows import Row, Run
from dsv4.cost_model.tier import HostWay
from dsv4.kernels.attention import hca_attention, sparse_attention
from dsv4.kernels.cache_rows import PAGE, STREAM_FORMATS, PackedRows, encode_rows, pack_layout
from dsv4.kernels.indexer import index_scores, topk_entries
from dsv4.model.spec import LayerKind

HEADS, LATENT, INDEX_HEADS, INDEX_DIM, WINDOW, TOPK, RATIO = 64, 512, 64, 128, 128, 512, 4
# name → format, and bytes a key
INDEX_KEYS = {
    name: (form, 2 * INDEX_DIM if form is None else form.layout(INDEX_DIM).row)
    for name, form in STREAM_FORMATS["index"].items()
}
FINDING = "index scores and top-512"


def dense_bytes(batch: int, context: int) -> int:
    return batch * (context * 1024 + 131072)


def csa_bytes(batch: int, context: int, key: int = 68) -> int:
    return sum(LatentGeometry(key=key).parts(LayerKind.CSA, batch, context).values())


def latent_bytes(batch: int, context: int) -> int:
    """Bytes of dense attention for one layer: a latent a token, 512 × 2 B."""
    return batch * context * LATENT * 2


def _entries(batch: int, context: int) -> int:
    """Entries of complete windows, of all rows."""
    return batch * (context // RATIO)


def searched(batch: int, context: int) -> int:
    """Entries that are scored: all, or none if all are selected."""
    return _entries(batch, context) if context // RATIO > TOPK else 0


class Inputs:
    """Queries of every layer; latents, entries and index keys of the distinct ones."""

    def __init__(self, batch: int, context: int, layers: int, distinct: int, index: str, device: torch.device):
        make, entries = torch.Generator(device=device).manual_seed(batch * 1000 + context), context // RATIO
        normal = lambda *shape: torch.randn(*shape, generator=make, device=device, dtype=torch.bfloat16)
        self.batch, self.distinct, self.entries = batch, distinct, entries
        self.queries = [normal(batch, 1, HEADS, LATENT) for _ in range(layers)]
        self.index_queries = [normal(batch, 1, INDEX_HEADS, INDEX_DIM) for _ in range(layers)]
        self.weights = torch.rand(batch, 1, INDEX_HEADS, generator=make, device=device) / INDEX_HEADS
        self.latents = [normal(batch, context, LATENT) for _ in range(distinct)]
        self.pools = [normal(batch * entries, LATENT) for _ in range(distinct)]
        self.keys = [_index_keys(batch, entries, index, device, normal) for _ in range(distinct)]
        self.sink = torch.linspace(-2, 2, HEADS, device=device)
        self.near = torch.arange(WINDOW, device=device) + torch.arange(batch, device=device).unsqueeze(1) * context
        self.seen, self.visible = (torch.full((batch, 1), n, device=device) for n in (context - WINDOW, entries))
        self.offset = torch.arange(batch, device=device).view(-1, 1, 1) * entries


def _index_keys(batch: int, entries: int, index: str, device, normal):
    """Index keys [B, N, 128] in the format; packed ones repeat some pages, since only their bytes matter."""
    form, _ = INDEX_KEYS[index]
    if form is None:
        return normal(batch, entries, INDEX_DIM)
    layout, pages, different = pack_layout(form, INDEX_DIM, 0), -(-entries // PAGE), 32
    some = PackedRows(
        form, torch.zeros(different, layout.page, dtype=torch.uint8, device=device), INDEX_DIM, 0, different * PAGE
    )
    payload, scales = encode_rows(normal(different * PAGE, INDEX_DIM).float(), form, 0)
    some.payload[:], some.scales[:] = payload.view(different, PAGE, -1), scales.view(different, PAGE, -1)
    data = some.data.repeat(-(-batch * pages // different), 1)[: batch * pages]
    return PackedRows(form, data.view(batch, pages, layout.page), INDEX_DIM, 0, entries)


class CSA:
    """Rows of V4-Flash's attention: dense over the uncompressed latent (read as HCA's kernel reads it), and CSA with
    its indexer."""

    name = "CSA"

    def __init__(self, device: torch.device, backend: str, index: str = "fp4"):
        self.device, self.backend, self.index = device, backend, index

    def document(self) -> dict:
        return {"kind": "csa", "index": self.index}

    def cache_bytes(self, batch: int, context: int) -> int:
        return latent_bytes(batch, context) + _entries(batch, context) * (1024 + INDEX_KEYS[self.index][1])

    def _held(self, batch: int, context: int) -> int:
        """Bytes of CSA alone: rows of the window, entries and index keys."""
        return latent_bytes(batch, min(WINDOW, context)) + _entries(batch, context) * (1024 + INDEX_KEYS[self.index][1])

    def ways(self) -> tuple[Way, list[Way]]:
        return Way("dense", dense_bytes, held=latent_bytes), [
            Way("csa", self._csa_bytes, FINDING, WINDOW + TOPK * RATIO, searched, self._held, self._host())
        ]

    def _host(self) -> HostWay:
        """Entries in host memory, in bf16: on the device windows, index keys, twice as many staged entries as a step
        chooses and a slot table; and one layer's entries on their way."""
        row, slots = 1024, 2 * TOPK
        entries = lambda batch, context: _entries(batch, context) * row

        def device(batch: int, context: int) -> int:
            table = batch * (16 * slots + 4 * (context // RATIO) + 28)
            return self._held(batch, context) - entries(batch, context) + batch * slots * row + table

        chosen = lambda batch, context: batch * min(TOPK, context // RATIO) * row
        return HostWay(device, entries, chosen, entries, 1)

    def _csa_bytes(self, batch: int, context: int) -> int:
        return csa_bytes(batch, context, INDEX_KEYS[self.index][1])

    def inputs(self, batch: int, context: int, layers: int, distinct: int) -> Inputs:
        return Inputs(batch, context, layers, distinct, self.index, self.device)

    def rows(self, batch: int, context: int) -> list[Row]:
        rows = [Row("dense", batch, context, dense_bytes(batch, context), True, make=self._dense)]
        if searched(batch, context):  # otherwise CSA reads every entry, and does not search
            rows.append(
                Row(
                    "csa",
                    batch,
                    context,
                    self._csa_bytes(batch, context),
                    False,
                    FINDING,
                    searched(batch, context),
                    self._csa,
                )
            )
        return rows

    def _dense(self, inputs: Inputs) -> Mapping[str, Run]:
        def run(i):
            latent = inputs.latents[i % inputs.distinct]
            return hca_attention(
                inputs.queries[i],
                latent.flatten(0, 1),
                inputs.near,
                latent[:, WINDOW:],
                inputs.seen,
                inputs.sink,
                LATENT**-0.5,
                backend=self.backend,
            )

        return {self.backend: run}

    def _csa(self, inputs: Inputs) -> Mapping[str, Run]:
        def run(i):
            latent = inputs.latents[i % inputs.distinct]
            scores = index_scores(
                inputs.index_queries[i],
                inputs.weights,
                inputs.keys[i % inputs.distinct],
                inputs.visible,
                backend=self.backend,
            )
            best = topk_entries(scores, TOPK, backend=self.backend)
            if inputs.batch > 1:  # entries of a row are numbered in the pool of all rows
                best = torch.where(best < 0, best, best + inputs.offset)
            return sparse_attention(
                inputs.queries[i].flatten(0, 1),
                latent.flatten(0, 1),
                inputs.near,
                inputs.pools[i % inputs.distinct],
                best.flatten(0, 1),
                inputs.sink,
                LATENT**-0.5,
                backend=self.backend,
            )

        return {self.backend: run}
