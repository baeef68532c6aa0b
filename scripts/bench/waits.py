"""Where the host waits for a device, counted."""

import contextlib
import warnings
from collections.abc import Iterator

import torch

# torch's words for each one; another warning, once, says that this mode is a prototype
A_SYNC = "called a synchronizing"
# of which torch says nothing
CALLS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))


@contextlib.contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """A list that holds, when this is left, one message for every operation that made the host wait for the device:
    copies that return only when they are done, and calls of `synchronize`. Without a CUDA device there is nothing to
    wait for, and calls alone are counted.

    Polling (`Event.query`) is none. Operations of other threads count too.
    """
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for owner, name in CALLS:
            stack.enter_context(_counted(owner, name, found))
        if torch.cuda.is_available():
            stack.enter_context(_warned(found))
        yield found


@contextlib.contextmanager
def _counted(owner, name: str, found: list[str]) -> Iterator[None]:
    """Calls of owner.name leave a message."""
    own, real = name in vars(owner), getattr(owner, name)

    def call(*args, **more):
        found.append(f"{owner.__name__}.{name}")
        return real(*args, **more)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, real)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def _warned(found: list[str]) -> Iterator[None]:
    """What torch itself warns of leaves its message."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            found += [str(w.message).splitlines()[0] for w in seen if A_SYNC in str(w.message)]
