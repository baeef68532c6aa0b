"""The attention of a dense layer over all compressed entries, in parallel with a model that attends to a few of
them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from dsv4.kernels.attention.reference import gather_rows
from dsv4.model.attention import CSAAttention
from dsv4.model.deepseek_v4 import Model
from dsv4.probes.oracle.attention import chosen
from dsv4.probes.scenes.buffers import numbers
from dsv4.probes.scenes.patching import wrapped

QUERY_BLOCK = 16  # queries whose attention over all entries exists at once


def entry_mass(
    q: torch.Tensor,
    near: torch.Tensor,
    absent: torch.Tensor,
    entries: torch.Tensor,
    visible: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Mean over heads of the attention probabilities over every visible entry, fp32 [B, T, n]; window and sink have the
    rest.

    q [B·T, H, D], rotated; near [B·T, W, D], each query's window rows, of which bool absent [B·T, W] do not exist;
    entries [B, n, D]; visible int64 [B, T], how many of the entries each query sees; sink [H].
    """
    (N, H, _), (B, T), n = q.shape, visible.shape, entries.shape[1]
    queries = q.float() * scale
    close = torch.bmm(queries, near.float().transpose(1, 2)).masked_fill(absent.unsqueeze(1), float("-inf"))
    far = torch.bmm(queries.view(B, T * H, -1), entries.float().transpose(1, 2)).view(B, T, H, n)
    seen = torch.arange(n, device=q.device) < visible.unsqueeze(-1)
    far = far.masked_fill(~seen.unsqueeze(2), float("-inf")).view(N, H, n)
    p = torch.softmax(torch.cat((far, close, sink.view(1, H, 1).expand(N, H, 1)), -1), -1)
    return p[..., :n].mean(1).view(B, T, n)


def dense_mass(attn: CSAAttention, q, window, window_index, step, entries) -> torch.Tensor:
    """`entry_mass` of this project's model, from what its attention is given: fp32 [B, T, n].

    q [N, H, D]; window [R, D] and window_index [N, W] as `sparse_attention` takes them; entries [B, n, D].
    """
    rows, absent = gather_rows(window, window_index)
    return entry_mass(q, rows, absent, entries, step.visible(attn.ratio), attn.attn_sink, attn.scale)


def by_blocks(q, near, absent, entries, visible, sink, scale: float) -> torch.Tensor:
    """`entry_mass` of one row, some queries at a time: q [T, H, D], entries [n, D], visible [T] → fp32 [T, n]."""
    blocks = torch.arange(len(q), device=q.device).split(QUERY_BLOCK)
    return torch.cat(
        [
            entry_mass(q[b], near[b], absent[b], entries.unsqueeze(0), visible[b].unsqueeze(0), sink, scale)[0]
            for b in blocks
        ]
    )


def row_mass(attn: CSAAttention, q, window, window_index, step, cache) -> torch.Tensor:
    """`by_blocks` of this project's model and a batch of one row, from what its attention is given: fp32 [T, n]. Of
    several ranks the mean over the heads of all."""
    near, absent = gather_rows(window, window_index)
    entries = numbers(cache.main.entries.visible(step))[0]
    mine = by_blocks(q, near, absent, entries, step.visible(attn.ratio)[0], attn.attn_sink, attn.scale)
    return attn.ranks.sum(mine) / attn.ranks.size


def watched(model: Model, see: Callable) -> AbstractContextManager:
    """Calls see(layer, attn, x, qr, q, window, window_index, step, cache) after each CSA layer attended."""

    def also(i: int, attn: CSAAttention, attend: Callable) -> Callable:
        def run(*held):
            out = attend(*held)
            see(i, attn, *held)
            return out

        return run

    return wrapped(
        [(i, block.attn) for i, block in enumerate(model.layers) if isinstance(block.attn, CSAAttention)],
        "_attend",
        also,
    )


def mask(selection: torch.Tensor, n: int) -> torch.Tensor:
    """int64 [Q, k] → bool [Q, n]; what is no entry counts as no pick."""
    selection = torch.where((selection < 0) | (selection >= n), -1, selection)
    return chosen(selection.unsqueeze(0), n)[0]


@contextmanager
def window_only(model: Model) -> Iterator[None]:
    """Cut off the compressed branches: CSA and HCA layers attend to their window (and sink) alone.

    Compressors and indexers still run; their results are not attended to.
    """
    ops = {id(block.attn.op): block.attn.op for block in (*model.layers, *model.mtp)}.values()
    before = [(op, op.sparse_attention, op.hca_attention) for op in ops]
    for op, sparse, _ in before:
        op.sparse_attention, op.hca_attention = _windowed(sparse)
    try:
        yield
    finally:
        for op, sparse, hca in before:
            op.sparse_attention, op.hca_attention = sparse, hca


def _windowed(sparse: Callable) -> tuple[Callable, Callable]:
    """`sparse_attention` and `hca_attention` without their entries, by the former with none."""

    def of_csa(q, window, window_index, entries, entry_index, sink, scale, *hints):
        return sparse(q, window, window_index, None, None, sink, scale, *hints)

    def of_hca(q, window, window_index, entries, visible, sink, scale, complete=False):
        return sparse(q.flatten(0, 1), window, window_index, None, None, sink, scale, complete).view(q.shape)

    return of_csa, of_hca
