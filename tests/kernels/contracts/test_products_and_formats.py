"""Contracts of linear maps, experts, routing, formats and pooling: honest kernels are green, planted faults are red."""

from functools import lru_cache

import pytest
import torch

from dsv4.kernels.contract import BITS, rebuilt, tensors
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.kernel_audit.plants import experts, formats, plants, pooling, products, routing
from tests.kernels.contracts.acceptance import cases_of, excess, results

torch.set_num_threads(1)
NAMES = (
    "linear",
    "grouped_linear",
    "experts",
    "shared_expert",
    "route_scored",
    "route_hashed",
    "simulate_fp8_blocks",
    "simulate_fp4_blocks",
    "write_rows",
    "gated_pool",
    "silu_mul",
)
OURS = [p for p in plants() if p.operation in NAMES]
UNCHANGED = {  # what planted faults are made from: right as long as nothing is changed
    "linear": products._simulated(lambda x: products.simulate_fp8_blocks(x, 128)),
    "experts": experts._routed(),
    "shared_expert": experts._shared(experts.clamped),
    "route_scored": routing._scored(),
    "route_hashed": routing._hashed(),
    "simulate_fp8_blocks": formats._fp8(),
    "simulate_fp4_blocks": formats._fp4(),
    "write_rows": formats._stored(formats.payload_of, formats.scales_of),
    "gated_pool": pooling._pool(lambda gate: gate.softmax(1)),
    "silu_mul": pooling._of(torch.nn.functional.silu),
}


def of(value) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def default(contract):
    return next(iter(contract.classes.values()))


@lru_cache
def drawn(name: str, dtype: torch.dtype) -> list:
    """(case, exact, honest) of every case."""
    contract = contract_of(name)
    return [
        (c, of(contract.exact(*c.arguments)), results(contract, default(contract), c))
        for c in cases_of(contract, dtype)
    ]


def dtypes() -> list:
    return [pytest.param(n, d, id=f"{n} {str(d)[6:]}") for n in NAMES for d in contract_of(n).dtypes]


def implementations(name: str) -> dict:
    found = (OPERATIONS | GQA_OPERATIONS)[name].implementations
    return {k: found[k] for k in ("reference", "cpu") if k in found}


@pytest.mark.every
@pytest.mark.parametrize("name,dtype", dtypes())
def test_honest_kernels_are_within_the_limits_of_every_case(name, dtype):
    contract = contract_of(name)
    honest = implementations(name) | ({"unchanged": UNCHANGED[name](default(contract))} if name in UNCHANGED else {})
    for case, wanted, own in drawn(name, dtype):
        for label, function in honest.items():
            far = excess(contract, results(contract, function, case), wanted, own, dtype is torch.bfloat16)
            assert far <= 1, (label, case.family, case.label, far)
        for label, function in list(contract.classes.items())[1:]:
            made = results(contract, function, case)
            assert excess(contract, made, wanted, made) <= 1, (label, case.family, case.label)


@pytest.mark.every
@pytest.mark.parametrize("plant", [p for p in OURS if p.clause == "gate"], ids=lambda p: f"{p.operation}: {p.name}")
def test_faults_are_twice_over_the_limit_of_some_case(plant):
    contract = contract_of(plant.operation)
    faulty = plant.make(default(contract))
    found = (
        excess(contract, results(contract, faulty, case), wanted, own)
        for case, wanted, own in drawn(plant.operation, torch.bfloat16 if len(contract.dtypes) > 1 else torch.float32)
    )
    assert any(far >= 2 for far in found)


@pytest.mark.every
@pytest.mark.parametrize("name,dtype", dtypes())
def test_results_of_other_inputs_and_inputs_themselves_are_refused_in_every_case(name, dtype):
    contract = contract_of(name)
    assert all(t.is_contiguous() for case, *_ in drawn(name, dtype) for t in tensors(case.arguments))
    others = [of(contract.exact(*c.arguments)) for c in cases_of(contract, dtype, seed=1)]
    for (case, wanted, own), other in zip(drawn(name, dtype), others, strict=True):
        other = tuple(o.to(h.dtype) for o, h in zip(other, own))
        canaries = {"other inputs": other, "zeros": tuple(map(torch.zeros_like, own))}
        echo = [
            next((a for a in tensors(case.arguments) if a.shape == h.shape and a.dtype is h.dtype), None) for h in own
        ]
        if all(e is not None for e in echo):
            canaries["echo"] = tuple(echo)
        for canary, found in canaries.items():
            alike = all(f.shape == h.shape for f, h in zip(found, own))
            if canary not in case.exempt and alike:
                assert excess(contract, found, wanted, own) > 1, (canary, case.family, case.label)


def test_experts_that_no_token_lists_are_not_read_by_the_honest_kernel_and_are_by_the_planted_one():
    contract = contract_of("experts")
    plant = next(p for p in OURS if p.clause == "poison")
    red = 0
    for case, wanted, own in drawn("experts", torch.bfloat16):
        if not any(mask.any() for mask in case.unread.values()):
            continue
        names = [a.name for a in contract.arguments]
        arguments = [
            rebuilt(a, lambda t, n=n: t.masked_fill(case.unread[n].expand(t.shape), float("nan")))
            if n in case.unread
            else a
            for n, a in zip(names, case.arguments)
        ]
        assert excess(contract, of(default(contract)(*arguments)), wanted, own) <= 1
        red += excess(contract, of(plant.make(default(contract))(*arguments)), wanted, own) > 1
    assert red


@pytest.mark.parametrize("plant", [p for p in OURS if p.clause == "inputs"], ids=lambda p: f"{p.operation}: {p.name}")
def test_faults_of_inputs_change_an_argument_and_no_result(plant):
    contract = contract_of(plant.operation)
    for case, wanted, own in drawn(plant.operation, contract.dtypes[-1])[:3]:
        arguments = [rebuilt(a, torch.clone) for a in case.arguments]
        found = of(plant.make(default(contract))(*arguments))
        assert excess(contract, found, wanted, own) <= 1
        before, after = list(tensors(case.arguments)), list(tensors(arguments))
        assert any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after))


def test_every_operation_has_the_faults_that_any_can_have():
    clauses = {name: {p.clause for p in OURS if p.operation == name} for name in NAMES}
    for name in NAMES:
        assert {"gate", "written", "calls"} <= clauses[name], name
        assert [o.rule for o in contract_of(name).outputs].count(BITS) or "inputs" in clauses[name]
    assert {"poison", "guard", "batch", "state", "repeats", "capture", "streams", "layout", "empty"} <= set().union(
        *clauses.values()
    )
