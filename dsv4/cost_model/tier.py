"""The price of caches in host memory: what a step takes longer than one whose caches are on the device.

    extra = layers · (c₂ + c₃, where something is fetched) + bytes fetched / β_link
    bytes fetched = (1 − hit rate) · bytes of what the layers choose

c₂ is the price of the tier's launches where nothing is missing, c₃ the latency of the link, paid by a layer that
fetches. The three are fitted to the measured steps of scripts/bench_host_tier.py. The bytes on the device are those of
`dsv4.cache.host_tier.planning`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from dsv4.cost_model.fit import non_negative
from dsv4.errors import InputError

Bytes = Callable[[int, int], int]  # (batch, context) → bytes of one layer


@dataclass(frozen=True)
class HostWay:
    """A policy whose caches are in host memory. Bytes of one layer, over all rows: device: of summaries, staged items
    and slot tables; host: pinned; chosen: that a step would fetch if nothing of its choice were staged; whole: of the
    buffer through which whole layers pass, of which a model has `buffers`."""

    device: Bytes
    host: Bytes
    chosen: Bytes
    whole: Bytes
    buffers: int = 2

    def held(self, batch: int, context: int, layers: int) -> int:
        """Bytes of `layers` layers on the device."""
        return layers * self.device(batch, context) + min(self.buffers, layers) * self.whole(batch, context)


@dataclass(frozen=True)
class Tier:
    """link: bytes/s of fetches; launch, latency: c₂ and c₃ in s a layer; copy: bytes/s of a large copy to the device,
    measured in that run; worst: greatest relative error of the fitted steps."""

    link: float
    launch: float
    latency: float
    copy: float
    device: str
    command: str
    worst: float = 0.0

    def extra(self, layers: int, fetched: float) -> float:
        """Seconds that a step takes longer, if its layers fetch `fetched` bytes together."""
        return layers * (self.launch + (self.latency if fetched else 0.0)) + fetched / self.link

    @classmethod
    def from_document(cls, document: Mapping) -> "Tier":
        """The inverse of `dataclasses.asdict`."""
        return cls(**document)


def tier_of(document: object) -> Tier:
    """The price of the tier from a document that scripts/bench_host_tier.py wrote: of its GQA part, or of its entries
    of CSA layers. Raises InputError for any other."""
    try:
        assert isinstance(document, dict)
        rows = [
            (part["layers"], row["bytes_a_step"], part["resident_seconds"], row["seconds"])
            for part, found in _parts(document)
            for row in found
        ]
        link, about = document["link"], document["about"]
        columns = [[n for _, n, *_ in rows], [n for n, *_ in rows], [n if fetched else 0 for n, fetched, *_ in rows]]
        if len(rows) < 3 or not any(columns[0]):
            raise ValueError(f"{len(rows)} steps of the tier; expected at least 3, some of which fetch")
        times = [seconds for *_, seconds in rows]
        each, launch, latency = non_negative(columns, [t - floor for *_, floor, t in rows], times)
        if not each:
            raise ValueError("time does not grow with the bytes fetched")
        found = Tier(1 / each, launch, latency, link["to_device"], about["device"], about["command"])
        said = [floor + found.extra(layers, fetched) for layers, fetched, floor, _ in rows]
        return Tier(**asdict(found) | {"worst": max(abs(s / t - 1) for s, t in zip(said, times))})
    except (KeyError, TypeError, AssertionError, ValueError) as error:
        raise InputError(
            f"no measured steps of the host tier were found ({type(error).__name__}: {error}); expected the JSON that "
            "scripts/bench_host_tier.py writes"
        ) from None


def _parts(document: Mapping) -> list[tuple[Mapping, Sequence[Mapping]]]:
    """(what a part says of its layers, its rows)."""
    if "grouped" in document:
        return [(document["grouped"], document["grouped"]["rows"])]
    return [(row, [row]) for row in document["entries"]]


def checked(document: Mapping, tier: Tier, resident: Callable[[int, int], float]) -> list[dict]:
    """Predicted steps of a whole model beside the measured ones of the document: staged, and the whole cache streamed.
    resident: (batch, context) → seconds of a sparse step whose caches are on the device."""
    found = []
    if (part := document.get("decode")) is not None:
        for row in part["rows"]:
            if row["guessed_a_step"]:
                continue  # guesses are fetched beside the layers' own work, which the model does not describe
            if row["fetched_a_step"]:
                said = resident(part["batch"], part["context"]) + tier.extra(part["layers"], row["fetched_a_step"])
            else:
                said = part["host_bytes"] / tier.copy  # streamed by the copy engine, under which the rest is hidden
            found.append(_compared(part, row, said))
    if (part := document.get("flash")) is not None:
        here, *away = part["rows"]  # its resident step was measured beside it
        for row in away:
            said = here["seconds"] + tier.extra(part["csa_layers"], row["fetched_a_step"])
            found.append(_compared(part, row, said))
    return found


def _compared(part: Mapping, row: Mapping, said: float) -> dict:
    return {
        "way": row["way"],
        "batch": part["batch"],
        "context": part["context"],
        "hit_rate": row["hit_rate"],
        "measured": row["seconds"],
        "map": said,
        "error": said / row["seconds"] - 1,
    }
