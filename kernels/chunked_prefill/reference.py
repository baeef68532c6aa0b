"""Two-phase chunked sparse prefill: each chunk attends to itself, and to a memory of fixed size of earlier tokens."""

from typing import NamedTuple

import torch
from einops import rearrange

from dsv4.kernels.chunked_prefill.chunking import Chunking, Memory, check, empty_memory
from dsv4.kernels.errors import UnsupportedInput


class Partial(NamedTuple):
    """A softmax over some keys, not yet divided: m [..., n] largest logit, l [..., n] = Σ e^(s−m), o [..., n, D] = Σ
    e^(s−m)·v."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor


def attend(q, k, v, scale: float, seen=None) -> tuple[torch.Tensor, Partial]:
    """Logits s = q·k·scale [..., n, K], −inf where not seen, and the softmax over them."""
    s = q @ k.mT * scale
    s = s if seen is None else s.masked_fill(~seen, float("-inf"))
    m = s.amax(-1)
    p = torch.exp(s - m.unsqueeze(-1))
    return s, Partial(m, p.sum(-1), p @ v)


def fuse(a: Partial, b: Partial) -> Partial:
    """The softmax over the keys of both (online softmax): neither order nor the size of the logits matters."""
    m = torch.maximum(a.m, b.m)
    x, y = torch.exp(a.m - m), torch.exp(b.m - m)
    return Partial(m, a.l * x + b.l * y, a.o * x.unsqueeze(-1) + b.o * y.unsqueeze(-1))


def column_sums(s, total: Partial) -> torch.Tensor:
    """The probability mass of each key from all queries of its group: Σ e^(s−m)/l over s [R, G, n, K] → [R, K]."""
    return (torch.exp(s - total.m.unsqueeze(-1)) / total.l.unsqueeze(-1)).sum((1, 2))


def given(s, own: Partial, t, far: Partial, total: Partial, score: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a chunk's queries give its own keys [R, n], by the chunk's softmax, and the memory [R, M], by the softmax
    that `score` names: logits s and t, softmax over the own keys, over the memory (`far`) and over both (`total`)."""
    return column_sums(s, own), column_sums(t, far if score == "memory" else total)


def select(positions, scores, heavy: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of candidates [R, C] in ascending positions, the `heavy` ones with the highest scores, still ascending; of equal
    scores the first wins."""
    kept = scores.sort(dim=-1, descending=True, stable=True).indices[:, :heavy].sort(-1).values
    return positions.gather(1, kept), scores.gather(1, kept)


def attend_chunk(q, keys, values, first: int, past: Memory, scale: float, chunking: Chunking):
    """Both phases for one chunk: q [n, H, D] at `first`, keys and values [KV, ·, D] of its row. Returns (out [n, H, D],
    the mass of its keys in phase 1 [R, n], the updated scores of the memory [R, M])."""
    (n, H, _), KV = q.shape, len(keys)
    R = chunking.sets(H, KV)
    head = torch.arange(R, device=q.device).unsqueeze(1) // (R // KV)  # [R, 1]: the KV head of each set
    mine = rearrange(q.float(), "n (r g) d -> r g n d", r=R)
    rows = lambda places: (t[head, places].unsqueeze(1).float() for t in (keys, values))
    place, causal = torch.arange(n, device=q.device), torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    s, own = attend(mine, *rows(first + place), scale, causal)
    if first:
        t, far = attend(mine, *rows(past.positions.long()), scale)
        total = fuse(own, far)
        mass, more = given(s, own, t, far, total, chunking.score)
    else:
        total, mass, more = own, column_sums(s, own), 0
    o = rearrange(total.o / total.l.unsqueeze(-1), "r g n d -> n (r g) d")
    return o.to(q.dtype), mass, past.scores + more


def chunked_prefill(
    q, keys, values, start: int, lengths, chunking: Chunking, scale: float, memory: Memory | None = None
) -> tuple[torch.Tensor, Memory]:
    """Sparse attention of a prompt in chunks of S tokens; the cache stays whole, so that decoding may attend to all of
    it.

    q [B, T, H, D]: token t of row b is at position start + t, where start is a multiple of S; keys, values [B, KV, ≥
    start + T, D] hold every token up to there, rotated by their positions. lengths int64 [B]: tokens of each whole
    prompt (T must be a multiple of S if one is longer than start + T). Returns (out [B, T, H, D] in q's dtype, 0 beyond
    a row's length; Memory). Query head h reads KV head h // (H // KV). fp32 softmax. Raises UnsupportedInput. A prompt
    may come in several calls, each with the Memory of the one before.

    Phase 1, all chunks at once: causal attention inside the chunk. Column sums of its probabilities, normalised by the
    chunk's own softmax (the mass of each query is 1), are the first scores of its keys. Phase 2, chunk by chunk from
    the second: attention of all its queries to the M tokens of the memory, fused with phase 1. Their column sums,
    normalised by the softmax that `Chunking.score` names (fused: the real mass), are added to the scores of the memory.
    So a score only grows: phase 2 reduces the mass of the chunk's own keys, because its softmax has more keys, but
    their scores are not reduced. Then memory = the last L tokens of the chunk ∪ the H with the highest scores among the
    older memory and the rest of the chunk; of equals the earliest. There are R memories, each with its own scores: one
    of each KV head, or of each query head (`Chunking.heads`).
    """
    check(q, keys, values, start, lengths, chunking, scale, memory)
    (B, T), S, out = q.shape[:2], chunking.chunk, torch.zeros_like(q)
    kept = empty_memory(q, chunking.sets(q.shape[2], keys.shape[1]), chunking, memory)
    for b, length in enumerate(lengths.tolist()):
        for i, first in enumerate(range(start, min(length, start + T), S)):
            last = min(first + S, length, start + T)
            if length > last < first + S:
                raise UnsupportedInput(
                    f"chunked_prefill: row {b} goes on to {length}, and these tokens end at {last}, inside a chunk of "
                    f"{S}"
                )
            here = slice(first - start, last - start)
            past = Memory(*(t[i, b, :, : chunking.memory if first else 0] for t in kept[:2]), None, None)
            out[b, here], mass, scores = attend_chunk(q[b, here], keys[b], values[b], first, past, scale, chunking)
            if length > last:
                place = torch.arange(first, last, dtype=torch.int32, device=q.device).expand(len(mass), -1)
                rest, local = slice(0, S - chunking.local), slice(S - chunking.local, S)
                heavy = select(
                    torch.cat((past.positions, place[:, rest]), 1),
                    torch.cat((scores, mass[:, rest]), 1),
                    chunking.heavy,
                )
                kept.positions[i + 1, b] = torch.cat((heavy[0], place[:, local]), 1)
                kept.scores[i + 1, b] = torch.cat((heavy[1], mass[:, local]), 1)
                kept.mass[b, :, here] = mass
                kept.updates[b] += 1
    return out, kept
