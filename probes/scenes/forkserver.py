"""Imported, for its effect, by the process that others are copies of: what each of them would compute again, which is
Triton's key of itself."""

from contextlib import suppress

with suppress(ImportError):  # on a machine without it nothing is compiled
    from dsv4.kernels.triton_cache import triton_key

    triton_key()
