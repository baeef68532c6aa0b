"""The one base class of every error that dsv4 raises on purpose.

It lives at the bottom of the import order (kernels < loaders < dsv4) so that each
folder can derive from it and the command line can catch them all in one place.
"""


class Dsv4Error(Exception):
    """An error meant for the user: one line, what was found, what was expected, what to do."""


class BackendUnavailable(Dsv4Error):
    """A backend was asked for that cannot run an operation here."""


class UnsupportedInput(Dsv4Error):
    """An operation was called with a shape, dtype or value that it does not take."""


class KernelError(Dsv4Error):
    """A user's kernel cannot take an operation's place."""


class KernelNotLoaded(KernelError):
    """The file, module or function of a user's kernel cannot be loaded."""


class UnknownOperation(KernelError):
    """A kernel was given for an operation that the model does not have."""


class KernelMismatch(KernelError):
    """A user's kernel takes or returns something else than the operation's reference."""


class KernelFailed(KernelError):
    """A user's kernel raised an exception."""


class KernelNotReached(KernelError):
    """The model ran, and never through the user's kernel."""
