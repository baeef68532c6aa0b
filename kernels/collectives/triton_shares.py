"""Sums of many numbers among GPUs that can write each other's memory: each rank sums its share of the numbers in the
order of ranks, and writes the result to the others. Of x every rank sends (R − 1) / R, whatever R is, and as much of
the result, in its own dtype.

A program takes one block of a share after the other. In every rank's buffer it has a place of its own for the parts
that it is given (fp32 [R, BLOCK]) and for the results (as wide), and two flags a rank, for parts and for results, which
hold the number of the block since the beginning (an epoch). Nobody writes what is still read: who writes parts of the
next block has seen results of this one, which come after its parts were read; who writes results of the next block has
seen its parts, which come after the results of this one were read.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch
from dsv4.kernels.quantize.triton_codes import narrow

BLOCK = 2048
PROGRAMS = 528  # four a processor of an H100: while one waits others move bytes; all run at the same time
WARPS = 4


class Shares:
    """Sums of one rank. buffers: addresses of all ranks' buffers of `nbytes` bytes, as this process sees them; they
    hold zeros before any rank's first call. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, buffers: Sequence[int], device: torch.device, programs: int = PROGRAMS):
        self.rank, self.size, self.programs = rank, len(buffers), programs
        self.buffers = torch.tensor(buffers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(size: int, programs: int = PROGRAMS) -> int:
        """Bytes of the buffer of one of `size` ranks: programs · size · 2 · (BLOCK · 4 + 4)."""
        return programs * size * 2 * (BLOCK * 4 + 4)

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of every rank's x (fp32), taken in the order of ranks, cast once to dtype (of at most 4 bytes).
        Raises UnsupportedInput for another x."""
        if x.dtype is not torch.float32:
            raise UnsupportedInput(f"sums by shares take float32; this tensor is {x.dtype}")
        x, y, early = x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device), dependent_launch(x.device)
        share = triton.cdiv(x.numel(), self.size)
        _by_shares[(min(self.programs, triton.cdiv(share, BLOCK)),)](
            x,
            y,
            self.buffers,
            self.epochs,
            x.numel(),
            share,
            self.rank,
            self.programs,
            self.size,
            BLOCK,
            early,
            num_warps=WARPS,
            launch_pdl=early,
        )
        return y


@triton.jit
def _memory(BUFFERS, r):
    """The buffer of rank r, in words; without the hint Triton would move numbers one by one."""
    return tl.multiple_of(tl.load(BUFFERS + r).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _wait(flag, epoch):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen - epoch < 0:  # a difference, because epochs wrap
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["rank", "PROGRAMS"])
def _by_shares(
    X,
    Y,
    BUFFERS,
    EPOCHS,
    N,
    share,
    rank,
    PROGRAMS,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Buffers: fp32 [PROGRAMS, 2 (parts, results), R, BLOCK], then flags int32 [PROGRAMS, 2, R]."""
    program, element = tl.program_id(0), tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(EPOCHS + program)
    place = program * 2 * R * BLOCK
    results = place + R * BLOCK  # BLOCK words of 4 bytes a rank, whatever the dtype
    flags = PROGRAMS * 2 * R * BLOCK + program * 2 * R
    for block in range(program, tl.cdiv(share, BLOCK), tl.num_programs(0)):
        epoch += 1
        at = block * BLOCK + element
        for r in tl.static_range(R):
            if r != rank:
                x = tl.load(X + r * share + at, mask=(at < share) & (r * share + at < N), other=0.0)
                tl.store(_memory(BUFFERS, r) + place + rank * BLOCK + element, x)
        tl.debug_barrier()  # of all threads: a flag is raised by one
        for r in tl.static_range(R):
            if r != rank:
                flag = _memory(BUFFERS, r).to(tl.pointer_type(tl.int32), bitcast=True) + flags + rank
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
        here = _memory(BUFFERS, rank)
        raised = here.to(tl.pointer_type(tl.int32), bitcast=True) + flags
        mine = (at < share) & (rank * share + at < N)
        own = tl.load(X + rank * share + at, mask=mine, other=0.0)
        for r in tl.static_range(R):
            if r != rank:
                _wait(raised + r, epoch)
        tl.debug_barrier()
        parts = here + place + element
        total = own
        for r in tl.static_range(R):
            part = own
            if r != rank:
                part = tl.load(parts + r * BLOCK, cache_modifier=".cg")
            total = part if r == 0 else total + part
        result = narrow(total, Y.dtype.element_ty)
        tl.store(Y + rank * share + at, result, mask=mine)
        for r in tl.static_range(R):
            if r != rank:
                there = _memory(BUFFERS, r) + results + rank * BLOCK
                tl.store(there.to(tl.pointer_type(Y.dtype.element_ty), bitcast=True) + element, result)
        tl.debug_barrier()
        for r in tl.static_range(R):
            if r != rank:
                flag = _memory(BUFFERS, r).to(tl.pointer_type(tl.int32), bitcast=True) + flags + R + rank
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
        for r in tl.static_range(R):
            if r != rank:
                _wait(raised + R + r, epoch)
        tl.debug_barrier()
        for r in tl.static_range(R):
            if r != rank:
                given = (here + results + r * BLOCK).to(tl.pointer_type(Y.dtype.element_ty), bitcast=True)
                y = tl.load(given + element, cache_modifier=".cg")
                tl.store(Y + r * share + at, y, mask=(at < share) & (r * share + at < N))
    tl.store(EPOCHS + program, epoch)
