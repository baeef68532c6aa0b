"""Compiles the kernels of `backend_matrix` in many processes before one process runs it on a GPU.

Triton takes a second to compile a kernel, one at a time, and the catalogue needs hundreds of kernels at a model's own
widths. Processes find each other's kernels in Triton's cache on disk. Nothing is checked here: an implementation that
fails here fails again in the probe, which reports it.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import torch

from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig
from dsv4.probes import families
from dsv4.probes.kernel_audit.harness import placed
from dsv4.probes.machine import usable_processors
from dsv4.probes.scenes.contract_cases import calls

# operations with many kernels come first, so that they are not last
HEAVY = ("moe", "experts", "linears", "linear", "shared_expert", "grouped_linear", "attention_inputs")
TURNS = 3  # pieces of each operation and dtype


class Piece(NamedTuple):
    """Every `TURNS`th case of an operation or composition, from the one of number `turn`."""

    name: str
    dtype: torch.dtype
    turn: int


def pieces(dtypes: Iterable[torch.dtype], tables: tuple[dict, dict]) -> list[Piece]:
    """Of operations and compositions, as `ProbedFamily.tables` gives them."""
    names = sorted({**tables[0], **tables[1]}, key=lambda name: name not in HEAVY)
    return [Piece(name, dtype, turn) for name in names for turn in range(TURNS) for dtype in dtypes]


def run_piece(config: ModelConfig | GQAConfig, piece: Piece, backend: str, device: str, seed: int) -> int:
    """The number of calls that returned. Results and errors are dropped."""
    torch.set_num_threads(1)
    operations, compositions = families.of(config).tables()
    mine, done = (operations | compositions)[piece.name].implementations.get(backend), 0
    if mine is None:
        return 0
    for arguments in islice(calls(piece.name, mine, config, piece.dtype, seed), piece.turn, None, TURNS):
        with suppress(Exception):
            mine(*placed(arguments, torch.device(device)))
            done += 1
    return done


def compile_ahead(
    configs: Iterable[ModelConfig | GQAConfig],
    dtypes: Iterable[torch.dtype],
    backend: str,
    device: str,
    seed: int,
    jobs: int | None = None,
) -> int:
    """Calls that were made, by `jobs` processes (None: one a usable processor). Nothing in a process that is itself one
    of many."""
    if parent_process() is not None:
        return 0
    dtypes = tuple(dtypes)
    work = [(config, piece) for config in configs for piece in pieces(dtypes, families.of(config).tables())]
    work.sort(key=lambda pair: pair[1].name not in HEAVY)
    with (
        suppress(BrokenProcessPool),
        ProcessPoolExecutor(min(jobs or usable_processors(), len(work)), get_context("spawn")) as pool,
    ):
        return sum(
            f.result() for f in [pool.submit(run_piece, config, piece, backend, device, seed) for config, piece in work]
        )
    return 0
