"""What the cases of contracts are drawn from: a generator on the CPU, so that the same seed is the same numbers on
every device."""

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, pack_layout, write_rows
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, quantize_nvfp4


class Draw:
    """Random inputs from a seed; activations in `dtype`. All of it lies in host memory."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16):
        self.seed, self.dtype = seed, dtype
        self.g = torch.Generator().manual_seed(seed)

    def rand(self, *shape: int) -> torch.Tensor:
        """fp32, normal, of size 1."""
        return torch.randn(*shape, generator=self.g)

    def act(self, *shape: int) -> torch.Tensor:
        """As `rand`, in the dtype of activations."""
        return self.rand(*shape).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """fp32, uniform."""
        return low + (high - low) * torch.rand(*shape, generator=self.g)

    def below(self, n: int, *shape: int) -> torch.Tensor:
        """int64 in [0, n)."""
        return torch.randint(0, n, shape, generator=self.g)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers low…high in the dtype of activations: sums of them are exact in fp32."""
        return torch.randint(low, high + 1, shape, generator=self.g).to(self.dtype)

    def choose(self, n: int, rows: int, k: int) -> torch.Tensor:
        """int64 [rows, k]: for each row k different numbers below n, in no order."""
        return (
            torch.stack([torch.randperm(n, generator=self.g)[:k] for _ in range(rows)]) if rows else self.below(n, 0, k)
        )

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

    def matrix(self, O: int, K: int) -> torch.Tensor:
        """fp32 [O, K] whose products with inputs of size 1 have size 1."""
        return self.rand(O, K) * K**-0.5

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
