"""Times of FP8 products on tensor cores, on a GPU, to choose the tile of `kernels/linear/triton_fp8.py` by.

    python scripts/tune_fp8.py [--tokens 64,256,4096] [--seconds 200]

Each tile is first held against `linear` of the same rounded activations. A line: µs, cold L2, with and without rounding
the activations, TFLOPS of the product, and how far the result is off, over the largest number. `now`: `linear`.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.linear import triton as linear
from dsv4.kernels.linear import triton_fp8
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from scripts.bench.timing import Clock

SHAPES = ((4096, 4096), (4096, 8192), (32768, 1024), (1024, 4096))  # rows and columns of the weight
TILES = (  # tokens, rows, warps, stages
    *((64, 128, 4, stages) for stages in (3, 4, 5)),
    *((128, 128, 8, stages) for stages in (3, 4)),
    *((128, 64, 4, stages) for stages in (4, 5)),
    *((64, 64, 4, stages) for stages in (4, 6)),
    (128, 128, 4, 4),
)
REPLAYS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[64, 256, 4096])
    parser.add_argument("--seconds", type=float, default=200.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: tiles are timed on a CUDA device; there is none", file=sys.stderr)
        return 2
    begun, wrong, clock = time.monotonic(), 0, Clock()
    timed = lambda run: clock.runs([run], REPLAYS).cold_us
    for O, K in SHAPES:
        scale = torch.exp2(torch.randint(-6, -2, (O // 128, K // 128), device="cuda").float())
        codes = torch.randn(O, K, device="cuda").to(torch.float8_e4m3fn)
        w = PackedWeight(WeightFormat.FP8, codes, scale.to(torch.float8_e8m0fnu))
        for N in args.tokens:
            x = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
            right, out = linear.linear(x, w, True), torch.empty(N, O, dtype=torch.bfloat16, device="cuda")
            print(f"{O}×{K}, {N} tokens: now {timed(lambda: linear.linear(x, w, True)):.1f} µs", flush=True)
            given, held = triton_fp8.quantised(x), hold("linear", w)
            for tile in TILES:
                if time.monotonic() - begun > args.seconds:
                    print("not begun: the time was up")
                    return int(bool(wrong))
                triton_fp8.TILE = tile
                try:
                    triton_fp8.product(*given, held, out)
                    off = float((out.float() - right.float()).abs().max() / right.float().abs().max())
                    alone = timed(lambda: triton_fp8.product(*given, held, out))
                    whole = timed(lambda: triton_fp8.product(*triton_fp8.quantised(x), held, out))
                except Exception as failure:  # a tile that does not fit
                    print(f"  {tile}: {type(failure).__name__}: {str(failure).splitlines()[0][:80]}", flush=True)
                    continue
                wrong += off > 0.01
                rate = 2 * N * O * K / alone / 1e6
                print(f"  {tile}: {whole:.1f}, {alone:.1f} µs, {rate:.0f} TFLOPS, off {off:.1e}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
