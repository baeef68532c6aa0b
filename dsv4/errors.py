"""Errors of the model and the engine. Each is one line meant for the user."""

from dsv4.kernels.errors import (
    BackendUnavailable,
    Dsv4Error,
    KernelError,
    KernelFailed,
    KernelMismatch,
    KernelNotLoaded,
    KernelNotReached,
    UnknownOperation,
    UnsupportedInput,
)

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "ConfigError",
    "ContextOverrun",
    "Dsv4Error",
    "InputError",
    "KernelError",
    "KernelFailed",
    "KernelMismatch",
    "KernelNotLoaded",
    "KernelNotReached",
    "MapMismatch",
    "MissingSelection",
    "MissingSummaries",
    "NotFinite",
    "OutOfPages",
    "PageError",
    "RankLost",
    "RanksDisagree",
    "RewindError",
    "RoundError",
    "UnknownOperation",
    "UnsupportedInput",
    "brief",
]


def brief(value: object, most: int = 40) -> str:
    """A value in a message: its first `most` characters."""
    text = str(value)
    return text if len(text) <= most else text[:most] + "…"


class ConfigError(Dsv4Error):
    """config.json asks for something this model does not have, or contradicts itself."""


class InputError(Dsv4Error):
    """A prompt, token id or argument that cannot be run."""


class ContextOverrun(InputError):
    """More tokens than the cache was built for."""


class RewindError(InputError):
    """A rewind further back than the rings still hold."""


class RankLost(Dsv4Error):
    """A process that holds a part of the model died, stalled or left."""


class RanksDisagree(Dsv4Error):
    """Processes that were to compute the same did not."""


class CapacityError(Dsv4Error):
    """The requested sizes do not fit the device; the message has the bytes."""


class OutOfPages(CapacityError):
    """A pool has fewer free pages than a step needs."""


class PageError(Dsv4Error):
    """A page that was freed twice, shared while free, or discarded although it is committed: the engine's own
    bookkeeping is wrong."""


class RoundError(Dsv4Error):
    """A round on the device and the host disagree about a request's tokens, or about where it ends: the engine's own
    bookkeeping is wrong."""


class MapMismatch(Dsv4Error):
    """A map of whole decode steps that is further from the measured steps than it may be."""


class NotFinite(Dsv4Error):
    """Logits that are infinite or NaN: no token can be chosen from them."""


class MissingSelection(Dsv4Error):
    """A CSA layer was run without a selection: it would attend to its window only."""


class MissingSummaries(InputError):
    """A policy searches blocks of a cache that keeps no summaries of them."""
