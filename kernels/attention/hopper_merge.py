"""Device code for programs of `hopper.attend` that share queries, run at the same time, and merge what they have found:
each waits until all programs of its columns have written their partial outputs, and finishes a piece.

They count their arrivals in `Counters`. One of them adds what makes the number overflow into its sign when all have
come, so the sign changes with each meeting: nothing is reset, however many programs meet the next time.
"""

import weakref
from collections import deque

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.kernels.attention.triton_tiles import added, opened
from dsv4.kernels.launch import capture
from dsv4.kernels.quantize.triton_codes import narrow

APART = gl.constexpr(8)  # numbers from one counter to the next: they are in sectors of their own
LOG2E = gl.constexpr(1.4426950408889634)
IN_FLIGHT = 64  # numbers of a thread that are on their way
PLACES = 256  # streams and graphs of a GPU that have counters


class Counters:
    """Counters of one GPU: int32 zeros [PLACES, programs, APART]. Kernels of one stream, or of one graph, follow each
    other and share a place. Graphs that are captured without `captured_in` have that of the stream they were captured
    on: two of these must not be replayed at the same time."""

    _of: dict[torch.device, "Counters"] = {}

    def __init__(self, device: torch.device, programs: int):
        self.numbers = torch.zeros(PLACES, programs, APART.value, dtype=torch.int32, device=device)
        self.free = deque(range(PLACES))
        self.places: dict[int, int] = {}  # by stream, or by id of a graph that lives
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before another stream counts

    @classmethod
    def of(cls, device: torch.device, programs: int) -> torch.Tensor | None:
        """Those of the graph that is being captured, or of the current stream; None if it has none: the first call is
        being captured, or all places are taken."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if device not in cls._of:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            cls._of[device] = cls(device, programs)
        held, graph = cls._of[device], capture()
        place = held._place(stream, graph)
        return None if place is None or programs > held.numbers.shape[1] else held.numbers[place]

    def _place(self, stream: int, graph: object | None) -> int | None:
        key = stream if graph is None else id(graph)
        if key not in self.places and self.free:
            self.places[key] = self.free.popleft()
            if graph is not None:
                weakref.finalize(graph, self._left, key).atexit = False
        return self.places.get(key)

    def _left(self, key: int) -> None:
        """A graph is gone. Its last replay may still run, so its place is taken last."""
        self.free.append(self.places.pop(key))


@gluon.constexpr_function
def piece_layout(heads, columns, warps):
    """Of a piece: up to 16 bytes of a row a thread."""
    each = max(1, min(4, heads * columns // (32 * warps)))
    across = min(32, columns // each)
    down = max(1, min(warps, heads * across // 32))
    return gl.BlockedLayout([1, each], [32 // across, across], [down, warps // down], [1, 0])


@gluon.constexpr_function
def together(heads, columns, warps, most):
    """Splits of a piece that are read at a time."""
    return max(1, min(most, IN_FLIGHT * 32 * warps // (heads * columns)))


@gluon.jit
def meet(counter, first, count):
    """Wait until all of the `count` ≥ 2 programs that share a counter are here; one of them is the first. What each has
    written before, all may read afterwards, past their L1."""
    tl.debug_barrier()  # of all threads: one of them counts
    before = gl.atomic_add(counter, gl.where(first, 2147483647 - (count - 2), 1), sem="acq_rel", scope="gpu")
    now = before
    while (before ^ now) >= 0:
        now = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@gluon.jit
def sink_of_piece(SINK, h0, H, piece, C: gl.constexpr, PIECES: gl.constexpr):
    """For `merge_piece`, from memory that may be far away: to be read before programs meet."""
    HEADS: gl.constexpr = 64 // PIECES if PIECES < 64 else 1
    L: gl.constexpr = piece_layout(HEADS, C * 64 // (HEADS * PIECES), gl.num_warps())
    h = (h0 + piece % (64 // HEADS) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, L)))[:, None]
    return gl.load(SINK + h, mask=h < H, other=0.0).to(gl.float32) * LOG2E


@gluon.jit
def merge_piece(
    PARTIAL,
    LSE,
    sink,
    OUT,
    h0,
    H,
    splits,
    piece,
    D: gl.constexpr,
    C: gl.constexpr,
    PIECES: gl.constexpr,
    MOST: gl.constexpr,
):
    """What `triton_tiles.merge` does, bit for bit, for one of PIECES of 64 heads from h0 on × C columns of a query:
    PARTIAL [splits, H, D], LSE [H, splits], OUT [H, D], from the first of the columns on; splits ≤ MOST."""
    HEADS: gl.constexpr = 64 // PIECES if PIECES < 64 else 1
    COLUMNS: gl.constexpr = C * 64 // (HEADS * PIECES)
    L: gl.constexpr = piece_layout(HEADS, COLUMNS, gl.num_warps())
    TOGETHER: gl.constexpr = together(HEADS, COLUMNS, gl.num_warps(), MOST)
    h = (h0 + piece % (64 // HEADS) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, L)))[:, None]
    d = (piece // (64 // HEADS) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, L)))[None, :]
    exists, parts = h < H, PARTIAL + (h * D + d)
    top, lses = sink, ()
    for s in gl.static_range(MOST):
        there = exists & (s < splits)
        lses = lses + (gl.load(LSE + h * splits + s, mask=there, other=float("-inf"), cache_modifier=".cg"),)
    for s in gl.static_range(MOST):
        top = gl.maximum(top, lses[s])
    safe, total = opened(sink, top)
    acc = gl.zeros([HEADS, COLUMNS], gl.float32, L)
    for s0 in gl.static_range(0, MOST, TOGETHER):
        given = ()
        for s in gl.static_range(s0, s0 + TOGETHER):
            there = exists & (s < splits) & (d >= 0)
            given = given + (gl.load(parts + s * (H * D), mask=there, other=0.0, cache_modifier=".cg"),)
        for s in gl.static_range(TOGETHER):
            total, acc = added(total, acc, lses[s0 + s], given[s], safe)
    gl.store(OUT + (h * D + d), narrow(acc / total, OUT.dtype.element_ty), mask=exists & (d >= 0))
