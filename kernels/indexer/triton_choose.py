"""How rows are searched for their best entries, and the launches."""

from typing import NamedTuple

import torch
import triton

from kernels.cache_rows.formats import PAGE
from kernels.errors import UnsupportedInput
from kernels.indexer.triton_topk import choose_rows, choose_together, maxima_of_rows, visible_entries
from kernels.launch import dependent_launch, interpreting, next_power, processors

MAX_HELD = 1 << 15     # numbers that one program holds at once
MAX_TOGETHER = 1 << 22  # entries of a row that many programs search
FEW = 16               # rows that do not fill a GPU with a program each
CHUNKS = 1024, 8192    # entries of one of many programs, the fewest and the most


class Plan(NamedTuple):
    """How rows of n entries are searched."""

    together: bool  # by many programs a row, else by one
    held: int       # numbers held at once, a power of two: all n or at least 4·k
    group: int      # entries under one maximum; 0: no maxima


def plan(rows: int, n: int, k: int) -> Plan:
    """Raises UnsupportedInput where a program would have to hold too many numbers."""
    held = 4 * next_power(k)
    if n <= max(4096, 2 * held) and n <= MAX_HELD or held > MAX_HELD >= n:
        return Plan(False, next_power(n), 0)
    if held > MAX_HELD:
        raise UnsupportedInput(f"topk_entries takes k up to {MAX_HELD // 4} of more than {MAX_HELD} entries, not k = {k} of {n}")
    group = 16 if n <= 16 * held else 64
    return Plan(rows <= FEW and n <= MAX_TOGETHER, held, group)


def maxima_width(n: int, group: int) -> int:
    """Maxima of a row of n entries, whole pages."""
    return triton.cdiv(n, PAGE) * (PAGE // group)


def choose(how: Plan, scores: torch.Tensor, n: int, k: int, visible: torch.Tensor | None, out: torch.Tensor,
           maxima: torch.Tensor | None = None, tickets: torch.Tensor | None = None) -> None:
    """The k ≤ n best of the first n of scores fp32 [B, T, ≥ n], a row's next to each other, to out int64 [B, T, k], contiguous.

    maxima, tickets: from the scores' kernel; if `how` has many programs a row, they are made here without it.
    """
    B, T = scores.shape[:2]
    rows, device = B * T, scores.device
    seen, absent = visible is not None, out.view(torch.int32)  # what stands in for a buffer that is not used: of its type
    visible = visible if seen else out
    strides = T, n, *scores.stride()[:2], *visible.stride()[:2]
    overlap = dependent_launch(device)
    launch = {"launch_pdl": True} if overlap else {}
    chunk = min(CHUNKS[1], max(CHUNKS[0], next_power(triton.cdiv(rows * n, processors(device)))))  # a program a multiprocessor
    if how.together and maxima is None:
        maxima = torch.empty(rows, maxima_width(n, how.group), dtype=torch.int32, device=device)
        tickets = torch.empty(rows, dtype=torch.int32, device=device)
        maxima_of_rows[(rows, triton.cdiv(n, chunk))](scores, maxima, tickets, visible, *strides, maxima.stride(0), seen,
                                                      how.group, chunk, overlap, num_warps=warps(chunk), **launch)
    width, group = (0, 0) if maxima is None else (maxima.stride(0), how.group)
    maxima = absent if maxima is None else maxima
    longest, classes = n > how.held, min(next_power(k), how.held)
    lists = torch.empty(rows, 2 * how.held, dtype=torch.int64, device=device) if longest else out
    if not how.together:
        choose_rows[(rows,)](scores, maxima, lists, out, visible, *strides, width, k, seen, longest, how.held, classes, group,
                             overlap, num_warps=warps(how.held), **launch, **registers(rows, how.held))
        return
    chunks, places = triton.cdiv(n, chunk), next_power(triton.cdiv(n, chunk))
    found = torch.empty(rows, places, chunk, dtype=torch.int64, device=device)
    counts = torch.empty(rows, places, dtype=torch.int32, device=device)
    choose_together[(rows, chunks)](scores, maxima, found, counts, tickets, lists, out, visible, *strides, width, k, seen,
                                    how.held, classes, group, chunk, places, overlap, num_warps=warps(max(chunk, how.held)),
                                    **launch)


def warps(held: int) -> int:
    """About 8 numbers a thread."""
    return min(16 if held <= 8192 else 32, max(4, held // 256))


def registers(rows: int, held: int) -> dict:
    """Where rows are many, so many that several programs share a multiprocessor."""
    return dict(maxnreg=80 if held <= 2048 else 64) if rows > FEW and held <= 4096 and not interpreting() else {}


def choose_visible(visible: torch.Tensor, out: torch.Tensor) -> None:
    """Every entry < visible int64 [B, T] to out int64 [B, T, n], contiguous, −1 for the others."""
    B, T, n = out.shape
    visible_entries[(B * T,)](out, visible, T, n, *visible.stride(), min(1024, next_power(n)), num_warps=4)
