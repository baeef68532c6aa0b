"""Grouped-query attention, dense and of kept blocks, and the choice of blocks, to compile ahead of time, as their
launchers launch them at the shapes of Llama (32 query heads, 8 KV heads of 128), Qwen2.5 (28 and 4) and small
models."""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch

from dsv4.kernels.block_choice import block_bounds, block_means, page_bounds, sink_window
from dsv4.kernels.block_choice import triton as choice
from dsv4.kernels.block_summaries import triton as block_summaries
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.gather_attention import triton as gather
from dsv4.kernels.grouped_attention import Termination, triton_decode
from dsv4.kernels.grouped_attention import triton as grouped
from dsv4.kernels.indexer import triton_choose
from dsv4.kernels.widths import LLAMA, QWEN
from scripts.aot.linear import BF16, F32, MULTIPROCESSORS, launches

MODULES = choice, block_summaries, grouped, triton_decode, triton_choose
SMALL = replace(QWEN, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
MODELS = {  # widths, dtype, tokens of the cache, whether every way to call is compiled
    "llama": (LLAMA, BF16, 1 << 17, True),
    "qwen": (QWEN, BF16, 1 << 20, False),
    "small": (SMALL, BF16, 4096, False),
    "odd": (replace(SMALL, num_attention_heads=6, head_dim=80), BF16, 1024, False),
    "fp32": (QWEN, F32, 4096, False),
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


def _calls(w, dtype: torch.dtype, S: int, every: bool):
    """(label, launch) of one model's operations over a cache of S tokens."""

    def made(operation: str, **sizes) -> tuple:
        return contract_of(operation).production.drawn(w, 0, "meta", dtype, slots=S, **sizes)

    dense = lambda T, window, *rule: grouped.grouped_attention(
        *made("grouped_attention", tokens=T, window=window), *rule
    )
    gathered = lambda policy, *rule: gather.gather_attention(
        *made("gather_attention", block=policy.block, kept=policy.kept), *rule
    )
    chosen = lambda policy, ranked=False: choice.choose_blocks(
        *made("choose_blocks", policy=policy, by_importance=ranked)
    )

    def scored(policy):
        q, _, *held, by_importance = made("choose_blocks", policy=policy)
        choice.block_scores(q, *held)

    summarised = lambda block: block_summaries.summarise_blocks(*made("summarise_blocks", block=block))
    yield "decode", lambda: dense(1, None)
    yield "decode, ART", lambda: dense(1, None, ART)
    yield "prefill", lambda: dense(512, None)
    yield "summaries of 128", lambda: summarised(128)
    yield "gather", lambda: gathered(block_bounds())
    yield "gather, ART", lambda: gathered(block_bounds(), ART)
    yield "choice", lambda: chosen(block_bounds())
    if every:
        yield "decode in a window", lambda: dense(1, 1000)
        yield "prefill in a window", lambda: dense(512, 1000)
        yield "summaries of 16", lambda: summarised(16)
        yield "gather of pages", lambda: gathered(page_bounds())
        yield "gather of pages, ART", lambda: gathered(page_bounds(), ART)
        yield "choice of pages", lambda: chosen(page_bounds())
        yield "choice by importance", lambda: chosen(block_bounds(), True)
        yield "choice by means", lambda: chosen(block_means())
        yield "sink and window", lambda: chosen(sink_window())
        yield "scores", lambda: scored(block_bounds())
    if S >= 1 << 20:
        yield "choice of many pages", lambda: chosen(page_bounds(), True)
