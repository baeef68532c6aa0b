"""What the calls of contracts are drawn from: a generator on the CPU for cases, so that the same seed is the same
numbers on every device; on a GPU for production sizes; and none on `meta`, whose tensors have shapes alone."""

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, encode_rows, pack_layout, write_rows
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, quantize_nvfp4

CHUNK = 1 << 18  # rows encoded at a time


class Draw:
    """Random inputs from a seed on a device, in host memory unless it says otherwise; activations in `dtype`."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"):
        self.seed, self.dtype, self.device = seed, dtype, device
        self.g = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def rand(self, *shape: int) -> torch.Tensor:
        """fp32, normal, of size 1."""
        return torch.randn(*shape, generator=self.g, device=self.device)

    def act(self, *shape: int) -> torch.Tensor:
        """As `rand`, in the dtype of activations."""
        return self.rand(*shape).to(self.dtype)

    def large(self, *shape: int) -> torch.Tensor:
        """As `act`, without a copy in fp32."""
        return torch.randn(*shape, generator=self.g, device=self.device, dtype=self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """fp32, uniform."""
        return low + (high - low) * torch.rand(*shape, generator=self.g, device=self.device)

    def below(self, n: int, *shape: int) -> torch.Tensor:
        """int64 in [0, n)."""
        return torch.randint(0, n, shape, generator=self.g, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers low…high in the dtype of activations: sums of them are exact in fp32."""
        return torch.randint(low, high + 1, shape, generator=self.g, device=self.device).to(self.dtype)

    def choose(self, n: int, rows: int, k: int) -> torch.Tensor:
        """int64 [rows, k]: for each row k different numbers below n, in no order."""
        return (
            torch.stack([torch.randperm(n, generator=self.g)[:k] for _ in range(rows)]) if rows else self.below(n, 0, k)
        )

    def chosen(self, n: int, rows: int, k: int) -> torch.Tensor:
        """int64 [rows, k]: for each row k different numbers below n, in no order; for large k."""
        parts = [min(CHUNK // 256, rows - first) for first in range(0, rows, CHUNK // 256)]
        return torch.cat([self.uniform(0, 1, part, n).topk(k, -1).indices for part in parts])

    def shuffled(self, values: torch.Tensor) -> torch.Tensor:
        """The values along the first axis in no order."""
        return values[torch.randperm(len(values), generator=self.g)]

    def coded(self, rows: int, width: int) -> torch.Tensor:
        """Rows [rows, width] of which each number says its place: ±2^(row mod 7 − 3) · (1 + column mod 4 / 4)."""
        row, column = torch.arange(rows).unsqueeze(1), torch.arange(width)
        sign = 1 - 2 * ((row + column // 4) % 2)
        return (sign * 2.0 ** (row % 7 - 3) * (1 + (column % 4) / 4)).to(self.dtype)

    def angles(self, half: int, *lead: int) -> torch.Tensor:
        """Rotations complex64 [*lead, half]."""
        angle = 6.3 * self.rand(*lead, half)
        return torch.polar(torch.ones_like(angle), angle)

    def bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """uint8 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.g, device=self.device, dtype=torch.uint8)

    def matrix(self, *shape: int) -> torch.Tensor:
        """fp32 [O, K], or a stack of such, whose products with inputs of size 1 have size 1."""
        return self.rand(*shape) * shape[-1] ** -0.5

    def weight(self, form: WeightFormat, w: torch.Tensor) -> PackedWeight:
        """A matrix fp32 [O, K] in the format."""
        match form:
            case WeightFormat.DENSE:
                return PackedWeight(form, w.to(self.dtype))
            case WeightFormat.FP8:
                return PackedWeight(form, *quantize_fp8(w))
            case WeightFormat.MXFP4:
                return PackedWeight(form, *quantize_mxfp4(w))
        weight, scale, top = quantize_nvfp4(w)
        return PackedWeight(form, weight, scale, top.view(1))

    def pool(self, form: RowFormat | None, rows: int, width: int, rope: int = 0, batch: int | None = None):
        """Rows of normal values for large pools, flat or with `batch` that many runs of `rows`: `PackedRows` in the
        format, or without one a tensor in the activations' dtype."""
        lead = () if batch is None else (batch,)
        if form is None:
            return self.act(*lead, rows, width)
        layout, pages = pack_layout(form, width, rope), -(-rows // PAGE)
        data = torch.zeros(*lead, pages, layout.page, dtype=torch.uint8, device=self.device)
        flat = PackedRows(form, data.view(-1, layout.page), width, rope, 0)
        total = 0 if self.g is None else (batch or 1) * pages * PAGE
        for start in range(0, total, CHUNK):
            count = min(CHUNK, total - start)
            payload, scales = encode_rows(self.rand(count, width), form, rope)
            page = slice(start // PAGE, (start + count) // PAGE)  # CHUNK and the total are whole pages
            flat.payload[page] = payload.view(-1, PAGE, layout.payload)
            flat.scales[page] = scales.view(-1, PAGE, layout.scales)
        return PackedRows(form, data, width, rope, rows)

    def packed(self, form: RowFormat, rows: torch.Tensor, rope: int = 0) -> PackedRows:
        """Rows fp32 [..., n, width] as one flat pool, or one run a batch row with leading axes (B,). Rows that do not
        exist (the end of the last page) hold other random rows, and padding 0xA5."""
        *lead, n, width = rows.shape
        pages, layout = -(-n // PAGE), pack_layout(form, width, rope)
        data = torch.full((*lead, pages, layout.page), 0xA5, dtype=torch.uint8)
        found = PackedRows(form, data, width, rope, n)
        for run, values in zip(data.view(-1, pages, layout.page), rows.reshape(-1, n, width)):
            whole = torch.cat((values, self.rand(PAGE * pages - n, width)))
            write_rows(found._replace(data=run, count=PAGE * pages), torch.arange(PAGE * pages), whole)
        return found
