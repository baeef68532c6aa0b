"""Capacity for a plan: memory of cards by name, and how `--device-map auto` splits layers over several cards."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.errors import InputError, brief
from dsv4.kernels.launch import GPU
from dsv4.units import format_bytes, parse_count

MIB = 1 << 20


class Card(NamedTuple):
    """mib: in all, as nvidia-smi reports them."""

    mib: int
    chip: GPU


CARDS = {
    "h100": Card(81559, GPU((9, 0), 132)),
    "h200": Card(143771, GPU((9, 0), 132)),
    "h20": Card(97871, GPU((9, 0), 78)),
    "gh200": Card(97871, GPU((9, 0), 132)),
    "b200": Card(183359, GPU((10, 0), 148)),
    "a100": Card(81920, GPU((8, 0), 108)),
    "a100-40": Card(40960, GPU((8, 0), 108)),
    "a6000": Card(49140, GPU((8, 6), 84)),
    "a40": Card(46068, GPU((8, 6), 84)),
    "a10": Card(23028, GPU((8, 6), 72)),
    "l40s": Card(46068, GPU((8, 9), 142)),
    "l4": Card(23034, GPU((8, 9), 58)),
    "5090": Card(32607, GPU((12, 0), 170)),
    "4090": Card(24564, GPU((8, 9), 128)),
    "3090": Card(24576, GPU((8, 6), 82)),
}
# Memory of a named card for the driver, a CUDA context, kernels and the exchange of ranks: of the 81559 MiB of an H100
# a process can have 81080; with a decode step of all of Flash captured, 790 of them were in use outside torch.
SET_ASIDE = 1280 * MIB
MOST_GPUS = 64  # up to this many are tried to find how many would suffice


@dataclass(frozen=True)
class Unit:
    """A module that is placed whole, with its weights and its caches in bytes."""

    name: str
    weights: int
    cache: int = 0

    @property
    def nbytes(self) -> int:
        return self.weights + self.cache


def chip_named(device: str) -> GPU:
    """The chip of a card called 'h100'. Raises InputError that lists the names."""
    found = CARDS.get(_name(device))
    if found is None:
        raise InputError(
            f"--device {brief(device)!r} is unknown; expected cuda or cuda:N of this machine, or one of "
            f"{', '.join(CARDS)}"
        )
    return found.chip


def _name(device: str) -> str:
    return device.strip().lower().removeprefix("rtx").strip("- ")


def named_bytes(device: str) -> int:
    """Usable bytes of a card called 'h100', or of a size ('80GiB'). Raises InputError that lists the names."""
    name = _name(device)
    if name in CARDS:
        return CARDS[name].mib * MIB - SET_ASIDE
    if name[:1].isdecimal() and not name.isdecimal():
        return parse_count(device)
    raise InputError(
        f"--device {brief(device)!r} is unknown; expected cpu, cuda or cuda:N of this machine, a size such as 80GiB, "
        f"or one of {', '.join(CARDS)}"
    )


def units(tensors: Mapping[str, int], caches: Mapping[str, int]) -> list[Unit]:
    """Units of a model in the order they run, as `dsv4.model.offload` places them.

    tensors: bytes by tensor name; caches: bytes by label, 'layer 3' or 'mtp 0'."""
    weights: dict[str, int] = {}
    for name, nbytes in tensors.items():
        unit = _unit(name)
        weights[unit] = weights.get(unit, 0) + nbytes
    kinds = {"layer": "layers", "mtp": "mtp"}
    held = {(kinds[kind], int(i)): nbytes for (kind, i), nbytes in ((k.split(), n) for k, n in caches.items())}
    last = {"layers": 1, "mtp": 2, "hc_head": 3, "norm": 4, "head": 5, "lm_head": 5}

    def numbered(name: str) -> tuple[str, int]:
        kind, _, index = name.removeprefix("model.").partition(".")
        return kind, int(index or 0)

    def order(name: str) -> tuple[int, int]:
        kind, index = numbered(name)
        return last.get(kind, 0), index

    return [Unit(name, weights[name], held.get(numbered(name), 0)) for name in sorted(weights, key=order)]


def _unit(tensor: str) -> str:
    """The unit that a tensor of this name belongs to."""
    layer = re.match(r"(model\.)?(layers|mtp)\.\d+(?=\.)", tensor)
    if layer:
        return layer.group()
    return "hc_head" if tensor.startswith("hc_head") else tensor.rpartition(".")[0]


def split(found: Sequence[Unit], capacities: Sequence[int]) -> list[list[Unit]]:
    """Whole units in their order, one list a GPU, so that the GPU with the least room left has as much as possible."""
    sums = {sum(u.nbytes for u in found[i:j]) for i in range(len(found)) for j in range(i + 1, len(found) + 1)}
    slacks = sorted({capacity - nbytes for nbytes in sums for capacity in set(capacities)}, reverse=True)
    low, high = 0, len(slacks) - 1  # a smaller slack always works: binary search for the largest
    while low < high:
        middle = (low + high) // 2
        if _filled(found, [c - slacks[middle] for c in capacities]) is None:
            low = middle + 1
        else:
            high = middle
    return _filled(found, [c - slacks[low] for c in capacities])


def _filled(found: Sequence[Unit], limits: Sequence[int]) -> list[list[Unit]] | None:
    """Each GPU in turn takes units until the next exceeds its limit; None if some are left over."""
    parts, rest = [], list(found)
    for limit in limits:
        part, used = [], 0
        while rest and used + rest[0].nbytes <= limit:
            used += rest[0].nbytes
            part.append(rest.pop(0))
        parts.append(part)
    return None if rest else parts


def memory_limits(parts: Sequence[Sequence[Unit]], capacities: Sequence[int]) -> list[int]:
    """Limits of weights, one a GPU up to the last in use, under which `--device-map auto` makes this split.

    accelerate fills one GPU after the other with weights alone, and on the first keeps room for the largest unit that
    is not placed yet. A limit is the planned weights of the GPU plus half of the next unit.
    """
    limits = []
    for i, part in enumerate(parts):
        after = [unit for later in parts[i + 1 :] for unit in later]
        if not part or not after:
            limits.append(capacities[i] if part else 0)
            if not after:
                break
            continue
        reserve = max(unit.weights for unit in after) if i == 0 else 0
        limits.append(sum(unit.weights for unit in part) + reserve + after[0].weights // 2)
    return limits


def max_memory(limits: Sequence[int]) -> str:
    """Limits as --max-memory takes them: '0=79000M,1=78000M'."""
    shown = lambda n: f"{n // MIB}M" if n >= 1024 * MIB else str(n)
    return ",".join(f"{gpu}={shown(limit)}" for gpu, limit in enumerate(limits))


def shares(parts: Sequence[Sequence[Unit]], capacities: Sequence[int]) -> list[dict]:
    """What each GPU holds, as JSON values."""
    return [
        {
            "gpu": gpu,
            "holds": _span(part),
            "weights_bytes": sum(unit.weights for unit in part),
            "cache_bytes": sum(unit.cache for unit in part),
            "left_bytes": capacity - sum(unit.nbytes for unit in part),
        }
        for gpu, (part, capacity) in enumerate(zip(parts, capacities))
    ]


def _span(part: Sequence[Unit]) -> str:
    return "nothing" if not part else part[0].name if len(part) == 1 else f"{part[0].name} … {part[-1].name}"


def enough(found: Sequence[Unit], capacity: int) -> int | None:
    """The fewest GPUs of that capacity that hold the units; None if `MOST_GPUS` do not."""
    return next((n for n in range(1, MOST_GPUS + 1) if _filled(found, [capacity] * n) is not None), None)


def answer(total: int, held: Sequence[Mapping], capacities: Sequence[int], label: str, hint: str = "") -> str:
    """'fits: …' or 'does not fit: …, N GiB short', in one line. held: of `shares`; label: '2 × h100'."""
    fullest = min(held, key=lambda gpu: gpu["left_bytes"])
    left, capacity = fullest["left_bytes"], capacities[fullest["gpu"]]
    verdict = "fits" if left >= 0 else "does not fit"
    where = f"{format_bytes(total)} on {label} ({format_bytes(capacity)} usable"
    if len(held) > 1:
        where += f" each; the fullest, GPU {fullest['gpu']}, is to hold {format_bytes(capacity - left)}"
    end = f"{format_bytes(left)} left free" if left >= 0 else f"{format_bytes(-left)} short"
    return f"{verdict}: {where}), {end}{hint}"
