"""Where routed experts live: the choice that a model is loaded with, and the bytes that it takes.

With experts in host memory all experts of a layer are in pinned pages there, and the device has slots for some of them.
`dsv4.model.host_experts` holds them; `dsv4 plan` and the loader count them here.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dsv4.cache.streams import Stream
from dsv4.errors import CapacityError, InputError
from dsv4.units import count_named, format_bytes

NAMES = ("device", "host")  # of the command line
RESERVE = 4 << 30  # bytes of a GPU that the default number of slots leaves for a step and its captured graphs
LONGEST = 1 << 20  # tokens a row that it leaves room for, if the model takes so many and no other number is known
SHARE = 4  # on a host processor, whose memory has no slots to fill, one expert in so many has a slot by default


@dataclass(frozen=True)
class ExpertMemory:
    """Routed experts in pinned host memory, from which a step fetches those that the router chose.

    resident: slots of each layer on the device. budget: bytes of the device for all that experts take there, instead.
    With neither, slots fill what weights, caches of `rows` rows of `context` tokens (None: the model's longest, at most
    1M) and `RESERVE` leave free. Raises InputError for both, and for sizes below 1.
    """

    resident: int | None = None
    budget: int | None = None
    rows: int = 1
    context: int | None = None

    def __post_init__(self):
        if self.resident is not None and self.budget is not None:
            raise InputError(
                f"--resident-experts {self.resident} and --expert-budget {self.budget} were given; both say how many "
                "experts stay on the device: leave out one"
            )
        if min(self.resident or 1, self.budget or 1, self.rows) < 1 or 0 in (self.resident, self.budget):
            raise InputError(f"{self} was asked for; expected at least one expert, byte and row")

    def holding(self, rows: int, context: int | None) -> "ExpertMemory":
        """This choice, for caches of that size."""
        return replace(self, rows=rows, context=context)


def expert_memory_named(name: str, resident: int | None = None, budget: str | None = None) -> ExpertMemory | None:
    """What --expert-memory, --resident-experts and --expert-budget ask for; None for experts on the device. Raises
    InputError for options that contradict each other."""
    if name not in NAMES:
        raise InputError(f"--expert-memory {name!r} is unknown; expected {' or '.join(NAMES)}")
    if name == "device":
        given = "--resident-experts" if resident is not None else "--expert-budget" if budget is not None else None
        if given:
            raise InputError(
                f"{given} says how many experts of host memory stay on the device, and all experts are there already; "
                "add --expert-memory host"
            )
        return None
    return ExpertMemory(resident, None if budget is None else count_named("--expert-budget", budget))


class ExpertSizes(NamedTuple):
    """each: bytes of one expert in every layer that has experts; experts: of a layer; topk: that a token chooses."""

    each: tuple[int, ...]
    experts: int
    topk: int

    @property
    def host_bytes(self) -> int:
        return self.experts * sum(self.each)

    def table_bytes(self, slots: int) -> int:
        """Of one layer: a `SlotTable`, counts of use, and four numbers more."""
        return 16 * slots + 12 * self.experts + 28 + 8 * 4

    def brought_bytes(self, slots: int) -> int:
        """The buffer, which layers share, for steps that choose more experts than there are slots."""
        return 0 if slots >= self.experts else self.experts * max(self.each)

    def device_bytes(self, slots: int) -> int:
        """All that `slots` slots a layer take on the device."""
        return slots * sum(self.each) + len(self.each) * self.table_bytes(slots) + self.brought_bytes(slots)

    def fitting(self, nbytes: int) -> int:
        """The most slots a layer that take no more than that."""
        if self.device_bytes(self.experts) <= nbytes:
            return self.experts
        slot = sum(self.each) + 16 * len(self.each)
        return max(0, min(self.experts - 1, (nbytes - self.device_bytes(0)) // slot))

    def streams(self, slots: int) -> list[Stream]:
        """What is allocated: pinned host memory, and on the device."""
        E, layers, kinds = self.experts, len(self.each), sorted(set(self.each))
        of = lambda count: " + ".join(f"{self.each.count(n)} layers × {count} × {n} B" for n in kinds)
        bytes_of = lambda name, nbytes, formula, place: Stream(name, (nbytes,), torch.uint8, formula, place=place)
        found = [
            bytes_of("routed experts", self.host_bytes, of(f"{E} experts"), "pinned"),
            bytes_of("resident experts", slots * sum(self.each), of(f"{slots} slots"), "staging"),
            bytes_of(
                "slot tables of experts",
                layers * self.table_bytes(slots),
                f"{layers} layers × ({slots} slots × 16 + {E} experts × 12 + 60) B",
                "staging",
            ),
        ]
        if brought := self.brought_bytes(slots):
            about = f"1 layer × {E} experts × {max(self.each)} B"
            found.append(bytes_of("a layer's experts on their way", brought, about, "staging"))
        return found


def resident_experts(choice: ExpertMemory, sizes: ExpertSizes, room: int | None) -> int:
    """Slots of each layer. room: bytes of the device that experts may take, None on a host processor.

    Raises InputError for a model without routed experts and for more slots than experts, CapacityError with the least
    bytes for fewer slots than a token chooses."""
    k, E = sizes.topk, sizes.experts
    if not sizes.each:
        raise InputError("experts in host memory were asked for, and this model has no routed experts")
    if choice.resident is not None:
        slots, found = choice.resident, f"{choice.resident} slots a layer were asked for"
        if slots > E:
            raise InputError(f"--resident-experts {slots} were asked for; a layer has {E} experts: ask for at most {E}")
    else:
        given = room if choice.budget is None else choice.budget
        slots = max(k, E // SHARE) if given is None else sizes.fitting(given)
        found = f"{format_bytes(max(0, given or 0))} of the device hold {slots} slots a layer"
    if slots < k:
        least = sizes.device_bytes(k)
        raise CapacityError(
            f"a token chooses {k} of {E} experts at once, and {found}; expected at least {k}, which take {least} bytes "
            f"({format_bytes(least)}) of the device"
        )
    return slots


def check_step(tokens: int, slots: int, sizes: ExpertSizes) -> None:
    """Raise CapacityError if a step of so many tokens may choose more experts of a layer than there are slots."""
    most = min(sizes.experts, tokens * sizes.topk)
    if most > slots:
        least = sizes.device_bytes(most)
        raise CapacityError(
            f"a step of {tokens} rows may choose {most} experts of a layer, which has {slots} slots on the device; ask "
            f"for --resident-experts {most} ({least} bytes, {format_bytes(least)}), or for fewer rows"
        )
