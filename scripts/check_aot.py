"""Compile every kernel for every supported GPU generation, without a GPU.

    python scripts/check_aot.py [--only REGEX] [--capabilities 80,89,90,100,120] [--jobs 2] [--json OUT] [--modules
    PACKAGE]

Cases come from `cases_for(capability)` of `scripts/aot/*.py`. Prints a table: registers a thread, bytes of stack
(spills), shared memory, and the tensor-core instructions in the PTX. Exit code 1 when a case does not compile, takes
more shared memory than the GPU has, or multiplies in TF32: no kernel here asks for that, and Triton (3.6, 3.7) chooses
it by itself for some fp32 products on sm_100.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# bytes for one block
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS, FRAME = 0x2F, 0x11  # attributes of .nv.info: registers a thread, bytes of stack
TF32 = r"\b(?:mma|wgmma|tcgen05)\.\S*tf32"
PRODUCTS = {"wgmma": r"\bwgmma\.mma_async", "mma": r"\bmma\.sync", "tcgen05": r"\btcgen05\.mma"}


def modules(package: str) -> list[str]:
    """Names of the modules of a package that define cases."""
    folder = importlib.import_module(package).__path__
    return [f"{package}.{m.name}" for m in pkgutil.iter_modules(folder)]


@cache
def cases(module: str, capability: int) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of what a module launches on a GPU of that capability."""
    return importlib.import_module(module).cases_for(divmod(capability, 10))


def compile_case(module: str, index: int, capability: int) -> dict:
    """Compile one case. Returns what the table shows; `error` is empty when it compiled."""
    row = {"capability": capability, "error": "", "registers": None, "stack": None, "shared": None, "spills": ""}
    row |= dict.fromkeys(PRODUCTS, 0)
    begun = time.perf_counter()
    try:
        row["name"], kernel, signature, constexprs, options = cases(module, capability)[index]
        compiled = build(kernel, signature, constexprs, dict(options), capability)
        row["shared"] = compiled.metadata.shared
        ptx = compiled.asm["ptx"]
        row |= {name: len(re.findall(pattern, ptx)) for name, pattern in PRODUCTS.items()}
        if re.search(TF32, ptx):
            row["error"] = "multiplies in TF32, which no kernel asks for"
        row["registers"], row["stack"] = resources(compiled.asm["cubin"])
        if row["stack"]:
            row["spills"] = spills(ptx, capability)
    except Exception as failure:  # whatever the compiler raises is the finding
        lines = str(failure).strip().splitlines() or [""]
        row["error"] = f"{type(failure).__name__}: {lines[-1]}"[:300]
    limit = SHARED_LIMIT.get(capability)
    if not row["error"] and limit is not None and row["shared"] > limit:
        row["error"] = f"{row['shared']} bytes of shared memory, over the {limit} of this GPU"
    return row | {"seconds": time.perf_counter() - begun}


def build(kernel, signature: dict, constexprs: dict, options: dict, capability: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    attrs = options.pop("attrs", {})
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers a thread and bytes of stack, the largest of any function, from the attributes of a cubin."""
    from scripts.bench.fatbin import sections

    at, size = sections(cubin).get(".nv.info", (0, 0))
    end, found = at + size, {REGISTERS: [], FRAME: []}
    while at + 4 <= end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if form == 4:  # a payload follows: here symbol and value
            if attribute in found and length == 8:
                found[attribute].append(struct.unpack_from("<I", cubin, at + 8)[0])
            at += length
        at += 4
    return tuple(max(values, default=None) for values in found.values())


def spills(ptx: str, capability: int) -> str:
    """ptxas's own words on spills; empty when it cannot be asked."""
    from triton.backends.nvidia import compiler

    arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        try:
            ptxas = compiler.get_ptxas(capability).path
            command = [ptxas, "-v", f"--gpu-name={arch}", source.name, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True).stderr
        except (AttributeError, OSError, TypeError):
            return ""
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return f"{found[1]}/{found[2]} B" if found else ""


def run(tasks: list[tuple[str, int, str, int]], jobs: int) -> list[dict]:
    """Compile cases (module, index, name, capability) in `jobs` processes."""
    rows, begun = [], time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(compile_case, module, index, capability): (module, name, capability)
            for module, index, name, capability in tasks
        }
        for done, future in enumerate(as_completed(futures), 1):
            module, name, capability = futures[future]
            try:
                row = {"module": module, "name": name} | future.result()
            except BrokenProcessPool as failure:  # the compiler took its process down
                row = {
                    "module": module,
                    "name": name,
                    "capability": capability,
                    "error": f"crashed: {failure}",
                    "seconds": 0.0,
                }
            rows.append(row)
            progress = f"[{done}/{len(tasks)}] {time.monotonic() - begun:4.0f} s"
            print(f"{progress} {name} sm_{capability}: {row['error'] or 'ok'}", file=sys.stderr, flush=True)
    order = {(module, name): i for i, (module, _, name, _) in enumerate(tasks)}
    return sorted(rows, key=lambda row: (order[row["module"], row["name"]], row["capability"]))


def cell(row: dict) -> str:
    if row["error"]:
        return "FAILED"
    products = " ".join(f"{name}·{row[name]}" for name in PRODUCTS if row[name])
    stack = f" stack {row['stack']}" + (f" (spills {row['spills']})" if row["spills"] else "") if row["stack"] else ""
    return f"{row['registers']} reg, {row['shared'] / 1024:.0f} KB{stack}{', ' + products if products else ''}"


def table(rows: list[dict], capabilities: list[int]) -> str:
    """Markdown: kernel × capability, then the failures."""
    cells = {(row["module"], row["name"], row["capability"]): row for row in rows}
    lines = ["| kernel | " + " | ".join(f"sm_{c}" for c in capabilities) + " |", "|---" * (1 + len(capabilities)) + "|"]
    for module, name in dict.fromkeys((row["module"], row["name"]) for row in rows):
        row = (cells.get((module, name, c)) for c in capabilities)
        lines.append(f"| {name} | " + " | ".join(cell(r) if r else "–" for r in row) + " |")
    failed = [row for row in rows if row["error"]]
    lines += ["", f"{len(rows) - len(failed)} of {len(rows)} compiled."]
    return "\n".join(lines + [f"- {row['name']}, sm_{row['capability']}: {row['error']}" for row in failed])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression; cases whose name it is found in")
    parser.add_argument("--capabilities", default="80,89,90,100,120")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--modules", default="scripts.aot", help="package to take cases from")
    args = parser.parse_args()
    # read when a kernel is defined, here and in the processes: compiled, not interpreted
    os.environ.pop("TRITON_INTERPRET", None)
    capabilities = [int(c) for c in args.capabilities.split(",")]
    tasks, broken = [], []
    for module in modules(args.modules):
        try:
            tasks += [
                (module, i, case[0], c)
                for c in capabilities
                for i, case in enumerate(cases(module, c))
                if re.search(args.only, case[0])
            ]
        except Exception as failure:  # the other modules are still checked; the exit code tells
            broken.append(f"{module}: {type(failure).__name__}: {failure}")
    rows = run(tasks, args.jobs)
    print(table(rows, capabilities))
    for line in broken:
        print(f"BROKEN {line}")
    if args.json:
        args.json.write_text(json.dumps({"broken": broken, "rows": rows}, indent=1) + "\n")
    return int(bool(broken) or any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
