"""Workloads of FlashInfer-Trace: cases of a contract, their tensors as safetensors, what SOL-ExecBench tolerates."""

import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv4.kernels.contract import BITS, CODES, SET
from dsv4.probes.kernel_audit.acceptance import CODES_SHARE, NARROW, WIDE, Truth, coded
from dsv4.probes.kernel_audit.trace.definitions import Exported

FP4_STEP = 0.34  # one code of FP4 is at most a third of the largest value of its block


def uuid_of(exported: Exported, number: int) -> str:
    """'dsv4_rms_norm_bf16_h256-03-where-eps-decides'."""
    family = re.sub(r"[^a-z0-9]+", "-", exported.case.family.lower()).strip("-")
    return f"{exported.call.name}-{number:02d}-{family}"


def workload(exported: Exported, uuid: str, path: str) -> dict:
    """One case: extents of its var axes, numbers, and tensors that lie in the safetensors file `path`."""
    call = exported.call
    sources = {
        part.name: {"type": "scalar", "value": part.value}
        if part.axes is None
        else {"type": "safetensors", "path": path, "tensor_key": part.name}
        for part in call.parts
    }
    axes = {axis: size for axis, size in call.sizes.items() if axis in call.variable}
    return {"uuid": uuid, "axes": axes, "inputs": sources}


def save_tensors(exported: Exported, file: Path) -> None:
    """The tensors of a case as one safetensors file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {part.name: part.value for part in exported.call.parts if part.axes is not None}
    save_file({name: t.clone() for name, t in kept.items()}, file)


def tolerance(truth: Truth) -> dict:
    """What SOL-ExecBench may accept, from the distance of an honest kernel of the same case to fp64.

    abs ≤ atol + rtol · |reference| for every element: rtol is the factor of dsv4's own limit times half an ulp, atol
    that factor times what an honest kernel needs beside it. SOL has no limit by rows, which is the sharper one, and one
    limit for all numbers of a case: where some are codes and others roundings, it is the wider of both.
    """
    results = zip(truth.contract.outputs, truth.exact, truth.honest)
    each = [_of(truth.rule(output), *two, truth.case.kept) for output, *two in results]
    found = _widest(each) | {"required_matched_ratio": min(one["required_matched_ratio"] for one in each)}
    found["allow_negative_inf"] = any(bool((t == float("-inf")).any()) for t in truth.exact if t.is_floating_point())
    return found


def _widest(each: list[dict]) -> dict:
    return {key: max(one[key] for one in each) for key in ("max_atol", "max_rtol", "max_error_cap")}


def _of(rule: str, exact: torch.Tensor, honest: torch.Tensor, kept: int) -> dict:
    """Of one result. Where `rule` is that of codes, columns that hold none (the rotated ones) are roundings."""
    if rule in (BITS, SET) or not honest.dtype.is_floating_point:
        return {"max_atol": 0.0, "max_rtol": 0.0, "required_matched_ratio": 1.0, "max_error_cap": 0.0}
    codes = coded(exact, kept) if rule == CODES else torch.zeros_like(exact, dtype=torch.bool)
    share = codes.double().mean().item() if codes.numel() else 0.0
    parts = _of_codes(exact[codes]), _of_sums(exact[~codes], honest[~codes])
    return _widest(parts) | {"required_matched_ratio": 1 - share * CODES_SHARE}


def _of_codes(exact: torch.Tensor) -> dict:
    top, size = _top_and_size(exact)
    return {"max_atol": 1e-5 * size, "max_rtol": 1e-5 if len(exact) else 0.0, "max_error_cap": FP4_STEP * top}


def _of_sums(exact: torch.Tensor, honest: torch.Tensor) -> dict:
    finite = exact.isfinite()
    exact, found = exact[finite].double(), honest[finite].double()
    if not len(exact):
        return {"max_atol": 0.0, "max_rtol": 0.0, "max_error_cap": 0.0}
    top, size = _top_and_size(exact)
    factor, half = NARROW if honest.element_size() < 4 else WIDE, torch.finfo(honest.dtype).eps / 2
    beside = ((found - exact).abs() - half * exact.abs()).clamp(min=0).amax().item()
    atol, rtol = factor * max(beside, half * size), factor * half
    return {"max_atol": atol, "max_rtol": rtol, "max_error_cap": 2 * (atol + rtol * top)}


def _top_and_size(exact: torch.Tensor) -> tuple[float, float]:
    """The largest number and the root mean square; 0 of none."""
    return (exact.abs().amax().item(), exact.square().mean().sqrt().item()) if len(exact) else (0.0, 0.0)
