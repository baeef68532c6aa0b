"""How attention on the GPU is divided: tiles, splits of the keys of a query, and programs that merge by themselves.

Costs are times in µs; they choose, and need not add up to what a kernel takes.
"""

from functools import lru_cache
from typing import NamedTuple

from dsv4.kernels.launch import interpreting, next_power

MAX_WIDTH = 512  # numbers in a row: a program keeps heads × width sums in registers
# Costs beside those of `Tile`, by `scripts/tune_merging.py` on an H200 with packed rows. Of merging by a second kernel:
# more than programs that meet, and partial outputs written and read through L2.
MERGE_US, PARTIAL_BYTES_US = 2.8, 5e6
PROGRAM_BYTES_US = 4.4e4  # that each of programs that merge by themselves writes and reads
PARTS = 8  # programs that share a tile, at most: 64 columns each
SPLITS = 128  # that programs merge by themselves, at most


class Shared(NamedTuple):
    """How programs of `hopper.attend` share a query. parts: programs that share a tile, by columns of the output;
    pieces: programs of a part that merge, 0 if a second kernel does; most: splits at most; stages: of a program (0: as
    many as its tile has)."""

    parts: int
    pieces: int
    most: int
    stages: int


ALONE = Shared(1, 0, 1, 0)


class Tile(NamedTuple):
    """Heads × keys that a program multiplies at a time; the cost of a program (`start`) and of each tile on an H100 or
    H200, in µs.

    The costs choose between tiles and numbers of splits. Tiles of 64 heads use wgmma or tcgen05.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    start: float
    each: float
    own: float = 0.0  # of `each`, what programs that share a tile divide
    unchain: bool = False  # see `add_tile`
    copied: bool = False  # by `hopper.attend`


@lru_cache(maxsize=4096)
def plan(
    N: int,
    H: int,
    D: int,
    W: int,
    K: int,
    fp32: bool,
    packed: bool,
    copied: bool,
    capability: tuple[int, int],
    processors: int,
) -> tuple[Tile, int]:
    """The tile and the number of splits with the least cost, for N queries of H heads over W window rows and K
    entries."""

    def cost(choice):
        tile, splits = choice
        tiles = -(-W // tile.keys) + -(-K // tile.keys)
        each, programs = -(-tiles // splits), N * -(-H // tile.heads) * splits
        if parts := parts_of(tile, splits, programs, processors):
            partial = 2 * 4 * tile.heads * D / parts
            taken = tile.start + (tile.each - tile.own + tile.own / parts) * each
            return taken + partial / PROGRAM_BYTES_US
        merging = MERGE_US + N * splits * H * D * 2 * 4 / PARTIAL_BYTES_US
        waves = -(-programs // processors)
        return waves * (tile.start + tile.each * D / MAX_WIDTH * each) + merging * (splits > 1)

    def splits(tile):
        tiles = -(-W // tile.keys) + -(-K // tile.keys)
        most = max(1, min(tiles, processors // (N * -(-H // tile.heads))))
        return {-(-tiles // -(-tiles // s)) for s in range(1, most + 1)} if tiles else {1}

    return min(
        ((tile, s) for tile in tile_shapes(fp32, packed, copied, capability) for s in sorted(splits(tile))), key=cost
    )


def parts_of(tile: Tile, splits: int, programs: int, processors: int) -> int:
    """In how many parts of the columns each of so many programs is divided, so that all of them run at the same time
    and merge what they find; 0 if they do not."""
    if not tile.copied or not 1 < splits <= SPLITS or programs > processors:
        return 0
    return next(parts for parts in (8, 4, 2, 1) if parts <= PARTS and programs * parts <= processors)


def shared_out(tile: Tile, splits: int, N: int, H: int, W: int, K: int, processors: int) -> Shared | None:
    """How a pass of N queries is shared out. Bits do not depend on it, so N may be any number of a plan's queries."""
    parts = parts_of(tile, splits, N * -(-H // tile.heads) * splits, processors)
    if not parts:
        return None
    tiles = -(-W // tile.keys) + -(-K // tile.keys)
    return Shared(parts, 1 << splits.bit_length() - 1, next_power(splits), 1 if splits >= tiles else 0)


def tile_shapes(fp32: bool, packed: bool, copied: bool, capability: tuple[int, int]) -> list[Tile]:
    """Tiles that fit: shared memory of 163 KB (8.0), 227 KB (9.0, 10.0) or 99 KB; rows of 512."""
    if fp32:
        return [Tile(16, 16, 4 if interpreting() else 8, 1, 4.0, 10.0)]
    large = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    narrow = Tile(16, 32, 4, 2 if large else 1, 3.2, 3.1) if packed else Tile(16, 32, 4, 3, 4.0, 1.25)
    match capability[0]:
        case 9 if copied:
            start, few, each, half = (4.1, 3.6, 3.4, 2.7) if packed else (5.2, 4.7, 2.5, 1.9)
            return [
                narrow,
                Tile(64, 64, 8, 2, start, each, 0.7, copied=True),
                Tile(64, 32, 8, 2, few, half, 0.4, copied=True),
            ]
        case 9:
            start, each = (5.5, 5.0) if packed else (6.0, 3.5)
            return [narrow, Tile(64, 64, 8, 2, start, each, unchain=True)]
        case 10:  # not measured
            return [narrow, Tile(64, 32, 8, 2, 5.0, 1.5)]
    return [narrow]
