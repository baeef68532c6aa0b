"""Audits of many kernels, several at once: ours and every adapter that is installed.

    PEERS=/tmp/peers python -m scripts.audit_kernels --device cuda --shapes flash --out audits/kernels

Writes OUT/<operation>/<kernel>/<device>/audit.md and .json, and prints one line a kernel. A kernel that is not here is
named with the reason. With --bench, the kernels of each operation are timed beside each other instead, ours first, one
operation after another: OUT/<operation>/bench/<device>/bench.md and .json. What --audited holds, reports of such audits
at these shapes on this device, is not audited again.

Checks that passed are left out of the JSON unless --whole is given. `scripts/kernel_table.py` makes one table of all
reports."""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from dsv4.kernels.contracts import contracts
from dsv4.probes.kernel_audit import bench_document
from dsv4.probes.kernel_audit.adapters import Adapter, adapters
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.bench import NEEDED, bench_kernels
from dsv4.probes.kernel_audit.clauses import ORDER
from dsv4.probes.kernel_audit.document import document, finding_line, headline, markdown, text
from dsv4.probes.kernel_audit.errors import KernelAuditError
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.report.files import write_files
from dsv4.probes.report.provenance import called, command_line, date, device
from dsv4.probes.report.waivers import holding
from scripts import kernel_table
from scripts.kernel_table import OURS
from scripts.places import device_slug


def audited(operation: str, kernel: str, arguments, waivers: tuple) -> str | None:
    """Verdict of the clauses that a benchmark needs by an earlier report; None where there is no such report."""
    file = Path(arguments.audited or ".") / operation / kernel / arguments.place / "audit.json"
    if not arguments.audited or not file.is_file():
        return None
    report = json.loads(file.read_text())
    same = report["shapes"] == arguments.shapes and report["about"]["device"] == device(torch.device(arguments.device))
    rows = [r for r in report["clauses"] if r["clause"] in NEEDED]
    if not same or not all(r["checks"] for r in rows):
        return None
    bad = [c for c in kernel_table.failed(report) if c.get("part") in NEEDED]
    waived = [c for c in bad if any(w.covers(c["part"], c["name"], c.get("where", "")) for w in waivers)]
    found = sum(r["findings"] for r in rows) - len(waived)
    vacuous = any(r["vacuous"] for r in rows)
    return "FAIL" if found else "VACUOUS" if vacuous else "PASS, limited" if waived else "PASS"


def jobs_of(arguments) -> list[tuple[str, str]]:
    """(operation, kernel) to audit, as the options ask."""
    wanted = arguments.operation or list(contracts())
    found = [(a.operation, a.name) for a in adapters() if a.operation in wanted]
    found += [(op, OURS) for op in wanted]
    return [job for job in found if not arguments.kernel or job[1] in arguments.kernel]


def clauses_of(arguments) -> tuple[str, ...]:
    """Clauses to ask, in their order."""
    wanted = ("gate", *arguments.clause) if arguments.clause else ORDER
    return tuple(name for name in ORDER if name in wanted and name not in arguments.without)


def one(job: tuple[str, str], arguments) -> str:
    """Audit one kernel and write its report; the line to print."""
    operation, kernel = job
    started = time.time()
    spec = SubjectSpec(operation, kernel, arguments.device)
    try:
        found = audit_kernel(
            *(spec, arguments.shapes, arguments.seed, arguments.budget),
            **dict(repeats=arguments.repeats, limit=arguments.limit, only=clauses_of(arguments)),
        )
    except KernelAuditError as error:
        return f"NOT RUN {operation} · {kernel}: {error}"
    except Exception as error:  # a fault of the audit must not end the others
        return f"BROKEN {operation} · {kernel}: {type(error).__name__}: {error}"
    report = document(found, command_line(called(sys.argv)), date(started))
    folder = Path(arguments.out) / operation / kernel / arguments.place
    kept = text(report) if arguments.whole else kernel_table.text(kernel_table.thinned(report))
    write_files(folder, {"audit.md": markdown(report, found.checks, found.findings), "audit.json": kept})
    lines = [f"{headline(report)} ({found.seconds:.0f} s, {len(found.skipped)} cases not taken)"]
    return "\n".join(lines + [f"    {finding_line(c)[:260]}" for c in found.findings[: arguments.show]])


