"""Hardware counters of kernels: what is asked of Nsight Compute's `ncu`, what it prints, and what that says.

`ncu --csv --page raw` prints a line of column names, a line of units, and a line a launch; without a page, a line a
launch and metric, with the columns "Metric Name", "Metric Unit" and "Metric Value". Both are read. Lines before the
first column name are the program's and ncu's own.
"""

import csv
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.errors import InputError
from dsv4.kernels.errors import UnsupportedInput

SECTOR = 32  # bytes
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
HIT = "lts__t_sector_hit_rate.pct"
LOADS = "ld", "ldgsts"  # loads to registers, and asynchronous copies to shared memory
SECTORS, REQUESTS, ASKED = (
    tuple(f"{name}_{load}.sum" for load in LOADS)
    for name in (
        "l1tex__t_sectors_pipe_lsu_mem_global_op",
        "l1tex__t_requests_pipe_lsu_mem_global_op",
        "sm__sass_data_bytes_mem_global_op",
    )
)
METRICS = (TIME, READ, WRITTEN, HIT, *SECTORS, *REQUESTS, *ASKED)
UNITS = {
    "": 1.0,
    "%": 1.0,
    "sector": 1.0,
    "request": 1.0,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    **dict.fromkeys(("nsecond", "ns"), 1e-9),
    **dict.fromkeys(("usecond", "us"), 1e-6),
    **dict.fromkeys(("msecond", "ms"), 1e-3),
    **dict.fromkeys(("second", "s"), 1.0),
}
# text of ncu → what to do
REFUSALS = {
    "ERR_NVGPUCTRPERM": "ncu may not read the counters (ERR_NVGPUCTRPERM); run as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0",
    "LibraryNotLoaded": "ncu cannot start its profiler here (LibraryNotLoaded), as in containers without access to the "
    "driver's counters; run on another machine",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel. metrics: in seconds, bytes and counts; None where ncu has no value."""

    kernel: str
    metrics: dict[str, float | None]


@dataclass
class Counted:
    """All launches of a kernel in one row, or of all its kernels. hit: %, mean weighted by time; asked: bytes that its
    load instructions name; efficiency: asked / (SECTOR · sectors), over 1 where threads of a warp share a sector."""

    kernel: str
    launches: int
    seconds: float
    read: float
    written: float
    hit: float | None = None
    sectors: float | None = None
    requests: float | None = None
    asked: float | None = None

    @property
    def bandwidth(self) -> float:
        """B/s read from and written to device memory."""
        return (self.read + self.written) / self.seconds

    @property
    def efficiency(self) -> float | None:
        return None if not self.sectors or self.asked is None else self.asked / (SECTOR * self.sectors)

    @property
    def sectors_a_request(self) -> float | None:
        return None if not self.requests or self.sectors is None else self.sectors / self.requests

    def document(self, bandwidth: float) -> dict:
        """As JSON values. bandwidth: B/s of the device, of which shares are."""
        return {
            "kernel": self.kernel,
            "launches": self.launches,
            "us": self.seconds * 1e6,
            "dram_read_bytes": self.read,
            "dram_written_bytes": self.written,
            "bandwidth_bytes_per_second": self.bandwidth,
            "share_of_bandwidth": self.bandwidth / bandwidth,
            "l2_hit_percent": self.hit,
            "l1_sectors": self.sectors,
            "sectors_a_request": self.sectors_a_request,
            "bytes_asked": self.asked,
            "gather_efficiency": self.efficiency,
        }


@dataclass
class Row:
    """A row of `scripts/bench_kernels.py`. needed: bytes that it must move, by formula. why: what went wrong."""

    name: str
    needed: int
    kernels: list[Counted] = field(default_factory=list)
    why: str = ""

    def document(self, bandwidth: float) -> dict:
        """As JSON values. bandwidth: B/s of the device, of which shares are."""
        whole = total(self.kernels)
        return {
            "row": self.name,
            "needed_bytes": self.needed,
            "moved_over_needed": None if whole is None else (whole.read + whole.written) / self.needed,
            "whole": None if whole is None else whole.document(bandwidth),
            "kernels": [k.document(bandwidth) for k in self.kernels],
            "why": self.why,
        }


def command(child: Sequence[str], hot: bool = False) -> list[str]:
    """The command line of ncu around a program that starts and stops the profiler itself. hot: caches stay as the
    program left them; else they are emptied before every pass. Clocks are left alone. Raises UnsupportedInput without
    ncu."""
    if shutil.which("ncu") is None:
        raise UnsupportedInput(
            "ncu is not on the PATH; install Nsight Compute (it comes with the CUDA toolkit), or add its folder to PATH"
        )
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    options += ["--cache-control", "none" if hot else "all", "--profile-from-start", "off"]
    return ["ncu", *options, "--metrics", ",".join(METRICS), *child]


def refused(text: str) -> None:
    """Raises UnsupportedInput where ncu says that it cannot count."""
    for sign, why in REFUSALS.items():
        if sign in text:
            raise UnsupportedInput(why)


def parse(text: str) -> list[Launch]:
    """What ncu printed, as launches in their order. Raises InputError for text without a table and units that are not
    known."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID","Process ID"')), None)
    if first is None:
        raise InputError(
            'ncu printed no table; expected a line of CSV that begins with "ID": ' + " ".join(text.split())[-200:]
        )
    names, *rows = csv.reader(line for line in lines[first:] if line.startswith('"'))
    body = [row for row in rows if len(row) == len(names)]
    return _long(names, body) if "Metric Name" in names else _wide(names, body)


def _wide(names: list[str], body: list[list[str]]) -> list[Launch]:
    units = dict(zip(names, body[0])) if body and not body[0][0] else {}
    launches = []
    for row in body:
        if row[0]:
            of = dict(zip(names, row))
            found = {m: value(of[m], units.get(m, ""), m) for m in METRICS if m in of}
            launches.append(Launch(of["Kernel Name"], found))
    return launches


def _long(names: list[str], body: list[list[str]]) -> list[Launch]:
    launches: dict[str, Launch] = {}
    for row in body:
        of = dict(zip(names, row))
        one = launches.setdefault(of["ID"], Launch(of["Kernel Name"], {}))
        metric = of["Metric Name"]
        if metric in METRICS:
            one.metrics[metric] = value(of["Metric Value"], of["Metric Unit"], metric)
    return list(launches.values())


def value(text: str, unit: str, metric: str) -> float | None:
    """'1,234.5' of a unit in base units; None for 'n/a' and nothing. Raises InputError."""
    if text.strip().lower() in ("", "n/a", "nan"):
        return None
    if unit not in UNITS:
        raise InputError(f"ncu gives {metric} in {unit!r}; expected one of {', '.join(filter(None, UNITS))}")
    try:
        return float(text.replace(",", "")) * UNITS[unit]
    except ValueError:
        raise InputError(f"ncu gives {metric} as {text!r}; expected a number") from None


def counted(launches: Sequence[Launch]) -> list[Counted]:
    """By kernel, the longest first. Raises InputError for a launch without its time or bytes."""
    found: dict[str, list[Counted]] = {}
    for launch in launches:
        of = launch.metrics
        if missing := [m for m in (TIME, READ, WRITTEN) if of.get(m) is None]:
            raise InputError(f"ncu gives no {missing[0]} of {launch.kernel[:60]}; its counters are not what was asked")
        sums = [_sum([of.get(m) for m in metrics]) for metrics in (SECTORS, REQUESTS, ASKED)]
        name = launch.kernel.split("(")[0].removeprefix("void ")[:80]
        found.setdefault(name, []).append(
            Counted(name, 1, of[TIME], of[READ], of[WRITTEN], of.get(HIT), *sums)  # type: ignore[arg-type]
        )
    return sorted((_added(name, each) for name, each in found.items()), key=lambda k: -k.seconds)


def total(kernels: Sequence[Counted]) -> Counted | None:
    return _added("all", kernels) if kernels else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _added(name: str, each: Sequence[Counted]) -> Counted:
    timed = [(k.hit, k.seconds) for k in each if k.hit is not None]
    weight = sum(seconds for _, seconds in timed)
    return Counted(
        name,
        sum(k.launches for k in each),
        sum(k.seconds for k in each),
        sum(k.read for k in each),
        sum(k.written for k in each),
        sum(hit * seconds for hit, seconds in timed) / weight if weight else None,
        *(_sum([getattr(k, key) for k in each]) for key in ("sectors", "requests", "asked")),
    )
