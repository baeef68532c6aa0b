"""A prompt in chunks and a memory, as a layer ran it, against the definition in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.oracle import chunks as oracle
from dsv4.probes.scenes.gqa.steps import Call, Tally


@dataclass(frozen=True)
class Chunk:
    """Chunk i of one row and memory, of n tokens from `first` on, and of the G query heads that share the memory. own,
    far: logits [G, n, n], and [G, n, M] of the memory it was given (None: it had none); values and far_values; out [G,
    n, D]: what the layer gave; float64."""

    first: int
    own: torch.Tensor
    far: torch.Tensor | None
    values: torch.Tensor
    far_values: torch.Tensor | None
    out: torch.Tensor


class Walk:
    """Every chunk of one layer's prompt, which may have come in several calls. keys, values [B, KV, S, D] of its
    cache."""

    def __init__(
        self, calls: list[Call], keys: torch.Tensor, values: torch.Tensor, lengths: list[int], where: str, limit: float
    ):
        self.calls, self.lengths, self.where, self.limit = calls, lengths, where, limit
        self.chunking: Chunking = calls[0].given[5]
        self.keys, self.values = (t.double().cpu() for t in (keys, values))
        self.heads = calls[0].given[0].shape[2]
        self.sets = self.chunking.sets(self.heads, self.keys.shape[1])

    def judge(self, tally: dict[str, Tally]) -> None:
        R = self.sets
        for b, length in enumerate(self.lengths):
            found = [self._set(tally, b, r, length) for r in range(R)]
            alike = R // self.keys.shape[1] if self.chunking.heads == "query" else R  # that a mistake makes alike
            for first in range(0, R, alike):
                self._apart(tally, found[first : first + alike], f"{self.where}, row {b}")
        for b, length in enumerate(self.lengths):
            last = next(c for c in reversed(self.calls) if c.given[3] < length)
            told = int(last.given[4][b])  # a row that ends with a chunk is said to go on, so that its memory is kept
            wrong = (
                last.out[1].updates[b].tolist() != [self.chunking.chunks(told) - 1] * R
                or not length <= told <= length + 1
            )
            tally["updates"].see(int(wrong), 1, f"{self.where}, row {b}")

    def _set(self, tally: dict[str, Tally], b: int, r: int, length: int) -> list[list[int]]:
        """Judge one of a row's memories, which a KV head or a query head keeps; returns what it held."""
        of = "query" if self.chunking.heads == "query" else "KV"
        S, scores, memory, held, found = self.chunking.chunk, {}, None, {}, []
        for call in self.calls:
            start, T = call.given[3], call.given[0].shape[1]
            kept, told = call.out[1], int(call.given[4][b])
            for i in range(-(-min(T, length - start) // S) if start < length else 0):
                first, at = start + i * S, f"{self.where}, row {b}, {of} head {r}, chunk {(start + i * S) // S}"
                given = kept.positions[i, b, r].tolist()
                tally["handed on"].see(int(given != (memory or [-1] * self.chunking.memory)), 1, at)
                memory = given if first else None
                chunk = self._chunk(call, b, r, first, min(first + S, length, start + T), memory)
                self._fusion(tally, chunk, at)
                if first + S < told:
                    scores, before = self._scores(chunk, scores, memory), scores
                    memory = kept.positions[i + 1, b, r].tolist()
                    said = dict(zip(memory, kept.scores[i + 1, b, r].tolist()))
                    self._memory(tally, memory, set(before), first + S, scores, at)
                    self._said(tally, said, held, chunk, given if first else None, at)
                    held, scores = said, {p: scores[p] for p in memory if p in scores}
                    found.append(memory)
        return found

    def _chunk(self, call: Call, b: int, r: int, first: int, last: int, memory: list[int] | None) -> Chunk:
        q, _, _, start, _, _, scale = call.given[:7]
        G, kv = self.heads // self.sets, r * self.keys.shape[1] // self.sets
        here, heads = slice(first - start, last - start), slice(r * G, r * G + G)
        mine, out = (t[b, here, heads].double().cpu().transpose(0, 1) for t in (q, call.out[0]))
        k, v = self.keys[b, kv], self.values[b, kv]
        past = None if memory is None else [p for p in memory if 0 <= p < len(k)]
        far = (None, None) if not past else (mine @ k[past].T * scale, v[past])
        return Chunk(first, oracle.within(mine, k[first:last], scale), far[0], v[first:last], far[1], out)

    def _fusion(self, tally: dict[str, Tally], c: Chunk, at: str) -> None:
        wanted = oracle.fused(c.own, c.far, c.values, c.far_values)
        part = "fusion" if c.first else "first chunk"
        if (tally[part].far(c.out, wanted, at, self.limit) > self.limit).any() and c.far is not None:
            tally[part].causes.update(
                name
                for name, other in misfused(c)
                if near(c.out, other, self.limit)
                for _ in range(wanted[..., 0].numel())
            )

    def _scores(self, c: Chunk, scores: dict[int, float], memory: list[int] | None) -> dict[int, float]:
        """Of the memory and of the chunk, after both phases."""
        fresh = dict(zip(range(c.first, c.first + len(c.values)), oracle.own_mass(c.own).tolist()))
        if c.far is not None:
            more = dict(zip(memory, oracle.far_mass(c.own, c.far, self.chunking.score).tolist()))
            scores = {p: scores.get(p, 0.0) + more[p] for p in more}
        return scores | fresh

    def _memory(
        self, tally: dict[str, Tally], memory: list[int], older: set[int], last: int, scores: dict[int, float], at: str
    ) -> None:
        """|M| = L + H, ascending, the last L tokens and the heaviest of the others, none twice."""
        c = self.chunking
        local, heavy, live = (
            set(range(last - c.local, last)),
            set(memory) - set(range(last - c.local, last)),
            set(memory),
        )
        rest = (older | set(range(last - c.chunk, last))) & set(scores) - local
        tally["size"].see(int(len(live) != c.memory or min(live) < 0), 1, at)
        tally["sorted"].see(int(memory != sorted(memory)), 1, at)
        tally["local"].see(int(not local <= live), 1, at)
        strange = bool(heavy - rest)
        tally["positions"].see(
            int(strange), 1, at, ("positions local to the chunk",) if strange and max(memory) < c.chunk else ()
        )
        if strange or len(heavy) != c.heavy:
            tally["heavy"].see(1, 1, at, chance=1.0)
            return
        left, most = [scores[p] for p in rest - heavy], max(scores.values())
        wrong = bool(left) and bool(heavy) and max(left) - min(scores[p] for p in heavy) > 2 * self.limit * most
        tally["heavy"].see(int(wrong), 1, at, chance=float(bool(left)))

    def _said(
        self,
        tally: dict[str, Tally],
        said: dict[int, float],
        held: dict[int, float],
        c: Chunk,
        memory: list[int] | None,
        at: str,
    ) -> None:
        """Scores that the layer keeps: what it kept before and what the definition adds, and never less than before."""
        fallen = sum(said[p] < held[p] for p in said if p in held)
        tally["fall"].see(fallen, sum(p in held for p in said), at)
        fresh = dict(zip(range(c.first, c.first + len(c.values)), oracle.own_mass(c.own).tolist()))
        more = dict(
            zip(memory or (), oracle.far_mass(c.own, c.far, self.chunking.score).tolist() if c.far is not None else ())
        )
        wanted = fresh | {p: held.get(p, 0.0) + m for p, m in more.items()}
        for phase, places in ((1, [p for p in said if p in fresh]), (2, [p for p in said if p in more])):
            if (
                places
                and (
                    tally["scores"].far(column(said, places), column(wanted, places), at, 2 * self.limit)
                    > 2 * self.limit
                ).any()
            ):
                mine = column(said, places) - (column(held, places) if phase == 2 else 0)
                tally["scores"].causes.update(
                    name
                    for name, other in misscored(c, phase, memory, self.chunking.score)
                    if near(mine, column(other, places), 1e-3)
                    for _ in places
                )

    def _apart(self, tally: dict[str, Tally], heads: list[list[list[int]]], at: str) -> None:
        """Memories are chosen head by head: all alike would be a choice over several at once, over all KV heads or
        over the query heads of a group."""
        for memories in zip(*heads):
            alike = len(heads) > 1 and self.chunking.heavy > 0 and all(m == memories[0] for m in memories)
            tally["heads"].see(int(alike), int(len(heads) > 1), at)


def near(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    return bool(((a - b).norm(dim=-1) <= 10 * limit * b.norm(dim=-1).clamp(min=1e-9)).all())


def misfused(c: Chunk) -> Iterator[tuple[str, torch.Tensor]]:
    """(what would be wrong, the output that it would give)."""
    tops = [s.amax(-1, keepdim=True) for s in (c.own, c.far)]
    weights = [torch.exp(s - top) for s, top in zip((c.own, c.far), tops)]
    sums, parts = [w.sum(-1, keepdim=True) for w in weights], [w @ v for w, v in zip(weights, (c.values, c.far_values))]
    yield "phases added without scaling", (parts[0] + parts[1]) / (sums[0] + sums[1])
    yield "memory left out", parts[0] / sums[0]
    yield "own chunk left out", parts[1] / sums[1]
    yield "mean of both phases", (parts[0] / sums[0] + parts[1] / sums[1]) / 2


def column(of: dict[int, float], places: list[int]) -> torch.Tensor:
    """[n, 1] in float64."""
    return torch.tensor([[of.get(p, float("nan"))] for p in places], dtype=torch.float64)


def misscored(c: Chunk, phase: int, memory: list[int] | None, score: str) -> Iterator[tuple[str, dict[int, float]]]:
    """(what would be wrong, what it would add to the tokens of the chunk (phase 1) or of the memory (phase 2))."""
    place = range(c.first, c.first + len(c.values))
    both = None if c.far is None else torch.cat((c.own, c.far), -1)
    if phase == 1:
        yield (
            "before normalisation",
            dict(zip(place, torch.exp(c.own - c.own.amax(-1, keepdim=True)).sum((0, 1)).tolist())),
        )
        if both is not None:
            yield "phase 1 by the fused softmax", dict(zip(place, torch.softmax(both, -1).sum((0, 1)).tolist()))
        return
    yield (
        "before normalisation",
        dict(zip(memory, torch.exp(both - both.amax(-1, keepdim=True)).sum((0, 1))[len(place) :].tolist())),
    )
    other, name = ("memory", "its own") if score == "fused" else ("fused", "the fused")
    yield f"phase 2 by {name} softmax", dict(zip(memory, oracle.far_mass(c.own, c.far, other).tolist()))
    yield "phase 2 not added", dict.fromkeys(memory, 0.0)
