"""Audit one checkpoint in every numerics, cache format and backend of a device, and print one table.

    python scripts/audit_matrix.py [CHECKPOINT] [--device cpu] [--backends cpu,reference] [--tensor-parallel-size N]
    [--jobs N] [--limit SECONDS] [--journal FILE] [--out DIR]

Each line is a `dsv4 audit` of its own, `--jobs` at a time: each on its own share of the processors and, of several
GPUs, on the one with the fewest audits; of several ranks, on as many GPUs. Kernels of Triton are compiled once, by all
processors, before the first. Writes <checkpoint>_matrix_<device>.md and .json to DIR after every audit that ends, of
several ranks <checkpoint>_matrix_<N>_ranks_<device>. Exit code 0 only if all of them ran to their end with something
measured and nothing red.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from queue import SimpleQueue

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.errors import Dsv4Error
from dsv4.probes.journal import Kept
from dsv4.probes.machine import gpu_names
from dsv4.probes.result import Status
from dsv4.probes.scenes.compile_ahead import compile_ahead
from dsv4.probes.subjects.files import FilesSubject
from scripts.bench import report
from scripts.places import folder

SCRIPT = "scripts/audit_matrix.py"
# numerics, window rows and entries, index keys; packed caches are audited in the numerics that round as they do
SETTINGS = (
    ("fp32", "auto", "auto"),
    ("native", "auto", "auto"),
    ("qat", "auto", "auto"),
    ("qat", "bf16", "fp4"),
    ("qat", "fp8", "bf16"),
    ("qat", "fp8", "fp8"),
    ("qat", "fp8", "fp4"),
    ("qat:fp32", "auto", "auto"),
)
OF_GQA = tuple(setting for setting in SETTINGS if setting[0] in ("fp32", "native"))  # such models simulate no formats
BACKENDS = {"cpu": "cpu,reference", "cuda": "triton,reference"}
STATES = tuple(status.value for status in Status)


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=Path("demo"))
    parser.add_argument("--device", default="cpu", choices=tuple(BACKENDS))
    parser.add_argument("--backends")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks of each audit")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800.0)
    parser.add_argument(
        "--journal",
        type=Path,
        help="audits that ended, kept in FILE; absent or of the same commit, device and checkpoint",
    )
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    return parser.parse_args(given)


class Places:
    """Where audits run: `jobs` at a time, each with processors of its own (as many processes as it then starts do not
    slow the others down) and one of the GPUs, of several ranks as many."""

    def __init__(self, jobs: int, gpus: int, ranks: int = 1):
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        each = gpu_names(gpus)
        names = [",".join(each[i : i + ranks]) for i in range(0, len(each) - ranks + 1, ranks)]
        self.free: SimpleQueue[tuple[set[int], str | None]] = SimpleQueue()
        for i in range(jobs):
            own = cores[i::jobs] or cores[i % max(len(cores), 1) :][:1]
            self.free.put((set(own), names[i % len(names)] if names else None))

    def run(self, command: list[str], limit: float) -> subprocess.CompletedProcess:
        """Raises subprocess.TimeoutExpired."""
        cores, gpu = place = self.free.get()
        pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=limit,
                preexec_fn=pin,
                env={**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})},
            )
        finally:
            self.free.put(place)


KEYS = ("backend", "numerics", "cache", "index_cache")  # of a row: what the audit was asked for


def audited(args: argparse.Namespace, backend: str, setting: tuple[str, str, str], places: Places) -> dict:
    """A row of the table: what `dsv4 audit` of that setting says, or that it did not end."""
    numerics, cache, index = setting
    row = {"backend": backend, "numerics": numerics, "cache": cache, "index_cache": index, "exit": None, "red": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "backend": backend,
            "device": args.device,
            "numerics": numerics,
            "cache": cache,
            "index-cache": index,
            "out": folder,
        }
        if args.tensor_parallel_size > 1:
            given["tensor-parallel-size"] = args.tensor_parallel_size
        command = [sys.executable, "-m", "dsv4", "audit", "run", str(args.checkpoint)]
        command += [text for name, value in given.items() for text in (f"--{name}", str(value))]
        try:
            ended = places.run(command, args.limit)
            row["exit"] = ended.returncode
            found = next(Path(folder).glob("*.json"), None)
            if found is None:
                row["red"] = [
                    f"no report: {ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else 'it said nothing'}"
                ]
            else:
                row |= summary(json.loads(found.read_text()))
        except subprocess.TimeoutExpired:
            row["red"] = [f"not ended after {args.limit:.0f} s"]
    return row | {"seconds": round(time.monotonic() - begun)}


def summary(document: dict) -> dict:
    """Counts by state, and the checks that are red."""
    checks = [(section["probe"], check) for section in document["sections"] for check in section["checks"]]
    red = [
        ": ".join((name, check["name"], *filter(None, [check.get("where")])))
        for name, check in checks
        if check["status"] in ("FAIL", "ERROR")
    ]
    return document["totals"] | {"red": red}


def clean(row: dict) -> bool:
    return row["exit"] == 0 and not row["red"] and row.get("PASS", 0) > 0


def markdown(rows: list[dict], about: dict, name: str, missing: int) -> str:
    good = sum(map(clean, rows))
    lines = [
        f"# Audits of {name}: every backend, numerics and cache format",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"**{good} of {len(rows)} clean**{f', {missing} not ended yet' if missing else ''}. VACUOUS: "
        "nothing could be measured there; the reports of single audits "
        "say why.",
        "",
        f"| backend | numerics | window rows, entries | index keys | {' | '.join(STATES)} | exit | s |",
        f"|---|---|---|---|{'---:|' * (len(STATES) + 2)}",
    ]
    lines += [
        "| "
        + " | ".join(
            str(row.get(key, "–"))
            for key in ("backend", "numerics", "cache", "index_cache", *STATES, "exit", "seconds")
        )
        + " |"
        for row in rows
    ]
    red = [
        f"- {row['backend']}, {row['numerics']}, {row['cache']}, {row['index_cache']}: {text}"
        for row in rows
        for text in row["red"]
    ]
    return "\n".join([*lines, *(["", "## Red", "", *red] if red else []), ""])


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    about, name = report.provenance(SCRIPT), args.checkpoint.resolve().name
    try:
        subject = FilesSubject(args.checkpoint)
        of = {"checkpoint": name, "ranks": args.tensor_parallel_size}
        kept = Kept(args.journal, {key: value for key, value in about.items() if key != "command"} | of)
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = OF_GQA if subject.family == "gqa" else SETTINGS
    asked = [
        (backend, *setting)
        for backend, setting in product((args.backends or BACKENDS[args.device]).split(","), settings)
    ]
    slug = report.device_slug(about["device"]) if args.device == "cuda" else "cpu"
    together = f"_{args.tensor_parallel_size}_ranks" if args.tensor_parallel_size > 1 else ""
    stem = f"{name}_matrix{together}_{slug}"
    before = {tuple(row[key] for key in KEYS): row for _, row in kept.held}
    rows = {one: before[one] for one in asked if one in before}
    left = [one for one in asked if one not in rows]
    args.out = folder(args.out, "audit", name, slug)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda" and any(backend == "triton" for backend, *_ in left):
        begun = time.monotonic()
        compile_ahead([subject.config], (torch.float32, torch.bfloat16), "triton", args.device, seed=0)
        print(f"kernels compiled: {time.monotonic() - begun:.0f} s", flush=True)
    places = Places(args.jobs, torch.cuda.device_count() if args.device == "cuda" else 0, args.tensor_parallel_size)
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(audited, args, one[0], one[1:], places): one for one in left}
        for future in as_completed(waiting):
            row = rows[waiting[future]] = future.result()
            if row["exit"] is not None:
                kept.append("ended", row)
            print(
                f"{len(rows)} of {len(asked)}: {' '.join(waiting[future])}: "
                f"{'clean' if clean(row) else 'RED ' + '; '.join(row['red'][:3])}, {row['seconds']} s",
                flush=True,
            )
            publish(args.out, stem, about, [rows[one] for one in asked if one in rows], len(asked))
    if not left:
        publish(args.out, stem, about, [*rows.values()], len(asked))
    return int(not all(map(clean, rows.values())))


def publish(out: Path, stem: str, about: dict, held: list[dict], asked: int) -> None:
    name = stem.partition("_matrix")[0]
    report.write(out, stem, {"about": about, "rows": held}, markdown(held, about, name, asked - len(held)), None)


if __name__ == "__main__":
    sys.exit(main())
