"""When a result is right: limits of rows and elements, NaN, codes, sets, bits."""

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.contract import BITS, CODES, SET, SUMS, Argument, Case, Contract, Output, Work
from dsv4.probes.kernel_audit import acceptance
from dsv4.probes.kernel_audit.acceptance import ANY, Truth, canaries, truth_of
from dsv4.probes.kernel_audit.errors import KernelAuditError


def contract(*rules: str, dtype: str = "float32") -> Contract:
    """y = 2x, with an output of each rule."""
    outputs = tuple(Output(f"y{i}", ("rows", "d"), dtype, "2x", rule) for i, rule in enumerate(rules))
    return Contract(
        *("twice", "y = 2x", (Argument("x", ("rows", "d"), "activation", "any"),), outputs),
        exact=lambda x: x.double() * 2,
        classes={"fp32": lambda x: x * 2, ANY: lambda x: x * 2},
        cases=lambda w, draw: (),
        work=lambda x: Work(0, 0, ""),
    )


def truth(exact, honest=None, rule=SUMS, scores=None, accuracy="fp32") -> Truth:
    honest = exact if honest is None else honest
    case = Case("a", "random", (scores if scores is not None else honest,))
    return Truth(contract(rule), case, accuracy, (exact,), (honest,))


@pytest.fixture
def rows():
    """(fp64 truth, an honest kernel's fp32 result with an error of 1e-6, the unit direction of that error)."""
    g = torch.Generator().manual_seed(1)
    exact = torch.randn(10, 64, generator=g, dtype=torch.float64)
    noise = torch.randn(10, 64, generator=g, dtype=torch.float64)
    noise *= exact.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
    return exact, (exact + 1e-6 * noise).float(), noise


@pytest.mark.parametrize("times,right", [(15, True), (17.5, False)])
def test_a_row_of_fp32_may_be_sixteen_times_as_wrong_as_the_honest_kernel(rows, times, right):
    exact, honest, noise = rows
    judged = truth(exact, honest).judge([(exact + times * 1e-6 * noise).float()])
    assert (judged.ratio <= 1) is right, judged
    assert judged.ratio == pytest.approx(times / 16, rel=0.1)


@pytest.mark.parametrize("times,right", [(3.6, True), (4.6, False)])
def test_a_row_of_bf16_may_be_four_times_as_wrong(rows, times, right):
    exact, _, noise = rows
    judged = truth(exact, (exact + 2e-3 * noise).float()).judge([(exact + times * 2e-3 * noise).float()])
    assert (judged.ratio <= 1) is right, judged


@pytest.mark.parametrize("n", [1, 2, 10, 11, 33])
def test_what_nine_in_ten_stay_below_is_the_quantile(n):
    values = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    assert torch.allclose(acceptance._of_nine_in_ten(values), values.quantile(0.9), rtol=1e-12)


def test_one_wrong_row_is_found_and_named(rows):
    exact, honest, noise = rows
    found = honest.clone()
    found[7] += (1e-3 * noise[7]).float()
    judged = truth(exact, honest).judge([found])
    assert judged.ratio > 1 and judged.place.startswith("y0[7]") and judged.what == "relative L2 of a row"


def test_one_wrong_element_is_found_where_its_row_is_long():
    g = torch.Generator().manual_seed(2)
    exact = torch.randn(10, 1 << 14, generator=g, dtype=torch.float64)
    honest = (exact + 1e-6 * torch.randn(exact.shape, generator=g, dtype=torch.float64)).float()
    found = honest.clone()
    found[3, 99] += 5e-4
    judged = truth(exact, honest).judge([found])
    assert judged.ratio > 1 and judged.what == "worst element of a row" and judged.place == "y0[3], element 99"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_must_be_where_they_belong(value):
    exact = torch.ones(3, 8, dtype=torch.float64)
    wrong = exact.float().clone()
    wrong[1, 2] = value
    assert truth(exact, exact.float()).judge([wrong]).ratio == float("inf")
    exact[1, 2] = value
    assert truth(exact, exact.float()).judge([wrong]).ratio <= 1
    judged = truth(exact, exact.float()).judge([torch.ones(3, 8)])
    # what is NaN in fp64 as well is undefined: a finite number may stand there
    assert (judged.ratio <= 1) is (value != value)


def test_a_row_of_zeros_must_be_zeros_where_the_honest_kernel_has_zeros(rows):
    exact, honest, _ = rows
    exact[4], honest[4] = 0, 0
    assert truth(exact, honest).judge([honest]).ratio <= 1
    wrong = honest.clone()
    wrong[4, 0] = 1e-9
    assert truth(exact, honest).judge([wrong]).ratio > 1


def test_the_form_of_results_is_held(rows):
    exact, honest, _ = rows
    one = truth(exact, honest)
    for wrong in ([], [None], [honest, honest], [honest[:5]], [honest.double()]):
        assert one.judge(wrong).ratio == float("inf")


def coded() -> torch.Tensor:
    """Numbers of FP8 that are not FP4: three bits of fraction each."""
    fractions = torch.tensor([1.125, 1.375, 1.625, 1.875], dtype=torch.float64)
    return fractions.repeat(4, 32)  # [4, 128], blocks of 32


