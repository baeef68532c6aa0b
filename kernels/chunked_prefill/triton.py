"""Chunked sparse prefill on a GPU: two launches for all chunks, then two for each chunk that has others before it.

Phase 1 runs the chunks side by side; phase 2 must go through them in order, since each chunk's queries decide what the
next one sees. Programs of rows that have ended return at once. Launches depend on shapes only, and nothing waits for
the host.
"""

import math
from typing import NamedTuple

import torch

from dsv4.kernels.chunked_prefill.chunking import Chunking, Memory, check, empty_memory
from dsv4.kernels.chunked_prefill.reference import chunked_prefill as definition
from dsv4.kernels.chunked_prefill.triton_attend import to_memory, within_chunks
from dsv4.kernels.chunked_prefill.triton_keep import choose, chunk_mass
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import capability, dependent_launch, dot_in_fp32, interpreting, next_power, require_device

LOG2E = 1 / math.log(2)
MAX_CANDIDATES = 1 << 15  # candidates of one KV head that one program selects among
AT_ONCE = 256  # tokens of a memory whose logits a program may hold in registers


class Tile(NamedTuple):
    """Rows × columns that a program multiplies at a time: queries × keys in attention, keys × queries in column sums.

    If a memory has at most `columns` tokens, a program fetches all of it at once and computes each logit once.
    """

    rows: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    within: Tile
    memory: Tile
    sums: Tile


def chunked_prefill(
    q, keys, values, start: int, lengths, chunking: Chunking, scale: float, memory: Memory | None = None
):
    require_device("chunked_prefill", q, keys, values, lengths)
    check(q, keys, values, start, lengths, chunking, scale, memory)
    _refuse(q, keys, values, chunking)
    q = q if q.stride(-1) == 1 else q.contiguous()
    sets = chunking.sets(q.shape[2], keys.shape[1])
    out, kept = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_memory(q, sets, chunking, memory)
    if not q.numel():
        return out, kept
    call = _Call(q, keys, values, out, start, lengths, chunking, scale * LOG2E)
    call.phase_one()
    S, first = chunking.chunk, 0 if start else 1
    for i in range(chunking.chunks(q.shape[1])):
        if i >= first:
            call.phase_two(i, kept)
        if (i + 1) * S <= q.shape[1]:
            call.update(i, i >= first, kept)
    return out, kept


chunked_prefill.__doc__ = definition.__doc__


