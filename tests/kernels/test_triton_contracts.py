"""Triton's kernels against every case of every contract: in the interpreter on a host processor, on a GPU as they are.

The contracts state shapes, edges and inputs. The widths here are those that no tile divides.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.contract import outcome, rebuilt
from dsv4.kernels.widths import SMALL, Widths
from dsv4.probes.kernel_audit.subject import SubjectSpec, resolve
from tests.kernels.products import DEVICE, poison  # noqa: F401 (a fixture: fresh buffers hold NaN)
from tests.kernels.test_contracts import ALL, DTYPES, NARROW, truths

WIDTHS = {
    "odd": Widths(72, 6, 40, 10, 40, 2, 20, 18, 5, 64, 17, 9, 3, 40, 1.5, hc_mult=3, hc_sinkhorn_iters=3),
    "narrow": replace(NARROW, index_n_heads=8),
} | ({"small": SMALL} if DEVICE == "cuda" else {})  # the interpreter takes minutes of them


def called(name: str, case) -> list[torch.Tensor | None]:
    """Results of Triton's kernel of the operation on copies of a case's arguments, in host memory."""
    arguments = [rebuilt(a, lambda t: t.to(DEVICE, copy=True)) for a in case.arguments]
    found = outcome(ALL[name], resolve(SubjectSpec(name, "triton", DEVICE))(*arguments), arguments)
    return [None if t is None else t.cpu() for t in found]


@pytest.mark.few("name", widths=["odd"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name,dtype", DTYPES)
def test_every_case_is_within_its_limit_and_the_first_repeats_bit_for_bit(name, dtype, widths):
    found = truths(name, dtype, widths=WIDTHS[widths])
    for truth in found:
        judgement = truth.judge(called(name, truth.case))
        assert judgement.ratio <= 1, (truth.case.family, truth.case.label, judgement)
    first, again = (called(name, found[0].case) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
