"""Bytes of packed cache rows as the public layouts have them (specification 5), written out here from their
definitions.

Nothing here comes from `dsv4.kernels.cache_rows`, which the probes hold against it. Rows lie in pages of 64: the
payload of all rows first, one after another, then their scales.

- FP8 rows (window, entries): all but the rotated dims as E4M3, the rotated ones in bf16; one E8M0 scale for 64 dims,
  the scales padded to 8 bytes. 584 B at 512 dims. A page is padded to a multiple of one row's payload.
- FP8 index keys: E4M3, then one fp32 scale, a power of two. 132 B at 128 dims.
- MXFP8 index keys: E4M3; one E8M0 scale for 32 dims. 132 B at 128 dims.
- FP4 index keys: two E2M1 codes a byte, the low nibble first; one E8M0 scale for 32 dims. 68 B at 128 dims.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dsv4.model.config import ModelConfig
from dsv4.probes.oracle.formats import E2M1_GRID, E4M3, E4M3_GRID, E8M0, nearest, scale_of, unpack_nibbles

PAGE = 64


@dataclass(frozen=True)
class Packed:
    """Rows of `width` numbers. payload, scales: bytes of a row; used: of the scales, without padding; page: of 64
    rows."""

    kind: str  # 'fp8 rows', or the name of a format in KEYS and 'keys'
    width: int
    rotated: int
    payload: int
    scales: int
    used: int
    page: int
    bits: int = 8
    block: int = 64  # 0: one fp32 scale a row

    def spans(self, first: int, count: int) -> list[tuple[int, int]]:
        """Bytes (start, stop) of rows first … first + count − 1 of a run of pages: two pieces a page that they
        touch."""
        found, stop = [], first + count
        while first < stop:
            page, slot = divmod(first, PAGE)
            rows = min(PAGE - slot, stop - first)
            at = page * self.page + slot * self.payload
            scale = page * self.page + PAGE * self.payload + slot * self.scales
            found += [(at, at + rows * self.payload), (scale, scale + rows * self.scales)]
            first += rows
        return found

    def offsets(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [n, payload + scales]: the bytes of rows int64 [n] of a run of pages, payload first."""
        page, slot = (rows // PAGE).unsqueeze(-1) * self.page, (rows % PAGE).unsqueeze(-1)
        payload = page + slot * self.payload + torch.arange(self.payload, device=rows.device)
        scales = page + PAGE * self.payload + slot * self.scales + torch.arange(self.scales, device=rows.device)
        return torch.cat((payload, scales), 1)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [n, width] → uint8 [n, payload + scales], zeros where scales are padded."""
        left = self.width - self.rotated
        if self.bits == 4:
            codes, exponents = _coded(values, self.block, E2M1_GRID, 6 * 2.0**-126, 3)
            payload = [codes[:, 0::2] | codes[:, 1::2] << 4]
        elif self.block == 0:
            codes, exponents = _coded(values, self.width, E4M3_GRID, 1e-4, 7)
            scale = (2.0 ** exponents.double()).numpy().astype("<f4").view(np.uint8)
            return torch.cat((codes, torch.from_numpy(scale)), 1)
        else:
            codes, exponents = _coded(values[:, :left], self.block, E4M3_GRID, 1e-4, 7)
            payload = [codes, values[:, left:].to(torch.bfloat16).contiguous().view(torch.uint8)]
        padding = torch.zeros(len(values), self.scales - self.used, dtype=torch.uint8)
        return torch.cat((*payload, (exponents + 127).to(torch.uint8), padding), 1)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """uint8 [n, payload + scales] → float64 [n, width]."""
        payload, scales = raw[:, : self.payload].numpy(), raw[:, self.payload : self.payload + self.used].numpy()
        left = self.width - self.rotated
        if self.bits == 4:
            return torch.from_numpy(unpack_nibbles(payload) * np.repeat(E8M0[scales], self.block, 1))
        if self.block == 0:
            return torch.from_numpy(E4M3[payload] * np.ascontiguousarray(scales).view("<f4").astype(np.float64))
        coded = E4M3[payload[:, :left]] * np.repeat(E8M0[scales], self.block, 1)[:, :left]
        if not self.rotated:
            return torch.from_numpy(coded)
        kept = raw[:, left : self.payload].contiguous().view(torch.bfloat16).double()
        return torch.cat((torch.from_numpy(coded), kept), 1)


def _coded(
    values: torch.Tensor, block: int, grid: torch.Tensor, floor: float, sign: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, K] of values [n, K] with one power-of-two scale a block of columns, and exponents int64 [n,
    blocks]."""
    codes, exponents = [], []
    for part in values.split(block, -1):
        scale = scale_of(part.abs().amax(-1, keepdim=True).clamp(min=floor), float(grid[-1]))
        code = nearest(part / scale, grid) | torch.signbit(part).long() << sign
        codes.append(code.to(torch.uint8))
        exponents.append(torch.log2(scale).round().long())
    return torch.cat(codes, -1), torch.cat(exponents, -1)


def fp8_rows(width: int, rotated: int) -> Packed:
    """Window rows and entries."""
    payload, used = width - rotated + 2 * rotated, -(-(width - rotated) // 64)
    scales = -(-used // 8) * 8
    return Packed("fp8 rows", width, rotated, payload, scales, used, -(-PAGE * (payload + scales) // payload) * payload)


# index keys: bits of a code, and numbers under one E8M0 scale (0: fp32, a row)
KEYS = {"fp8": (8, 0), "fp4": (4, 32), "mxfp8": (8, 32)}


def keys_named(name: str, width: int) -> Packed:
    """Index keys in a format of KEYS."""
    bits, block = KEYS[name]
    payload, scales = width * bits // 8, width // block if block else 4
    return Packed(f"{name} keys", width, 0, payload, scales, scales, PAGE * (payload + scales), bits, block)


def all_keys(width: int) -> list[Packed]:
    """Index keys in every format into whose blocks they divide."""
    return [keys_named(name, width) for name, (_, block) in KEYS.items() if not block or width % block == 0]


def packed_streams(config: ModelConfig, caches: tuple[str, str]) -> dict[str, Packed]:
    """Stream name → its layout, of the streams that are packed in these formats of the main cache and of the index
    keys."""
    found, (main, index) = {}, caches
    if main == "fp8":
        found |= dict.fromkeys(("window", "entries"), fp8_rows(config.head_dim, config.qk_rope_head_dim))
    if index in KEYS:
        found["index keys"] = keys_named(index, config.index_head_dim)
    return found
