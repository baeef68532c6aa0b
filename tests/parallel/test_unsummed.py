"""Sums over ranks that are left to the kernel that reads them, in processes that share memory of the host: bits are
those of an exchange by itself, and both kinds follow each other."""

import os
import time

import pytest
import torch

from dsv4.kernels.collectives.triton_one_shot import BLOCK, OneShot
from dsv4.kernels.collectives.unsummed import Unsummed, sum_now
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.fusions.triton_step import mhc_post_head_norm
from dsv4.kernels.hyper_connections.triton import mhc_post_pre_norm
from tests.parallel.test_collectives import in_order, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs: tests/gpu/test_ranks.py")
PROCESSORS, STREAMS, EACH = 132, 4, 3
# (tokens, columns, dtype): blocks that are full and not, and begin within a token; one program of tokens and several;
# too many tokens
CALLS = [
    (1, 64, torch.bfloat16),
    (7, 80, torch.bfloat16),
    (2, 160, torch.float32),
    (16, 64, torch.bfloat16),
    (17, 64, torch.bfloat16),
    (3, 32, torch.bfloat16),
]
FORMS = "numbers", "experts by width", "experts by expert", "routed experts alone"


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part_of(rank: int, call: int, form: str) -> torch.Tensor | ExpertRows:
    """What a rank has of the sum: numbers, or experts' rows; the sizes of ranks' numbers differ."""
    N, d, dtype = CALLS[call]
    seed, large = 100 * call + 10 * rank, 10.0**rank
    if form == "numbers":
        return drawn(seed, N, d).mul(large)
    rows = drawn(seed, N * EACH, d).mul(large).to(dtype)
    indices = torch.arange(N * EACH).view(N, EACH) % 5
    if form == "experts by expert":
        indices = indices.masked_fill((indices + rank) % 2 == 0, -1)
        rows[indices.flatten() < 0] = float("nan")  # never written
    shared = None if form == "routed experts alone" else drawn(seed + 1, N, d)
    return ExpertRows(rows, indices, shared)


def alone(part: torch.Tensor | ExpertRows) -> torch.Tensor:
    """The rank's part in torch: fp32 [N, d]."""
    if isinstance(part, torch.Tensor):
        return part
    N, d = part.shape
    total = torch.zeros(N, d)
    for slot in range(EACH):
        row = part.rows.view(N, EACH, d)[:, slot].float()
        total = total + row.masked_fill(part.indices[:, slot, None] < 0, 0.0)
    return total if part.shared is None else total + part.shared.float()


def connection(call: int) -> tuple[list[torch.Tensor], tuple, tuple]:
    """(streams, post, comb), and what follows them in `mhc_post_pre_norm` and in `mhc_post_head_norm`."""
    (N, d, dtype), n = CALLS[call], STREAMS
    g = lambda i, *shape: drawn(7000 + 10 * call + i, *shape)
    merged = [g(0, N, n, d).to(dtype), g(1, N, n), g(2, N, n, n)]
    weight, M = g(3, d).to(dtype), 2 * n + n * n
    pre = g(4, M, n * d), g(5, 3), g(6, M), 3, 1e-6, 1e-6, weight, 1e-6
    head = g(4, n, n * d), g(5, 1), g(6, n), 1e-6, 1e-6, weight, 1e-6
    return merged, pre, head


def rank_of(rank: int, size: int, buffers, processors: int, errors) -> None:
    """All calls of a rank, at its own pace; between two, exchanges by themselves."""
    try:
        torch.set_num_threads(1)
        group, pace = OneShot(rank, [t.data_ptr() for t in buffers], torch.device("cpu")), drawn(rank, 1000)
        group.processors, exchanges, run = processors, [], group._run
        group._run = lambda *args: exchanges.append(args) or run(*args)
        for call, (N, _, dtype) in enumerate(CALLS):
            if pace[call] > 0.5:
                time.sleep(0.02)
            (streams, *mixing), pre, head = connection(call)
            for form in (FORMS[call % 4], FORMS[(call + 2) % 4]):
                told = f"{form} of call {call}"
                mine = part_of(rank, call, form)
                wanted = in_order([alone(part_of(r, call, form)) for r in range(size)]).to(dtype)
                later = Unsummed(mine, dtype, group)
                assert torch.equal(sum_now(later), wanted), f"sum of {told}"
                run_one, given = (mhc_post_head_norm, head) if call % 3 == 1 else (mhc_post_pre_norm, pre)
                exchanges.clear()
                found = run_one(later, streams, *mixing, *given)
                assert len(exchanges) == (N > 16 or not processors), f"{len(exchanges)} exchanges in {told}"
                for got, right in zip(found, run_one(wanted, streams, *mixing, *given), strict=True):
                    assert torch.equal(got, right), f"{run_one.__name__} of {told}"
            n = (3, 700, 2 * BLOCK)[call % 3]
            given = [drawn(9000 + 10 * call + r, n) for r in range(size)]
            assert torch.equal(group.sum(given[rank], dtype), in_order(given).to(dtype)), f"sum after call {call}"
            assert torch.equal(group.gather(given[rank]), torch.stack(given)), f"parts after call {call}"
    except BaseException as failure:
        errors.put(f"rank {rank}: {type(failure).__name__}: {failure}")
        os._exit(1)  # the others wait for this one


@pytest.mark.parametrize("size, processors", [(2, PROCESSORS), (3, PROCESSORS), (2, 0)])
def test_a_sum_has_its_bits_whoever_takes_it(size, processors):
    run_ranks(rank_of, size, OneShot.nbytes(size), processors)


def test_a_kernel_joins_the_exchange_if_its_programs_run_together():
    group = OneShot(0, [0], torch.device("cpu"), PROCESSORS)
    assert group.joins(2 * PROCESSORS, 4, BLOCK) and not group.joins(2 * PROCESSORS + 1, 4, BLOCK)
    assert group.joins(PROCESSORS, 8, 1) and not group.joins(PROCESSORS + 1, 8, 1)
    assert not group.joins(1, 16, 1) and not group.joins(1, 4, BLOCK + 1)
    assert not OneShot(0, [0], torch.device("cpu"), 1000).joins(513, 4, 1)  # epochs