def missing_here(found: Adapter, device: str) -> str:
    """Why a published kernel cannot be called here, in one line; '' if it can."""
    try:
        found.bind(device)
    except Exception as error:  # a peer may fail at its import in any way
        named = "" if isinstance(error, KernelAuditError) else f"{type(error).__name__}: "
        return f"{found.about}: not here: {named}{' '.join(str(error).split())[:160]}"
    return ""


def bench_one(operation: str, arguments) -> str:
    """Time the kernels of one operation and write the report; the lines to print."""
    started, missing = time.time(), []
    try:
        kernels = [OURS]
        for found in adapters():
            if found.operation != operation or (arguments.kernel and found.name not in arguments.kernel):
                continue
            why = missing_here(found, arguments.device)
            if why:
                missing.append(f"NOT RUN {operation} · {found.name}: {why}")
            else:
                kernels.append(found.name)
        if len(kernels) == 1 and not (arguments.kernel and OURS in arguments.kernel):
            return "\n".join((*missing, f"NOT RUN {operation}: no other kernel is here"))
        about = operation, kernels, arguments.shapes, arguments.device, arguments.seed, arguments.replays
        waivers = holding(arguments.waivers, print)
        known = {k: v for k in kernels if (v := audited(operation, k, arguments, waivers)) is not None}
        rows, found, verdicts = bench_kernels(*about, waivers=waivers, verdicts=known)
    except KernelAuditError as error:
        return f"NOT RUN {operation}: {error}"
    except Exception as error:  # a fault of one benchmark must not end the others
        return f"BROKEN {operation}: {type(error).__name__}: {error}"
    how = command_line(called(sys.argv)), date(started), arguments.seed, arguments.device
    report = bench_document.document(operation, arguments.shapes, rows, found, verdicts, *how)
    folder = Path(arguments.out) / operation / "bench" / arguments.place
    whole = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_files(folder, {"bench.md": bench_document.markdown(report), "bench.json": whole})
    return "\n".join((*missing, f"{operation} ({time.time() - started:.0f} s)", *bench_document.lines(report)))


def parsed(given: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operation", action="append", help="only this one; may be given several times")
    parser.add_argument("--kernel", action="append", help="only this one; may be given several times")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", default="flash")
    parser.add_argument("--place", help="last folder of each report, instead of the device's name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of one audit")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one answer")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", type=int, default=3, help="findings that are printed of each")
    parser.add_argument("--bench", action="store_true", help="time the kernels instead")
    parser.add_argument("--replays", type=int, default=30, help="of each kernel on each row of a benchmark")
    parser.add_argument("--audited", help="folder of reports that --bench believes")
    parser.add_argument("--waivers", type=Path, help="of --bench, as dsv4 kernel bench takes them")
    parser.add_argument("--clause", action="append", help="only this one, behind the gate; may be given several times")
    parser.add_argument("--without", action="append", default=[], help="not this clause; may be given several times")
    parser.add_argument("--whole", action="store_true", help="write checks that passed to the JSON too")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(given)
    options.place = options.place or ("cpu" if options.device == "cpu" else device_slug(device(options.device)))
    return options


def main(given: list[str] | None = None) -> None:
    arguments = parsed(given)
    if arguments.bench:
        for operation in arguments.operation or sorted({a.operation for a in adapters()}):
            print(bench_one(operation, arguments), flush=True)
        return
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(one, job, arguments) for job in jobs_of(arguments)]):
            print(done.result(), flush=True)


if __name__ == "__main__":
    main()
