"""Writes the table of audits/README.md and the headers of its markdown files.

    python scripts/audits_table.py            # audits/README.md, from audits/index.json, the files' headers and git
    python scripts/audits_table.py --check    # exit code 1 where the table is not what this script would write

Each entry of audits/index.json names files by their common beginning, says what they show, and lists the folders whose
code they measure. Command, commit, device, versions and date come from a file's header: the keys of a JSON, the first
lines of a markdown file, or the JSON or else the report beside a picture or a log. A report that has its provenance at
the end gets a header under its title, and says there how many seconds its command took.

Whether a file is older than the code comes from git: it is older if a commit behind its own touched one of the
folders. Commits of .git-blame-ignore-revs changed the form of the code only and do not count. Without history (a
shallow clone) the last two columns are taken from the table as it stands.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AUDITS = ROOT / "audits"
# Not measured files: the table, its source, a log whose entries name their runs, the requests of a run.
BARE = (
    "README.md",
    "index.json",
    "kernel_log.md",
    *(f"batch/demo/cpu/{name}.jsonl" for name in ("demo_pressure", "shared_prefixes")),
)
HEADER_LINES = 14  # of a markdown file: title, device, versions and commit, command
COLUMNS = (
    *("files", "what they show", "command", "commit", "device", "versions", "seconds"),
    *("measured", "older than the code"),
)
HISTORY = 2  # columns that need git
# folder → where its files lay before they were moved, for files that were measured then
FORMER = {
    "dsv4/model": (":(glob)dsv4/*.py", "dsv4/gqa"),
    "dsv4/model/gqa": ("dsv4/gqa",),
    "dsv4/cache/host_tier": ("dsv4/host_tier",),
    "dsv4/runtime/capture.py": ("dsv4/capture.py",),
    "dsv4/runtime/graph.py": ("dsv4/graph.py",),
    "probes/measure/fidelity": ("probes/fidelity",),
    "probes/measure/recall": ("probes/recall",),
    "probes/measure/sparse_prefill": ("probes/sparse_prefill",),
    "probes/measure/termination": ("probes/terminating",),
}
INTRO = """# Audits

These files were really measured and emitted. They lie in `<kind>/<subject>/<device>/`. Nothing in them was edited, but
long lists were left out: a file from which something is missing says so under `thinned`, or in the table.

`python scripts/audits_table.py` writes this table from [index.json](index.json) and the header of each file. "Older
than the code" counts the commits behind the file's own that touched the code it measures, and gives the day of the
last. Such a file is still true of its commit. What was tried, predicted and dropped is in the [log](kernel_log.md).

"Seconds" is the wall-clock time of the command on its device, where the file records it.
"""


@dataclass(frozen=True)
class Header:
    """Where a file comes from. date: '' and seconds: None where the file has none."""

    command: str
    commit: str
    device: str
    versions: str
    date: str
    seconds: float | None = None


class Unmarked(Exception):
    """A file without a header."""


def files() -> list[Path]:
    """All audit files, without those of BARE."""
    return sorted(f for f in AUDITS.rglob("*") if f.is_file() and str(f.relative_to(AUDITS)) not in BARE)


def index() -> dict[str, dict]:
    """Beginning of the files' paths → {'shows': text, 'measures': [folder]}."""
    return json.loads((AUDITS / "index.json").read_text())


def entry_of(path: Path, entries: dict[str, dict]) -> str | None:
    """The entry a file belongs to: the longest whose last part the file's name begins with."""
    name = path.relative_to(AUDITS).as_posix()
    owns = [key for key in entries if re.fullmatch(re.escape(key) + r"([.-].*)?", name)]
    return max(owns, key=len, default=None)


def header(path: Path) -> Header:
    """Raises Unmarked where a file does not say where it comes from."""
    if path.suffix == ".json":
        return _of_document(path)
    if path.suffix == ".md":
        return _of_markdown(path)
    for suffix, read in ((".json", _of_document), (".md", _of_markdown)):
        beside = [f for f in path.parent.glob(f"*{suffix}") if path.name.startswith(f.name.split(".")[0])]
        if beside:
            return read(max(beside, key=lambda f: len(f.name)))
    raise Unmarked(f"{path}: no JSON or report beside it has its header; expected {path.stem}.json or {path.stem}.md")


def _of_document(path: Path) -> Header:
    document = json.loads(path.read_text())
    about = next((document[k] for k in ("about", "provenance") if isinstance(document.get(k), dict)), None)
    about = about or (document.get("figures") or [document])[0]
    versions = about.get("versions") or {
        k: about[k] for k in ("python", "torch", "triton", "transformers") if k in about
    }
    try:
        found = Header(
            about["command"].replace("__main__.py ", "dsv4 "),
            about["commit"].removesuffix("-dirty"),
            re.sub(r"^cuda \((.*)\)$", r"\1", about["device"]),
            ", ".join(f"{k} {v}" for k, v in versions.items() if v and k in ("torch", "triton", "transformers")),
            about.get("date", "")[:10],
            _seconds(document, about),
        )
    except (KeyError, AttributeError) as missing:
        raise Unmarked(f"{path}: {missing}; expected command, commit and device") from None
    if not (found.command and found.commit and found.device and found.versions):
        raise Unmarked(f"{path}: {found}; expected command, commit, device and versions")
    return found


def _seconds(document: dict, about: dict) -> float | None:
    """Wall-clock seconds of the run: of the header, of the document, or the sum of its parts."""
    found = about.get("seconds", document.get("seconds"))
    return sum(found.values()) if isinstance(found, dict) else found


