"""Compiles the kernels of `backend_matrix` in many processes before one process runs it on a GPU.

Triton takes a second to compile a kernel, one at a time, and the catalogue needs hundreds of kernels at a model's own
widths. Processes find each other's kernels in Triton's cache on disk. Nothing is checked here: an implementation that
fails here fails again in the probe, which reports it.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import torch

from dsv4.config import ModelConfig
from dsv4.gqa.config import GQAConfig
from dsv4.gqa.model import GQA_COMPOSITIONS
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.case_inputs import Inputs
from dsv4.probes.composition_cases import composition_cases
from dsv4.probes.machine import usable_processors
from dsv4.probes.operation_cases import operation_cases

# operations with many kernels come first, so that they are not last
HEAVY = ("moe", "experts", "linears", "linear", "shared_expert", "grouped_linear", "attention_inputs")


class Piece(NamedTuple):
    """All cases of one operation or composition for so many tokens."""

    name: str
    dtype: torch.dtype
    tokens: int


def tables_of(config: ModelConfig | GQAConfig) -> tuple[dict, dict]:
    """Operations and compositions that a model of this config binds."""
    return (GQA_OPERATIONS, GQA_COMPOSITIONS) if isinstance(config, GQAConfig) else (OPERATIONS, COMPOSITIONS)


def pieces(
    dtypes: Iterable[torch.dtype], tokens: Iterable[int], tables: tuple[dict, dict] = (OPERATIONS, COMPOSITIONS)
) -> list[Piece]:
    names = sorted({**tables[0], **tables[1]}, key=lambda name: name not in HEAVY)
    return [Piece(name, dtype, n) for name in names for n in tokens for dtype in dtypes]


def run_piece(config: ModelConfig | GQAConfig, piece: Piece, backend: str, device: str, seed: int) -> int:
    """The number of calls that returned. Results and errors are dropped."""
    from dsv4.probes.backend_matrix import results

    torch.set_num_threads(1)
    (operations, compositions), cases = tables_of(config), operation_cases
    operation = operations.get(piece.name)
    if operation is None:
        operation, cases = compositions[piece.name], composition_cases
    mine, done = operation.implementations.get(backend), 0
    if mine is None:
        return 0
    for case in cases(piece.name, Inputs(config, piece.tokens, piece.dtype, seed)):
        with suppress(Exception):
            results(mine, case, torch.device(device))
            done += 1
    return done


def compile_ahead(
    configs: Iterable[ModelConfig | GQAConfig],
    dtypes: Iterable[torch.dtype],
    tokens: Iterable[int],
    backend: str,
    device: str,
    seed: int,
    jobs: int | None = None,
) -> int:
    """Calls that were made, by `jobs` processes (None: one a usable processor). Nothing in a process that is itself one
    of many."""
    if parent_process() is not None:
        return 0
    dtypes, tokens = tuple(dtypes), tuple(tokens)
    work = [(config, piece) for config in configs for piece in pieces(dtypes, tokens, tables_of(config))]
    work.sort(key=lambda pair: pair[1].name not in HEAVY)
    with (
        suppress(BrokenProcessPool),
        ProcessPoolExecutor(min(jobs or usable_processors(), len(work)), get_context("spawn")) as pool,
    ):
        return sum(
            f.result() for f in [pool.submit(run_piece, config, piece, backend, device, seed) for config, piece in work]
        )
    return 0
