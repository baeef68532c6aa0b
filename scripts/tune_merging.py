"""Times of attention over few queries on a Hopper GPU: by two kernels, and by one whose programs merge.

    python scripts/tune_merging.py [--only REGEX] [--seconds 250] [--jobs 8] [--alone]

Every way of tiling, splitting and sharing columns that fits is compiled by `jobs` processes, run, held against the
reference and against two kernels that split alike (the same bits), and timed, cold L2. --alone: without a cooperative
launch. A kernel that takes more than a minute ends the process.
"""

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.attention import reference, triton, triton_plan
from dsv4.kernels.attention.triton_plan import Tile
from scripts.bench.timing import Clock
from scripts.tune_attention import WINDOW, D, H, pool

REPLAYS, PATIENCE = 30, 60
TILES = (64, 8), (32, 8), (32, 4)  # keys and warps
CASES = {
    "CSA fp8 B1": ("fp8", 1, 512, True),
    "CSA fp8 B8": ("fp8", 8, 512, True),
    "CSA fp8 B4": ("fp8", 4, 512, True),
    "HCA fp8 8K B1": ("fp8", 1, 64, False),
    "HCA fp8 8K B8": ("fp8", 8, 64, False),
    "HCA fp8 1M B1": ("fp8", 1, 8192, False),
    "CSA bf16 B1": ("bf16", 1, 512, True),
    "CSA bf16 B8": ("bf16", 8, 512, True),
    "CSA bf16 B4": ("bf16", 4, 512, True),
    "HCA bf16 8K B1": ("bf16", 1, 64, False),
    "HCA bf16 1M B1": ("bf16", 1, 8192, False),
}  # rows, queries, entries, whether they are listed


class Choice(NamedTuple):
    """parts: 0 of two kernels."""

    tile: Tile
    splits: int
    parts: int

    def __str__(self) -> str:
        how = f"one kernel, {self.parts} parts" if self.parts else "two kernels"
        return f"{self.tile.heads} × {self.tile.keys} keys, {self.tile.warps} warps, {self.splits} splits, {how}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: kernels are timed on a CUDA device; there is none", file=sys.stderr)
        return 2
    names = [name for name in CASES if re.search(args.only, name)]
    tasks = [(name, choice, args.alone) for name in names for choice in choices(name)]
    begun, wrong = time.monotonic(), 0
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as workers:
        list(workers.map(once, tasks))
    print(f"{len(tasks)} kernels or pairs were compiled in {time.monotonic() - begun:.0f} s", flush=True)
    clock = Clock()
    for name in names:
        if time.monotonic() - begun > args.seconds:
            print("not begun: the time was up")
            break
        wrong += case(name, clock, args.alone)
    return int(bool(wrong))


def case(name: str, clock: Clock, alone: bool) -> int:
    """Prints a line a choice; the number of those that are wrong."""
    run, exact, planned = drawn(name)
    right, wrong, of_two = exact(), 0, {}
    print(f"{name}: planned {planned}", flush=True)
    for choice in choices(name):
        signal.alarm(PATIENCE)
        with chosen(choice, alone):
            out = run()
            off = float((out.float() - right).abs().max() / right.abs().max())
            taken = clock.runs([run], REPLAYS).cold_us
            again = run()
        signal.alarm(0)
        two = of_two.setdefault(choice[:2], out)
        alike = torch.equal(out, two) and torch.equal(out, again)
        wrong += not (off < 0.01 and alike)
        print(f"  {taken:6.2f} µs  {choice}{'' if alike else ', OTHER BITS'}, off {off:.1e}", flush=True)
    return wrong


def choices(name: str) -> Iterator[Choice]:
    """Two kernels before one, for each tile and number of splits."""
    form, N, K, _ = CASES[name]
    one = triton_plan.tile_shapes(False, form == "fp8", True, (9, 0))
    narrow, copied = one[0], [Tile(64, keys, warps, 2, 0, 0, copied=True) for keys, warps in TILES]
    for tile in (narrow, *copied):
        tiles, most = -(-WINDOW // tile.keys) + -(-K // tile.keys), processors() // N
        each = sorted({-(-tiles // splits) for splits in range(2, min(tiles, most) + 1)})
        for runs in each[: 1 if tile is narrow else 2]:
            splits = -(-tiles // runs)
            fits = [parts for parts in (8, 4, 2, 1) if N * splits * parts <= processors()]
            for parts in (0, *(fits if tile.copied and splits <= triton_plan.SPLITS else ())):
                if parts > 1 or tile.warps == 8 or tile is narrow:  # the others need too many registers
                    yield Choice(tile, splits, parts)


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def chosen(choice: Choice, alone: bool) -> ExitStack:
    """While it is entered, every call is shared out so."""
    stack, given = ExitStack(), triton.shared_out
    stack.enter_context(patch.object(triton, "plan", lambda *shape: choice[:2]))
    stack.enter_context(patch.object(triton_plan, "PARTS", choice.parts))
    stack.enter_context(patch.object(triton, "shared_out", given if choice.parts else lambda *shape: None))
    stack.enter_context(patch.object(triton, "COOPERATIVE", not alone))
    return stack


def once(task: tuple[str, Choice, bool]) -> None:
    """Compile it, in a process of its own."""
    name, choice, alone = task
    signal.alarm(2 * PATIENCE)
    with chosen(choice, alone):
        drawn(name)[0]()
    torch.cuda.synchronize()
    signal.alarm(0)


def drawn(name: str) -> tuple[Callable, Callable, str]:
    """(run, the reference in fp32, what is planned) of a case."""
    form, N, K, listed = CASES[name]
    torch.manual_seed(0)
    made = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    q, rows, sink = made(N, 1, H, D), made(N * WINDOW, D), torch.randn(H, device="cuda")
    window = torch.arange(N * WINDOW, device="cuda").view(N, WINDOW)
    count = 4096 if listed else K
    entries = made(N, count, D)
    packed = pool if form == "fp8" else lambda given: given
    planned = triton_plan.plan(N, H, D, WINDOW, K, False, form == "fp8", True, (9, 0), processors())
    said = f"{planned[0][:4]}, {planned[1]} splits"
    said += f", {triton_plan.shared_out(*planned, N, H, WINDOW, K, processors())}"
    if listed:
        selected = torch.rand(N, count, device="cuda").topk(K, -1).indices
        selected += torch.arange(N, device="cuda")[:, None] * count
        given = q[:, 0], packed(rows), window, packed(entries.view(-1, D)), selected, sink, D**-0.5
        return lambda: triton.sparse_attention(*given), exactly(reference.sparse_attention, given), said
    runs = packed(entries.view(-1, D))
    if form == "fp8":
        runs = runs._replace(data=runs.data.view(N, -1, runs.data.shape[-1]), count=count)
    seen = torch.full((N, 1), K, device="cuda")
    given = q, packed(rows), window, runs if form == "fp8" else entries, seen, sink, D**-0.5
    return lambda: triton.hca_attention(*given), exactly(reference.hca_attention, given), said


def exactly(operation: Callable, given: tuple) -> Callable[[], torch.Tensor]:
    return lambda: operation(given[0].float(), *given[1:])


if __name__ == "__main__":
    sys.exit(main())
