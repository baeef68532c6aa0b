"""Times of the index selection of whole prompts on a Hopper GPU: by codes (`kernels/indexer/triton_fp8.py`) beside the
present kernel.

    python scripts/tune_index.py [--tokens 1024,8192,32768,131072] [--seconds 200]

Queries are rounded to FP4, keys are FP4. For each length, of 48 queries: how far scores by codes are off beside fp32,
relative L2 norm, and the share of the entries with the best fp32 scores that each way selects. Then µs, cold L2: of the
present selection, of its parts by codes, and of selections by codes with other sizes of scratch memory and other
numbers of pages of keys in shared memory.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.contracts import productions
from dsv4.kernels.indexer import reference, triton, triton_fp8
from dsv4.kernels.indexer.contract import RATIO
from dsv4.kernels.indexer.triton_choose import choose, plan
from dsv4.kernels.widths import FLASH
from scripts.bench.timing import Clock
from scripts.bench.tuning import asked

SAMPLED, REPLAYS = 48, 10
SCRATCH, STAGES = (208, 96, 416), (8, 4, 12)  # MiB; pages; the first are tried with all of the other
ERROR, RECALL = 1e-3, 0.99  # of scores, at most; of selections by codes, at least


def main() -> int:
    args = asked(__doc__, "selections", (1024, 8192, 32768, 131072), 200.0)
    if args is None:
        return 2
    begun, wrong, clock = time.monotonic(), 0, Clock()
    for T in args.tokens:
        given = prompt(T)
        if not triton_fp8.takes(given[0], given[2]):
            print("error: no selection by codes on this GPU", file=sys.stderr)
            return 2
        wrong += not right(T, given)
        for name, run in (("present", partial(triton.select_entries, *given)), *parts(T, given), *ways(given)):
            if time.monotonic() - begun > args.seconds:
                print("not begun: the time was up")
                return int(bool(wrong))
            try:
                print(f"{T} tokens, {name}: {clock.runs([run], REPLAYS).cold_us:.1f} µs", flush=True)
            except Exception as failure:  # what does not fit
                print(f"{T} tokens, {name}: {type(failure).__name__}: {str(failure).splitlines()[0][:80]}", flush=True)
    return int(bool(wrong))


def prompt(T: int) -> tuple:
    """Arguments of `select_entries` without the hint. Fewer entries than are selected, of a short prompt, would have no
    scores, so that it selects at most half of them."""
    sizes = dict(keys="fp4", entries=T // RATIO, prompt=True, k=min(FLASH.index_topk, T // RATIO // 2))
    *given, _ = productions()["select_entries"].drawn(FLASH, 0, "cuda", **sizes)
    return tuple(given)


def by_codes(given: tuple, scratch: int = SCRATCH[0], stages: int = STAGES[0]) -> torch.Tensor:
    with ExitStack() as changes:
        for where, name, value in (
            (triton, "CODED_PAIRS", 1),
            (triton, "CODED_QUERIES", 1),
            (triton, "CODES_SCRATCH_BYTES", scratch << 20),
            (triton_fp8, "STAGES", stages),
        ):
            changes.enter_context(patch.object(where, name, value))
        return triton.select_entries(*given, True)


def right(T: int, given: tuple) -> bool:
    """Print how far scores and selections are off; whether that is little."""
    q, weights, keys, visible, k = given
    t = torch.linspace(0, T - 1, SAMPLED, device="cuda").long()
    sampled = q[:, t], weights[:, t], keys, visible[:, t]
    wanted = reference.index_scores(*sampled)
    found = torch.full_like(wanted, float("-inf"))
    triton_fp8.launch_codes(*sampled[:2], triton_fp8.coded_keys(keys), sampled[3], found, found.shape[-1])
    there = wanted.isfinite()
    error = float((found - wanted)[there].norm() / wanted[there].norm())
    alike = torch.equal(there, found.isfinite())
    best = reference.topk_entries(wanted, k)
    now, codes = (share(best, way[:, t]) for way in (triton.select_entries(*given), by_codes(given)))
    print(f"{T} tokens: scores off {error:.1e}, recall {now:.5f} now, {codes:.5f} by codes", flush=True)
    return alike and error < ERROR and codes > RECALL


def share(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Of entries wanted int64 [B, T, k], −1 where there are fewer, those that were found."""
    there = (wanted.unsqueeze(-1) == found.unsqueeze(-2)).any(-1)
    return float(there[wanted >= 0].float().mean())


def parts(T: int, given: tuple) -> Iterator[tuple[str, Callable]]:
    """What a selection by codes of a prompt consists of. Of queries, scores and their selection, the last of as many
    queries as have room at once: these see the most entries."""
    q, weights, keys, visible, k = given
    yield "codes of keys", partial(triton_fp8.coded_keys, keys)
    coded, n = triton_fp8.coded_keys(keys), keys.count
    rows = triton.codes_scratch(n) // (4 * triton._width(n))
    last = slice(T - triton._chunk_of_codes(1, T, rows, q.device)[1], T)
    q, weights, visible = q[:, last], weights[:, last], visible[:, last]
    N = q.shape[1]
    scores = torch.empty(1, N, triton._width(n), dtype=torch.float32, device="cuda")
    how, out = plan(N, n, k), torch.empty(1, N, k, dtype=torch.int64, device="cuda")
    known = k if how.by_number else 0
    yield f"codes of the last {N} queries", partial(triton_fp8.coded_queries, q, weights, visible, n, known)
    run = partial(triton_fp8.launch_codes, q, weights, coded, visible, scores, n, known)
    yield f"codes of the last {N} queries and scores", run
    run()
    select = partial(choose, how, scores, n, k, visible, out, scored=not how.by_number)
    yield f"selection by scores of the last {N} queries ({how.method})", select


def ways(given: tuple) -> Iterator[tuple[str, Callable]]:
    """(name, selection by codes) of the sizes that are tried."""
    tried = [(SCRATCH[0], stages) for stages in STAGES] + [(scratch, STAGES[0]) for scratch in SCRATCH[1:]]
    for scratch, stages in tried:
        yield f"by codes, {scratch} MiB, {stages} pages", partial(by_codes, given, scratch, stages)


if __name__ == "__main__":
    sys.exit(main())
