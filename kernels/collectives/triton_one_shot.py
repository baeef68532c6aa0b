"""One-shot exchange among GPUs that can write each other's memory: every rank writes its part into the buffers of all,
waits for theirs, and goes on with the parts in the order of ranks.

What travels are words of 8 bytes: 4 of the tensor and, in the upper half, the number of the call (an epoch). A word is
written at once, so who reads it with the number of this call has the rest too: there are no flags, and no rank waits
for its own writes to arrive.

Each program has a block of the tensor, and in every rank's buffer a place of its own for it: int64 [P, 2, R, BLOCK]. It
counts its calls, and the two halves take turns. Nobody writes into a half that is still read: who writes for the
second time after a call has seen the words of the call between, which the others wrote after their kernels of that call
had ended. So nothing is reset, graphs are replayed, and a call of any size may follow one of any other.

A program waits for as long as another rank needs. That a rank is gone is for its host to notice.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch
from dsv4.kernels.quantize.triton_codes import narrow, widen

BLOCK = 512  # words of 4 bytes of a program
BLOCKS = 512  # programs at most: all of them can run at the same time, since each waits for another GPU
WARPS = 4
SUM, GATHER, SAME = 0, 1, 2  # what becomes of the parts
SUMMED = (torch.float32, torch.bfloat16, torch.float16)


class OneShot:
    """Exchanges of one rank, of tensors of at most BLOCK · BLOCKS words of 4 bytes.

    buffers: addresses of all ranks' buffers of `nbytes` bytes, as this process sees them; they hold zeros before any
    rank's first call. Every rank makes the same calls in the same order.
    """

    BYTES = 4 * BLOCK * BLOCKS  # of a tensor, at most

    def __init__(self, rank: int, buffers: Sequence[int], device: torch.device):
        self.rank, self.size = rank, len(buffers)
        self.buffers = torch.tensor(buffers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of the buffer of one of `size` ranks: BLOCKS · 2 · size · BLOCK · 8."""
        return BLOCKS * 2 * size * BLOCK * 8

    @staticmethod
    def sums(x: torch.Tensor) -> bool:
        """Whether there is room for x, and its sum is taken in fp32."""
        return x.dtype in SUMMED and x.numel() <= BLOCK * BLOCKS

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        """Whether there is room for x, in whole words."""
        return x.nbytes % 4 == 0 and x.nbytes <= OneShot.BYTES

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of every rank's x (fp32, bf16 or fp16), taken in fp32 in the order of ranks, cast once to dtype.
        Raises UnsupportedInput where `sums` is false."""
        if not self.sums(x):
            raise UnsupportedInput(
                f"one exchange sums {BLOCK * BLOCKS} numbers of at most 4 bytes; these are {x.numel()} of {x.dtype}"
            )
        return self._run(SUM, x, torch.empty(x.shape, dtype=dtype, device=x.device))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank: [R, *x.shape]. Raises UnsupportedInput where `takes` is false."""
        parts = x.new_empty(self.size, *x.shape)
        self._run(GATHER, _words(x), parts.view(-1).view(torch.int32))
        return parts

    def same(self, x: torch.Tensor, differs: torch.Tensor) -> None:
        """Sets differs (int32, one number) to 1 if a rank's x is another; leaves it as it is otherwise. Raises
        UnsupportedInput where `takes` is false."""
        self._run(SAME, _words(x), differs)

    def _run(self, kind: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        early = dependent_launch(x.device)
        _exchange[(triton.cdiv(x.numel(), BLOCK),)](
            x.contiguous(),
            y,
            self.buffers,
            self.epochs,
            x.numel(),
            self.rank,
            self.size,
            BLOCK,
            kind,
            early,
            num_warps=WARPS,
            launch_pdl=early,
        )
        return y


def _words(x: torch.Tensor) -> torch.Tensor:
    if not OneShot.takes(x):
        raise UnsupportedInput(
            f"one exchange takes {BLOCK * BLOCKS} whole words of 4 bytes; this tensor has {x.nbytes} bytes"
        )
    return x.contiguous().view(-1).view(torch.int32)


@triton.jit(do_not_specialize=["N", "rank"])
def _exchange(
    X,
    Y,
    BUFFERS,
    EPOCHS,
    N,
    rank,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """KIND: SUM (0), of floating X; GATHER (1) or SAME (2), of words. One program a block of X."""
    program, element = tl.program_id(0), tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(EPOCHS + program) + 1
    at = program * BLOCK + element
    valid = at < N
    x = tl.load(X + at, mask=valid, other=0)
    mine = widen(x).to(tl.int32, bitcast=True) if KIND == 0 else x
    number = epoch.to(tl.int64) << 32
    words = number | (mine.to(tl.int64) & 0xFFFFFFFF)
    half = (program * 2 + (epoch & 1)) * R * BLOCK + element
    for r in tl.static_range(R):
        if r != rank:
            theirs = tl.load(BUFFERS + r).to(tl.pointer_type(tl.int64))
            tl.store(theirs + half + rank * BLOCK, words, mask=valid)
    own = tl.load(BUFFERS + rank).to(tl.pointer_type(tl.int64)) + half
    total = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(R):
        part = mine
        if r != rank:
            word = tl.load(own + r * BLOCK, mask=valid, other=number, volatile=True)
            while tl.max(((word >> 32).to(tl.int32) != epoch).to(tl.int32), 0) > 0:
                word = tl.load(own + r * BLOCK, mask=valid, other=number, volatile=True)
            part = word.to(tl.int32)
        if KIND == 0:
            given = part.to(tl.float32, bitcast=True)
            total = given if r == 0 else total + given
        elif KIND == 1:
            tl.store(Y + r * N + at, part, mask=valid)
        elif tl.max((valid & (part != mine)).to(tl.int32), 0) > 0:
            tl.store(Y, 1)
    if KIND == 0:
        tl.store(Y + at, narrow(total, Y.dtype.element_ty), mask=valid)
    tl.store(EPOCHS + program, epoch)
