"""Results of a benchmark run as JSON, a markdown table and an SVG."""

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from dsv4.errors import Dsv4Error
from dsv4.outputs import dumped, writable
from scripts.bench import assembled, beside, limits
from scripts.bench.measure import PeerResult, Result
from scripts.bench.timing import Machine
from scripts.places import device_slug  # noqa: F401 (files and folders are called after it)

ROOT = Path(__file__).resolve().parents[2]
BEGUN = time.perf_counter()  # of the script, which imports this first
ABSENT = "not installed: "
MOST_ROWS = 16  # of one SVG: a screen
COLORS = {"ours": "#1f6feb", "floor": "0.75", "goal": "#d9a300", "best peer": "#b3423c"}


def provenance(script: str) -> dict:
    """What a figure must carry: command, commit, device and versions."""
    import torch
    import triton

    commit = (
        os.environ.get("DSV4_COMMIT")
        or subprocess.run(  # a copy without .git is told its commit
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip()
    )
    given = re.sub(r" --journal \S+| --child", "", " ".join(["python", script, *sys.argv[1:]]))
    return {
        "command": given,
        "commit": commit or "unknown",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "seconds": None,  # until the report is written
    }


def headline(about: dict) -> str:
    return f"{about['device']}, torch {about['torch']}, triton {about['triton']}, commit {about['commit']}"


def us(value: float | None) -> str:
    """µs with three significant digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def document(results: Sequence[Result], machine: Machine, about: dict) -> dict:
    judged = lambda r: [asdict(j) | {"verdict": j.verdict} for j in beside.judged(r)]
    return finite(
        {"about": about, "machine": asdict(machine), "rows": [r.document() | {"judged": judged(r)} for r in results]}
    )


def markdown(results: Sequence[Result], machine: Machine, about: dict) -> str:
    lines = [
        "# Kernels: ours, the published ones, and the physical limits",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        *(
            [
                "Drawn again from its JSON, with goals beside peers that came later; nothing was measured anew: "
                f"`{about['redrawn']}`",
                "",
            ]
            if "redrawn" in about
            else []
        ),
        "Medians in µs of CUDA-graph replays; cold: L2 flushed before each and input sets rotated, hot: the same "
        f"inputs again. Floor: the longer of the bytes at {machine.bandwidth / 1e12:.2f} TB/s (1 GiB read, measured "
        f"here; a copy moves {machine.copy / 1e12:.2f}) and the products at {machine.matmul / 1e12:.0f} TFLOPS "
        f"(bf16, measured here). An empty kernel takes {machine.empty_us:.1f} µs on this scale, each further "
        f"dependent one {machine.dependent_us:.1f} µs; neither is subtracted. A row is timed only after its result "
        "agreed with the reference; a peer only after its own check, where it has one.",
        "",
        "| operation | shape | cold µs | hot µs | kernels | peers, cold µs | bytes | floor µs | of floor | goal µs | |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    lines += [_line(result) for result in results]
    lines += [
        "",
        _tally(results),
        "",
        *beside.markdown(results),
        *assembled.markdown(results, machine),
        *limits.markdown(results, machine),
    ]
    notes = [f"- {r.name}: {r.why}" for r in results if r.why]
    silent = [(r, name, p) for r in results for name, p in r.peers.items() if p.why]
    left = sorted({name for _, name, p in silent if p.why.startswith("left out")})
    notes += [f"- left out on the command line: {', '.join(left)}"] if left else []
    notes += [f"- {r.name}, {name}: {p.why}" for r, name, p in silent if not p.why.startswith((ABSENT, "left out"))]
    missing = sorted({f"{name} ({p.why.removeprefix(ABSENT)})" for _, name, p in silent if p.why.startswith(ABSENT)})
    notes += [f"- not installed: {', '.join(missing)}"] if missing else []
    return "\n".join(lines + (["## Notes", "", *notes, ""] if notes else []))


def _line(r: Result) -> str:
    head = f"| `{r.op}` | {r.shape} "
    share = "–" if r.red else f"{r.share_of_floor:.0%}"
    relative = beside.judged(r)
    goals = ", ".join(
        [us(r.goal_us)] * (r.goal_us is not None or not relative) + [f"{beside.said(j.goal)}" for j in relative]
    )
    verdicts = ", ".join(filter(None, [r.verdict, *(j.verdict for j in relative if not r.red)]))
    tail = f"| {size(r.bytes)} | {us(r.floor_us)} | {share} | {goals} | {verdicts} |"
    if r.red:
        return f"{head}| – | – | – | – {tail}"
    kernels = "–" if r.timing.kernels is None else str(r.timing.kernels)
    return f"{head}| {us(r.timing.cold_us)} | {us(r.timing.hot_us)} | {kernels} | {_peers(r.peers)} {tail}"


def _peers(found: dict[str, PeerResult]) -> str:
    timed = sorted((p.timing.cold_us, name) for name, p in found.items() if p.timing is not None)
    return ", ".join(f"{name} {us(value)}" for value, name in timed) or "–"


def _tally(results: Sequence[Result]) -> str:
    count = lambda verdict: sum(r.verdict == verdict for r in results)
    ahead = [r for r in results if not r.red and r.best_peer]
    won = sum(r.timing.cold_us < r.best_peer[1] for r in ahead)
    return (
        f"{len(results)} rows: {count('met')} goals met, {count('MISSED')} MISSED, "
        f"{count('RED')} RED; ahead of the fastest peer in {won} of {len(ahead)} rows that "
        "have one." + beside.tally(results)
    )


def console(r: Result) -> str:
    """One progress line."""
    if r.red:
        return f"RED     {r.name}: {r.why}"
    goal = "" if r.goal_us is None else f", goal {us(r.goal_us)}"
    peers = "" if r.best_peer is None else f"; {_peers(r.peers)}"
    goal += "".join(f", {beside.said(j.goal)}: {j.verdict}" for j in beside.judged(r))
    return (
        f"{r.verdict or 'ok':7} {r.name}: {us(r.timing.cold_us)} µs cold, {us(r.timing.hot_us)} hot, "
        f"{r.share_of_floor:.0%} of the floor{goal}{peers}"
    )


def svgs(results: Sequence[Result], about: dict) -> dict[str, str]:
    """SVG by the end of its file's name: '.svg' where all rows fit one, else '-OPERATIONS.svg', a group of operations
    each, in the order of the rows. Empty when no row was timed. Raises ModuleNotFoundError without matplotlib."""
    timed = [r for r in results if not r.red]
    groups: list[list[Result]] = []
    for op in dict.fromkeys(r.op for r in timed):
        rows = [r for r in timed if r.op == op]
        for start in range(0, len(rows), MOST_ROWS):
            piece = rows[start : start + MOST_ROWS]
            if groups and len(groups[-1]) + len(piece) <= MOST_ROWS:
                groups[-1] += piece
            else:
                groups.append(piece)
    if len(groups) <= 1:
        return {".svg": svg(groups[0], about)} if groups else {}
    return {f"-{number:02}-{_operations(group)}.svg": svg(group, about) for number, group in enumerate(groups, 1)}


def _operations(rows: Sequence[Result]) -> str:
    """'sparse_attention' or 'linear-to-rms_norm', of the operations of a group."""
    ops = [re.sub(r"\W+", "_", r.op).strip("_") for r in rows]
    return ops[0] if ops[0] == ops[-1] else f"{ops[0]}-to-{ops[-1]}"


def svg(results: Sequence[Result], about: dict) -> str | None:
    """Bars of ours, floor, goal and the best peer, log scale; None when no row was timed. Raises ModuleNotFoundError
    without matplotlib."""
    timed = [r for r in results if not r.red]
    if not timed:
        return None
    import matplotlib
    import matplotlib.patches
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 1.1 + 0.46 * len(timed)), layout="constrained")
        axis = figure.subplots()
        for i, r in enumerate(timed):
            name, best = r.best_peer or ("", None)
            bars = {"ours": r.timing.cold_us, "best peer": best, "goal": r.goal_us, "floor": r.floor_us}
            missed = [" MISSED"] * (r.verdict == "MISSED") + [
                f" MISSED: {beside.said(j.goal)}" for j in beside.judged(r) if j.verdict == "MISSED"
            ]
            said = f" {us(r.timing.cold_us)}{','.join(missed)}"
            for j, (kind, value) in enumerate(bars.items()):
                if value:
                    at, label = i + 0.2 * (j - 1.5), {"ours": said, "best peer": f" {name}"}.get(kind, "")
                    axis.barh(at, value, 0.19, color=COLORS[kind])
                    axis.text(value, at, label, fontsize=6, va="center")
        axis.set_yticks(range(len(timed)), [r.name for r in timed], fontsize=7)
        axis.invert_yaxis()
        axis.set(xscale="log", xlabel="µs, cold L2, median")
        axis.margins(y=0.01)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlim(right=2.5 * axis.get_xlim()[1])  # room for the labels
        keys = [matplotlib.patches.Patch(color=color) for color in COLORS.values()]
        figure.legend(keys, list(COLORS), fontsize=6, loc="outside lower center", ncols=4)
        axis.set_title(headline(about), fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def out_folder(text: str) -> Path:
    """Type of a script's --out: a folder that can be written, tried before anything is measured. Otherwise one line and
    exit code 2."""
    return _writable(Path(text), False)


def out_file(text: str) -> Path:
    """Type of a script's --out where it names a file."""
    return _writable(Path(text), True)


def _writable(path: Path, is_file: bool) -> Path:
    try:
        return writable(path, is_file)
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def exit_code(run: Callable[[], None]) -> int:
    """Of a script that does `run`: 0, or 2 and the error as one line."""
    try:
        run()
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def dumps(contents: dict) -> str:
    """JSON of `dsv4.outputs.dumped`. Raises ValueError for NaN."""
    json.dumps(contents, allow_nan=False)
    return dumped(contents) + "\n"


def timed(contents: dict) -> dict:
    """The report with the wall-clock seconds of the script so far in `about`, if this process measured it: a report
    that is drawn again keeps what it says."""
    about = contents.get("about")
    if not isinstance(about, dict) or about.get("seconds", 0) is not None:
        return contents
    return contents | {"about": about | {"seconds": round(time.perf_counter() - BEGUN, 1)}}


def write(folder: Path, stem: str, contents: dict, text: str, pictures: str | dict[str, str] | None) -> list[Path]:
    """Write STEM.json with the seconds that it took, STEM.md and STEM.svg, or the SVGs of `svgs`. Returns what was
    written."""
    contents = timed(contents)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {".svg": pictures} if isinstance(pictures, str) else pictures or {}
    written = []
    for suffix, content in ({".json": dumps(contents), ".md": text.rstrip("\n") + "\n"} | drawn).items():
        path = folder / f"{stem}{suffix}"
        path.write_text(content)
        written.append(path)
    return written


def finite(value):
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
