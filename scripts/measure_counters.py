"""Hardware counters of this project's kernels, by Nsight Compute: bandwidth, L2 hit rate, gather efficiency.

    python scripts/measure_counters.py [--only REGEX] [--hot] [--seconds 480] [--list] [--out DIR]

Rows are those of `scripts/bench_kernels.py` (--list prints the chosen ones). Each runs in a process of its own under
ncu: once unprofiled, so that it compiles, then once with counters, its caches emptied before every pass (--hot: left
as they are). Clocks are left alone. The files are written after each row, so that what is known stays if the run is
killed. Writes counters_<device>.json and .md. Exit code 1 when a row failed, 2 where ncu cannot count.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4.errors import Dsv4Error
from dsv4.kernels.errors import UnsupportedInput
from scripts.bench import counters, report
from scripts.bench.counters import Counted, Row
from scripts.bench.timing import Clock, measure_machine
from scripts.bench_kernels import collect
from scripts.places import folder

SCRIPT = "scripts/measure_counters.py"
CHOSEN = (  # the most wanted first: a run that ends early has these
    r"^chunked_prefill (4096|16384) tokens, chunk (512|1024), (64|256) local",
    r"^gqa_gather (128K|1M) B[18] 28q",
    r"^gqa_decode 128K B1 28q",
    r"^csa_decode B[18] 128\+512 fp8|^hca_decode B[18] 128\+8192 fp8",
    r"^index_scores fp4 262144 entries B[18]",
    r"^block_choice",
    r"^chunked_prefill 16384 tokens, chunk 2048",
    r"^csa_decode B[18] 128\+512 bf16",
)
ROW_SECONDS = 120  # of one row under ncu, which runs each kernel several times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="|".join(CHOSEN), help="regular expression; rows whose 'op shape' it is found in"
    )
    parser.add_argument("--hot", action="store_true", help="caches as the row's first run left them")
    parser.add_argument("--seconds", type=float, default=480, help="begin no row after this many seconds")
    parser.add_argument("--list", action="store_true", help="print the chosen rows; needs no GPU")
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    parser.add_argument("--child", metavar="ROW", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return run_row(args.child)
    rows, broken = collect("cpu", args.only)
    rows.sort(key=lambda row: next((i for i, part in enumerate(CHOSEN) if re.search(part, row.name)), len(CHOSEN)))
    for line in broken:
        print(f"BROKEN  {line}", file=sys.stderr)
    if args.list:
        print("\n".join(row.name for row in rows))
        return int(bool(broken))
    try:
        counters.command([], args.hot)  # whether there is an ncu
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: counters are those of a CUDA device; --list works without one", file=sys.stderr)
        return 2
    return count(args, rows)


def count(args: argparse.Namespace, rows) -> int:
    """Count row by row; write the report after each."""
    about, begun = report.provenance(SCRIPT), time.monotonic()
    out, stem = folder(args.out, "counters", "all", about["device"]), f"counters_{report.device_slug(about['device'])}"
    bandwidth = measure_machine(Clock()).bandwidth
    found: list[Row] = []
    for row in rows:
        one = Row(row.name, row.bytes)
        found.append(one)
        if time.monotonic() - begun > args.seconds:
            one.why = "not begun: the time was up"
        else:
            try:
                one.kernels = counted_row(row.name, args.hot)
            except UnsupportedInput as error:  # of ncu itself: no other row can be counted either
                print(f"error: {error}", file=sys.stderr)
                return 2
            except Dsv4Error as error:
                one.why = str(error)
        print(line(one), flush=True)
        text = markdown(found, about, args.hot, bandwidth)
        report.write(out, stem, report.finite(document(found, about, args.hot, bandwidth)), text, None)
    print(markdown(found, about, args.hot, bandwidth))
    return int(any(row.why and not row.why.startswith("not begun") for row in found))


def counted_row(name: str, hot: bool) -> list[Counted]:
    """Raises UnsupportedInput where ncu cannot count, InputError where this row could not be counted."""
    from dsv4.errors import InputError

    child = [sys.executable, str(Path(__file__).resolve()), "--child", name]
    try:
        done = subprocess.run(counters.command(child, hot), capture_output=True, text=True, timeout=ROW_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"it was not counted within {ROW_SECONDS} s; choose a smaller row") from None
    text = done.stdout + done.stderr
    counters.refused(text)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise InputError(f"it ended with exit code {done.returncode} under ncu: {' '.join(last)[:200]}")
    return counters.counted(counters.parse(done.stdout))


def run_row(name: str) -> int:
    """Run a row once to compile it, then once between the start and the stop of the profiler."""
    [row] = collect("cuda", f"^{re.escape(name)}$")[0]
    made = row.make(0)
    run = made[0] if isinstance(made, tuple) else made
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


def line(row: Row) -> str:
    whole = counters.total(row.kernels)
    if whole is None:
        return f"{row.name}: {row.why}"
    return f"{row.name}: {whole.seconds * 1e6:.1f} µs, {whole.bandwidth / 1e9:.0f} GB/s, {len(row.kernels)} kernels"


def document(rows: list[Row], about: dict, hot: bool, bandwidth: float) -> dict:
    """As JSON values. bandwidth: B/s of the device, of which shares are."""
    return {
        "about": about,
        "machine": {"bandwidth_bytes_per_second": bandwidth},
        "hot": hot,
        "metrics": list(counters.METRICS),
        "rows": [row.document(bandwidth) for row in rows],
    }


def markdown(rows: list[Row], about: dict, hot: bool, bandwidth: float) -> str:
    lines = [
        "# Hardware counters of kernels",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"Nsight Compute, caches {'as the first run left them' if hot else 'emptied before every pass'}, clocks left "
        "alone. GB/s: read from and written to device memory over the kernel's time; share: of the "
        f"{bandwidth / 1e12:.2f} TB/s at which this device reads 1 GiB. L2 hits: of sectors, mean weighted by time. "
        f"Gather efficiency: bytes that load instructions ask for over {counters.SECTOR} B × sectors that L1 fetches "
        "for them; over 100 % where threads of a warp share a sector. Moved over needed: bytes of device memory over "
        "those that the row must move, by formula (under 1 where results stay in L2). The times are ncu's, "
        "of single launches.",
        "",
        "| row | kernel | launches | µs | GB/s | share | L2 hits | sectors a request | gather efficiency | moved over "
        "needed |",
        "|---|---|" + "---:|" * 8,
    ]
    for row in rows:
        whole = counters.total(row.kernels)
        for kernel in ([whole] if len(row.kernels) > 1 else []) + row.kernels:
            shown = kernel is whole or len(row.kernels) == 1
            lines.append(_line(row, kernel, shown, bandwidth))
    notes = [f"- {row.name}: {row.why}" for row in rows if row.why]
    return "\n".join([*lines, *([""] + notes if notes else [])]) + "\n"


def _line(row: Row, k: Counted, whole: bool, bandwidth: float) -> str:
    some = lambda x, form: "–" if x is None else format(x, form)
    moved = (k.read + k.written) / row.needed if whole else None
    hit = "–" if k.hit is None else f"{k.hit:.1f} %"
    return (
        f"| {row.name} | `{k.kernel}` | {k.launches} | {k.seconds * 1e6:.1f} | {k.bandwidth / 1e9:.0f} | "
        f"{k.bandwidth / bandwidth:.1%} | {hit} | {some(k.sectors_a_request, '.1f')} | "
        f"{some(k.efficiency, '.1%')} | {some(moved, '.2f')} |"
    )


if __name__ == "__main__":
    sys.exit(main())
