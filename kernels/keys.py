"""Makes keys of Triton's disk cache stable, so that the next process finds its kernels.

The key of a compiled kernel holds the constants of all functions that it calls. Triton (3.6, 3.7) reads those of a
callee before it has analysed the callee, so they are in the key only if another kernel used the callee earlier. So a
kernel would get another key in a process that launches its kernels in another order, and be compiled again. Here the
callees of a function of this project are analysed when its own key is asked for, and the key is always the same.
"""

from collections.abc import Iterator
from threading import RLock

from triton.language import core, standard
from triton.runtime.jit import JITCallable

_analysed = JITCallable.cache_key.fget
_lock = RLock()  # a callee that another thread analyses is waited for


def use() -> None:
    """From now on in this process."""
    JITCallable.cache_key = property(_key)


def _key(f: JITCallable) -> str:
    if f.hash is None and f.fn.__module__.startswith("dsv4.kernels."):
        with _lock:
            _analyse(f, set())
    return _analysed(f)


def _analyse(f: JITCallable, begun: set[int]) -> None:
    """Callees first. begun: ids of functions whose analysis has begun; they may call themselves."""
    begun.add(id(f))
    for callee in _callees(f):
        if callee.hash is None and id(callee) not in begun:
            _analyse(callee, begun)
    _analysed(f)


def _callees(f: JITCallable) -> Iterator[JITCallable]:
    for name in f.fn.__code__.co_names:  # globals, and what is taken from triton.language
        callee = f.__globals__.get(name) or getattr(standard, name, None) or getattr(core, name, None)
        if isinstance(callee, JITCallable):
            yield callee
