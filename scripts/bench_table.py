"""One table of what was measured at one commit on one device: kernels beside the published ones, decode steps, whole
prompts and the start of a process, each beside its goal, in native and in official numerics.

    python scripts/bench_table.py FOLDER [--out DIR]
    python scripts/bench_table.py --rows          # the regular expression of the kernels' rows, for bench_kernels.py

FOLDER: where bench_kernels.py, bench_decode.py (once for each numerics) and measure_start.py wrote their JSON, at any
depth. What is not there has a dash. A goal is judged by official numerics where they were measured. Writes
table_<device>.json and .md. Exit code 1 where a goal is missed, 2 where files are of several commits or devices.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import InputError
from scripts.bench import report
from scripts.places import folder

COMMAND = "scripts/gpu_all.sh table"  # what makes it
ROWS = (
    r"^(linear_fp8 .*\b(16|64|256|4096) tokens|linear_fp4 4096x4096, 4096 tokens|experts (\d+) tokens|csa_prefill"
    r"|csa_decode B[18] .* fp8|index_prefill|select_entries fp4 262144 entries k512 B8|topk 262144 entries k512 B8)"
)
THROUGH = re.compile(", (x through FP8|queries in FP4)$")  # what the names of rows of official numerics end in
STEP_MS = {1: 2.2, 32: 13.5, 64: 19.0}  # by batch, 16 layers at 8K
KERNELS_A_LAYER = {32: 20.0, 64: 20.0}
PROMPT_MS = {8 << 10: 11.5, 128 << 10: 230.0}  # a layer, by tokens
START_S = {"empty": 12.0, "full": 4.0}


@dataclass
class Line:
    """One row: numbers in `unit`, None where it was not measured."""

    group: str
    name: str
    unit: str
    native: float | None = None
    official: float | None = None
    public: float | None = None
    public_name: str = ""
    goal: float | None = None

    @property
    def verdict(self) -> str:
        value = self.native if self.official is None else self.official
        return "" if self.goal is None or value is None else "met" if value <= self.goal else "MISSED"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    args = parser.parse_args(given)
    if args.rows:
        print(ROWS)
        return 0
    try:
        about, documents = read(args.folder)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [line for document in documents for line in lines_of(document)]
    lines = joined(lines)
    text = markdown(lines, about, [document["about"]["command"] for document in documents])
    print(text)
    place = folder(args.out, "bench", "flash", about["device"])
    contents = {
        "about": about | {"command": COMMAND},
        "rows": [asdict(line) | {"verdict": line.verdict} for line in lines],
    }
    for path in report.write(place, f"table_{report.device_slug(about['device'])}", contents, text, None):
        print(f"wrote {path}")
    return int(any(line.verdict == "MISSED" for line in lines))


def read(where: Path | None) -> tuple[dict, list[dict]]:
    """What all measurements below a folder share, and their documents. Raises InputError where there is none, or they
    are of several commits or devices."""
    found = {}
    for path in sorted(where.rglob("*.json")) if where else []:
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise InputError(f"{path} is no JSON ({error}); measure it again, or name another folder") from None
        if isinstance(document, dict) and {"commit", "device"} <= set(document.get("about", {})):
            found[path] = document
    if not found:
        raise InputError(f"{where} holds no measurements; run scripts/gpu_all.sh table, or name the folder of one")
    kept = {key: {d["about"].get(key) for d in found.values()} for key in ("commit", "device", "torch", "triton")}
    for key in ("commit", "device"):
        if len(kept[key]) > 1:
            raise InputError(f"measurements of {key}s {', '.join(sorted(kept[key]))}; measure all of them at one {key}")
    return {key: ", ".join(sorted(map(str, values))) for key, values in kept.items()}, list(found.values())


def lines_of(document: dict) -> Iterator[Line]:
    """Of one measurement, by what it holds."""
    if "points" in document:
        yield from of_steps(document)
    elif "rows" in document and document["rows"] and "op" in document["rows"][0]:
        yield from of_kernels(document["rows"])
    elif "rows" in document and document["rows"] and "kind" in document["rows"][0]:
        yield from of_start(document["rows"])


def of_kernels(rows: Sequence[dict]) -> Iterator[Line]:
    for row in rows:
        if row.get("timing") is None:
            continue
        name = f"{row['op']} {row['shape']}"
        peers = {peer: found["timing"]["cold_us"] for peer, found in row["peers"].items() if found.get("timing")}
        best = min(peers, key=peers.__getitem__, default="")
        line = Line("kernels", THROUGH.sub("", name), "µs", goal=row["goal_us"], public_name=best)
        line.public = peers.get(best)
        setattr(line, "official" if THROUGH.search(name) else "native", row["timing"]["cold_us"])
        yield line


def of_steps(document: dict) -> Iterator[Line]:
    numerics = {"native": "native", "qat": "official"}.get(document["setup"]["numerics"])
    if numerics is None:
        return
    for point in document["points"]:
        batch, what = point["batch"], f"batch {point['batch']} at {point['context'] >> 10}K"
        step = Line("decode steps of 16 layers", what, "ms", goal=STEP_MS.get(batch))
        launched = Line("kernels a layer of a decode step", what, "", goal=KERNELS_A_LAYER.get(batch))
        setattr(step, numerics, point["step_ms"])
        setattr(launched, numerics, point["kernels"] and point["kernels"] / point["layers"])
        yield from (step, launched)
    for prompt in document.get("prefills", ()):
        name = f"{prompt['tokens'] >> 10}K in chunks of {prompt['chunk']}"
        line = Line("whole prompts, a layer", name, "ms", goal=PROMPT_MS.get(prompt["tokens"]))
        setattr(line, numerics, prompt["layer_ms"])
        yield line


def of_start(rows: Sequence[dict]) -> Iterator[Line]:
    for kind, goal in START_S.items():
        seconds = [row["first_token_seconds"] for row in rows if row["kind"] == kind and "first_token_seconds" in row]
        if seconds:
            name = f"cache {kind}, the slowest of {len(seconds)}"
            yield Line("process start to first token", name, "s", native=max(seconds), goal=goal)


def joined(lines: Sequence[Line]) -> list[Line]:
    """Lines of one name in both numerics as one, groups together. A goal and a peer of official numerics go first."""
    found: dict[tuple[str, str], Line] = {}
    for line in sorted(lines, key=lambda line: line.official is None):
        kept = found.setdefault((line.group, line.name), line)
        kept.native = line.native if kept.native is None else kept.native
        kept.goal = line.goal if kept.goal is None else kept.goal
        if kept.public is None:
            kept.public, kept.public_name = line.public, line.public_name
    order = {key: i for i, key in enumerate(dict.fromkeys((line.group, line.name) for line in lines))}
    groups = list(dict.fromkeys(line.group for line in lines))
    return sorted(found.values(), key=lambda line: (groups.index(line.group), order[line.group, line.name]))


def markdown(lines: Sequence[Line], about: dict, commands: Sequence[str]) -> str:
    shown = lambda value: "–" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    text = ["# Measured at one commit, beside goals", "", f"{report.headline(about)}.", ""]
    text += [f"    {command}" for command in dict.fromkeys(commands)]
    text += [
        "",
        "Official numerics round activations to FP8, and index queries and keys to FP4. Kernels: cold L2, median.",
    ]
    for group in dict.fromkeys(line.group for line in lines):
        rows = [line for line in lines if line.group == group]
        unit = f", {rows[0].unit}" if rows[0].unit else ""
        text += ["", f"## {group[0].upper()}{group[1:]}{unit}", ""]
        text += ["| | native | official | best public | goal | |", "|---|---:|---:|---|---:|---|"]
        for line in rows:
            public = "–" if line.public is None else f"{shown(line.public)} {line.public_name}"
            goal = "–" if line.goal is None else f"≤ {shown(line.goal)}"
            cells = (line.name, shown(line.native), shown(line.official), public, goal, line.verdict)
            text.append(f"| {' | '.join(cells)} |")
    judged = [line.verdict for line in lines if line.verdict]
    return "\n".join([*text, "", f"{judged.count('met')} of {len(judged)} goals are met."]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
