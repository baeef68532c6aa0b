"""How far a result is from `exact`, as a multiple of the limit that the class's own error gives."""

import torch

from dsv4.kernels.contract import BITS, CODES, SET, SUMS, Case, Contract, rebuilt
from dsv4.kernels.drawing import Draw
from dsv4.kernels.widths import WIDTHS

WRONG = float("inf")
NARROW, WIDE = 4, 16  # factors for results of 16 bits, whose rounding hides the order of sums, and of fp32


def cases_of(contract: Contract, dtype: torch.dtype, seed: int = 0, widths: str = "small") -> list[Case]:
    return list(contract.cases(WIDTHS[widths], Draw(seed, dtype)))


def results(contract: Contract, run, case: Case) -> tuple[torch.Tensor, ...]:
    """Results of run(*arguments) on copies of them, those written in place among them."""
    arguments = [rebuilt(a, torch.clone) for a in case.arguments]
    for at in contract.written:  # pools are named tuples, whose tensors `rebuilt` has copied
        assert arguments[at] is not None
    found = run(*arguments)
    made = iter(found if isinstance(found, tuple | list) else (found,))
    return tuple(
        next(made) if o.argument is None or found is not None else _tensor(arguments[o.argument])
        for o in contract.outputs
    )


def _tensor(value):
    return value.data if not isinstance(value, torch.Tensor) else value


def excess(contract: Contract, found: tuple, wanted: tuple, honest: tuple, narrow: bool = False) -> float:
    """Largest distance of any output as a multiple of its limit; above 1 is a fault. narrow: inputs of 16 bits, whose
    rounding on the way hides the order of sums of fp32 results too."""
    if len(found) != len(wanted):
        return WRONG
    found, wanted, honest = (_in_order(contract, r) for r in (found, wanted, honest))
    each = zip(contract.outputs, found, wanted, honest)
    return max(_one(o.rule, o.row, f, w, h, narrow) for o, f, w, h in each)


def _in_order(contract: Contract, outputs: tuple) -> tuple:
    """Where an output is a set of indices, all outputs of its shape in ascending order of the indices."""
    sets = [o for o, output in zip(outputs, contract.outputs) if output.rule == SET]
    if not sets:
        return outputs
    order = sets[0].sort(-1).indices
    return tuple(o.gather(-1, order) if o.shape == order.shape else o for o in outputs)


def _one(rule, row, found, wanted, honest, narrow) -> float:
    if found.shape != honest.shape or found.dtype is not honest.dtype:
        return WRONG
    if rule == SET:
        return 0.0 if torch.equal(found, wanted.to(found.dtype)) else WRONG
    if rule == BITS:
        return 0.0 if _same_bits(found, wanted.to(found.dtype)) else WRONG
    assert rule in (SUMS, CODES)
    masks = (torch.isnan, torch.isposinf, torch.isneginf)
    if not all(torch.equal(mask(found), mask(wanted)) for mask in masks):
        return WRONG
    factor = NARROW if narrow or found.element_size() < 4 else WIDE
    rows = [torch.nan_to_num(t.double(), 0, 0, 0).flatten(-row).flatten(0, -2) for t in (found, wanted, honest)]
    return sums(*rows, torch.finfo(found.dtype).eps / 2, factor)


def sums(found, wanted, honest, half: float, factor: int) -> float:
    """Rows [n, width]: relative L2 against `factor` times the class's, worst element against twice that."""
    if not found.numel():
        return 0.0
    whole, off, own = wanted.norm(dim=1), (found - wanted).abs(), (honest - wanted).abs()
    live = whole > 0
    if (off[~live] > 0).any():
        return WRONG
    if not live.any():
        return 0.0
    whole, off, own, wanted = (t[live] for t in (whole, off, own, wanted))
    d0, worst = own.norm(dim=1) / whole, own.amax(1)
    by_row = off.norm(dim=1) / whole / (factor * d0.clamp(min=max(d0.quantile(0.9).item(), half)))
    usual = torch.stack((worst, (worst / whole).quantile(0.9) * whole, half * wanted.abs().amax(1))).amax(0)
    return max(by_row.max().item(), (off.amax(1) / (2 * factor * usual)).max().item())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