class _Call:
    """The buffers of one call, and its launches."""

    def __init__(self, q, keys, values, out, start: int, lengths, chunking: Chunking, scale: float):
        (B, T, H, D), KV, M = q.shape, keys.shape[1], chunking.memory
        self.sets = chunking.sets(H, KV)
        self.each = H // self.sets  # query heads of a set
        self.q, self.keys, self.values, self.out, self.lengths, self.chunking = q, keys, values, out, lengths, chunking
        self.start, self.scale, self.T, self.heads = start, scale, T, (H, H // KV)
        self.fp32, self.steps, self.cache = dot_in_fp32(q), q.stride()[:3], keys.stride()[:2]
        self.tiles = tiles(q.dtype is torch.float32, D, chunking, capability(q.device))
        self.dependent = dependent_launch(q.device)
        self.lse, self.given = (torch.empty(B, H, T, device=q.device) for _ in range(2))
        self.splits = splits(self.tiles, chunking, self.each)
        self.part = torch.empty(B, self.sets, self.splits, M, device=q.device)

    def options(self, warps: int) -> dict:
        return {"num_warps": warps, "launch_pdl": self.dependent}

    def phase_one(self) -> None:
        q, tile, T, (H, G), S = self.q, self.tiles.within, self.T, self.heads, self.chunking.chunk
        B, D = q.shape[0], q.shape[3]
        within_chunks[(-(-T // tile.rows), B * H)](
            q,
            self.keys,
            self.values,
            self.out,
            self.lse,
            self.lengths,
            self.scale,
            self.start,
            T,
            H,
            G,
            *self.steps,
            *self.cache,
            S,
            D,
            tile.rows,
            tile.columns,
            self.fp32,
            tile.stages,
            self.dependent,
            **self.options(tile.warps),
        )
        tile = self.tiles.sums
        if T // S:
            chunk_mass[(T // S * S // tile.rows, B * H)](
                q,
                self.keys,
                self.lse,
                self.lengths,
                self.given,
                self.scale,
                self.start,
                T,
                H,
                G,
                *self.steps,
                *self.cache,
                S,
                D,
                tile.rows,
                tile.columns,
                self.fp32,
                tile.stages,
                self.dependent,
                **self.options(tile.warps),
            )

    def phase_two(self, i: int, kept: Memory) -> None:
        """Chunk i of the call attends to its memory."""
        q, tile, T, (H, G), S = self.q, self.tiles.memory, self.T, self.heads, self.chunking.chunk
        (B, _, _, D), c0 = q.shape, i * S
        to_memory[(min(S, -(-(T - c0) // tile.rows) * tile.rows) // tile.rows, B * H)](
            q,
            self.keys,
            self.values,
            kept.positions[i],
            self.out,
            self.lse,
            self.lengths,
            self.part,
            self.scale,
            self.start,
            T,
            c0,
            self.splits,
            H,
            G,
            self.sets,
            self.each,
            *self.steps,
            *self.cache,
            S,
            D,
            self.chunking.memory,
            tile.rows,
            tile.columns,
            tile.rows,
            self.chunking.score == "memory",
            self.fp32,
            tile.stages,
            self.dependent,
            **self.options(tile.warps),
        )

    def update(self, i: int, had_memory: bool, kept: Memory) -> None:
        """The memory after chunk i, which is whole, in the rows that continue."""
        T, c, c0, past = self.T, self.chunking, i * self.chunking.chunk, self.chunking.memory if had_memory else 0
        candidates = next_power(max(past + c.chunk - c.local, c.local))
        choose[(self.q.shape[0] * self.sets,)](
            kept.positions[i],
            kept.scores[i],
            self.given,
            kept.mass,
            self.part,
            self.lengths,
            kept.updates,
            self.start,
            T,
            c0,
            kept.positions.stride(0),
            self.sets,
            self.each,
            c.chunk,
            c.local,
            c.heavy,
            past,
            self.splits,
            candidates,
            self.dependent,
            **self.options(min(16, max(1, candidates // 256))),
        )


def _refuse(q, keys, values, chunking: Chunking) -> None:
    D = q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedInput(f"chunked_prefill: {q.dtype}; the triton backend takes bfloat16 and float32")
    if not 16 <= D <= 256 or D & (D - 1):
        raise UnsupportedInput(f"chunked_prefill: heads of {D}; the triton backend takes powers of two from 16 to 256")
    if chunking.chunk % 16:
        raise UnsupportedInput(f"chunked_prefill: chunks of {chunking.chunk}; the triton backend takes multiples of 16")
    if chunking.memory + chunking.chunk - chunking.local > MAX_CANDIDATES:
        raise UnsupportedInput(
            f"chunked_prefill: {chunking.memory + chunking.chunk - chunking.local} candidates a KV head; the triton "
            f"backend selects among up to {MAX_CANDIDATES}"
        )
    if keys.stride()[2:] != (D, 1) or keys.stride() != values.stride():
        raise UnsupportedInput(
            f"chunked_prefill: keys of strides {keys.stride()}, values of {values.stride()}; expected heads that are "
            "contiguous [S, D] and the same in both"
        )


def tiles(fp32: bool, D: int, chunking: Chunking, capability: tuple[int, int]) -> Tiles:
    """Tiles that fit 99 KB of shared memory, or 163 KB and more on 8.0, 9.0 and 10.0; their sides divide the chunk."""
    roomy = capability[0] in (9, 10)
    if fp32:
        found = Tiles(Tile(32, 16, 4, 1), Tile(32, 32, 4, 1), Tile(32, 16, 4, 1))
    elif interpreting():
        found = Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1))
    # programs are short: two or three on a multiprocessor hide each other's loads
    elif roomy and chunking.chunk <= 512:
        found = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))
    elif roomy or capability in ((8, 0), (8, 7)):
        found = Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))
    else:
        found = Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 4, 2))
    side = chunking.chunk & -chunking.chunk  # the largest power of two that divides it
    fit = lambda t: t._replace(rows=min(t.rows, side), columns=min(t.columns, side, t.rows))
    found = Tiles(*map(fit, found))
    if chunking.memory <= AT_ONCE and D <= 128 and (roomy and not fp32 or interpreting()):
        found = found._replace(memory=Tile(min(128, side), max(16, next_power(chunking.memory)), 8, 1))
    return found


def splits(tiles: Tiles, chunking: Chunking, group: int) -> int:
    """Parts of the column sums of a memory: a part for each tile of queries. group: query heads that
    share the memory."""
    return group * (chunking.chunk // tiles.memory.rows)
