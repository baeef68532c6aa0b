"""Chooses the kernels that select the best entries of rows, and launches them."""

from typing import NamedTuple

import torch
import triton

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer.triton_collect import collect, rank_found
from dsv4.kernels.indexer.triton_filter import filter_rows
from dsv4.kernels.indexer.triton_scores import GROUP, maxima_layout
from dsv4.kernels.indexer.triton_topk import maxima_of_rows, rank_entries, topk_of_rows, visible_entries
from dsv4.kernels.launch import dependent_launch, interpreting, next_power, processors

MAX_CANDIDATES = 1 << 15  # keys that one program holds at once
MAX_PAIRS = 1 << 23  # comparisons up to which every entry is ranked against every other
CHUNK = 2048  # entries that a program of `maxima_of_rows` reads
FEW = 16  # rows up to which several programs share one
PARTS = 16  # programs of `collect` that share a row
# Entries that each may find, beyond which `rank_found` descends instead. Rows whose neighbours are alike have many: of
# 262,144 scores that correlate by 0.7 in runs of 64 a part of 16 has 283 (simulated).
ROOM = 1024
MAX_COLLECTED = 1 << 11  # the largest k for which entries are collected
MANY = 256  # rows that fill a GPU with one program each
# Entries that a program of `filter_rows` lists, at least and at most; half of them should be plenty. It holds a row of
# no more at once. Fewer would leave no room for what a sample says too little about.
MIN_LISTED, MAX_LISTED = 1 << 10, 1 << 11
SAMPLED = 1 << 10  # scores that it samples of up to LONG entries; of more, twice as many
LONG = 1 << 15


class Plan(NamedTuple):
    """How rows of n entries are searched."""

    method: str  # "rank", "collect", "filter" or "descend"
    candidates: int  # keys held at once, a power of two
    levels: int  # of maxima

    @property
    def by_number(self) -> bool:
        """Whether rows with at most k visible entries need no scores: a program has each row."""
        return self.method in ("filter", "descend")


def plan(rows: int, n: int, k: int) -> Plan:
    """Raises UnsupportedInput where the candidates exceed what a program can hold."""
    if rows * n * n <= MAX_PAIRS:
        return Plan("rank", next_power(n), 0)
    candidates = max(512, next_power(GROUP * k), next_power(triton.cdiv(n, GROUP * GROUP)))
    if rows >= MANY and 4 * next_power(k) <= MAX_LISTED and candidates <= MAX_CANDIDATES:
        return Plan("filter", max(MIN_LISTED, 4 * next_power(k)), 0)
    if n <= candidates and n <= MAX_CANDIDATES:
        return Plan("descend", next_power(n), 0)
    if candidates > MAX_CANDIDATES:
        most = MAX_CANDIDATES * GROUP * GROUP
        raise UnsupportedInput(
            f"topk_entries takes k up to {MAX_CANDIDATES // GROUP} of at most {most} entries where these "
            f"are more than {MAX_CANDIDATES}, not k = {k} of {n}"
        )
    return Plan(
        "collect" if rows <= FEW and k <= MAX_COLLECTED else "descend", candidates, 1 if n <= GROUP * candidates else 2
    )


