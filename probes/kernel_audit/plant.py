"""A planted faulty kernel: what the self-test of `dsv4 kernel` must find, and by which clause."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

CLAUSES = {
    "gate": "results of every case against fp64, with canaries that must fail",
    "poison": "rows, bytes and pages that may not be read hold NaN",
    "written": "outputs are filled with NaN, then with a marker, and must be written whole",
    "guard": "bytes around outputs and arguments written in place are not touched",
    "inputs": "arguments are unchanged, bit for bit",
    "layout": "strides, offsets and addresses of 4, 8 and 16 bytes",
    "empty": "no queries: an empty result",
    "batch": "one query alone, in another place, beside neighbours of NaN",
    "repeats": "the same bits again, many times, under disturbance",
    "state": "another problem between, of another size, of NaN, two at once; earlier results stay as they were",
    "calls": "results of later calls, of changed contents at the same addresses, of the same contents at others",
    "streams": "another stream, a producer that is late, a consumer that does not wait",
    "capture": "captured with one problem, replayed with others",
    "addresses": "offsets beyond 2 GiB and 4 GiB",
    "processors": "a part of the device's multiprocessors",
    "shared": "the device by turns with other processes",
    "sanitizer": "compute-sanitizer: accesses, races in shared memory, barriers",
    "integrity": "clocks, threads, result types and memory of the process",
    "timing": "results of timed replays, time against the physical floor",
}


@dataclass(frozen=True)
class Plant:
    """A fault in one operation.

    clause: the one that must find it; entry: its number in the catalogue of faults (docs/kernel_faults.md).
    make(honest) → the faulty kernel, called as the honest one is. device: 'any', or 'cuda' where it needs one. dtype:
    of activations; None: bf16, or what the operation takes. A fault that is below the rounding of bf16 names fp32."""

    name: str
    operation: str
    clause: str
    entry: int
    make: Callable[[Callable], Callable]
    device: str = "any"
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.clause not in CLAUSES:
            raise ValueError(f"plant {self.name!r} names clause {self.clause!r}; expected one of {', '.join(CLAUSES)}")
