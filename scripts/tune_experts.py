"""Times of MXFP4 experts on FP8 tensor cores, on a GPU, to choose the tiles of `kernels/experts/hopper_launch.py` by.

    python scripts/tune_experts.py [--tokens 1,8,16,32,64,256,1024,4096] [--seconds 300]

Widths are those of Flash, numerics the official ones. Each tile is first held against the other kernels of `experts`.
A line: µs of the whole operation, cold L2, for those and for a tile of so many tokens with so many stages; bytes that
must be moved over the time, as a share of the bandwidth at which this GPU reads; and how far the result is off, as a
relative L2. The tiles that would be chosen come first, for each number of tokens, and then others. At the end what
each kernel adds, with the fastest tile; and for up to 256 tokens the time with an FP8 shared expert, in the launches of
the routed ones and in its own, to choose `hopper_launch.BESIDE` by.
"""

import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.experts import hopper_launch, triton
from dsv4.kernels.experts.contract import expert_work
from dsv4.kernels.experts.hopper_launch import MOST, STAGES, TOKENS, tile_tokens, unfit
from dsv4.kernels.experts.triton_stream import Routed
from dsv4.kernels.linear.contract import bytes_of
from dsv4.kernels.linear.hopper_weights import Unfit
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.widths import FLASH
from scripts.bench.timing import Clock, device_kernels, read_times
from scripts.bench.tuning import asked

NUMBERS = (1, 8, 16, 32, 64, 256, 1024, 4096)
FEWER = 3  # stages less than fit
LEAST, AT_ONCE = 8, 4  # stages of tiles that free four at once
MOST_BESIDE = 256  # tokens that are tried with a shared expert
REPLAYS, FAR = 20, 0.01


class Tile(NamedTuple):
    tokens: int
    stages: int


