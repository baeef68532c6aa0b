"""Errors of the kernel audit, for the user: one line each."""

from dsv4.errors import Dsv4Error


class KernelAuditError(Dsv4Error):
    """The audit could not run: what was found, what was expected and what to do."""


class SubjectFailed(KernelAuditError):
    """The kernel raised; `refused` where it said so before it ran (NotImplementedError, UnsupportedInput)."""

    def __init__(self, message: str, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class SubjectDied(KernelAuditError):
    """The kernel's process ended, or gave no answer in time, or the device answers nothing more in it."""
