"""Attributes of a model's parts exchanged for as long as something is measured, and put back whatever happens."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

ABSENT = object()


@contextmanager
def replaced(objects: Iterable, name: str, value) -> Iterator[None]:
    """The attribute `name` of all objects set to `value`."""
    with _set([(thing, value) for thing in objects], name):
        yield


def kept(thing, name: str) -> AbstractContextManager:
    """The attribute `name` is afterwards what it is now, whatever it is set to in between."""
    return replaced([thing], name, getattr(thing, name))


@contextmanager
def wrapped(
    objects: Iterable[tuple[int, object]], name: str, around: Callable[[int, object, Callable], Callable]
) -> Iterator[None]:
    """The method `name` of each (number, object) made around(number, object, the method)."""
    with _set([(thing, around(i, thing, getattr(thing, name))) for i, thing in objects], name):
        yield


@contextmanager
def _set(values: list[tuple[object, object]], name: str) -> Iterator[None]:
    # its own: what its class has is not put onto it
    before = [(thing, vars(thing).get(name, ABSENT)) for thing, _ in values]
    for thing, value in values:
        setattr(thing, name, value)
    try:
        yield
    finally:
        for thing, old in before:
            if old is ABSENT:
                delattr(thing, name)
            else:
                setattr(thing, name, old)
