"""Imported, for its effect, by the process that others are copies of: what each of them would compute again.

Triton's key of itself, a hash of all its files (0.5 GB), takes 0.9 s of a processor, in each process that compiles or
finds a kernel.
"""

from contextlib import suppress

with suppress(ImportError):  # on a machine without it nothing is compiled
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # where older releases have it
        from triton.compiler.compiler import triton_key
    triton_key()
