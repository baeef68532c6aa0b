"""Launches of attention of single queries over a cache, dense or by a list of blocks: tiles, splits and merging."""

from functools import lru_cache
from typing import NamedTuple

import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.grouped_attention.termination import OFFSET, PROBED, STEP, Termination
from dsv4.kernels.grouped_attention.triton_tiles import LOG2E, attend, merge
from dsv4.kernels.launch import (
    capability,
    dependent_launch,
    dot_in_fp32,
    interpreting,
    next_power,
    processors,
    require_device,
)

FEW = 16  # tokens of a row that are planned as one, so that each has the bits of its own step
UNIT = 128  # tokens in the unit that is divided among splits
MAX_WIDTH, MAX_GROUP = 256, 64
# units whose keys are loaded together if a traversal may stop: at most so much is loaded in vain
CHUNK = 8
MERGED = 2048  # numbers that a program of one warp merges at a time


class Tile(NamedTuple):
    """Keys that a program multiplies at a time; programs that share a multiprocessor."""

    keys: int
    warps: int
    stages: int
    programs: int


@lru_cache(maxsize=256)
def tile_shape(width: int, fp32: bool, capability: tuple[int, int]) -> Tile:
    """A tile that fits: shared memory of 163 KB (8.0), 227 KB (9.0, 10.0) or 99 KB a multiprocessor."""
    if interpreting():
        return Tile(64, 4, 1, 1)
    if fp32:
        return Tile(32 if width <= 128 else 16, 8, 1, 1)
    keys = 64 if width <= 128 else 32
    if capability[0] in (9, 10):
        return Tile(keys, 4, 4, 2)
    return Tile(keys, 4, 3, 2 if capability in ((8, 0), (8, 7)) else 1)


