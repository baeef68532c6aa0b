"""Makes keys of Triton's disk cache stable, so that the next process finds its kernels.

The key of a compiled kernel holds the constants of all functions that it calls. Triton (3.6, 3.7) reads those of a
callee before it has analysed the callee, so they are in the key only if another kernel used the callee earlier. So a
kernel gets another key in a process that launches its kernels in another order, and is compiled again. If callees are
analysed before their callers, the key is always the same.
"""

import sys

from triton import knobs
from triton.language import core, standard
from triton.runtime.jit import JITCallable


def settle(package: str = "dsv4.kernels", backwards: bool = False) -> list[str]:
    """Analyse every Triton function of the imported modules of `package`, callees first; call it before the first
    launch.

    Returns "module.name key" of each, sorted. backwards: in the opposite order, which must change nothing. Nothing is
    compiled while kernels are interpreted: then there are no keys.
    """
    if knobs.runtime.interpret:
        return []
    found = [
        f
        for name, module in sorted(sys.modules.items())
        if name == package or name.startswith(f"{package}.")
        for f in vars(module).values()
        if isinstance(f, JITCallable) and f.fn.__module__ == name
    ]
    seen: set[int] = set()
    for f in reversed(found) if backwards else found:
        _visit(f, seen)
    return sorted(f"{f.fn.__module__}.{f.fn.__name__} {f.cache_key}" for f in found)


def _visit(f: JITCallable, seen: set[int]) -> None:
    if id(f) in seen:
        return
    seen.add(id(f))
    for name in f.fn.__code__.co_names:  # globals, and what is taken from triton.language
        callee = f.__globals__.get(name) or getattr(standard, name, None) or getattr(core, name, None)
        if isinstance(callee, JITCallable):
            _visit(callee, seen)
    f.cache_key
