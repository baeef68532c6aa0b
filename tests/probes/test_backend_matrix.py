"""Every operation and every fused composition: equal implementations are green, and a wrong one is red in its own rows
only."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.kernels import operations
from dsv4.kernels.contracts import contracts
from dsv4.kernels.dispatch import DispatchLedger, Operation, bind
from dsv4.kernels.drawing import Draw
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import OPERATIONS
from dsv4.kernels.quantize import simulate_fp8_blocks
from dsv4.kernels.widths import Widths
from dsv4.probes.catalogue import backend_matrix
from dsv4.probes.catalogue.backend_matrix import BackendMatrix, differing, error_of, most_of
from dsv4.probes.kernel_audit.harness import own
from dsv4.probes.result import Status
from dsv4.probes.scenes.contract_cases import cases_beside, contract_cases, size_of
from dsv4.probes.subjects.ours import OurSubject


@pytest.fixture(scope="module")
def subject(official):
    opened = OurSubject(official, "qat", "reference")
    opened.model.backend = "cpu"  # what it bound stays the reference; the probe asks for what a cpu backend runs
    return opened


def planted(monkeypatch, name: str, change) -> None:
    """On the backend `cpu`, operation or composition `name` is change(the reference)."""
    if name in OPERATIONS:
        op = OPERATIONS[name]
        monkeypatch.setitem(
            OPERATIONS,
            name,
            Operation(
                name, {"reference": op.implementations["reference"], "cpu": change(op.implementations["reference"])}
            ),
        )
    else:
        held = COMPOSITIONS[name]
        whole = partial(held.default, bind(OPERATIONS, "reference", DispatchLedger()))
        monkeypatch.setitem(COMPOSITIONS, name, replace(held, implementations={"cpu": change(whole)}))


def off(value):
    """The first result, a little off; picks that are not the best."""
    if isinstance(value, tuple):
        return off(value[0]), *value[1:]
    return value * 1.1 if value.is_floating_point() else value.clamp(min=1) - 1


def wrong(name: str, real):
    if name == "write_rows":
        return lambda rows, slots, values: real(rows, slots, values * 1.1)
    if name == "store_rows":
        return lambda raw, *rest: real(raw * 1.1, *rest)
    if name == "rotate":
        return lambda x, cis: real(x.mul_(1.1), cis)
    return lambda *args: off(real(*args))


@pytest.mark.few(name=["topk_entries", "write_rows", "latent"])
@pytest.mark.parametrize("name", [*OPERATIONS, *COMPOSITIONS])
def test_each_has_inputs_at_which_a_fault_shows(subject, monkeypatch, name):
    planted(monkeypatch, name, lambda real: lambda *args: real(*args))
    mine = [c for c in BackendMatrix().run(subject) if c.part == name]
    assert len(mine) > 3 and {c.status for c in mine} == {Status.PASS}, [c for c in mine if c.status is not Status.PASS]
    assert any("bfloat16" in c.where for c in mine) or name in ("gated_pool", "topk_entries")
    planted(monkeypatch, name, lambda real: wrong(name, real))
    found = BackendMatrix().run(subject)
    assert {c.part for c in found if c.status is Status.FAIL} == {name}


def test_what_is_overwritten_may_not_be_returned_as_another_tensor(subject, monkeypatch):
    """Layers take what `rotate` returns, its contract what it wrote."""
    planted(monkeypatch, "rotate", lambda real: lambda x, cis: 1.1 * real(x, cis))
    mine = [c for c in BackendMatrix().run(subject) if c.part == "rotate"]
    assert mine and all(c.status is Status.ERROR and "x is returned as another tensor" in c.note for c in mine)


FORMATS = ("dense", "fp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", ["linear", "grouped_linear", "shared_expert", "experts", "moe", "linears"])
def test_every_format_of_weights_is_among_them(subject, name):
    widths, dtype = Widths.of(subject.config), torch.bfloat16
    cases = list(contract_cases(name, widths, dtype, 0)) or list(cases_beside(name, subject.config, dtype, 0))
    labels = " ".join(case.label for case in cases)
    assert all(how in labels for how in FORMATS)
    assert name == "grouped_linear" or labels.count("simulated") + labels.count("activations in FP8") >= 3


@pytest.mark.few(name=["linear", "gather_attention"])
@pytest.mark.parametrize("name", list(contracts()))
def test_the_subset_has_each_family_and_each_size_of_a_contract(subject, name):
    contract, widths = contracts()[name], Widths.of(subject.config)
    every = list(contract.cases(widths, Draw(0, contract.dtypes[0])))
    chosen = list(contract_cases(name, widths, contract.dtypes[0], 0))
    assert {c.family for c in chosen} == {c.family for c in every}
    assert {size_of(c) for c in chosen} == {size_of(c) for c in every}
    labels = [(c.family, c.label) for c in every]
    assert all((c.family, c.label) in labels for c in chosen) and len(chosen) <= len(every)


def test_a_scale_of_fewer_columns_is_red(subject, monkeypatch):
    """Activations through E4M3 by a scale for 32 columns instead of 128: as close as rounding, but where a few columns
    are large."""

    def change(real):
        return lambda x, w, simulate: real(simulate_fp8_blocks(x, 32) if simulate else x, w, False)

    planted(monkeypatch, "linear", change)
    found = [c for c in BackendMatrix().run(subject) if c.part == "linear" and c.status is Status.FAIL]
    in_bf16 = [c.where for c in found if "bfloat16" in c.where]
    assert in_bf16 and all("large columns" in where for where in in_bf16)


def test_entries_taken_for_one_packed_block_are_red(subject, monkeypatch):
    def change(real):
        def attend(q, window, near, entries, *rest):
            if isinstance(entries, torch.Tensor):
                B, n, D = entries.shape
                entries = entries.as_strided((B, n, D), (n * D, D, 1))
            return real(q, window, near, entries, *rest)

        return attend

    planted(monkeypatch, "hca_attention", change)
    found = [c for c in BackendMatrix().run(subject) if c.status is Status.FAIL]
    assert {(c.part, c.where.split(", ")[-1]) for c in found} == {("hca_attention", "rows of longer buffers")}


@pytest.mark.few("name", name=["latent", "moe", "linears"])
@pytest.mark.parametrize(
    "name,drop",
    [
        ("latent", lambda *a: (*a[:-1], False)),
        ("index_queries", lambda *a: (*a[:-1], False)),
        ("pool_entries", lambda *a: (*a[:-1], None)),
        ("moe", lambda *a: (*a[:-2], False, False)),
        ("shared_expert", lambda *a: (*a[:-1], False)),
        ("linears", lambda *a: (*a[:4], tuple(False for _ in a[4]), a[5])),
    ],
)
def test_a_simulation_that_is_left_out_is_red(subject, monkeypatch, name, drop):
    planted(monkeypatch, name, lambda real: lambda *args: real(*drop(*args)))
    assert {c.part for c in BackendMatrix().run(subject) if c.status is Status.FAIL} == {name}


def test_a_missing_operation_is_an_error_and_the_others_run(subject, monkeypatch):
    monkeypatch.setattr(subject.model, "backend", "triton")
    alone = {"reference": OPERATIONS["rotate"].implementations["reference"]}
    monkeypatch.setitem(OPERATIONS, "rotate", Operation("rotate", alone))
    assert "rotate" not in subject.operations
    for cases in ("truths", "cases_beside"):
        monkeypatch.setattr(backend_matrix, cases, lambda *given: [])
    found = {c.part: c for c in BackendMatrix().run(subject)}
    assert found["rotate"].status is Status.ERROR and "has only reference" in found["rotate"].note
    assert set(found) == {*OPERATIONS, *COMPOSITIONS}
    assert operations.OPERATIONS is OPERATIONS


def test_what_an_operation_raises_is_its_own_error(subject, monkeypatch):
    planted(monkeypatch, "rotate", lambda real: lambda *args: 1 / 0)
    found = BackendMatrix().run(subject)
    assert {c.part for c in found if c.status is Status.ERROR} == {"rotate"}


def test_another_dtype_or_shape_is_a_finding(subject, monkeypatch):
    planted(monkeypatch, "hadamard", lambda real: lambda x: real(x).double())
    assert {c.name for c in BackendMatrix().run(subject) if c.status is Status.FAIL} == {"hadamard: dtypes and shapes"}


def test_measures():
    a = torch.tensor([[1.0, 2.0, 3.0, float("-inf")]])
    assert error_of(a, a) == 0 and error_of(torch.where(a.isinf(), 0, a), a) == float("inf")
    picks = torch.tensor([[1, 3]])
    assert error_of(picks.flip(-1), picks) == 0 and error_of(torch.tensor([[3, 2]]), picks) == 1
    nan = torch.tensor([float("nan"), 0.0])
    assert differing(nan, nan) == 0 and differing(torch.tensor([-0.0]), torch.tensor([0.0])) == 1
    one_off = torch.ones(1, 100)
    one_off[0, 3] = 2
    assert most_of(one_off, torch.ones(1, 100)) == 0 and most_of(torch.full((1, 100), 1.1), torch.ones(1, 100)) > 0.09
    strided = torch.arange(12.0).view(3, 4)[:, :2]
    mine = own(strided, torch.device("cpu"))
    assert mine.stride() == strided.stride() and torch.equal(mine, strided)
