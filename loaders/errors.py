"""Errors of reading and writing checkpoints."""

from dsv4.kernels.errors import Dsv4Error


class CheckpointError(Dsv4Error):
    """A checkpoint that is broken, incomplete, or not what its config says."""


class WriteError(Dsv4Error):
    """A checkpoint could not be written; nothing half-written is left."""
