"""Kernels on a GPU that several processes share by time: what arrives late there is otherwise always in time.

Attention whose splits were partly empty gave up to 27 wrong results of 800 in each of six processes, and none alone.
"""

import time
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from dsv4.probes.kernel_audit.clauses import shared
from dsv4.probes.kernel_audit.stops import Stops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROCESSES, CALLS = 6, 100


def wrong(form: str) -> int:
    """Results of attention in one kernel, of rows that see 0, 129 and 300 of 300 entries, that are not those of two
    kernels."""
    from dsv4.kernels.attention import hca_attention, triton, triton_plan
    from tests.kernels.test_triton_attention_sizes import hca

    args, found = hca(3, 1, 300, (form, form), seen=torch.tensor([[0], [129], [300]], device="cuda")), 0
    merging = triton.shared_out
    for tile in triton_plan.tile_shapes(False, form == "fp8", True, (9, 0)):
        for splits in (5, 10) if tile.copied else ():
            triton.plan = lambda *shape, how=(tile, splits): how
            triton.shared_out = lambda *shape: None
            wanted = hca_attention(*args, backend="triton")
            triton.shared_out = merging
            results = [hca_attention(*args, backend="triton") for _ in range(CALLS)]
            found += sum(not torch.equal(result, wanted) for result in results)
    return found


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="merging kernels need Hopper"
)
def test_attention_in_one_kernel_beside_other_processes():
    with get_context("spawn").Pool(PROCESSES) as pool:
        found = pool.map_async(wrong, ["bf16", "fp8"] * (PROCESSES // 2), 1).get(300)
    assert found == [0] * PROCESSES


def calls_that_wait(seconds: float = 1.5) -> tuple:
    """What `by_turns` finds of a call that waits twice for the device, as one that reads lengths does."""
    x = torch.ones(1 << 16, device="cuda")
    call = lambda arguments, templates: [x + (x.sum().item() - x.sum().item())]
    harness = SimpleNamespace(device=x.device, fresh=lambda arguments: lambda: arguments, ordered=list, call=call)
    return shared.by_turns(harness, (), (), seconds)


def test_stops_are_counted_beside_other_processes():
    """Other tests may use the device too: what is counted before is what is compared with."""

    def watched() -> tuple[int, float]:
        stops, begun = Stops(torch.device("cuda")), time.monotonic()
        while time.monotonic() - begun < 0.3:
            stops.watch()
        return stops.read()

    before, _ = watched()
    with shared.others("cuda"):
        beside, each = watched()
    assert beside >= max(5, 2 * before) and each > 1


def test_a_kernel_beside_calls_that_wait_for_the_device_is_stopped_too():
    """Each wait is as long as the turns of the others: 64 calls take a second, and a kernel that watched once in so
    many calls was stopped too rarely to count."""
    calls_that_wait(0.1)  # compiled
    with shared.others("cuda"):
        calls, differ, _, stops, each = calls_that_wait()
    assert differ == 0 and stops >= shared.LEAST and each > 1
