"""How a prompt is cut into chunks and what is kept of it; the inputs that every implementation refuses."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.kernels.errors import UnsupportedInput

RULES = {"score": ("fused", "memory"), "heads": ("kv", "query")}  # the first of each is the default


@dataclass(frozen=True)
class Chunking:
    """The S tokens of a chunk attend together, and to `local` L and `heavy` H earlier tokens, M = L + H < S.

    score: the softmax whose column sums phase 2 adds to the scores of the memory. "fused": over the chunk and the
        memory together, so that a query gives its real mass. "memory": over the memory alone, as published, so that
        every query gives 1.
    heads: which heads keep a memory. "kv": each KV head keeps one, for all query heads of its group. "query": each
        query head keeps its own, as published.

    Raises UnsupportedInput for other sizes and names.
    """

    chunk: int
    local: int
    heavy: int
    score: str = "fused"
    heads: str = "kv"

    def __post_init__(self):
        for name, known in RULES.items():
            if getattr(self, name) not in known:
                raise UnsupportedInput(f"{name} {getattr(self, name)!r} is unknown; expected {' or '.join(known)}")
        if min(self.local, self.heavy) < 0 or not 1 <= self.memory < self.chunk:
            raise UnsupportedInput(
                f"chunk {self.chunk}, local {self.local}, heavy {self.heavy}: expected local and heavy of at least 0 "
                "that together are at least 1 and less than the chunk"
            )

    @property
    def memory(self) -> int:
        """M: earlier tokens that a chunk sees, from the second chunk on."""
        return self.local + self.heavy

    @property
    def rule(self) -> str:
        """What differs from the default, as the command line names it: 'score=memory,heads=query'; '' for nothing."""
        return ",".join(f"{name}={getattr(self, name)}" for name in RULES if getattr(self, name) != RULES[name][0])

    def chunks(self, tokens: int) -> int:
        return -(-tokens // self.chunk)

    def sets(self, heads: int, kv_heads: int) -> int:
        """R: memories of a row, of a model with so many query and KV heads."""
        return heads if self.heads == "query" else kv_heads


class Memory(NamedTuple):
    """What the chunks 0 … n−1 of one call kept, in R sets (`Chunking.sets`): of each KV head, or of each query head.

    positions int32 [n + 1, B, R, M], ascending: [i] is the memory of chunk i, [n] the memory with which the next call
        begins; −1 if a row has no memory: before its second chunk, and after its last.
    scores fp32, in that shape: the attention mass of these tokens when they were kept.
    mass fp32 [B, R, T]: the mass of this call's tokens in phase 1; 0 in a row's last chunk, of which nothing is kept.
    updates int64 [B, R]: how often the memory was chosen since the row began: its chunks − 1.
    """

    positions: torch.Tensor
    scores: torch.Tensor
    mass: torch.Tensor
    updates: torch.Tensor


def check(q, keys, values, start: int, lengths, chunking: Chunking, scale: float, memory: Memory | None) -> None:
    """Raise UnsupportedInput if the arguments of `chunked_prefill` contradict each other."""
    name, (B, T, H, D), S = "chunked_prefill", q.shape, chunking.chunk
    if keys.shape != values.shape or keys.dim() != 4 or keys.shape[0] != B or keys.shape[3] != D or H % keys.shape[1]:
        raise UnsupportedInput(
            f"{name}: q {list(q.shape)}, keys {list(keys.shape)}, values {list(values.shape)}; expected q [B, T, H, "
            "D] and keys and values [B, KV, S, D] with KV dividing H"
        )
    if {keys.dtype, values.dtype} != {q.dtype}:
        raise UnsupportedInput(
            f"{name}: q in {q.dtype}, keys in {keys.dtype}, values in {values.dtype}; expected one type"
        )
    if lengths.shape != (B,) or lengths.dtype is not torch.int64:
        raise UnsupportedInput(f"{name}: lengths {lengths.dtype} {list(lengths.shape)}; expected int64 [{B}]")
    if start < 0 or start % S or start + T > keys.shape[2]:
        raise UnsupportedInput(
            f"{name}: tokens {start} … {start + T} of a cache of {keys.shape[2]}; expected a start at a multiple of "
            f"the chunk, {S}, and a cache that holds them"
        )
    if not scale > 0:
        raise UnsupportedInput(f"{name}: scale {scale}; expected a positive number")
    if bool(start) != (memory is not None):
        raise UnsupportedInput(
            f"{name}: start {start} {'with' if memory else 'without'} a memory; the first call begins at 0 without "
            "one, and each that follows takes what the one before returned"
        )
    kept = (B, chunking.sets(H, keys.shape[1]), chunking.memory)
    if memory is not None and tuple(memory.positions.shape[1:]) != kept:
        raise UnsupportedInput(
            f"{name}: a memory of {list(memory.positions.shape[1:])}; expected {list(kept)} [B, sets, local + heavy]"
        )


def empty_memory(q, sets: int, chunking: Chunking, before: Memory | None) -> Memory:
    """A Memory for q [B, T, H, D] that holds only what the previous call left."""
    (B, T), device = q.shape[:2], q.device
    positions = torch.full((chunking.chunks(T) + 1, B, sets, chunking.memory), -1, dtype=torch.int32, device=device)
    each, begin = B * sets, -(-B * sets // 2) * 4  # a count takes two fp32; scores begin at 16 bytes
    zeros = torch.zeros(begin + positions.numel() + each * T, device=device)  # one fill
    scores, mass = zeros[begin:].split((positions.numel(), each * T))
    memory = Memory(
        positions, scores.view_as(positions), mass.view(B, sets, T), zeros[: 2 * each].view(torch.int64).view(B, sets)
    )
    if before is not None:
        memory.positions[0].copy_(before.positions[-1])
        memory.scores[0].copy_(before.scores[-1])
        memory.updates.copy_(before.updates)
    return memory
