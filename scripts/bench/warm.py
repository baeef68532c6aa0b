"""Kernels that rounds of speculation launch, compiled by many processes before one process is timed.

A cold Triton compiles a second a kernel, one at a time; rounds of nine sizes in three batches take hundreds. What one
process has compiled the others find in Triton's cache on disk. Each has a model of a few layers of the same widths,
which share their experts: what is compiled depends on how many experts there are, and on which kinds of layers, not on
how many. Nothing is judged: what fails here fails again where it counts.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from unittest.mock import patch

from dsv4.model.deepseek_v4 import Model
from dsv4.probes.machine import usable_processors
from dsv4.speculation import MAX_DRAFTS, Static, on_device

LAYERS = 5  # Flash's first: two windows, CSA, HCA, CSA; three of them route by hash
# of such a model (6.0 GiB: one layer's experts, embeddings, head), its context and caches on the device: as many
# processes as fit
BYTES = 9 << 30

_model: Model | None = None


def small_dummy(widths: str, backend: str = "triton", device: str = "cuda") -> Model:
    """The first layers of `widths` and the MTP block, all with the experts of the first."""
    from torch import nn

    from dsv4.model import dummy

    real = dummy.published_model

    def without(*given, **more) -> Model:
        model = real(*given, **more)
        for block in (*model.layers, *model.mtp)[1:]:
            # until there are some: shared now, they would get memory once for each layer
            block.ffn.experts = nn.Identity()
        return model

    with patch.object(dummy, "published_model", without):
        model = dummy.load_dummy(
            widths, LAYERS, backend=backend, device=device, cache="fp8", index_cache="fp4", mtp=True
        )
    for block in (*model.layers, *model.mtp)[1:]:
        block.ffn.experts = model.layers[0].ffn.experts
    return model


def _begin(load: Callable[[], Model]) -> None:
    import torch

    global _model
    torch.set_num_threads(1)
    _model = load()


def _round(batch: int, size: int, context: int) -> None:
    import torch

    from scripts.bench.speculation_gpu import traced

    rounds = traced(
        _model,
        batch,
        context,
        4 * (MAX_DRAFTS + 2),
        on_device(Static(size), batch, _model.device),
        [size or MAX_DRAFTS],
    )
    with torch.inference_mode():
        rounds._round(size)
        for n in () if size else rounds.catch_up_widths:
            rounds._catch_up(n)


def warm(
    load: Callable[[], Model], batches: Sequence[int], context: int, jobs: int, seconds: float = 150.0
) -> tuple[int, float]:
    """Rounds of every size that were run, and the seconds it took; what is not done within `seconds` is left to the
    caller."""
    begun, done = time.monotonic(), 0
    work = [(batch, size) for size in range(MAX_DRAFTS, -1, -1) for batch in batches]
    pool = ProcessPoolExecutor(min(jobs, len(work)), get_context("spawn"), _begin, (load,))
    try:
        with suppress(BrokenProcessPool, TimeoutError):
            for future in as_completed([pool.submit(_round, *one, context) for one in work], timeout=seconds):
                done += future.exception() is None
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
    return done, time.monotonic() - begun


def warm_device(widths: str, batches: Sequence[int], context: int) -> tuple[int, float]:
    """`warm` on the current GPU, by as many processes as its memory and the processors take."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return warm(partial(small_dummy, widths), batches, context, max(1, min(usable_processors() - 1, free // BYTES)))
