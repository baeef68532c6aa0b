"""Triton's kernels against every case of every contract: in the interpreter on a host processor, on a GPU as they are.

The contracts state shapes, edges and inputs. The widths here are those that no tile divides.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.contract import outcome, rebuilt, tensors
from dsv4.kernels.widths import SMALL, Widths
from dsv4.probes.kernel_audit.scene import with_poison
from dsv4.probes.kernel_audit.subject import SubjectSpec, resolve
from tests.kernels.products import DEVICE, poison  # noqa: F401 (a fixture: fresh buffers hold NaN)
from tests.kernels.test_contracts import ALL, BATCHED, DTYPES, NARROW, truths, without_queries

WIDTHS = {
    "odd": Widths(72, 6, 40, 10, 40, 2, 20, 18, 5, 64, 17, 9, 3, 40, 1.5, hc_mult=3, hc_sinkhorn_iters=3),
    "narrow": replace(NARROW, index_n_heads=8),
    "wide": Widths(1030, 6, 512, 64, 96, 2, 18, 33, 17, 128, 16, 40, 6, 257, 1.5),
} | ({"small": SMALL} if DEVICE == "cuda" else {})
ROWS = "rms_norm", "rotate", "hadamard", "gated_pool", "query_heads", "latent", "index_queries", "pool_entries"
MADE = [
    pytest.param(*case.values, widths, id=f"{case.id} {widths}")
    for widths in WIDTHS
    for case in DTYPES
    if DEVICE == "cuda" or widths != "wide" or case.values[0] in ROWS  # the interpreter takes minutes of the others
]


def called(name: str, arguments: tuple) -> list[torch.Tensor | None]:
    """Results of Triton's kernel of the operation on copies of the arguments, in host memory. Arguments that it does
    not promise to write keep their bits."""
    contract, mine = ALL[name], [rebuilt(a, lambda t: t.to(DEVICE, copy=True)) for a in arguments]
    found = outcome(contract, resolve(SubjectSpec(name, "triton", DEVICE))(*mine), mine)
    for i, argument in enumerate(contract.arguments):
        if not argument.scratch and i not in contract.written:
            for before, after in zip(tensors(arguments[i]), tensors(mine[i]), strict=True):
                assert torch.equal(raw(before), raw(after.cpu())), argument.name
    return [None if t is None else t.cpu() for t in found]


def raw(t: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).contiguous().view(-1).view(torch.uint8)


@pytest.mark.few(each=lambda p: (p["name"], p["widths"] == "wide"))
@pytest.mark.parametrize("name,dtype,widths", MADE)
def test_every_case_is_within_its_limit_and_the_first_repeats_bit_for_bit(name, dtype, widths):
    """What may not be read is NaN."""
    found = truths(name, dtype, widths=WIDTHS[widths])
    for truth in found:
        judgement = truth.judge(called(name, with_poison(truth)))
        assert judgement.ratio <= 1, (truth.case.family, truth.case.label, judgement)
    first, again = (called(name, found[0].case.arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.every
@pytest.mark.parametrize("name", BATCHED)
def test_no_queries_give_an_empty_result(name):
    truth, arguments = without_queries(name)
    assert [t.shape for t in called(name, arguments)] == [(0, *t.shape[1:]) for t in truth.exact]
