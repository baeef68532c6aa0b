"""When a result is right: relative L2 of each row against fp64, held by the error of an honest kernel of the same case.

limit of a row = factor · max(d₀ that nine rows in ten of the case stay below, d₀ of the row, half an ulp of the
result's type), d₀ the honest kernel's own relative L2. The worst element of a row may be twice that factor times the
honest kernel's. The factor is 4 where a rounding to 16 bits or less decides d₀, since that hides the order of sums, and
16 elsewhere. Canaries say whether a case can tell at all: see `canaries`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dsv4.kernels.contract import BITS, CODES, SET, Case, Contract, Output, copied, ordered, outcome, rebuilt, tensors
from dsv4.kernels.honest import OrderedSums
from dsv4.probes.kernel_audit.errors import KernelAuditError

NARROW, WIDE, ROUNDED = 4.0, 16.0, 2.0**-12  # factors, and the d₀ from which a rounding to 16 bits decides
CODES_SHARE = 0.1  # of numbers that end in FP8 or FP4, how many may be another code
SAME = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-18}  # relative roundings that do not make another code
ANY = "any-of-equals"
NEXT = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float8_e4m3fn}


@dataclass(frozen=True)
class Judgement:
    """ratio: the worst error as a multiple of its limit (at most 1 is right); what: the measure; place: where, in
    words; error: the worst relative L2 of a row (of codes and sets: the share that differs)."""

    ratio: float
    what: str = ""
    place: str = ""
    error: float = 0.0


@dataclass(frozen=True, eq=False)
class Truth:
    """Of one case: results in fp64, and what an honest kernel of the class returns."""

    contract: Contract
    case: Case
    accuracy: str
    exact: tuple[torch.Tensor, ...]
    honest: tuple[torch.Tensor, ...]

    def judge(self, found: list[torch.Tensor | None]) -> Judgement:
        """The worst judgement of all results; wrong numbers of them, shapes and dtypes are infinitely wrong."""
        there = sum(t is not None for t in found)
        if len(found) != len(self.exact) or there < len(found):
            return Judgement(float("inf"), "results", f"{there} tensors, expected {len(self.exact)}")
        rules = [self.rule(output) for output in self.contract.outputs]
        results = (ordered(r, rules) if len(r) > 1 else r for r in (found, self.exact, self.honest))
        judged = [self._one(output, *three) for output, *three in zip(self.contract.outputs, *results)]
        return max(judged, key=lambda j: j.ratio)

    def rule(self, output: Output) -> str:
        """The rule of an output in this case."""
        return self.case.rules.get(output.name, output.rule)

    def _one(self, output: Output, found, exact, honest) -> Judgement:
        if found.shape != exact.shape or found.dtype is not honest.dtype:
            got, want = (f"{str(t.dtype)[6:]} {list(t.shape)}" for t in (found, honest))
            return Judgement(float("inf"), "shape and dtype", f"{output.name}: {got}, expected {want}")
        if found.numel() == 0:
            return Judgement(0.0)
        if self.rule(output) == BITS:
            return _bits(output, found, exact.to(honest.dtype))
        if self.rule(output) == SET:
            return _set(output, found, exact, self.case.arguments[0] if self.accuracy == ANY else None)
        if self.rule(output) == CODES:
            return _codes(output, found, exact, self.case.kept)
        rows = [t.double().reshape(-1, _row_size(t, output.row)) for t in (found, exact, honest)]
        unlike = (rows[0].isnan() & ~rows[1].isnan()) | (rows[0].isinf() | rows[1].isinf()) & (rows[0] != rows[1])
        if unlike.any():
            return Judgement(float("inf"), "NaN or infinity", _place(output, found, unlike.nonzero()[0]), float("inf"))
        rows = [torch.where(rows[1].isfinite(), t, 0.0) for t in rows]
        return _sums(output, found, *rows)


def _row_size(t: torch.Tensor, axes: int) -> int:
    return max(1, t[(0,) * (t.ndim - axes)].numel() if axes < t.ndim else t.numel())


def _place(output: Output, t: torch.Tensor, at: torch.Tensor) -> str:
    """'out[3, 17, :] at 5' of (row, place in the row)."""
    row = int(at[0])
    lead = list(t.shape[: t.ndim - output.row])
    index = []
    for extent in reversed(lead):
        index.append(row % extent)
        row //= extent
    return f"{output.name}{list(reversed(index))}" + (f", element {int(at[1])}" if len(at) > 1 else "")


def _half_ulp(dtype: torch.dtype) -> float:
    """Relative to a number at the upper end of its binade: the smallest that half an ulp is."""
    return torch.finfo(dtype).eps / 4 if dtype.is_floating_point else 0.0


def _sums(output: Output, t, found, exact, honest) -> Judgement:
    half, norm = _half_ulp(t.dtype), exact.norm(dim=1)
    live = norm > 0
    own, off = (honest - exact).norm(dim=1), (found - exact).norm(dim=1)
    d0 = own[live] / norm[live]
    most = max(_of_nine_in_ten(d0).item() if live.any() else 0.0, half)
    factor = NARROW if most >= ROUNDED else WIDE
    limit = factor * torch.where(live, norm, 0.0) * (own / norm.clamp(min=1e-300)).clamp(min=most)
    limit = torch.where(live, limit, 2 * factor * own)
    by_row = _ratio(off, limit)
    worst, mine = (found - exact).abs(), (honest - exact).abs().amax(1)
    usual = _of_nine_in_ten(mine[live] / norm[live]) * norm if live.any() else mine
    by_element = _ratio(worst.amax(1), 2 * factor * torch.stack((mine, usual, half * exact.abs().amax(1))).amax(0))
    row = int(torch.maximum(by_row, by_element).argmax())
    error = (off[live] / norm[live]).amax().item() if live.any() else 0.0
    at = torch.tensor([row, int(worst[row].argmax())])
    if by_row[row] >= by_element[row]:
        return Judgement(by_row[row].item(), "relative L2 of a row", _place(output, t, at[:1]), error)
    return Judgement(by_element[row].item(), "worst element of a row", _place(output, t, at), error)


def _of_nine_in_ten(values: torch.Tensor) -> torch.Tensor:
    """What nine in ten of the values [n] stay below, between two of them in proportion: `quantile(0.9)`, which takes
    longer than all else of a small case."""
    place = 0.9 * (len(values) - 1)
    low, high = values.sort().values[[math.floor(place), math.ceil(place)]]
    return torch.lerp(low, high, place % 1)


def _ratio(error: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return torch.where(error > 0, error / limit.clamp(min=1e-300), 0.0).clamp(max=1e30)


def _codes(output: Output, found: torch.Tensor, exact: torch.Tensor, kept: int = 0) -> Judgement:
    """Numbers that end in FP8 or FP4: few may be another code, and none further away than the next.

    Blocks of 32 columns say themselves what they hold: numbers of one bit of fraction are FP4, of three bits FP8;
    others are not coded and may only differ by roundings, which are relative to the block's largest number. No block
    holds both coded columns and some of the last `kept`, which are not coded."""
    same, columns = SAME.get(found.dtype, 2.0**-18), exact.shape[-1]
    blocks = lambda t: _in_blocks(t, columns - kept)
    got, want, column = blocks(found.double()), blocks(exact.double()), blocks(torch.arange(1, columns + 1)).flatten()
    far, size = (got - want).abs(), torch.maximum(got.abs(), want.abs())
    if not torch.equal(got.isfinite(), want.isfinite()):
        return Judgement(float("inf"), "NaN or infinity", output.name, float("inf"))
    largest, row = size.amax(-1, keepdim=True), size.amax((-1, -2), keepdim=True)
    fp8 = torch.maximum(0.126 * size, row * 2.0**-9 / 223)  # small FP8 codes may look like FP4
    fp4 = torch.maximum(torch.maximum(0.51 * size, largest / 5.9), fp8)
    of_three = _of_bits(want, 3)
    step = torch.where(_of_bits(want, 1), fp4, torch.where(of_three, fp8, same * largest))
    beyond = _ratio(far, torch.maximum(step, same * size))
    wrong = (far > same * size) & of_three
    share = wrong.double().sum().item() / max(1, int(_columns(of_three.expand_as(far), column).sum()))
    worst = beyond.max().item() if beyond.numel() else 0.0

    def place(mask: torch.Tensor) -> str:
        row, at = mask.flatten(0, -3).flatten(1).nonzero()[0]
        return _place(output, found, torch.stack((row, column[at] - 1)))

    if worst > 1:
        return Judgement(worst, "further away than the next code", place(beyond > 1), share)
    return Judgement(share / CODES_SHARE, "share of codes that differ", place(wrong) if wrong.any() else "", share)


def _in_blocks(t: torch.Tensor, coded: int) -> torch.Tensor:
    """Columns [..., D] as blocks [..., blocks, 32], filled with zeros at the end of the first `coded` columns, and of
    the others."""
    parts = [part for part in t.split((coded, t.shape[-1] - coded), -1) if part.shape[-1]]
    return torch.cat([F.pad(part, (0, -part.shape[-1] % 32)).unflatten(-1, (-1, 32)) for part in parts], -2)


def _of_bits(blocks: torch.Tensor, n: int) -> torch.Tensor:
    """bool [..., blocks, 1]: whether n bits of fraction hold every number of a block."""
    return (torch.frexp(blocks).mantissa * 2 ** (n + 1) % 1 == 0).all(-1, keepdim=True)


def coded(exact: torch.Tensor, kept: int = 0) -> torch.Tensor:
    """bool of its shape: the numbers that `codes` takes for codes of FP8 or FP4, and not for roundings."""
    columns = exact.shape[-1]
    blocks = _in_blocks(exact.double(), columns - kept)
    column = _in_blocks(torch.arange(1, columns + 1), columns - kept).flatten()
    return _columns(_of_bits(blocks, 3).expand_as(blocks), column)


def _columns(blocks: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Blocks [..., blocks, 32] as columns again, without the filling, whose `column` is 0."""
    return blocks.flatten(-2)[..., column > 0]


