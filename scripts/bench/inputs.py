"""Inputs at production shapes, made on the device."""

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, encode_rows, pack_layout

CHUNK = 1 << 18  # rows encoded at a time


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*shape, device=device, generator=generator(device, seed)).to(dtype)


def packed(
    format: RowFormat, width: int, rope: int, rows: int, seed: int, batch: int | None = None, device: str = "cuda"
) -> PackedRows:
    """Rows of normal values, encoded: a flat pool, or with `batch` that many runs of `rows` rows."""
    layout, pages = pack_layout(format, width, rope), -(-rows // PAGE)
    lead = (pages,) if batch is None else (batch, pages)
    out = PackedRows(format, torch.zeros(*lead, layout.page, dtype=torch.uint8, device=device), width, rope, rows)
    flat = PackedRows(format, out.data.view(-1, layout.page), width, rope, 0)
    total, g = (1 if batch is None else batch) * pages * PAGE, generator(device, seed)
    for start in range(0, total, CHUNK):
        count = min(CHUNK, total - start)
        payload, scales = encode_rows(torch.randn(count, width, device=device, generator=g), format, rope)
        page = slice(start // PAGE, (start + count) // PAGE)  # CHUNK and the total are whole pages
        flat.payload[page] = payload.view(-1, PAGE, layout.payload)
        flat.scales[page] = scales.view(-1, PAGE, layout.scales)
    return out


def choose(
    seed: int, rows: int, count: int, pool: int, device: str = "cuda", dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """[rows, count] different indices below pool in each row, sorted as an attention kernel gets them from a
    selection."""
    keys = torch.rand(rows, pool, device=device, generator=generator(device, seed))
    return keys.topk(count, -1).indices.sort(-1).values.to(dtype)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error over entries that are finite in `want`; NaN where they are not finite in the same
    places."""
    got, want = got.float(), want.float()
    seen = want.isfinite()
    if not torch.equal(seen, got.isfinite()):
        return float("nan")
    return ((got[seen] - want[seen]).norm() / want[seen].norm().clamp(min=1e-30)).item()
