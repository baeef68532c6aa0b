"""MXFP4 weights in the layout that Marlin's kernels read, shared by `linear` and `experts`."""

import torch
import torch.nn.functional as F

from dsv4.kernels.quantize import PackedWeight
from dsv4.probes.kernel_audit.adapters.installed import processors

E2M1 = 562949953487106  # vLLM's id of FP4: 2 exponent bits, 1 mantissa bit, signed, finite only
LOCKS = 4  # of a multiprocessor
ONE = 127  # the E8M0 byte of scale 1
RUN = 64  # rows whose scales are permuted together
ORDER = tuple(i + 8 * j for i in range(8) for j in range(8))  # scale at place p of a run is that of row ORDER[p]
PAIRS = (0, 2, 1, 3)  # and then every four are put into this order


def padded_rows(w: PackedWeight, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales as bytes) of MXFP4 [..., O, ·], with rows of zeros up to a multiple."""
    more = -w.weight.shape[-2] % multiple
    scale = w.scale.view(torch.uint8)
    return F.pad(w.weight, (0, 0, 0, more)), F.pad(scale, (0, 0, 0, more), value=ONE)


def permuted_scales(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes [..., rows, groups], rows a multiple of 64 → E8M0 [..., groups, rows] in Marlin's order."""
    s = scale.transpose(-1, -2).contiguous()
    shape = s.shape
    s = s.view(*shape[:-1], -1, RUN)[..., list(ORDER)]
    s = s.reshape(*shape[:-1], -1, len(PAIRS))[..., list(PAIRS)]
    return s.reshape(shape).view(torch.float8_e8m0fnu)


def as_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [O, K/2] as int32 [K/8, O]: the eight codes of a word stand at 8·row … 8·row + 7, lowest first."""
    return codes.contiguous().view(torch.int32).T.contiguous()


def repacked(repack, codes: torch.Tensor) -> torch.Tensor:
    """gptq_marlin_repack(words, K, O, 4 bits, False) of codes [O, K/2], or of each matrix of a stack [E, O, K/2]."""
    if codes.dim() == 3:
        return torch.stack([repacked(repack, one) for one in codes])
    return repack(as_words(codes), 2 * codes.shape[1], codes.shape[0], 4, False)


def locks(device) -> torch.Tensor:
    """The zeroed locks that Marlin works with, and leaves zeroed."""
    return torch.zeros(processors() * LOCKS, dtype=torch.int32, device=device)