def tiles(N: int) -> list[Tile]:
    """The tile that would be chosen for N tokens, then its neighbours."""
    chosen = tile_tokens(N * FLASH.num_experts_per_tok, FLASH.n_routed_experts)
    near = [t for t in TOKENS if chosen // 2 <= t <= 2 * chosen and t != chosen]
    fewer = STAGES[chosen] - (FEWER if chosen >= MOST else AT_ONCE)
    less = [Tile(chosen, fewer)] if fewer >= LEAST or chosen >= MOST else []
    return [Tile(chosen, STAGES[chosen])] + [Tile(t, STAGES[t]) for t in near] + less


def weights() -> tuple[PackedWeight, PackedWeight]:
    """Random codes and scales."""
    E, I, d = FLASH.n_routed_experts, FLASH.moe_intermediate_size, FLASH.hidden_size
    stack = lambda rows, columns: PackedWeight(
        WeightFormat.MXFP4,
        torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8, device="cuda"),
        torch.randint(117, 122, (E, rows, columns // 32), dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu),
    )
    return stack(2 * I, d), stack(d, I)


def shared_expert() -> tuple[PackedWeight, ...]:
    """Random codes, all scales alike."""
    I, d = FLASH.moe_intermediate_size, FLASH.hidden_size
    scale = lambda o, k: torch.full((o // 128, k // 128), 118, dtype=torch.uint8, device="cuda")
    make = lambda o, k: PackedWeight(
        WeightFormat.FP8,
        torch.randn(o, k, device="cuda").to(torch.float8_e4m3fn),
        scale(o, k).view(torch.float8_e8m0fnu),
    )
    return make(I, d), make(I, d), make(d, I)


class Bench:
    """Inputs of one number of tokens, and what was found with them."""

    def __init__(self, N: int, stacks: tuple[PackedWeight, PackedWeight], clock: Clock, bandwidth: float):
        k, E = FLASH.num_experts_per_tok, FLASH.n_routed_experts
        x = torch.randn(N, FLASH.hidden_size, device="cuda", dtype=torch.bfloat16)
        indices = torch.rand(N, E, device="cuda").topk(k).indices
        self.N, self.clock, self.bandwidth = N, clock, bandwidth
        self.arguments = (x, indices, torch.rand(N, k, device="cuda"), *stacks, FLASH.swiglu_limit, True)
        self.bytes = expert_work(*self.arguments).bytes
        self.times: dict[Tile, float] = {}
        with patch.object(hopper_launch, "unfit", lambda x, routed: Unfit("beside it")):
            self.right = self.run()
            self.found("other kernels", self.run)

    def run(self) -> torch.Tensor:
        return triton.experts(*self.arguments)

    def found(self, what: str, run, off: float = 0.0) -> float:
        """Time it and print a line. Returns µs."""
        us = self.clock.runs([run], REPLAYS).cold_us
        share = self.bytes / (us * 1e-6) / self.bandwidth
        print(f"{self.N} tokens, {what}: {us:.1f} µs, {share:.0%} of the bandwidth, off {off:.1e}", flush=True)
        return us

    def timed(self, tile: Tile) -> bool:
        """Whether the tile's result is right, or it does not fit."""
        with chosen(tile):
            try:
                y = self.run()
                off = float((y - self.right).norm() / self.right.norm())
                self.times[tile] = self.found(f"{tile.tokens} × {tile.stages} stages", self.run, off)
            except Exception as failure:  # a tile that does not fit
                said = f"{type(failure).__name__}: {str(failure).splitlines()[0][:80]}"
                print(f"{self.N} tokens, {tile.tokens} × {tile.stages} stages: {said}", flush=True)
                return True
        return off <= FAR

    def kernels(self) -> None:
        with chosen(min(self.times, key=self.times.get)):
            parts = [f"{name} {adds:.1f}" for name, _, adds in device_kernels(self.run)]
        print(f"{self.N} tokens, µs that each kernel adds: {', '.join(parts)}", flush=True)

    def beside(self, shared: tuple[PackedWeight, ...]) -> bool:
        """Whether sums with the shared expert are alike in either way, which are timed."""
        x, indices, routing, w13, w2, limit, _ = self.arguments
        self.bytes += bytes_of(*shared)
        run = lambda: triton.moe(x, indices, routing, w13, w2, shared, limit, True, True)
        results = []
        for most, where in ((0, "launches of its own"), (MOST_BESIDE, "the launches of the routed ones")):
            with patch.object(hopper_launch, "BESIDE", most):
                results.append(run().float())
                off = float((results[-1] - results[0]).norm() / results[0].norm())
                self.found(f"with a shared expert in {where}", run, off)
                parts = [f"{name} {adds:.1f}" for name, _, adds in device_kernels(run)]
            print(f"{self.N} tokens, µs that each kernel adds: {', '.join(parts)}", flush=True)
        return off <= FAR


def chosen(tile: Tile):
    """While it lasts, `experts` multiplies codes with this tile."""
    return patch.multiple(hopper_launch, STAGES={tile.tokens: tile.stages}, tile_tokens=lambda P, E: tile.tokens)


def main() -> int:
    args = asked(__doc__, "tiles", NUMBERS, 300.0)
    if args is None:
        return 2
    begun, wrong, clock, stacks = time.monotonic(), 0, Clock(), weights()
    bandwidth = (1 << 30) / read_times(clock, torch.zeros(1 << 28, dtype=torch.int32, device="cuda")).hot_us * 1e6
    print(f"this GPU reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    late = lambda: time.monotonic() - begun > args.seconds
    benches = {}
    for others in (False, True):
        for N in args.tokens:
            if late():
                print("not begun: the time was up")
                return int(bool(wrong))
            bench = benches.get(N) or benches.setdefault(N, Bench(N, stacks, clock, bandwidth))
            refused = unfit(bench.arguments[0], Routed(*bench.arguments[1:3], *(hold("experts", w) for w in stacks)))
            if refused:
                print(f"error: {refused.reason}", file=sys.stderr)
                return 2
            for tile in tiles(N)[1:] if others else tiles(N)[:1]:
                wrong += not late() and not bench.timed(tile)
    for bench in benches.values():
        if bench.times and not late():
            bench.kernels()
    shared = shared_expert()
    for bench in benches.values():
        if bench.N <= MOST_BESIDE and not late():
            wrong += not bench.beside(shared)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
