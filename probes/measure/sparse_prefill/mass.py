"""Attention mass: what share of a dense attention falls on the keys that chunked prefill could see, and on other
memories of that size.

Queries and keys are those of the dense run, so that nothing of layers below enters; the memory is the one that the
sparse run chose. Every `every`-th query is looked at. Sums are kept by the chunk of the query, head and key, from which
any memory's share follows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base.attending import attending
from dsv4.probes.measure.sparse_prefill.measures import remembered

ROUND = 64  # queries whose probabilities exist at once
KINDS = ("own", "kept", "recent", "random", "oracle_next", "oracle_future")


@dataclass(frozen=True)
class DenseMass:
    """sums fp32 [C, H, T]: probability that the queries looked at of each chunk gave each key; queries int64 [C]: how
    many they were."""

    sums: torch.Tensor
    queries: torch.Tensor
    chunk: int

    def of_chunks(self, chunk: int) -> "DenseMass":
        """These masses by longer chunks, whose length is a multiple of this one's."""
        each = chunk // self.chunk
        if each * self.chunk != chunk:
            raise ValueError(f"chunks of {chunk} are no multiple of {self.chunk}")
        short = -len(self.sums) % each
        pad = lambda x: torch.cat((x, x.new_zeros(short, *x.shape[1:]))).unflatten(0, (-1, each)).sum(1)
        return DenseMass(pad(self.sums), pad(self.queries), chunk)


@contextmanager
def watched(model: CausalLM, tokens: int, chunk: int, every: int) -> Iterator[dict[int, DenseMass]]:
    """While one row of `tokens` tokens runs densely: layer → DenseMass, of its queries at positions p with (p + 1) %
    every = 0."""
    found: dict[int, DenseMass] = {}

    def look(layer: int, attn, q, keys, values, step) -> None:
        if layer not in found:
            n = -(-tokens // chunk)
            found[layer] = DenseMass(
                torch.zeros(n, attn.H, tokens, device=q.device), torch.zeros(n, dtype=torch.int64), chunk
            )
        add(found[layer], q, keys, int(step.start[0]), attn.scale, every)

    with attending(model, look):
        yield found


def add(mass: DenseMass, q: torch.Tensor, keys: torch.Tensor, start: int, scale: float, every: int) -> None:
    """Count queries q [1, T, H, D] at start, start + 1, …; keys [1, KV, S, D], those of the queries among them."""
    (_, T, H, D), KV, chunk = q.shape, keys.shape[1], mass.chunk
    place = torch.arange(start, start + T, device=q.device)
    for chosen in place[(place + 1) % every == 0].split(ROUND):
        if not len(chosen):  # the only part of a step that is shorter than `every`
            continue
        end = int(chosen[-1]) + 1
        # [KV, G, Q, D]
        mine = q[0, chosen - start].float().view(len(chosen), KV, H // KV, D).permute(1, 2, 0, 3)
        hidden = torch.arange(end, device=q.device) > chosen.unsqueeze(-1)
        p = (
            (mine @ keys[0, :, None, :end].float().mT * scale)
            .masked_fill(hidden, float("-inf"))
            .softmax(-1)
            .flatten(0, 1)
        )
        for i in (chosen // chunk).unique().tolist():
            of = chosen // chunk == i
            mass.sums[i, :, :end] += p[:, of].sum(1)
            mass.queries[i] += int(of.sum())


def shares(mass: DenseMass, positions: torch.Tensor, cut: Chunking) -> dict[str, torch.Tensor]:
    """Kind → fp32 [n − 1, H]: share of the dense mass of each chunk's queries, from the second chunk on, by head. NaN
    without queries.

    positions int [≥ n, KV, M]: [i] what chunk i attended beside itself. own: on the keys of the own chunk. The others
    add to it:
    kept: the memory that was chosen. recent: the last M tokens. random: M of all earlier tokens, expected. Oracles: the
    last L, and of the other earlier tokens the H that most mass truly falls on, of the queries of this chunk (next: no
    memory of L + H tokens of a KV head holds more) or of this and all later ones (future), summed over the query heads
    of each KV head.
    """
    n, H, T = mass.sums.shape
    KV, M, group = positions.shape[1], cut.memory, H // positions.shape[1]
    held = remembered(positions[:n].unsqueeze(1), T)[:, 0].repeat_interleave(group, 1)  # [n, H, T]
    future = mass.sums.view(n, KV, group, T).sum(2).flip(0).cumsum(0).flip(0)  # [n, KV, T]
    found = {kind: torch.full((n - 1, H), float("nan")) for kind in KINDS}
    for i in range(1, n):
        if not mass.queries[i]:
            continue
        first, of = i * cut.chunk, mass.sums[i]
        past, own = of[:, :first], of[:, first:].sum(-1)
        local = past[:, first - cut.local :].sum(-1)
        older = past[:, : first - cut.local]
        best = {"oracle_next": older.view(KV, group, -1).sum(1), "oracle_future": future[i, :, : first - cut.local]}
        kinds = {
            "own": torch.zeros_like(own),
            "kept": (past * held[i, :, :first]).sum(-1),
            "recent": past[:, first - M :].sum(-1),
            "random": past.sum(-1) * M / first,
        }
        kinds |= {
            kind: local + older.gather(1, score.topk(cut.heavy, -1).indices.repeat_interleave(group, 0)).sum(-1)
            for kind, score in best.items()
        }
        for kind, value in kinds.items():
            found[kind][i - 1] = ((own + value) / mass.queries[i]).cpu()
    return found


def figures(found: dict[str, torch.Tensor], queries: torch.Tensor) -> dict[str, list[float]]:
    """Kind → the mean over chunks by head [H], each chunk by its number of queries."""
    weight = queries[1:].double().unsqueeze(-1)
    return {
        kind: ((values.double().nan_to_num() * weight).sum(0) / weight.sum()).tolist() for kind, values in found.items()
    }
