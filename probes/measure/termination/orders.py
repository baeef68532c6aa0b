"""The walks of a model's attention: the tiles of each order, and their contents.

A GQA model: dense, newest first after the sequence's first tile; a policy's keep-set, most important first; of a policy
that chooses once, the newest token first back to the window's first, then the chosen by falling score. CSA: the
window newest first, then the selected entries by falling index score. HCA: the window, then the entries, newest first.
The sink logit of CSA and HCA counts from the beginning. Walks of a GQA model are on its device, some queries of all KV
heads at once; those of CSA and HCA are on the host.
"""

import torch
import torch.nn.functional as F

from dsv4.kernels.attention.reference import gather_rows
from dsv4.kernels.block_choice import Policy, choose_blocks
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.gather_attention.reference import positions_of
from dsv4.kernels.grouped_attention.termination import newest_first
from dsv4.kernels.indexer.reference import topk_entries
from dsv4.probes.measure.termination.walk import Walk, joined, together, walk
from dsv4.probes.scenes.buffers import numbers

Kept = tuple[torch.Tensor, int]
AT_ONCE = 1 << 26, 1 << 18  # numbers of values in fp64 that are gathered at once: on a GPU, and on a host


def places(
    q: torch.Tensor, keys: torch.Tensor, start: torch.Tensor, policy: Policy, tile: int, kept: Kept | None = None
) -> torch.Tensor:
    """Positions of the tiles that each query and KV head reads, in order: int64 [T, KV, n, tile] of one row, −1 where
    nothing is. q [1, T, H, D]; keys [1, KV, S, D]; start int64 [1]; kept: what a policy that chooses once chose after
    its prompt, (tokens int64 [KV, k], since) of `choose_tokens`."""
    (_, T, _, D), (KV, S) = q.shape, keys.shape[1:3]
    position = start.unsqueeze(1) + torch.arange(T, device=q.device)
    if policy.dense:
        return newest_first(position, torch.zeros_like(position), -(-S // tile), tile)[0].expand(T, KV, -1, -1)
    if kept is not None:
        best, since = kept
        back = torch.arange(int(position.max()) - since + 1, device=q.device)
        recent = (position[0].unsqueeze(-1) - back).unsqueeze(1)
        recent = torch.where(recent >= since, recent, -1).expand(T, KV, -1)
        found = torch.cat((recent, best.expand(T, KV, -1)), -1)
        found = found.gather(-1, (found < 0).long().argsort(dim=-1, stable=True))
        return _in_tiles(found, tile)
    shape = 1, KV, -(-S // policy.block), D
    low, high, mean = (torch.zeros(shape, dtype=keys.dtype, device=keys.device) for _ in range(3))
    summarise, choose = (operation.resolve("reference")[0] for operation in (summarise_blocks, choose_blocks))
    summarise(keys, torch.zeros_like(start), int(start[0]) + T, low, high, mean, policy.block)
    found = positions_of(choose(q, KV, low, high, mean, start, policy, True), policy.block)[0]
    return _in_tiles(found, tile)


def _in_tiles(found: torch.Tensor, tile: int) -> torch.Tensor:
    return F.pad(found, (0, -found.shape[-1] % tile), value=-1).unflatten(-1, (-1, tile))


def heads(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    scale: float,
    policy: Policy,
    tile: int,
    kept: Kept | None = None,
) -> Walk:
    """Walks of T queries of one row, T·KV groups. Arguments as `places` takes them, values like keys."""
    (_, T, H, D), (KV, S) = q.shape, keys.shape[1:3]
    order = places(q, keys, start, policy, tile, kept)
    seen = (order >= 0) & (order <= (start + torch.arange(T, device=q.device)).view(T, 1, 1, 1))
    some = seen.any(-1)  # tiles in which a query sees nothing are not read
    first = (~some).long().argsort(dim=-1, stable=True)[..., : max(1, int(some.sum(-1).max()))].unsqueeze(-1)
    order, seen = (x.gather(2, first.expand(*first.shape[:3], tile)) for x in (order, seen))
    order = torch.where(seen, order, 0)  # the first position is always there, and weighs nothing where it is masked
    k, v = keys[0].double(), values[0].double()
    logits = torch.einsum("tkgd,ksd->tkgs", q[0].double().view(T, KV, H // KV, D), k) * scale
    head, found = torch.arange(KV, device=q.device).view(1, KV, 1, 1), []
    each = max(1, AT_ONCE[q.device.type == "cpu"] // (KV * order[0, 0].numel() * D))
    for at in torch.arange(T, device=q.device).split(each):
        place, here = order[at], seen[at].unsqueeze(2)  # [t, KV, n, tile]
        weights = logits[at].gather(-1, place.flatten(2).unsqueeze(2).expand(-1, -1, H // KV, -1))
        weights = weights.unflatten(-1, place.shape[2:]).masked_fill(~here, -torch.inf)
        found.append(together(weights.flatten(0, 1), v[head, place].flatten(0, 1), some[at].sum(-1).flatten()))
    return joined(found)


def entries(attn, x, qr, q, window, window_index, step, cache, tile: int) -> Walk:
    """Walks of a batch of one row through a CSA layer, from what `dsv4.probes.measure.base.mass.watched` sees; all
    heads share the tiles."""
    n = step.max_visible(attn.ratio)
    order = topk_entries(attn.indexer.scores(x, qr, step, cache).float().cpu(), min(n, attn.indexer.topk))[0]
    return _latents(attn, q, window, window_index, numbers(cache.main.entries.visible(step))[0], order, tile)


def heavily_compressed(attn, q, window, window_index, step, cache, tile: int) -> Walk:
    """Walks of a batch of one row through an HCA layer, from what its `attend` is given."""
    visible = step.visible(attn.ratio)[0].unsqueeze(-1).cpu()
    order = (visible - 1 - torch.arange(max(1, step.max_visible(attn.ratio)))).clamp(min=-1)
    return _latents(attn, q, window, window_index, numbers(cache.main.entries.visible(step))[0], order, tile)


def _latents(attn, q, window, window_index, rows, order, tile: int) -> Walk:
    """q [T, H, D]; entries rows [n, D], of which order int64 [T, K] are read, −1 where nothing is."""
    near, absent = (x.cpu() for x in gather_rows(window, window_index.flip(-1)))
    q, rows, sink, found = q.cpu(), rows.cpu(), attn.attn_sink.cpu(), []
    for t in range(len(q)):
        mine = order[t][order[t] >= 0]
        read = torch.cat((near[t][~absent[t]], rows[mine].float())).double()
        padded = F.pad(read, (0, 0, 0, -len(read) % tile))
        logits = q[t].double() @ padded.T * attn.scale
        logits[:, len(read) :] = -torch.inf
        found.append(walk(logits.unflatten(-1, (-1, tile)), padded.unflatten(0, (-1, tile)), sink))
    return joined(found)
