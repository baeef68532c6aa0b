"""One-shot exchange among GPUs that can write each other's memory: every rank writes its part into the buffers of all,
waits for theirs, and goes on with the parts in the order of ranks.

What travels are words of 8 bytes: 4 of the tensor and, in the upper half, the number of the call (an epoch). A word is
written at once, so who reads it with the number of this call has the rest too: there are no flags, and no rank waits
for its own writes to arrive.

Each program has a block of the tensor, and in every rank's buffer a place of its own for it: int64 [P, 2, R, BLOCK]. It
counts its calls, and the two halves take turns. Nobody writes into a half that is still read: who writes for the
second time after a call has seen the words of the call between, which the others wrote after their kernels of that call
had ended. So nothing is reset, graphs are replayed, and a call of any size may follow one of any other.

Other kernels exchange what they are about to use by the same functions and in the same buffers: `memories`, `send` and
`summed`, between reading and writing the epoch of a program's place. Every rank runs the same kernel, and all of its
programs at the same time (`OneShot.joins`).

A program waits for as long as another rank needs. That a rank is gone is for its host to notice.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels import launch
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.experts.triton_combine import ExpertRows, combined
from dsv4.kernels.launch import dependent_launch
from dsv4.kernels.quantize.triton_codes import narrow, widen

BLOCK = 512  # words of 4 bytes of a program
BLOCKS = 512  # programs at most: all of them can run at the same time, since each waits for another GPU
WARPS = 4
RESIDENT = 8  # warps that fit on a multiprocessor, whatever registers they take
SUM, GATHER, SAME = 0, 1, 2  # what becomes of the parts
SUMMED = (torch.float32, torch.bfloat16, torch.float16)


class OneShot:
    """Exchanges of one rank, of tensors of at most BLOCK · BLOCKS words of 4 bytes.

    buffers: addresses of all ranks' buffers of `nbytes` bytes, as this process sees them; they hold zeros before any
    rank's first call. processors: multiprocessors of the smallest rank's GPU (None: of this one). Every rank makes the
    same calls in the same order.
    """

    BYTES = 4 * BLOCK * BLOCKS  # of a tensor, at most

    def __init__(self, rank: int, buffers: Sequence[int], device: torch.device, processors: int | None = None):
        self.rank, self.size, self.processors = rank, len(buffers), processors or launch.processors(device)
        self.buffers = torch.tensor(buffers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of the buffer of one of `size` ranks: BLOCKS · 2 · size · BLOCK · 8."""
        return BLOCKS * 2 * size * BLOCK * 8

    @staticmethod
    def sums(x: torch.Tensor | ExpertRows) -> bool:
        """Whether there is room for x, and its sum is taken in fp32."""
        return x.dtype in SUMMED and math.prod(x.shape) <= BLOCK * BLOCKS

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """Whether there is room for x, in whole words."""
        return x.nbytes % 4 == 0 and x.nbytes <= OneShot.BYTES

    def joins(self, programs: int, warps: int, words: int) -> bool:
        """Whether a kernel of so many programs can exchange `words` of each beside what it does: there is room, and all
        programs run at the same time. The answer is that of every rank."""
        return programs <= min(BLOCKS, self.processors * (RESIDENT // warps)) and words <= BLOCK

    def sum(self, x: torch.Tensor | ExpertRows, dtype: torch.dtype) -> torch.Tensor:
        """The sum of every rank's x (fp32, bf16 or fp16), taken in fp32 in the order of ranks, cast once to dtype; of
        experts' rows the sum of what `combine` gives in fp32. Raises UnsupportedInput where `sums` is false."""
        if not self.sums(x):
            raise UnsupportedInput(
                f"one exchange sums {BLOCK * BLOCKS} numbers of at most 4 bytes; these are {math.prod(x.shape)} of "
                f"{x.dtype}"
            )
        return self._run(SUM, x, torch.empty(x.shape, dtype=dtype, device=self.epochs.device))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank: [R, *x.shape]. Raises UnsupportedInput where `takes` is false."""
        parts = x.new_empty(self.size, *x.shape)
        self._run(GATHER, _words(x), parts.view(-1).view(torch.int32))
        return parts

    def same(self, x: torch.Tensor, differs: torch.Tensor) -> None:
        """Sets differs (int32, one number) to 1 if a rank's x is another; leaves it as it is otherwise. Raises
        UnsupportedInput where `takes` is false."""
        self._run(SAME, _words(x), differs)

    def _run(self, kind: int, x: torch.Tensor | ExpertRows, y: torch.Tensor) -> torch.Tensor:
        early, numbers = dependent_launch(self.epochs.device), math.prod(x.shape)
        given, d, each = operands(x)
        _exchange[(triton.cdiv(numbers, BLOCK),)](
            *given,
            y,
            self.buffers,
            self.epochs,
            numbers,
            self.rank,
            self.size,
            d,
            each,
            BLOCK,
            kind,
            early,
            num_warps=WARPS,
            launch_pdl=early,
        )
        return y


def operands(x: torch.Tensor | ExpertRows) -> tuple[tuple[torch.Tensor | None, ...], int, int]:
    """x as kernels take it: (x or rows, indices or None, shared rows or None), columns of rows, experts of a token."""
    if isinstance(x, ExpertRows):
        return tuple(x), x.shape[1], x.indices.shape[1]
    return (x.contiguous(), None, None), 0, 0


def _words(x: torch.Tensor) -> torch.Tensor:
    if not OneShot.takes(x):
        raise UnsupportedInput(
            f"one exchange takes {BLOCK * BLOCKS} whole words of 4 bytes; this tensor has {x.nbytes} bytes"
        )
    return x.contiguous().view(-1).view(torch.int32)


@triton.jit
def memories(BUFFERS, R: tl.constexpr):
    """Every rank's buffer, as pointers to words. Addresses never change, so they may be read before a kernel waits for
    earlier ones."""
    found = ()
    for r in tl.static_range(R):
        found = found + (tl.load(BUFFERS + r).to(tl.pointer_type(tl.int64)),)
    return found


@triton.jit
def send(memory, rank, place, epoch, at, mine, valid, R: tl.constexpr, BLOCK: tl.constexpr):
    """Write words of the call `epoch` of the program at `place`, int32 `mine` at `at` of its block, to the others."""
    words = (epoch.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    at += ((place * 2 + (epoch & 1)) * R + rank) * BLOCK
    for r in tl.static_range(R):
        if r != rank:
            tl.store(memory[r] + at, words, mask=valid)


@triton.jit
def received(own, r, place, epoch, at, valid, R: tl.constexpr, BLOCK: tl.constexpr):
    """What rank r sent to this rank's buffer `own` in that call: int32, once all of it is there."""
    number, at = epoch.to(tl.int64) << 32, at + ((place * 2 + (epoch & 1)) * R + r) * BLOCK
    word = tl.load(own + at, mask=valid, other=number, volatile=True)
    while tl.max(tl.ravel((word >> 32).to(tl.int32) != epoch).to(tl.int32), 0) > 0:
        word = tl.load(own + at, mask=valid, other=number, volatile=True)
    return word.to(tl.int32)


@triton.jit
def summed(own, rank, place, epoch, at, mine, valid, R: tl.constexpr, BLOCK: tl.constexpr):
    """The sum fp32 of what every rank sent in that call, in the order of ranks; this one sent int32 `mine`."""
    total = mine.to(tl.float32, bitcast=True)
    for r in tl.static_range(R):
        part = mine
        if r != rank:
            part = received(own, r, place, epoch, at, valid, R, BLOCK)
        given = part.to(tl.float32, bitcast=True)
        total = given if r == 0 else total + given
    return total


@triton.jit(do_not_specialize=["N", "rank"])
def _exchange(
    X,
    INDICES,
    SHARED,
    Y,
    BUFFERS,
    EPOCHS,
    N,
    rank,
    R: tl.constexpr,
    D: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """KIND: SUM (0), of floating X, or with INDICES of `combined` rows; GATHER (1) or SAME (2), of words. One program a
    block of X."""
    place, element, memory = tl.program_id(0), tl.arange(0, BLOCK), memories(BUFFERS, R)
    own = tl.load(BUFFERS + rank).to(tl.pointer_type(tl.int64))
    at = place * BLOCK + element
    valid = at < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(EPOCHS + place) + 1
    if INDICES is not None:
        number = tl.minimum(at, N - 1)
        mine = combined(X, INDICES, SHARED, (number // D).to(tl.int64), number % D, valid, D, EACH)
    else:
        mine = tl.load(X + at, mask=valid, other=0)
    mine = widen(mine).to(tl.int32, bitcast=True) if KIND == 0 else mine
    send(memory, rank, place, epoch, element, mine, valid, R, BLOCK)
    if KIND == 0:
        total = summed(own, rank, place, epoch, element, mine, valid, R, BLOCK)
        tl.store(Y + at, narrow(total, Y.dtype.element_ty), mask=valid)
    else:
        for r in tl.static_range(R):
            part = mine
            if r != rank:
                part = received(own, r, place, epoch, element, valid, R, BLOCK)
            if KIND == 1:
                tl.store(Y + r * N + at, part, mask=valid)
            elif tl.max((valid & (part != mine)).to(tl.int32), 0) > 0:
                tl.store(Y, 1)
    tl.store(EPOCHS + place, epoch)
