"""Times of FP8 products on tensor cores, on a GPU, to choose the tiles of `kernels/linear/triton_fp8.py` by.

    python scripts/tune_fp8.py [--tokens 16,64,256,4096] [--seconds 200]

Each tile is first held against `linear` of the same rounded activations. A line: µs, cold L2, with and without rounding
the activations, TFLOPS of the product, and how far the result is off, over the largest number. `now`: `linear`;
`chosen`: the tile that `tile_for` gives; `read`: the weight's bytes alone, by a kernel that does nothing else. At the
end two weights of one input, in two launches and in one.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.launch import processors
from dsv4.kernels.linear import triton as linear
from dsv4.kernels.linear import triton_fp8
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from scripts.bench.timing import Clock, read_times
from scripts.bench.tuning import asked

SHAPES = ((4096, 4096), (4096, 8192), (32768, 1024), (1024, 4096))  # rows and columns of the weight
PAIRS = ((1024, 512, 4096), (32768, 8192, 1024), (2048, 2048, 4096))  # rows of two weights, and their columns
REPLAYS = 20


def ways(N: int, O: int) -> Iterator[tuple[str, Callable]]:
    """(name, product) of the tiles that are tried."""
    chosen = triton_fp8.tile_for(N, O, processors(torch.device("cuda")))
    yield f"chosen {tuple(chosen)}", triton_fp8.product
    for tile in triton_fp8.TIMES:
        if tile != chosen and N > tile.tokens // 2:
            yield f"{tuple(tile)}", partial(triton_fp8.product, tile=tile)


def main() -> int:
    args = asked(__doc__, "tiles", (16, 64, 256, 4096), 200.0)
    if args is None:
        return 2
    begun, wrong, clock = time.monotonic(), 0, Clock()
    timed = lambda run: clock.runs([run], REPLAYS).cold_us
    for O, K in SHAPES:
        codes = weight(O, K).weight.view(torch.int32).flatten()
        print(f"{O}×{K}: read {read_times(clock, codes).cold_us:.1f} µs, cold L2", flush=True)
    cases = [partial(ways_right, *shape, N, timed) for shape in SHAPES for N in args.tokens]
    cases += [partial(pair_right, *shape, N, timed) for shape in PAIRS for N in args.tokens]
    for right in cases:
        if time.monotonic() - begun > args.seconds:
            print("not begun: the time was up")
            break
        wrong += not right()
    return int(bool(wrong))


def ways_right(O: int, K: int, N: int, timed: Callable) -> bool:
    """Times of one product by each tile. Whether all were right."""
    w, x, wrong = weight(O, K), torch.randn(N, K, device="cuda", dtype=torch.bfloat16), 0
    right, out = linear.linear(x, w, True), torch.empty(N, O, dtype=torch.bfloat16, device="cuda")
    print(f"{O}×{K}, {N} tokens: now {timed(lambda: linear.linear(x, w, True)):.1f} µs", flush=True)
    for blocks in (8, 32):
        with patch.multiple(triton_fp8, ROWS_QUANTISED=blocks, ROWS_OF_MANY=blocks):
            print(f"  rounded by programs of {blocks} blocks: {timed(lambda: triton_fp8.quantised(x)):.1f} µs")
    given, held = triton_fp8.quantised(x), hold("linear", w)
    for name, product in ways(N, O):
        try:
            product(*given, held, out)
            off = float((out.float() - right.float()).abs().max() / right.float().abs().max())
            alone = timed(lambda: product(*given, held, out))
            whole = timed(lambda: product(*triton_fp8.quantised(x), held, out))
        except Exception as failure:  # a tile that does not fit
            print(f"  {name}: {type(failure).__name__}: {str(failure).splitlines()[0][:80]}", flush=True)
            continue
        wrong += not off <= 0.01
        rate = 2 * N * O * K / alone / 1e6
        print(f"  {name}: {whole:.1f}, {alone:.1f} µs, {rate:.0f} TFLOPS, off {off:.1e}", flush=True)
    return not wrong


def pair_right(O: int, O1: int, K: int, N: int, timed: Callable) -> bool:
    """Times of two weights in two launches and in one. Whether their bits are equal."""
    both = [hold("linear", weight(rows, K)) for rows in (O, O1)]
    given, found = triton_fp8.quantised(torch.randn(N, K, device="cuda", dtype=torch.bfloat16)), []
    for paired in (False, True):
        outs = [torch.empty(N, rows, dtype=torch.bfloat16, device="cuda") for rows in (O, O1)]
        with patch.object(triton_fp8, "PAIRED", paired):
            found.append((timed(partial(triton_fp8.products, *given, both, outs)), outs))
    (apart, right), (together, outs) = found
    print(f"{O} and {O1} × {K}, {N} tokens: {apart:.1f} µs apart, {together:.1f} together", flush=True)
    return all(map(torch.equal, right, outs))


def weight(O: int, K: int) -> PackedWeight:
    scale = torch.exp2(torch.randint(-6, -2, (O // 128, K // 128), device="cuda").float())
    codes = torch.randn(O, K, device="cuda").to(torch.float8_e4m3fn)
    return PackedWeight(WeightFormat.FP8, codes, scale.to(torch.float8_e8m0fnu))


if __name__ == "__main__":
    sys.exit(main())