def _bits(output: Output, found, exact) -> Judgement:
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    same = found.contiguous().view(view) == exact.contiguous().view(view)
    if found.dtype.is_floating_point:
        same |= found.isnan() & exact.isnan()
    wrong = ~same.reshape(-1, _row_size(found, output.row))
    count = int(wrong.sum())
    place = _place(output, found, wrong.nonzero()[0]) if count else ""
    return Judgement(2.0 * count, "values of other bits", place, count / found.numel())


def _set(output: Output, found, exact, scores) -> Judgement:
    """Indices of each row in any order. With scores: any of equal ones may be chosen, none twice."""
    if scores is not None:
        whole, n = scores.double(), scores.shape[-1]
        outside = (found < -1) | (found >= n)
        twice = found.sort(-1).values
        twice = (twice[..., 1:] == twice[..., :-1]) & (twice[..., 1:] >= 0)
        pick = lambda index: (
            torch.where(index < 0, float("-inf"), whole.gather(-1, index.clamp(0, n - 1))).sort(-1).values
        )
        wrong = pick(found) != pick(exact)
        wrong[..., 1:] |= twice
        wrong |= outside
    else:
        wrong = found.sort(-1).values != exact.sort(-1).values
    count = int(wrong.sum())
    rows = wrong.reshape(-1, wrong.shape[-1])
    place = _place(output, found, rows.nonzero()[0][:1]) if count else ""
    return Judgement(2.0 * count, "indices that differ", place, count / found.numel())