def plan(
    rows: int, units: int, width: int, fp32: bool, capability: tuple[int, int], processors: int
) -> tuple[Tile, int]:
    """The tile, and the number of splits, for rows (queries × KV heads) that have up to `units` units of tokens."""
    tile = tile_shape(width, fp32, capability)
    return tile, max(1, min(units, tile.programs * processors // max(1, rows)))


def traversals(
    B: int,
    T: int,
    KV: int,
    tokens: int,
    D: int,
    fp32: bool,
    device: torch.device,
    window: int | None,
    rule: Termination | None,
) -> tuple[Tile, int, int]:
    """The tile, the number of splits among which each query's tokens (up to `tokens`, of which `window` are seen) are
    divided, and the most units of one split. Up to FEW tokens a row count as one."""
    unit = rule.tile if rule else UNIT
    units = -(-(tokens if window is None else min(tokens, window + 2 * unit)) // unit)
    tile, own = plan(
        B * KV * (1 if T <= FEW else T), units, max(16, next_power(D)), fp32, capability(device), processors(device)
    )
    splits = own if rule is None else rule.dealt(own, units)
    return tile, splits, -(-units // splits)


def attend_queries(
    name: str, q, keys, values, blocks, start, window: int | None, scale: float, block: int, rule: Termination | None
):
    """`gather_attention`, or `grouped_attention` if blocks is None. Returns out [B, T, H, D], or with a rule (out,
    tiles)."""
    (B, T, H, D), (KV, S) = q.shape, keys.shape[1:3]
    check(name, q, keys, values, start, blocks, window)
    q = q if q.stride(-1) == 1 else q.contiguous()
    unit, n = rule.tile if rule else UNIT, 0 if blocks is None else blocks.shape[3]
    if blocks is not None and max(block, unit) % min(block, unit):
        raise UnsupportedInput(
            f"{name}: blocks of {block} tokens and tiles of {unit}; expected one to be a multiple of the other"
        )
    fp32 = any(dot_in_fp32(t) for t in (q, keys))
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    tiles = torch.empty(B, T, KV, dtype=torch.int32, device=q.device) if rule else None
    if out.numel() and (blocks is None or n):
        width, N = max(16, next_power(D)), B * T
        listed = blocks is not None
        tile, splits, most = traversals(
            B, T, KV, n * block if listed else S, D, fp32, q.device, None if listed else window, rule
        )
        paged = listed and block < tile.keys  # positions are loaded one tile further ahead than keys and values
        partial, lse, read, dependent = out, out, tiles, dependent_launch(q.device)
        if splits > 1:
            partial = torch.empty(N, splits, H, D, dtype=torch.float32, device=q.device)
            lse = torch.empty(N, H, splits, dtype=torch.float32, device=q.device)
            read = torch.empty(N, KV, splits, dtype=torch.int32, device=q.device) if rule else None
        attend[(N * KV, splits)](
            q,
            keys,
            values,
            start if blocks is None else blocks,
            start,
            partial,
            lse,
            start if read is None else read,
            scale * LOG2E,
            window or 0,
            *_rule(rule, D),
            T,
            S,
            KV,
            n,
            splits,
            *q.stride()[:3],
            H // KV,
            D,
            width,
            max(16, next_power(H // KV)),
            tile.keys,
            unit,
            listed,
            block,
            window is not None,
            splits > 1,
            rule is not None,
            rule is not None and most >= rule.useful,
            rule is None or rule.scale,
            rule is None or rule.direction,
            *_probed(D),
            CHUNK,
            fp32,
            2 * tile.stages - 1 if paged else tile.stages,
            dependent,
            num_warps=tile.warps,
            launch_pdl=dependent,
        )
        if splits > 1:
            _merge(partial, lse, read, out, tiles, KV, dependent)
    else:  # no block is kept
        out.zero_()
        tiles = tiles.zero_() if rule else None
    return out if rule is None else (out, tiles)


def _rule(rule: Termination | None, D: int) -> tuple:
    return (0.0, 0.0, 1) if rule is None else (float(rule.tau), 1.0 - rule.phi, rule.wait)


def _probed(D: int) -> tuple[int, int, int]:
    """(STEP, OFFSET, PROBED) such that ((d − OFFSET)·STEP) mod D < PROBED exactly for `probed_channels(D)`."""
    return (1, 0, min(D, PROBED)) if D <= PROBED or D % STEP == 0 else (pow(STEP, -1, D), OFFSET, PROBED)


def _merge(partial, lse, read, out, tiles, KV: int, dependent: bool) -> None:
    """partial [N, splits, H, D], lse [N, H, splits] → out [N, H, D]; read [N, KV, splits] → tiles. A program is one
    warp: several warps would exchange sums through shared memory, and after kernels that use much of it a
    multiprocessor gives it to few programs."""
    N, splits, H, D = partial.shape
    together = min(64, next_power(splits))
    columns = min(max(16, next_power(D)), max(32, MERGED // together))
    count = read is not None
    merge[(N * H, -(-D // columns))](
        partial,
        lse,
        read if count else lse,
        out,
        tiles if count else lse,
        H,
        splits,
        H // KV,
        D,
        columns,
        together,
        count,
        dependent,
        num_warps=1,
        launch_pdl=dependent,
    )


def check(name: str, q, keys, values, start, blocks=None, window: int | None = None) -> None:
    """Raise UnsupportedInput for what the kernels cannot take."""
    require_device(name, q, keys, values, start, blocks)
    if keys.dim() != 4 or keys.shape != values.shape or keys.shape[0] != q.shape[0] or keys.shape[3] != q.shape[3]:
        raise UnsupportedInput(
            f"{name} takes q [B, T, H, D] and keys and values [B, KV, S, D]; found {tuple(q.shape)}, "
            f"{tuple(keys.shape)} and {tuple(values.shape)}"
        )
    (B, T, H, D), KV = q.shape, keys.shape[1]
    if H % KV or H // KV > MAX_GROUP or D > MAX_WIDTH:
        raise UnsupportedInput(
            f"{name} takes up to {MAX_GROUP} query heads a KV head, of up to {MAX_WIDTH} channels; found {H} query "
            f"heads, {KV} KV heads and {D} channels"
        )
    if any(t.dtype not in (torch.bfloat16, torch.float32) for t in (q, keys)) or keys.dtype is not values.dtype:
        raise UnsupportedInput(f"{name} takes bf16 and fp32; found {q.dtype}, {keys.dtype} and {values.dtype}")
    if not keys.is_contiguous() or not values.is_contiguous():
        raise UnsupportedInput(
            f"{name} takes contiguous keys and values; found strides {keys.stride()} and {values.stride()}"
        )
    if start.dtype is not torch.int64 or start.shape != (B,):
        raise UnsupportedInput(f"{name} takes start as int64 [{B}]; found {start.dtype} {tuple(start.shape)}")
    if window is not None and window < 1:
        raise UnsupportedInput(f"{name}: a window of {window}; expected at least the query's own token")
    if blocks is not None and (
        blocks.dtype is not torch.int32 or blocks.shape[:3] != (B, T, KV) or not blocks.is_contiguous()
    ):
        raise UnsupportedInput(
            f"{name} takes blocks as contiguous int32 {[B, T, KV, 'n']}; found {blocks.dtype} {tuple(blocks.shape)}"
        )
