"""Attention on the GPU: one pass over the keys of each query, split among programs while queries are few.

Each split writes its partial output and the logarithm of its sum, and a second kernel merges them. On Hopper, programs
that all run at the same time merge by themselves, to the same bits (`hopper_merge`).

The number of splits depends on shapes only, and not on a pass's number of tokens of a row while these are FEW: a pass
that verifies drafts gives each token the bits of its own step. The device code is in `triton_tiles`; Hopper runs
`hopper` at widths of 512.
"""

import math
from typing import NamedTuple

import torch

from dsv4.kernels.attention import hopper, hopper_prefill
from dsv4.kernels.attention.hopper_merge import Counters
from dsv4.kernels.attention.triton_plan import ALONE, MAX_WIDTH, Tile, plan, shared_out
from dsv4.kernels.attention.triton_tiles import attend, merge
from dsv4.kernels.attention.triton_unpack import unpacked
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat
from dsv4.kernels.descriptors import described
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import (
    capability,
    capture,
    captured_in,
    cooperative,
    dependent_launch,
    dot_in_fp32,
    next_power,
    processors,
    require_device,
)

LOG2E = 1 / math.log(2)
UNPACKED_BYTES = 128 << 20  # of the rows of a call that are unpacked for `hopper_prefill`, at most
MERGED = 2048  # numbers that a program, one warp, merges at a time
FEW = 16  # queries of a batch row that are planned as one
TOO_LARGE = "too many blocks in cooperative launch"  # of the driver, before anything runs
COOPERATIVE = True  # whether the driver is asked to run these programs at the same time


def sparse_attention(
    q, window, window_index, entries, entry_index, sink, scale: float, complete: bool = False, together: int = 1
) -> torch.Tensor:
    """Computes what the reference does, for head_dim ≤ 512 and PackedRows of KV_FP8; raises UnsupportedInput beyond."""
    N, H, D = q.shape
    near, far = _Pool.of(window, D), None if entry_index is None else _Pool.of(entries, D)
    return _launch(
        "sparse_attention", q.unsqueeze(1), near, window_index, far, entry_index, None, sink, scale, together
    ).view(N, H, D)


def hca_attention(
    q, window, window_index, entries, visible, sink, scale: float, complete: bool = False
) -> torch.Tensor:
    """Computes what the reference does, for head_dim ≤ 512 and PackedRows of KV_FP8; raises UnsupportedInput beyond."""
    D = q.shape[-1]
    return _launch(
        "hca_attention",
        q,
        _Pool.of(window, D),
        window_index,
        _Pool.of(entries, D),
        None,
        visible,
        sink,
        scale,
        q.shape[1],
    ).view(q.shape)


class _Pool(NamedTuple):
    """Rows as the kernel takes them: `row` is numbers from row to row, or bytes from page to page if packed; `run`
    likewise from one batch row to the next; `count` rows of a batch row; `words` as in `load_fp8_rows`."""

    data: torch.Tensor
    packed: bool
    row: int
    run: int
    count: int
    rope: int
    words: bool

    @classmethod
    def of(cls, rows, D: int) -> "_Pool":
        data = rows.data if isinstance(rows, PackedRows) else rows
        data = data if data.stride(-1) == 1 else data.contiguous()
        run = data.stride(0) if data.dim() == 3 else 0
        if not isinstance(rows, PackedRows):
            return cls(data, False, data.stride(-2), run, data.shape[-2], 0, True)
        if rows.format is not RowFormat.KV_FP8 or rows.width != D:
            raise UnsupportedInput(
                f"attention takes packed rows in {RowFormat.KV_FP8.value}, {D} wide; found "
                f"{rows.format.value}, {rows.width} wide"
            )
        words = (data.data_ptr() | data.stride(-2) | run) % 8 == 0 and D % 2 == 0
        return cls(data, True, data.stride(-2), run, rows.count, rows.rope, words)

    def unpacked(self, D: int) -> "_Pool":
        """Of bf16 rows at the same places."""
        rows = unpacked(self.data, D, self.rope, self.words)
        return _Pool(rows, False, D, rows.stride(0) if rows.dim() == 3 else 0, rows.shape[-2], 0, True)

    @property
    def big(self) -> bool:
        """Whether offsets within one batch row need 64 bits."""
        return self.data.shape[-2] * self.row >= 1 << 31


