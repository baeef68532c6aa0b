"""Which MXFP4 weights are E4M3 codes under one scale a row, exactly, and these scales."""

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.quantize.weights import MXFP4_BLOCK

SPREAD = 13  # the most by which exponents of a row's scales may differ: codes of E4M3 reach from 2^−9 to 448
LEAST = 7  # byte of the smallest scale that may be the largest of a row
UNSCALED = 127  # byte that stands for the largest scale of a row of zeros
ROWS, COLUMNS = 256, 512  # of which shapes are multiples: rows of a tile, columns whose scales are copied at once


class Unfit(NamedTuple):
    """Why a weight is left to other kernels."""

    reason: str


_known: dict[tuple, tuple[StorageWeakRef, torch.Tensor | Unfit]] = {}


def largest_scales(w: Held) -> torch.Tensor | Unfit:
    """uint8 [E, O], or [O] of one matrix: byte of the largest scale of each row, of groups that are not all zeros; or
    why there is none.

    Scales of a row become part of its codes, relative to the largest one. E4M3 holds E2M1 codes exactly over 14
    exponents. The weight is read once, when it is first asked for, and must not be written to later. The bytes are kept
    as long as the weight, one a row.
    """
    if w.format != "mxfp4":
        return Unfit(f"the weight is in {w.format}")
    if w.of is not None:
        return Unfit("the weight is a pool of slots, whose matrices change")
    if w.O % ROWS or w.K % COLUMNS or w.weight.ndim not in (2, 3):
        return Unfit(f"{w.O} rows of {w.K} columns are not multiples of {ROWS} and {COLUMNS}")
    if w.weight.is_meta:
        return torch.empty(w.weight.shape[:-1], dtype=torch.uint8, device="meta")
    if w.weight.data_ptr() % 16 or w.scale.data_ptr() % 16:
        return Unfit("the weight does not begin at a multiple of 16 bytes")
    key = w.weight.device, w.weight.data_ptr(), w.scale.data_ptr(), tuple(w.weight.shape)
    if key in _known and not _known[key][0].expired():
        return _known[key][1]
    for gone in [k for k, (storage, _) in _known.items() if storage.expired()]:
        del _known[gone]
    single = w.weight.ndim == 2
    found = _largest_scales(*((w.weight[None], w.scale[None]) if single else (w.weight, w.scale)))
    found = found[0] if single and isinstance(found, torch.Tensor) else found
    _known[key] = StorageWeakRef(w.weight.untyped_storage()), found
    return found


def _largest_scales(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | Unfit:
    top = torch.empty(weight.shape[:2], dtype=torch.uint8, device=weight.device)
    spread, least, invalid = [], [], []
    for e in range(len(weight)):  # one after the other, for the memory
        nibbles = weight[e].view(torch.int64).unflatten(-1, (-1, MXFP4_BLOCK // 16))
        zero = (nibbles & 0x7777777777777777).eq(0).all(-1)
        byte = scale[e].to(torch.int16)
        largest, smallest = byte.masked_fill(zero, -1).amax(-1), byte.masked_fill(zero, 256).amin(-1)
        spread.append((largest - smallest).amax())
        least.append(largest.masked_fill(largest < 0, UNSCALED).amin())
        invalid.append(byte.amax())
        top[e] = largest.masked_fill(largest < 0, UNSCALED).to(torch.uint8)
    widest, lowest, highest = (torch.stack(t) for t in (spread, least, invalid))
    widest, lowest, highest = torch.stack((widest.amax(), lowest.amin(), highest.amax())).tolist()
    if highest == 255:
        return Unfit("a scale is NaN")
    if widest > SPREAD:
        return Unfit(f"exponents of the scales of a row differ by {widest}; E4M3 codes of one base span {SPREAD}")
    if lowest < LEAST:
        return Unfit(f"all scales of a row are below 2^{LEAST - 127}")
    return top
