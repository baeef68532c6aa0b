"""Inputs at production shapes, made on the device."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from dsv4.kernels.cache_rows import PackedRows, RowFormat
from dsv4.kernels.contract import Production, tensors
from dsv4.kernels.drawing import Draw
from dsv4.kernels.operations import OPERATIONS
from dsv4.kernels.widths import FLASH

REFERENCE = SimpleNamespace(**{name: op.implementations["reference"] for name, op in OPERATIONS.items()})


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*shape, device=device, generator=generator(device, seed)).to(dtype)


def packed(
    format: RowFormat, width: int, rope: int, rows: int, seed: int, batch: int | None = None, device: str = "cuda"
) -> PackedRows:
    """Rows of normal values, encoded: a flat pool, or with `batch` that many runs of `rows` rows."""
    return Draw(seed, device=device).pool(format, rows, width, rope, batch)


def choose(seed: int, rows: int, count: int, pool: int, device: str = "cuda") -> torch.Tensor:
    """int64 [rows, count]: different indices below pool in each row, ascending, as a selection lists them."""
    return Draw(seed, device=device).chosen(pool, rows, count).sort(-1).values


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error over entries that are finite in `want`; NaN where they are not finite in the same
    places."""
    got, want = got.float(), want.float()
    seen = want.isfinite()
    if not torch.equal(seen, got.isfinite()):
        return float("nan")
    return ((got[seen] - want[seen]).norm() / want[seen].norm().clamp(min=1e-30)).item()


def beside_definition(
    production: Production,
    sizes: dict,
    ours: Callable,
    definition: Callable,
    tolerance: float,
    device: str,
    overwrites: bool = False,
):
    """make(i) of a row: ours on what the contract draws at V4-Flash's widths. Each result is held against the
    definition's. overwrites: a run may change its inputs, so that a check draws them anew."""

    def make(i: int):
        args = production.drawn(FLASH, i, device, **sizes)

        def check():
            mine, theirs = (production.drawn(FLASH, i, device, **sizes) if overwrites else args for _ in range(2))
            pairs = zip(tensors(ours(*mine)), tensors(definition(*theirs)), strict=True)
            return max(difference(got, want) for got, want in pairs), tolerance

        return lambda: ours(*args), check

    return make
