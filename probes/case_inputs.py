"""What the cases of `backend_matrix` are made of: random inputs at a model's own widths, in host memory, from a
seed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dsv4.config import ModelConfig
from dsv4.kernels.cache_rows import PackedRows, write_rows
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, quantize_nvfp4
from dsv4.probes.layouts import PAGE, Packed
from dsv4.probes.packed_rows import rows_of


@dataclass(frozen=True)
class Case:
    """One call. written: arguments that it changes in place, which are its results too.

    rule: 'sums' of numbers that both sides have alike; 'bits': equal ones; 'codes': rounded to FP8 or FP4 at the end,
    so that a value beside a boundary moves by a whole step; 'of codes': sums of such.
    """

    label: str
    arguments: list
    written: tuple[int, ...] = ()
    rule: str = "sums"


class Inputs:
    """Random inputs for N tokens; activations in `dtype`."""

    def __init__(self, config: ModelConfig, N: int, dtype: torch.dtype, seed: int):
        self.config, self.N, self.dtype, self.seed = config, N, dtype, seed
        self.g = torch.Generator().manual_seed(seed + N)
        self.label = f"{N} tokens" + ("" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}")

    def rand(self, *shape: int) -> torch.Tensor:
        """fp32, of size 1."""
        return torch.randn(*shape, generator=self.g)

    def act(self, *shape: int) -> torch.Tensor:
        """Like `rand`, in the dtype of activations."""
        return self.rand(*shape).to(self.dtype)

    def below(self, n: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, n, shape, generator=self.g)

    def angles(self, *lead: int) -> torch.Tensor:
        """Rotations complex64 [*lead, d/2] of the rotated dims."""
        angle = 6.3 * self.rand(*lead, self.config.qk_rope_head_dim // 2)
        return torch.polar(torch.ones_like(angle), angle)

    def matrix(self, O: int, K: int) -> torch.Tensor:
        return self.rand(O, K) * K**-0.5

    def uneven(self, *shape: int) -> torch.Tensor:
        """Like `act`, some columns times 2^14: they decide the scale that E4M3 rounds the others of their block by."""
        return torch.where(large_columns(shape[-1]), 2.0**14, 1.0).to(self.dtype) * self.act(*shape)

    def weights(self, O: int, K: int, even: bool = True) -> dict[str, PackedWeight]:
        """A matrix in every format that its columns allow; zeros, unless `even`, where `uneven` is large."""
        w = self.matrix(O, K)
        if not even:
            w[:, large_columns(K)] = 0
        found = {
            "dense": PackedWeight(WeightFormat.DENSE, w.to(self.dtype)),
            "fp8": PackedWeight(WeightFormat.FP8, *quantize_fp8(w)),
        }
        if K % 32 == 0:
            found["mxfp4"] = PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(w))
        if K % 16 == 0:
            weight, scale, top = quantize_nvfp4(w)
            found["nvfp4"] = PackedWeight(WeightFormat.NVFP4, weight, scale, top.view(1))
        return found

    def stack(self, E: int, O: int, K: int, parts: int = 1) -> dict[str, PackedWeight]:
        """E matrices, each of `parts` along its rows, in every format that their columns allow."""
        rows = O // parts
        each = [[self.matrix(rows, K) for _ in range(parts)] for _ in range(E)]
        whole = torch.stack([torch.cat(ws) for ws in each])
        pairs = lambda quantise: (torch.stack(t) for t in zip(*(quantise(w) for w in whole)))
        found = {
            "dense": PackedWeight(WeightFormat.DENSE, whole.to(self.dtype)),
            "fp8": PackedWeight(WeightFormat.FP8, *pairs(quantize_fp8)),
        }
        if K % 32 == 0:
            found["mxfp4"] = PackedWeight(WeightFormat.MXFP4, *pairs(quantize_mxfp4))
        if K % 16 == 0:
            made = [[quantize_nvfp4(w) for w in ws] for ws in each]
            joined = lambda i: torch.stack([torch.cat([part[i] for part in ws]) for ws in made])
            tops = torch.tensor([[part[2].item() for part in ws] for ws in made])
            found["nvfp4"] = PackedWeight(WeightFormat.NVFP4, joined(0), joined(1), tops)
        return found

    def packed(self, form: Packed, *lead: int, count: int) -> PackedRows:
        """Rows that hold something: a flat pool, or one run a batch row with lead = (B,); rows beyond `count` are
        NaN."""
        pages = -(-count // PAGE)
        data = torch.full((*lead, pages, form.page), 255, dtype=torch.uint8)
        for run in data.view(-1, pages, form.page):
            write_rows(rows_of(form, run), torch.arange(count), self.rand(count, form.width))
        return rows_of(form, data)._replace(count=count)


def large_columns(K: int) -> torch.Tensor:
    """bool [K]: the first 32 of every block of 128."""
    return torch.arange(K) % 128 < 32


def cases_of(make: Callable[["Inputs"], Iterable[tuple]] | None, i: "Inputs") -> list[Case]:
    """make(i) → (what is special, arguments, the rest of a Case) each; no case without `make`."""
    made = make(i) if make else ()
    return [Case(", ".join(filter(None, (i.label, how))), arguments, *more) for how, arguments, *more in made]


def simulations(how: str) -> tuple[bool, ...]:
    """Whether activations may be quantised for weights of this format: for dense ones they may not."""
    return (False,) if how == "dense" else (False, True)


def of_codes(how: str, simulate: bool, arguments: list) -> tuple:
    """A case in which what is computed on the way is quantised, if simulated."""
    return (f"{how}, simulated", arguments, (), "of codes") if simulate else (how, arguments)
