"""Sections 1.5 to 1.7 and 1.14: what goes wrong only where an operation goes by tiles."""

import torch

from dsv4.kernels.attention import reference as attention
from dsv4.kernels.grouped_attention import reference as grouped
from dsv4.kernels.indexer import reference as indexer
from dsv4.probes.faults import Site, mutation

KEYS = 128  # of one tile of a kernel


def score_tile(q: torch.Tensor) -> int:
    """Entries of a tile of index scores."""
    B, T, H, _ = q.shape
    return max(64, indexer.SCRATCH_BYTES // (4 * B * T * H))


@mutation("1.5", bugs=(57,), parts=("last tile of index scores",), probes=("tiles",))
def last_partial_tile_is_not_scored(site: Site) -> None:
    """The loop over tiles of entries ends with the last whole one: the entries behind it are never selected."""

    def change(real):
        def scores(q, weights, keys, visible):
            found, tile = real(q, weights, keys, visible), score_tile(q)
            whole = found.shape[-1] // tile * tile
            if 0 < whole < found.shape[-1]:
                found[..., whole:] = float("-inf")
            return found

        return scores

    site.kernel("index_scores", change)


@mutation("1.5", bugs=(57,), parts=("tiles of index scores",), probes=("tiles",))
def tiles_of_scores_read_from_the_first(site: Site) -> None:
    """The offset of a tile is added to what is written and not to what is read: every tile scores the first keys."""

    def change(real):
        def scores(q, weights, keys, visible):
            found, tile = real(q, weights, keys, visible), score_tile(q)
            n = found.shape[-1]
            if n > tile:
                hidden = torch.isinf(found)
                found = found[..., torch.arange(n, device=found.device) % tile].masked_fill(hidden, float("-inf"))
            return found

        return scores

    site.kernel("index_scores", change)


@mutation("1.7", bugs=(86,), parts=("sparse attention",), probes=("tiles",))
def running_maximum_is_not_carried(site: Site) -> None:
    """Each tile of 128 keys weighs them by its own maximum, and the sums before it are not rescaled."""

    def change(real):
        def attend(q, window, near, entries, far, sink, scale, *rest):
            if near.shape[1] + (0 if far is None else far.shape[1]) <= KEYS:
                return real(q, window, near, entries, far, sink, scale, *rest)
            parts = [attention.gather_rows(window, near)]
            parts += [] if far is None else [attention.gather_rows(entries, far)]
            rows, absent = (torch.cat(side, 1) for side in zip(*parts))
            logits = (q.float() @ rows.transpose(1, 2) * scale).masked_fill(absent.unsqueeze(1), float("-inf"))
            top, sums, out = sink.view(1, -1), 0, 0
            for tile in range(0, rows.shape[1], KEYS):
                some = logits[..., tile : tile + KEYS]
                top = some.amax(-1).maximum(sink.view(1, -1))
                p = torch.exp(some - top.unsqueeze(-1))
                sums, out = sums + p.sum(-1), out + p @ rows[:, tile : tile + KEYS]
            return (out / (sums + torch.exp(sink.view(1, -1) - top)).unsqueeze(-1)).to(q.dtype)

        return attend

    site.kernel("sparse_attention", change)


@mutation("1.7", bugs=(86,), parts=("sparse attention",), probes=("tiles",))
def lanes_of_the_last_chunk_are_stale(site: Site) -> None:
    """Window rows are taken 16 lanes at a time; the last chunk, where it is not whole, holds the lanes of the first."""

    def change(real):
        def attend(q, window, near, *rest):
            left = near.shape[1] % 16
            if near.shape[1] > 16 and left:
                near = torch.cat((near[:, :-left], near[:, :left]), 1)
            return real(q, window, near, *rest)

        return attend

    site.kernel("sparse_attention", change)


@mutation("1.7", bugs=(57, 140), parts=("HCA attention",), probes=("tiles",))
def last_queries_of_hca_get_stale_rows(site: Site) -> None:
    """The last tile of queries, where it is not whole, is never written: it holds what the tile before it left."""

    def change(real):
        def attend(q, window, near, entries, *rest):
            found, (B, T, H, D) = real(q, window, near, entries, *rest), q.shape
            W, n = near.shape[1], entries.count if hasattr(entries, "count") else entries.shape[1]
            tile = max(1, attention.SCRATCH_BYTES // (4 * B * (H * (W + n + 1) + W * D)))
            left = T % tile
            if T > tile and left:
                found = torch.cat((found[:, :-left], found[:, -left - tile :][:, :left]), 1)
            return found

        return attend

    site.kernel("hca_attention", change)


@mutation("1.14", bugs=(57,), parts=("last tile of grouped attention",), probes=("tiles",), profile="llama3")
def last_queries_of_a_piece_are_not_written(site: Site) -> None:
    """Grouped attention takes a few queries at a time; those behind the last whole piece get the output of nobody."""

    def change(real):
        def attend(q, keys, *rest):
            found, (B, T, H, _) = real(q, keys, *rest), q.shape
            step = max(1, grouped.SCRATCH_BYTES // (4 * B * H * keys.shape[2]))
            if isinstance(found, torch.Tensor) and T > step and T % step:
                found[:, T - T % step :] = 0
            return found

        return attend

    site.kernel("grouped_attention", change)