def _launch(*given) -> torch.Tensor:
    """As `_launched`. A green context has fewer multiprocessors than its device, which may not hold all programs that
    would wait for each other: there a second kernel merges, with the same bits."""
    try:
        return _launched(*given)
    except RuntimeError as error:
        if TOO_LARGE not in str(error):
            raise
    with captured_in(capture(), cooperative=False):
        return _launched(*given)


def _launched(
    name: str,
    q,
    window: _Pool,
    window_index,
    entries: _Pool | None,
    entry_index,
    visible,
    sink,
    scale: float,
    together: int,
) -> torch.Tensor:
    """q [B, T, H, D] → [B·T, H, D]. Entries by entry_index [B·T, K], or those below `visible` [B, T], or none."""
    B, T, H, D = q.shape
    N, W, DP = B * T, window_index.shape[1], max(16, next_power(D))
    listed = visible is None
    K = 0 if entries is None else entry_index.shape[1] if listed else entries.count
    far = window if entries is None else entries
    require_device(name, q, window.data, window_index, far.data, entry_index, visible, sink)
    listing = window_index if entry_index is None else entry_index
    _refuse(name, D, window_index, listing, window, far)
    q, sink = q if q.stride(-1) == 1 else q.contiguous(), sink.contiguous()
    out = torch.empty(N, H, D, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    packed = window.packed or far.packed
    plain = [p.data for p in (window, far) if not p.packed]
    fp32 = any(dot_in_fp32(t) or t.dtype is not torch.bfloat16 for t in (q, *plain))
    copied = not fp32 and D == 512 and _copies_whole(q, window, far)
    alike = together if together <= FEW else 1
    tile, splits = plan(N // alike, H, D, W, K, fp32, packed, copied, capability(q.device), processors(q.device))
    many = _many(tile, splits, (window, far), q, N // alike, W)
    if many and packed:
        window, far = (p.unpacked(D) for p in (window, far)) if far is not window else 2 * (window.unpacked(D),)
    partial, lse, dependent = out, out, dependent_launch(q.device)
    shared = shared_out(tile, splits, N, H, W, K, processors(q.device))
    counters = Counters.of(q.device, processors(q.device)) if shared and cooperative() else None
    shared = ALONE if counters is None else shared
    if splits > 1:
        partial = torch.empty(N, splits, H, D, dtype=torch.float32, device=q.device)
        lse = torch.empty(N, shared.parts, H, splits, dtype=torch.float32, device=q.device)
    seen = window_index if visible is None else visible
    common = (
        q,
        partial,
        lse,
        sink,
        window.data,
        far.data,
        window_index,
        listing,
        seen,
        scale * LOG2E,
        T,
        H,
        W,
        K,
        splits,
        *q.stride()[:3],
        far.run,
        *window_index.stride(),
        *listing.stride(),
        *seen.stride(),
    )
    grid = (N * -(-H // tile.heads), splits)
    if many:
        _attend_many(common[3:], q, out, (window.row, far.row, listed), min(grid[0], processors(q.device)), dependent)
    elif tile.copied:
        hopper.attend[(*grid, shared.parts)](
            *common,
            out,
            out if counters is None else counters,
            window.row,
            far.row,
            packed,
            listed,
            splits > 1,
            tile.keys,
            shared.stages or tile.stages,
            *shared[:3],
            num_warps=tile.warps,
            launch_pdl=dependent,
            launch_cooperative_grid=COOPERATIVE and shared.pieces > 0,
        )
    else:
        one_loop = listed and (window.data.dtype, window.packed, window.row) == (far.data.dtype, far.packed, far.row)
        attend[grid](
            *common,
            D,
            max(window.rope, far.rope),
            max(64, DP) if packed else DP,
            tile.heads,
            tile.keys,
            max(1, 32 * tile.warps // tile.keys),
            window.row,
            far.row,
            window.packed,
            far.packed,
            window.words and far.words,
            window.big or far.big,
            listed,
            one_loop,
            splits > 1,
            tile.unchain,
            fp32,
            capability(q.device) >= (8, 9),
            tile.stages,
            dependent,
            num_warps=tile.warps,
            launch_pdl=dependent,
        )
    if splits > 1 and not shared.pieces:
        _merge(partial, lse, sink, out, dependent)
    return out


def _many(tile: Tile, splits: int, pools: tuple[_Pool, ...], q: torch.Tensor, queries: int, window: int) -> bool:
    """Whether `hopper_prefill.attend_many` takes q [B, T, H, 512] instead of `hopper.attend`: each of the programs that
    run in parallel has more than 64 heads of one of the `queries`, as planned. Packed pools are unpacked for it, if
    they are not too large."""
    H, programs = q.shape[2], processors(q.device)
    whole = H % 64 == 0 and q.is_contiguous() and queries * H // 64 > programs and window > 0
    rows = sum(p.data.numel() // p.row * PAGE for p in pools if p.packed)
    return whole and tile.copied and splits == 1 and rows * q.shape[-1] * 2 <= UNPACKED_BYTES


def _attend_many(common: tuple, q, out, form: tuple, programs: int, dependent: bool) -> None:
    """common: as `_launched` has it, from the sink on; form: what is known when it is compiled."""
    sink, window, far, window_index, listing, seen, scale, T, H, W, K, _, *strides = common
    queries, rows = (described(t.view(-1, t.shape[-1]), 64, columns) for t, columns in ((q, 256), (out, 64)))
    hopper_prefill.attend_many[(programs,)](
        queries, rows, sink, window, far, window_index, listing, seen, scale, out.shape[0], T, W, K, *strides[3:], H,
        *form, num_warps=4, maxnreg=168, launch_pdl=dependent,
    )  # fmt: skip


def _merge(partial, lse, sink, out, dependent: bool) -> None:
    """partial [N, splits, H, D], lse [N, 1, H, splits] → out [N, H, D].

    Programs are one warp, because several warps would exchange sums through shared memory. Such programs took as long
    (14 µs for 1024 programs of 4 KB, 3 µs for 512 without shared memory) as if a multiprocessor of an H100 ran only one
    or two of them at a time.
    """
    N, splits, H, D = partial.shape
    most = next_power(splits)
    together = min(64, most)
    columns = min(max(16, next_power(D)), max(32, MERGED // together))
    merge[(N * H, -(-D // columns))](
        partial, lse, sink, out, H, splits, D, columns, together, most, dependent, num_warps=1, launch_pdl=dependent
    )


def _refuse(name: str, D: int, window_index, listing, window: _Pool, far: _Pool) -> None:
    if D > MAX_WIDTH:
        raise UnsupportedInput(f"{name} keeps {MAX_WIDTH} numbers a row; found head_dim {D}")
    if {window_index.dtype, listing.dtype} != {torch.int64}:
        raise UnsupportedInput(f"{name} takes indices in int64; found {window_index.dtype}, {listing.dtype}")
    if window.packed and far.packed and window.rope != far.rope:
        raise UnsupportedInput(
            f"{name} takes packed pools that keep the same columns in bf16; found {window.rope} and {far.rope} of them"
        )


def _copies_whole(q, window: _Pool, far: _Pool) -> bool:
    """Whether all rows are of one kind and begin at multiples of 16 bytes, as `hopper.attend` requires."""
    packed = window.packed and far.packed and window.rope == 64
    plain = not window.packed and not far.packed
    aligned = all(t.data_ptr() % 16 == 0 for t in (q, window.data, far.data))
    return (
        (packed or plain) and aligned and not any(step % 16 for step in (*q.stride()[:3], window.row, far.row, far.run))
    )