def choose(
    how: Plan,
    scores: torch.Tensor,
    n: int,
    k: int,
    visible: torch.Tensor | None,
    out: torch.Tensor,
    maxima: torch.Tensor | None = None,
    scored: bool = True,
    run: int | None = None,
    first: int = 0,
) -> None:
    """The k ≤ n best of the first n of scores fp32 [B, T, ≥ n], a row's next to each other, to out int64 [B, T, k],
    contiguous.

    maxima: from the scores' kernel, if `how` has levels; without them they are made here. scored: if not, rows with at
    most k visible entries, all of which are chosen, may have no scores; that `how.by_number` says. run: an entry
    of row b is written as (first + b) · run + its number.
    """
    B, T = scores.shape[:2]
    rows, device = B * T, scores.device
    width, second = maxima_layout(n)
    # stands in for a buffer that is not used, with its dtype
    seen, absent = visible is not None, out.view(torch.int32)
    visible = visible if seen else out
    ends = T, n, *scores.stride()[:2], *visible.stride()[:2]
    strides = *ends, width, second
    overlap = dependent_launch(device)
    if how.levels and maxima is None:
        maxima = torch.empty(rows, width, dtype=torch.int32, device=device)
        maxima_of_rows[(rows, triton.cdiv(n, CHUNK))](
            scores, maxima, visible, *strides, seen, how.levels, CHUNK, overlap, num_warps=8, launch_pdl=overlap
        )
    if not how.levels:
        maxima = absent
    classes = next_power(k)
    lists = torch.empty(rows, how.candidates // 4, dtype=torch.int32, device=device) if how.levels else absent
    search = classes if 2 * classes <= how.candidates else 0, how.candidates, how.levels
    if how.method == "filter":
        C = how.candidates
        lists = torch.empty(rows, 7 * C, dtype=torch.int32, device=device) if n > C else absent
        options = {} if interpreting() else dict(maxnreg=128)  # for 16 programs on a multiprocessor
        filter_rows[(rows,)](
            scores,
            lists,
            out,
            visible,
            *ends,
            k,
            first,
            run,
            seen,
            scored,
            C,
            min(C, SAMPLED if n <= LONG else 2 * SAMPLED),
            scores.shape[-1] // 4 * 4 >= n,  # whole groups of four can be read
            overlap,
            num_warps=1,
            launch_pdl=overlap,
            **options,
        )
        return
    if how.method == "descend":
        # About 8 keys a thread; registers for two programs of 4096 candidates on a multiprocessor.
        options = dict(maxnreg=64) if how.candidates == 4096 and not interpreting() else {}
        topk_of_rows[(rows,)](
            scores,
            maxima,
            lists,
            out,
            visible,
            *strides,
            k,
            first,
            run,
            seen,
            scored,
            *search,
            overlap,
            num_warps=min(16, max(4, how.candidates // 256)),
            launch_pdl=overlap,
            **options,
        )
        return
    if how.method == "rank":
        rank_entries[(rows, min(triton.cdiv(n, 16), max(1, processors(device) // rows)))](
            scores,
            out,
            visible,
            *ends,
            k,
            first,
            run,
            seen,
            classes,
            16,
            min(1024, how.candidates),
            overlap,
            num_warps=4 if how.candidates <= 4096 else 8,
            launch_pdl=overlap,
        )
        return
    warps = min(16, max(4, how.candidates // 256))
    room = max(ROOM, classes // 2)
    groups = torch.empty(rows, how.candidates, dtype=torch.int32, device=device)
    counts = torch.empty(rows, PARTS, dtype=torch.int32, device=device)
    found = torch.empty(rows, PARTS, room, dtype=torch.int64, device=device)
    collect[(rows, PARTS)](
        scores,
        maxima,
        groups,
        counts,
        found,
        visible,
        *strides,
        k,
        seen,
        *search,
        PARTS,
        room,
        32 * warps,
        8,
        overlap,
        num_warps=warps,
        launch_pdl=overlap,
    )
    mine, others = 2, 16  # entries of each part that are compared at a time
    options = {} if interpreting() else dict(maxnreg=128)  # for two programs on a multiprocessor
    rank_found[(rows, triton.cdiv(k, 8 * mine))](
        scores,
        maxima,
        counts,
        found,
        lists,
        out,
        visible,
        *strides,
        k,
        first,
        run,
        seen,
        *search,
        PARTS,
        room,
        classes,
        mine,
        others,
        overlap,
        num_warps=min(16, max(8, how.candidates // 512)),
        launch_pdl=overlap,
        **options,
    )


def choose_visible(visible: torch.Tensor, out: torch.Tensor, run: int | None = None) -> None:
    """Every entry < visible int64 [B, T] to out int64 [B, T, n], contiguous, −1 for the others. run: as of `choose`."""
    B, T, n = out.shape
    visible_entries[(B * T,)](out, visible, T, n, *visible.stride(), run, min(1024, next_power(n)), num_warps=4)
