"""Grouped-query attention, dense and of kept blocks, and the choice of blocks, to compile ahead of time, as their
launchers launch them at the shapes of Llama (32 query heads, 8 KV heads of 128), Qwen2.5 (28 and 4) and small
models."""

from contextlib import ExitStack
from unittest.mock import patch

import torch

from dsv4.kernels.block_choice import block_bounds, block_means, page_bounds, sink_window
from dsv4.kernels.block_choice import triton as choice
from dsv4.kernels.block_summaries import triton as block_summaries
from dsv4.kernels.gather_attention import triton as gather
from dsv4.kernels.grouped_attention import Termination, triton_decode
from dsv4.kernels.grouped_attention import triton as grouped
from dsv4.kernels.indexer import triton_choose
from scripts.aot.linear import BF16, F32, MULTIPROCESSORS, empty, launches

MODULES = choice, block_summaries, grouped, triton_decode, triton_choose
MODELS = {  # query heads, KV heads, width, dtype, tokens of the cache, whether every way to call is compiled
    "llama": (32, 8, 128, BF16, 1 << 17, True),
    "qwen": (28, 4, 128, BF16, 1 << 20, False),
    "small": (8, 2, 64, BF16, 4096, False),
    "odd": (6, 2, 80, BF16, 1024, False),
    "fp32": (28, 4, 128, F32, 4096, False),
}
ART = Termination()


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each kernel that differs."""
    found: dict = {}
    with ExitStack() as stack:
        for module in MODULES:
            for attribute, stand_in in (
                ("require_device", lambda *_: None),
                ("processors", lambda _: MULTIPROCESSORS),
                ("capability", lambda _: capability),
                ("dependent_launch", lambda _: capability >= (9, 0)),
            ):
                if hasattr(module, attribute):
                    stack.enter_context(patch.object(module, attribute, stand_in))
        for name, sizes in MODELS.items():
            for label, call in _calls(*sizes):
                for case in launches(f"grouped {name} {label}", call):
                    if not case[1].__module__.startswith("dsv4.kernels.indexer"):  # cases of its own
                        found.setdefault(repr((case[1].__name__, *case[2:])), case)
    return list(found.values())


def _calls(H: int, KV: int, D: int, dtype: torch.dtype, S: int, every: bool):
    """(label, launch) of one model's operations over a cache of S tokens."""
    keys, start = empty(1, KV, S, D, dtype=dtype), empty(1, dtype=torch.int64)
    q = lambda T: empty(1, T, H, D, dtype=dtype)
    listed = lambda n: empty(1, 1, KV, n, dtype=torch.int32)
    dense = lambda T, *rest: grouped.grouped_attention(q(T), keys, keys, start, *rest)
    gathered = lambda policy, *rest: gather.gather_attention(
        q(1), keys, keys, listed(policy.kept), start, None, 0.1, policy.block, *rest
    )
    pooled = lambda block: (empty(1, KV, S // block, D, dtype=dtype),) * 3
    chosen = lambda policy, ranked=False: choice.choose_blocks(q(1), KV, *pooled(policy.block), start, policy, ranked)
    yield "decode", lambda: dense(1, None, 0.1)
    yield "decode, ART", lambda: dense(1, None, 0.1, ART)
    yield "prefill", lambda: dense(512, None, 0.1)
    yield "summaries of 128", lambda: block_summaries.summarise_blocks(keys, start, 1, *pooled(128), 128)
    yield "gather", lambda: gathered(block_bounds())
    yield "gather, ART", lambda: gathered(block_bounds(), ART)
    yield "choice", lambda: chosen(block_bounds())
    if every:
        yield "decode in a window", lambda: dense(1, 1000, 0.1)
        yield "prefill in a window", lambda: dense(512, 1000, 0.1)
        yield "summaries of 16", lambda: block_summaries.summarise_blocks(keys, start, 1, *pooled(16), 16)
        yield "gather of pages", lambda: gathered(page_bounds())
        yield "gather of pages, ART", lambda: gathered(page_bounds(), ART)
        yield "choice of pages", lambda: chosen(page_bounds())
        yield "choice by importance", lambda: chosen(block_bounds(), True)
        yield "choice by means", lambda: chosen(block_means())
        yield "sink and window", lambda: chosen(sink_window())
        yield "scores", lambda: choice.block_scores(q(1), *pooled(128), start, block_bounds())
    if S >= 1 << 20:
        yield "choice of many pages", lambda: chosen(page_bounds(), True)