def listed(value) -> tuple[torch.Tensor, ...]:
    """The results of a call as a tuple."""
    return tuple(tensors(value))


def truth_of(contract: Contract, case: Case, accuracy: str) -> Truth:
    """Results in fp64 and of the honest kernel. What is written in place is returned by both, in the order of the
    contract's outputs. Raises KernelAuditError for an unknown class of accuracy."""
    if accuracy not in contract.classes:
        raise KernelAuditError(
            f"{contract.operation} has no accuracy class {accuracy!r}; expected one of {', '.join(contract.classes)}"
        )
    exact = listed(contract.exact(*copied(case.arguments)))
    arguments = copied(case.arguments)
    with OrderedSums():
        found = outcome(contract, contract.classes[accuracy](*arguments), arguments)
    honest = tuple(_typed(t, o) for t, o in zip(found, contract.outputs, strict=True))
    return Truth(contract, case, accuracy, exact, honest)


def _typed(value: torch.Tensor, output: Output) -> torch.Tensor:
    """In the dtype that the contract promises; of activations the honest kernel's own."""
    return value.to(getattr(torch, output.dtype, value.dtype))


def canaries(truth: Truth, other: Truth | None) -> Iterator[tuple[str, Judgement | None, str]]:
    """(name, judgement, why not) of results that must be refused on every case: zeros, NaN, an input that has the
    result's shape, the right answer to other inputs of the same shapes, and the right answer to inputs rounded to the
    next lower type."""
    shaped = truth.honest
    exempt = truth.case.exempt

    def of(name, values, why=""):
        if name in exempt:
            return name, None, exempt[name]
        return (name, None, why) if values is None else (name, truth.judge(values), "")

    yield of("zeros", [torch.zeros_like(t) for t in shaped])
    floats = any(t.is_floating_point() for t in shaped)
    nan = [torch.full_like(t, float("nan")) if t.is_floating_point() else t for t in shaped]
    yield of("NaN", nan if floats else None, "no result is a float")
    echo = [
        next((a for a in tensors(truth.case.arguments) if a.shape == t.shape and a.dtype == t.dtype), None)
        for t in shaped
    ]
    yield of("echo", None if any(e is None for e in echo) else echo, "no argument has the result's shape and dtype")
    other = other or truth
    alike = [t.shape for t in other.honest] == [t.shape for t in shaped]
    alike = alike and not all(torch.equal(_ordered(a), _ordered(b)) for a, b in zip(other.exact, truth.exact))
    why = "results of other inputs have other shapes, or are the same"
    yield of("other inputs", list(other.honest) if alike else None, why)
    lower = _lower(truth)
    yield of("lower precision", lower, "the next lower precision holds these inputs exactly")


def _ordered(t: torch.Tensor) -> torch.Tensor:
    """Indices in ascending order; other values as they are."""
    return t if t.is_floating_point() or not t.ndim else t.sort(-1).values


def _lower(truth: Truth) -> list[torch.Tensor] | None:
    """The exact answer to activations rounded to the next lower type; None where no value changes by that."""
    changed = False

    def rounded(t: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        low = NEXT.get(t.dtype)
        if low is None or not t.is_floating_point():
            return t.clone()
        limit = torch.finfo(low).max
        result = torch.where(t.isfinite(), t.clamp(-limit, limit).to(low).to(t.dtype), t)
        changed |= not torch.equal(result, t)
        return result

    arguments = tuple(
        rebuilt(a, rounded) if spec.dtype in ("activation", "rows") and spec.shape is not None else copied(a)
        for spec, a in zip(truth.contract.arguments, truth.case.arguments)
    )
    if not changed:
        return None
    return [e.to(h.dtype) for e, h in zip(listed(truth.contract.exact(*arguments)), truth.honest)]
