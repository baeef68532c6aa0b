"""What a rule that never ends costs dense decode, by how many units are fetched ahead, on a GPU: `CHUNK` of
`kernels/grouped_attention/triton_decode.py` is chosen by this.

    python scripts/tune_termination.py [--contexts 32K,128K] [--batches 1,8] [--chunks 4,8,16,32] [--tiles 128,256]
    [--replays 20]

Attention with the rule and without it run in turn, cold; the figure is the ratio of their medians. Fetching more ahead
stalls less often, and reads more in vain where a rule does end. Prints a line for each shape, and says where outputs
that walk the same tiles, of 128 tokens, are not the same bits.
"""

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.grouped_attention import Termination, grouped_attention, triton_decode
from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.widths import LLAMA
from dsv4.runtime.timing import Clock, capture
from dsv4.units import parse_count

H, KV, D = sizes(LLAMA)
numbers = lambda text: [parse_count(part) for part in text.split(",")]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("contexts", "32K,128K"), ("batches", "1,8"), ("chunks", "4,8,16,32"), ("tiles", "128,256")):
        parser.add_argument(f"--{name}", type=numbers, default=numbers(default))
    parser.add_argument("--replays", type=int, default=20)
    args = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("error: kernels are timed on a CUDA device", file=sys.stderr)
        return 2
    clock = Clock()
    for S in args.contexts:
        for B in args.batches:
            measure(clock, S, B, args)
    return 0


def measure(clock: Clock, S: int, B: int, args: argparse.Namespace) -> None:
    q = torch.randn(B, 1, H, D, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(B, KV, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start = torch.full((B,), S - 1, device="cuda")
    run = lambda rule: grouped_attention(
        q, keys, values, start, None, D**-0.5, *([rule] if rule else []), backend="triton"
    )
    plain, graphs, names, same = run(None), [capture(lambda: run(None))], ["without"], [True]
    for tile in args.tiles:
        for chunk in args.chunks:
            with patch.object(triton_decode, "CHUNK", chunk):
                rule = Termination(tau=0.0, phi=0.0, tile=tile)
                same.append(tile != triton_decode.UNIT or torch.equal(run(rule)[0], plain))
                graphs.append(capture(lambda: run(rule)))
                names.append(f"tiles of {tile}, {chunk} ahead")
    times = [t.cold_us for t in clock.in_turn([[g] for g in graphs], args.replays)]
    told = [
        f"{name} {us / times[0]:.3f}{'' if equal else ' (OTHER BITS)'}" for name, us, equal in zip(names, times, same)
    ][1:]
    print(f"{S} tokens, batch {B}: {times[0]:.1f} µs without; " + ", ".join(told), flush=True)


if __name__ == "__main__":
    sys.exit(main())
