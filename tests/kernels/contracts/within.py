"""How far a result is from fp64, as a multiple of what its accuracy class allows. Shared by the tests of contracts."""

import math
from dataclasses import replace

import torch

from dsv4.kernels.contract import BITS, CODES, SET, Case, Contract, Output, rebuilt
from dsv4.kernels.drawing import Draw
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.kernels.widths import SMALL

# Of rule 'codes': a number that differs by more than intermediate roundings in the dtype do is another code. The
# smallest step between two codes is 1/16 of the number.
SAME = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-18}


def drawn(contract: Contract, dtype=torch.bfloat16, seed: int = 5, widths=SMALL) -> list[Case]:
    return list(contract.cases(widths, Draw(seed, dtype)))


def results(contract: Contract, function, case: Case) -> list[torch.Tensor]:
    """What the function returns and writes, in the order of the contract's outputs; its arguments are copies."""
    arguments = [rebuilt(a, torch.clone) for a in case.arguments]
    found = function(*arguments)
    return list_of(contract, found, arguments)


def list_of(contract: Contract, found, arguments) -> list[torch.Tensor]:
    returned = iter(found if isinstance(found, tuple | list) else (found,))
    own = [next(returned) if o.argument is None else arguments[o.argument] for o in contract.outputs]
    return [getattr(t, "data", t) if not isinstance(t, torch.Tensor) else t for t in own]


def exactly(contract: Contract, case: Case) -> list[torch.Tensor]:
    """Results in fp64; `exact` returns those of arguments that are written too."""
    found = contract.exact(*[rebuilt(a, torch.clone) for a in case.arguments])
    return list(found) if isinstance(found, tuple | list) else [found]


def beyond(output: Output, got: torch.Tensor, want: torch.Tensor, own: torch.Tensor, half: float) -> float:
    """Error of `got` over its limit, which comes from the class's result `own`; `want` fp64. half: a relative half ulp
    of the dtype, which no limit goes below."""
    if got.shape != want.shape or got.dtype is not own.dtype:
        return math.inf
    if not got.numel():
        return 0.0
    if output.rule == BITS:
        return 0.0 if torch.equal(bits(got), bits(want.to(own.dtype))) else math.inf
    if output.rule == SET:
        return 0.0 if torch.equal(got.long().sort(-1).values, want.long().sort(-1).values) else math.inf
    got, plain = got.double(), torch.isfinite(want)
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(
        got[~plain].nan_to_num(), want[~plain].nan_to_num()
    ):
        return math.inf
    if not got[plain].isfinite().all():
        return math.inf
    if output.rule == CODES:
        return codes_beyond(got, want, SAME[own.dtype])
    zero = lambda t: torch.where(plain, t.double(), 0.0).reshape(math.prod(t.shape[: t.dim() - output.row]), -1)
    got, want, own = zero(got), zero(want), zero(own)
    size = want.norm(dim=1)
    relative = lambda t: torch.where(t > 0, t / size.clamp(min=1e-300), 0.0)
    d0, far = relative((own - want).norm(dim=1)), relative((got - want).norm(dim=1))
    limit = 4 * torch.maximum(d0, d0.median()).clamp(min=half)
    worst = 8 * torch.maximum((own - want).abs().amax(), half * want.abs().amax(1))
    return max(float((far / limit).max()), float(((got - want).abs().amax(1) / worst.clamp(min=1e-300)).max()))


def codes_beyond(got: torch.Tensor, want: torch.Tensor, same: float) -> float:
    """Share of numbers with another code, over a tenth; infinite if one is further away than the next code.

    Blocks of 32 columns say themselves what they hold: numbers of one bit of fraction are FP4, of three bits FP8;
    others are not coded and may only differ by roundings, which are relative to the block's largest number.
    """
    columns = want.shape[-1]
    blocks = lambda t: torch.nn.functional.pad(t, (0, -columns % 32)).unflatten(-1, (-1, 32))
    got, want = blocks(got), blocks(want)
    far, size = (got - want).abs(), torch.maximum(got.abs(), want.abs())
    largest, row = size.amax(-1, keepdim=True), size.amax((-1, -2), keepdim=True)
    mantissa = torch.frexp(want).mantissa
    of_bits = lambda n: (mantissa * 2 ** (n + 1) % 1 == 0).all(-1, keepdim=True)
    fp8 = torch.maximum(0.126 * size, row * 2.0**-9 / 223)  # small FP8 codes may look like FP4
    fp4 = torch.maximum(torch.maximum(0.51 * size, largest / 5.9), fp8)
    step = torch.where(of_bits(1), fp4, torch.where(of_bits(3), fp8, same * largest))
    if (far > torch.maximum(step, same * size)).any():
        return math.inf
    coded = of_bits(3).expand_as(far)
    return float((far > same * size)[coded].double().mean()) / 0.1 if coded.any() else 0.0


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def excess(contract: Contract, function, case: Case, klass: str = "", coarse: bool = False) -> float:
    """The largest error of any output over its limit. coarse: half an ulp is that of a number at the lower end of its
    binade, not at the upper, so that limits are up to twice as wide."""
    own = results(contract, contract.classes[klass or next(iter(contract.classes))], case)
    want = exactly(contract, case)
    got = results(contract, function, case)
    found = [0.0]
    for output, g, w, o in zip(contract.outputs, got, want, own, strict=True):
        eps = torch.finfo(o.dtype).eps if o.dtype.is_floating_point else 0.0
        output = replace(output, rule=case.rules.get(output.name, output.rule))
        found.append(beyond(output, g, w, o, eps / (2 if coarse else 4)))
    return max(found)


def implementations(name: str) -> dict:
    """Reference and `cpu` implementation of an operation."""
    operation = OPERATIONS.get(name) or GQA_OPERATIONS[name]
    return {k: f for k, f in operation.implementations.items() if k in ("reference", "cpu")}
