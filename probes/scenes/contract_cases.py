"""Cases of contracts at a model's own widths: what `backend_matrix` compares, and what is compiled ahead of it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.contract import Case
from dsv4.kernels.contracts import contracts
from dsv4.kernels.drawing import Draw
from dsv4.kernels.quantize import PackedWeight
from dsv4.kernels.widths import Widths
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig
from dsv4.probes import families
from dsv4.probes.kernel_audit.acceptance import Truth, truth_of
from dsv4.probes.kernel_audit.harness import taken
from dsv4.probes.scenes.backend_cases import TOKENS, Inputs
from dsv4.probes.scenes.backend_cases import Case as CaseBeside

KEPT = 1 << 20  # numbers of a matrix of every expert
Config = ModelConfig | GQAConfig


def contract_cases(
    name: str, widths: Widths, dtype: torch.dtype, seed: int, own: torch.dtype | None = None
) -> Iterator[Case]:
    """Of the contract of `name` each case with a family and flags, formats, a whole number or a size that none before
    has. None where there is no contract, or none for activations in `dtype`. own: the subject's activations, if it has
    any; in another dtype each combination of formats and flags is enough where the contract has both."""
    contract, seen = contracts().get(name), set[tuple]()
    if contract is None or dtype not in contract.dtypes:
        return
    whole = own in (None, dtype) or own not in contract.dtypes
    for case in contract.cases(widths, Draw(seed, dtype)):
        flags = tuple(a for a in case.arguments if isinstance(a, bool | str))
        traits: set[tuple] = {(flags, tuple(map(_form, case.arguments)))}
        if whole:
            traits |= {(flags, case.family), ("size", size_of(case))}
            traits |= {(i, a) for i, a in enumerate(case.arguments) if isinstance(a, int)}
        if traits - seen:
            seen |= traits
            yield case


def cases_beside(name: str, config: Config, dtype: torch.dtype, seed: int) -> Iterator[CaseBeside]:
    """Cases of the operation or composition called `name` for each of `TOKENS`; none if contracts have them all."""
    make = families.of(config).cases().get(name)
    for tokens in TOKENS if make else ():
        i = Inputs(config, tokens, dtype, seed)
        for how, arguments, *more in make(i):
            yield CaseBeside(", ".join(filter(None, (i.label, how))), arguments, *more)


def _form(value):
    """The format of packed weights and rows, flags as they are, and of anything else whether it is there."""
    if isinstance(value, PackedRows | PackedWeight):
        return value.format
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    return value if isinstance(value, bool | str) else value is not None


def size_of(case: Case) -> int:
    """0 for one query, 1 for up to 16, 2 for more, by which implementations choose their way."""
    first = next(a for a in case.arguments if isinstance(a, torch.Tensor))
    return bisect_left((1, 16), first.shape[0] * (first.shape[1] if first.ndim == 4 else 1))


def truths(
    name: str, config: Config, dtype: torch.dtype, seed: int, own: torch.dtype | None = None
) -> Iterator[Truth] | list[Truth]:
    """Those cases with their results in fp64 and of an honest kernel: made one after another, and of small models kept
    for the next subject."""
    w = Widths.of(config)
    small = max(1, w.n_routed_experts) * w.hidden_size * w.moe_intermediate_size <= KEPT
    return (_kept if small else _truths)(name, w, dtype, seed, own)


def _truths(name: str, widths: Widths, dtype: torch.dtype, *which) -> Iterator[Truth]:
    for case in contract_cases(name, widths, dtype, *which):
        yield truth_of(contracts()[name], case, contracts()[name].default(dtype))


@lru_cache(maxsize=128)
def _kept(*given) -> list[Truth]:
    return list(_truths(*given))


def calls(name: str, function: Callable, config: Config, dtype: torch.dtype, seed: int) -> Iterator[tuple | list]:
    """Arguments of every call of `function` in the place of `name` that `backend_matrix` makes, in host memory."""
    for case in contract_cases(name, Widths.of(config), dtype, seed):
        yield case.arguments[: taken(function, contracts()[name], False)]
    for beside in cases_beside(name, config, dtype, seed):
        yield beside.arguments
