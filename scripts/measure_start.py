"""From the start of a process to the first token of `dsv4 generate`: with nothing compiled, and with everything.

    python scripts/measure_start.py [CHECKPOINT | --dummy-weights flash --layers 8] [--device cuda] [--runs 3]
        [--numerics native] [--prompt-tokens 300] [--out DIR]

Each run is a process. `empty`: Triton's cache holds nothing; `full`: it holds what the run before compiled; `warm`: it
holds what `dsv4 warm` compiled. The first token is the first byte on standard output; phases before it are those that
`generate --verbose` prints. All modules have byte code, as those of an installed package: a run that is not listed
writes it to a temporary folder, which the others share. The imports that take longest are listed. Writes
start_<device>.json and .md. Exit code 1 if a run failed, or compiled what `warm` should have.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import report
from scripts.places import folder

SCRIPT = "scripts/measure_start.py"
LONGEST = 12  # imports that are listed
COMPILED = re.compile(r"(\d+) kernels, (\d+) of them compiled in ([\d.]+) s")
STARTED = re.compile(r"start: torch imported in ([\d.]+) s, dsv4 in ([\d.]+) s, loaded in ([\d.]+) s")
FIRST = re.compile(r"first token after ([\d.]+) s")
PHASES = ("torch", "dsv4", "loading", "prompt", "other")


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--dummy-weights")
    parser.add_argument("--layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--numerics", default="native")
    parser.add_argument("--prompt-tokens", default="300")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    return parser.parse_args(given)


def subject(args: argparse.Namespace) -> list[str]:
    if args.dummy_weights:
        return ["--dummy-weights", args.dummy_weights, *(["--layers", args.layers] if args.layers else [])]
    return [str(args.checkpoint or "demo")]


def environment(args: argparse.Namespace, cache: str) -> dict[str, str]:
    """Of a process: byte code in the folder that all share, and Triton's cache."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": args.byte_code, "TRITON_CACHE_DIR": cache}


def run(args: argparse.Namespace, kind: str, cache: str) -> dict:
    """One process: seconds to the first token, by phases, and to its end, and what it says of kernels."""
    command = [sys.executable, *(["-X", "importtime"] if kind == "imports" else []), "-m", "dsv4", "generate"]
    command += [*subject(args), "--device", args.device, "--numerics", args.numerics, "--max-new-tokens", "8"]
    command += ["--prompt-tokens", args.prompt_tokens, "--verbose"]
    with tempfile.TemporaryFile("w+") as errors:
        begun = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment(args, cache))
        byte = process.stdout.read(1)
        first = time.monotonic() - begun
        process.stdout.read()
        code = process.wait()
        row = {"kind": kind, "exit": code, "seconds": time.monotonic() - begun}
        errors.seek(0)
        said = errors.read()
    if byte:
        row |= {"first_token_seconds": first, "phases": phases(said, first)}
    if found := COMPILED.search(said):
        row |= {"kernels": int(found[1]), "compiled": int(found[2]), "compiling_seconds": float(found[3])}
    if code:
        row["why"] = (said.strip().splitlines() or ["it said nothing"])[-1][:300]
    if kind == "imports":
        row["imports"] = longest(said)
    return row


def phases(said: str, first: float) -> dict[str, float]:
    """Seconds of each phase until the first token; `other`: the interpreter, and what the command line imports. Empty
    where the process does not say them."""
    started, prompt = STARTED.search(said), FIRST.search(said)
    if started is None or prompt is None:
        return {}
    found = [*map(float, started.groups()), float(prompt[1])]
    return dict(zip(PHASES, [*found, first - sum(found)], strict=True))


def longest(said: str) -> list[tuple[str, float]]:
    """(module, ms by itself) of the imports that take longest."""
    rows = [line[len("import time:") :].split("|") for line in said.splitlines() if line.startswith("import time:")]
    found = [(name.strip(), int(own) / 1e3) for own, _, name in rows if own.strip().isdecimal()]
    return sorted(found, key=lambda pair: -pair[1])[:LONGEST]


def measured(args: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory() as args.byte_code:
        with tempfile.TemporaryDirectory() as cache:
            run(args, "byte code", cache)
        return _measured(args)


def _measured(args: argparse.Namespace) -> list[dict]:
    rows = []

    def add(kind: str, cache: str) -> None:
        rows.append(run(args, kind, cache))
        print({key: value for key, value in rows[-1].items() if key != "imports"}, flush=True)

    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as cache:
            add("empty", cache)
            add("full", cache)
    with tempfile.TemporaryDirectory() as cache:
        if args.device.startswith("cuda"):
            command = [sys.executable, "-m", "dsv4", "warm", *subject(args), "--numerics", args.numerics]
            command += ["--device", args.device, "--prompt-tokens", args.prompt_tokens]
            tokens = int(args.prompt_tokens)
            subprocess.run([*command, "--max-context", str(tokens + 7)], env=environment(args, cache))
        add("warm", cache)
        add("imports", cache)
    return rows


def markdown(rows: list[dict], about: dict) -> str:
    some = lambda row, key, form: format(row[key], form) if key in row else "–"
    lines = [
        "# From process start to the first token",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        "`empty`: nothing is compiled. `full`: what the run before compiled. `warm`: what `dsv4 warm` compiled. All",
        "modules have byte code, as those of an installed package. Of the seconds to the first token: the imports of",
        "torch, with what it imports, and of dsv4; loading, with options, kernels and hashes that are waited for; the",
        "prompt, to its first token; other, which is the interpreter and the command line.",
        "",
        f"| cache | s to the first token | {' | '.join(PHASES)} | s in all | kernels | compiled | s compiling |",
        f"|---|---:|{'---:|' * len(PHASES)}---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['kind']} | {some(row, 'first_token_seconds', '.1f')} | "
        f"{' | '.join(some(row.get('phases', {}), name, '.2f') for name in PHASES)} | {row['seconds']:.1f} | "
        f"{some(row, 'kernels', 'd')} | {some(row, 'compiled', 'd')} | {some(row, 'compiling_seconds', '.1f')} |"
        for row in rows
        if row["kind"] != "imports"
    ]
    lines += [f"\n{row['kind']} ended with {row['exit']}: {row['why']}" for row in rows if row["exit"]]
    for row in rows:
        if row.get("imports"):
            lines += ["", "| import | ms by itself |", "|---|---:|"]
            lines += [f"| `{name}` | {ms:.0f} |" for name, ms in row["imports"]]
    return "\n".join([*lines, ""])


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    rows, about = measured(args), report.provenance(SCRIPT)
    device = about["device"] if args.device.startswith("cuda") else "cpu"
    name = args.dummy_weights or (args.checkpoint or Path("demo")).resolve().name
    text = markdown(rows, about)
    print(text)
    place, stem = folder(args.out, "start", name, device), f"start_{report.device_slug(device)}"
    for path in report.write(place, stem, report.finite({"about": about, "rows": rows}), text, None):
        print(f"wrote {path}")
    missed = any(row["kind"] == "warm" and row.get("compiled") for row in rows)
    return int(missed or any(row["exit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
