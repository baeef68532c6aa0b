"""Times of chunked sparse prefill with other tiles, on a GPU, to choose those of `kernels/chunked_prefill/triton.py`
by.

    python scripts/tune_prefill.py [--tokens 32768] [--chunk 2048 --local 256 --heavy 768] [--seconds 300]

One kind of kernel at a time is given other tiles, the rest stay as they are; the figure is that of all its launches in
one run, by the profiler. Of a memory of up to 256 tokens both forms of phase 2 are tried: in a loop, and at once where
a tile has all its columns. Prints a line as each is known, the fastest last: of each kind, of phase 2 also in each
form.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.chunked_prefill import triton as prefill
from dsv4.kernels.chunked_prefill.triton import Tile
from dsv4.kernels.launch import next_power
from scripts.bench.rows_prefill_chunked import KV, D, H, kept_pairs
from scripts.bench.timing import device_kernels

TILES = [
    Tile(*t)
    for t in (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 128, 4, 2),
        (64, 32, 4, 3),
        (128, 32, 8, 4),
    )
]
SUMS = [
    Tile(*t)
    for t in (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 32, 4, 3),
        (128, 64, 4, 3),
        (128, 128, 4, 2),
        (256, 64, 8, 3),
    )
]
AT_ONCE = ((128, 8), (64, 4), (64, 8), (128, 4), (32, 4))  # rows and warps; columns are those of the memory


def kinds(cut: Chunking) -> dict[str, tuple[str, str, list[Tile]]]:
    """What is tuned → (the field of `Tiles`, its kernel, tiles to try)."""
    found = {
        "within": ("within", "within_chunks", [t for t in TILES if t.rows % t.columns == 0]),
        "sums": ("sums", "chunk_mass", SUMS),
        "memory in a loop": ("memory", "to_memory", [t for t in TILES if t.columns < cut.memory]),
    }
    if cut.memory <= prefill.AT_ONCE:
        columns = max(16, next_power(cut.memory))
        found["memory at once"] = "memory", "to_memory", [Tile(rows, columns, warps, 1) for rows, warps in AT_ONCE]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--local", type=int, default=256)
    parser.add_argument("--heavy", type=int, default=768)
    parser.add_argument("--seconds", type=float, default=300, help="begin no tile after this many seconds")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: tiles are timed on a CUDA device", file=sys.stderr)
        return 2
    cut, begun = Chunking(args.chunk, args.local, args.heavy), time.monotonic()
    shape = lambda heads: (1, heads, args.tokens, D)
    q = torch.randn(shape(H), device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous()
    k, v = (torch.randn(shape(KV), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths, usual = (
        torch.tensor([args.tokens], device="cuda"),
        prefill.tiles(False, D, cut, torch.cuda.get_device_capability()),
    )
    run = lambda: prefill.chunked_prefill(q, k, v, 0, lengths, cut, D**-0.5)
    wanted = run()[0]
    whole = Counter()
    for name, took, _ in device_kernels(run):
        whole[name] += took
    flops = 4 * H * D * kept_pairs(args.tokens, cut)
    print(
        f"as it is: {sum(whole.values()):.0f} µs in kernels, {flops / sum(whole.values()) / 1e6:.0f} TFLOPS on "
        "kept pairs; " + ", ".join(f"{name} {us:.0f}" for name, us in whole.most_common(8)),
        flush=True,
    )
    best = {}
    for kind, (field, kernel, candidates) in kinds(cut).items():
        for tile in candidates:
            if time.monotonic() - begun > args.seconds:
                print(f"not begun within {args.seconds:.0f} s: {kind} {tuple(tile)}", flush=True)
                continue
            with patch.object(prefill, "tiles", lambda *_: usual._replace(**{field: tile})):
                try:
                    error = ((run()[0] - wanted).float().norm() / wanted.float().norm()).item()
                    us = sum(took for name, took, _ in device_kernels(run) if name == kernel)
                except Exception as failure:  # a tile that does not fit is a line of the list
                    print(
                        f"{kind} {tuple(tile)}: {type(failure).__name__}: {' '.join(str(failure).split())[:120]}",
                        flush=True,
                    )
                    continue
            right = error < 5e-3
            print(f"{kind} {tuple(tile)}: {us:.0f} µs{'' if right else f', WRONG by {error:.1e}'}", flush=True)
            if right:
                best[kind] = min(best.get(kind, (us, tile)), (us, tile))
    for kind, (us, tile) in best.items():
        print(f"fastest {kind}: {tuple(tile)} {us:.0f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