def test_few_codes_may_be_the_next_one_and_none_may_be_two_away():
    exact = coded()
    near, far, many = exact.clone(), exact.clone(), exact.clone()
    near[0, :4] += 0.125
    far[0, 0] += 0.25
    many[:, :16] += 0.125  # 12.5 % of the values
    judged = [truth(exact, exact.float(), CODES).judge([t.float()]) for t in (exact, near, far, many)]
    assert [j.ratio <= 1 for j in judged] == [True, True, False, False], judged
    assert judged[2].what == "further away than the next code" and judged[3].what == "share of codes that differ"


def test_columns_that_are_not_coded_do_not_share_a_block_with_codes():
    """24 codes and 8 other numbers: a code may move, one of the others may not."""
    exact = coded()[:, :32].clone()
    exact[:, 24:] += 2.0**-9
    case = Case("a", "random", (exact.float(),), kept=8)
    one = Truth(contract(CODES), case, "fp32", (exact,), (exact.float(),))
    moved, other = exact.clone(), exact.clone()
    moved[0, 3] += 0.125
    other[2, 25] += 0.125
    assert one.judge([moved.float()]).ratio <= 1
    refused = one.judge([other.float()])
    assert refused.ratio > 1 and refused.place == "y0[2], element 25"
    assert replace(one, case=replace(case, kept=0)).judge([moved.float()]).ratio > 1


def test_a_set_may_come_in_any_order_and_not_with_another_index():
    exact = torch.tensor([[3, 1, 2], [5, 4, -1]])
    one = truth(exact, exact, SET)
    assert one.judge([exact.flip(-1)]).ratio <= 1
    for wrong in ([[3, 1, 7], [5, 4, -1]], [[3, 3, 2], [5, 4, -1]], [[3, 1, 2], [5, 4, 0]]):
        assert one.judge([torch.tensor(wrong)]).ratio > 1, wrong


def test_of_equal_scores_any_may_be_chosen_in_that_class_alone():
    scores = torch.tensor([[5.0, 4.0, 4.0, 1.0]])
    exact, other = torch.tensor([[0, 1]]), torch.tensor([[2, 0]])
    assert truth(exact, exact, SET, scores).judge([other]).ratio > 1
    ties = truth(exact, exact, SET, scores, ANY)
    assert ties.judge([other]).ratio <= 1
    for wrong in ([[0, 0]], [[0, 3]], [[0, 4]], [[0, -2]]):
        assert ties.judge([torch.tensor(wrong)]).ratio > 1, wrong
    equal = truth(other[:, :1].expand(1, 2), torch.tensor([[1, 2]]), SET, scores, ANY)
    assert equal.judge([torch.tensor([[1, 2]])]).ratio <= 1
    assert equal.judge([torch.tensor([[1, 1]])]).ratio > 1  # equal scores, one index twice


def test_what_lies_beside_a_set_is_compared_in_the_order_of_its_indices():
    index, values = torch.tensor([[7, 3, 5]]), torch.tensor([[0.7, 0.3, 0.5]])
    case = Case("a", "random", (values,))
    both = Truth(contract(SET, SUMS), case, "fp32", (index, values.double()), (index, values))
    assert both.judge([index.flip(-1), values.flip(-1)]).ratio <= 1
    assert both.judge([index.flip(-1), values]).ratio > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_exactly_one_wrong_bit_fails(dtype):
    exact = torch.arange(1, 25).view(3, 8).to(dtype)
    wrong = exact.clone()
    wrong.view(torch.uint8)[1, 0] ^= 1
    one = truth(exact, exact, BITS)
    assert one.judge([exact.clone()]).ratio == 0
    assert one.judge([wrong]).ratio > 1 and one.judge([wrong]).place.startswith("y0[1]")


def test_a_case_may_have_a_rule_of_its_own():
    exact = coded()
    one = truth(exact, exact.float(), BITS)
    near = exact.float().clone()
    near[0, 0] += 0.125
    assert one.judge([near]).ratio > 1
    assert replace(one, case=replace(one.case, rules={"y0": CODES})).judge([near]).ratio <= 1


def test_every_canary_fails_on_a_case_that_can_tell():
    g = torch.Generator().manual_seed(3)
    here, there = (torch.randn(4, 64, generator=g) for _ in range(2))
    cases = [truth_of(contract(SUMS), Case("a", "random", (x,)), "fp32") for x in (here, there)]
    found = {name: judged for name, judged, _ in canaries(*cases)}
    assert list(found) == ["zeros", "NaN", "echo", "other inputs", "lower precision"]
    for name, judged in found.items():
        assert judged is not None and judged.ratio > 1, name


def test_a_canary_that_cannot_fail_says_why():
    case = Case("a", "random", (torch.ones(2, 8),), exempt={"zeros": "a reason"})
    one = truth_of(contract(SUMS), case, "fp32")
    found = {name: (judged, why) for name, judged, why in canaries(one, one)}
    assert found["zeros"] == (None, "a reason")
    assert found["other inputs"][0] is None and "the same" in found["other inputs"][1]
    assert found["lower precision"][0] is None and "exactly" in found["lower precision"][1]


def test_an_unknown_accuracy_class_is_refused_in_one_line():
    with pytest.raises(KernelAuditError) as error:
        acceptance.truth_of(contract(SUMS), Case("a", "random", (torch.ones(1, 8),)), "bf16")
    assert "twice has no accuracy class 'bf16'; expected one of fp32" in str(error.value)
    assert "\n" not in str(error.value)