def _of_markdown(path: Path) -> Header:
    whole = path.read_text()
    lines = whole.split("\n")[:HEADER_LINES]
    text = "\n".join(lines)
    commit, torch = (
        re.search(r"commit ([0-9a-f]{7,40})\b", text),
        re.search(r"(torch \S+?(?:, triton \S+?)?)[,.]? ", text),
    )
    command = next((line.strip() for line in lines if line.startswith("    ")), None)
    if not (commit and torch and command):
        raise Unmarked(f"{path}: its first {HEADER_LINES} lines have no device, torch, commit and indented command")
    line = next(one for one in lines if "commit " in one)
    device = re.search(r"device ([^,]+(?: \([^)]*\))?)", line)
    date, seconds = re.search(r"date (\d{4}-\d\d-\d\d)", line), re.search(r"^\| seconds \| ([\d.]+) \|$", whole, re.M)
    about = command, commit[1], device[1] if device else line.split(", torch")[0], torch[1]
    return Header(*about, date[1] if date else "", float(seconds[1]) if seconds else None)


def stamp(path: Path) -> None:
    """Writes the header of the JSON beside a markdown file under its title, if it has none."""
    try:
        _of_markdown(path)
    except Unmarked:
        found = _of_document(path.with_suffix(".json"))
        title, rest = path.read_text().split("\n", 1)
        date = f", date {found.date}" if found.date else ""
        head = f"{found.device}, {found.versions}, commit {found.commit[:7]}{date}."
        path.write_text(f"{title}\n\n{head}\n\n    {found.command}\n{rest}")


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def history(commit: str, measures: list[str]) -> tuple[str, str] | None:
    """(day of the commit, 'no' or 'N commits, DAY of the last'); None where git does not know the commit."""
    if git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    ignored = {
        line.split()[0] for line in (ROOT / ".git-blame-ignore-revs").read_text().split("\n") if line[:1].isalnum()
    }
    places = [place for folder in measures for place in (folder, *FORMER.get(folder, ()))]
    since = git("log", "--format=%H %cs", f"{commit}..HEAD", "--", *places).split("\n")
    days = [line.split()[1] for line in since if line and line.split()[0] not in ignored]
    return git(
        "show", "--no-patch", "--format=%cs", commit
    ), f"{len(days)} commit{'s' * (len(days) > 1)}, {days[0]}" if days else "no"


def rows(before: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Entry → the cells of its row. before: rows of the table as it stands, for cells that need history."""
    entries = index()
    found: dict[str, list[Path]] = {key: [] for key in entries}
    for file in files():
        owner = entry_of(file, entries)
        if owner is not None:
            found[owner].append(file)
    since = cache(lambda commit, *measures: history(commit, list(measures)))  # many files share both
    return {key: _row(key, entries[key], held, before, since) for key, held in sorted(found.items())}


def _row(
    key: str, entry: dict, held: list[Path], before: dict[str, tuple[str, ...]], since: Callable
) -> tuple[str, ...]:
    if not held:
        raise Unmarked(f"audits/index.json has {key}, and no file begins so")
    about = header(next((f for f in held if f.suffix == ".json"), held[0]))
    known = since(about.commit, *entry["measures"])
    day, older = known or before.get(key, ("unknown", "unknown"))[-HISTORY:]
    base = Path(key).parent
    links = ", ".join(f"[{f.name.removeprefix(Path(key).name)}]({f.relative_to(AUDITS).as_posix()})" for f in held)
    command = about.command.replace("|", "\\|")
    seconds = "–" if about.seconds is None else f"{about.seconds:,.0f}"
    cells = (about.commit[:7], about.device, about.versions, seconds, about.date or day if known else day, older)
    return (f"`{base}/` {Path(key).name}: {links}", entry["shows"], f"`{command}`", *cells)


def table(found: dict[str, tuple[str, ...]]) -> str:
    line = lambda cells: f"| {' | '.join(cells)} |"
    rule = "|" + "---|" * len(COLUMNS)
    return "\n".join([INTRO, cost(found), "", line(COLUMNS), rule, *map(line, found.values()), ""])


def cost(found: dict[str, tuple[str, ...]]) -> str:
    """A sentence on the seconds that the rows record, by device, and how many record none."""
    spent: dict[str, list[str]] = {}
    device, seconds = COLUMNS.index("device"), COLUMNS.index("seconds")
    for row in found.values():
        spent.setdefault(row[device] if row[device].startswith("NVIDIA") else "CPU", []).append(row[seconds])
    parts = []
    for name, cells in sorted(spent.items()):
        known = [int(cell.replace(",", "")) for cell in cells if cell != "–"]
        parts.append(f"{name} {sum(known):,} s in {len(known)} of {len(cells)} rows")
    return f"Recorded in all: {'; '.join(parts)}. The other rows do not say how long they took."


def standing() -> dict[str, tuple[str, ...]]:
    """Rows of audits/README.md as it stands."""
    path = AUDITS / "README.md"
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in path.read_text().split("\n") if line.startswith("| `")]
    whole = [tuple(row) for row in cells if len(row) == len(COLUMNS)]
    return {re.sub(r"^`(.*)` ([^:]*): .*", r"\1\2", row[0]): row for row in whole}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(given).check
    try:
        if not check:
            for path in files():
                if path.suffix == ".md":
                    stamp(path)
        text = table(rows(standing()))
    except Unmarked as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if check:
        return int((AUDITS / "README.md").read_text() != text)
    (AUDITS / "README.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
