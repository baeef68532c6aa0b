"""Times of decode steps by how many bytes of weights are asked for before earlier kernels have ended (`TO_L2` of
`kernels/linear/triton_streams.py`), on a GPU.

    python scripts/tune_prefetch.py [--layers 16] [--batch 1,8] [--context 8K] [--seconds 120]

All numbers take turns, in two rounds. A line: ms a step, and over that without.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.linear import triton_streams
from dsv4.units import count_named
from scripts.bench.decode import measure_point
from scripts.bench.timing import Clock, measure_machine

MIB = (0, 8, 16, 24, 32, 48)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--context", type=lambda text: count_named("--context", text), default=8192)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: steps are timed on a CUDA device; there is none", file=sys.stderr)
        return 2
    from dsv4.model.dummy import load_dummy

    begun, machine = time.monotonic(), measure_machine(Clock())
    model = load_dummy(
        "flash", args.layers, device="cuda", numerics="native", backend="triton", cache="fp8", index_cache="fp4"
    )
    for batch in args.batch:
        found: dict[int, float] = {}
        for mib in 2 * MIB:
            if time.monotonic() - begun > args.seconds:
                print("not begun: the time was up")
                return 0
            triton_streams.TO_L2 = mib << 20
            point = measure_point(model, batch, args.context, machine)
            found[mib] = min(point.step_ms, found.get(mib, point.step_ms))
        for mib, ms in found.items():
            print(f"batch {batch}, {mib} MiB: {ms:.3f} ms a step, {ms / found[0]:.3f} of that without", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
