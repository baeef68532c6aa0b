"""Plants a bug in the demo checkpoint's loader, generates with it, audits it, and draws what came out.

    python scripts/draw_planted_bug.py [OUT.svg] [--audit REPORT.json]      # default: docs/planted_bug.svg

The bug is the mutation `indexer compressor under another prefix`: weights of the indexer are looked up under a wrong
name and stay random, without an error. --audit: the JSON of an audit that ran with it before, instead of a new one.
Everything in the picture that looks like output is output.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dsv4.commands import cli
from dsv4.probes.faults import Site, catalogue

BUG = "indexer compressor under another prefix"
ASK = ("generate", str(ROOT / "demo"), "--prompt", "The capital of France is", "--max-new-tokens", "22", "--json")
AUDIT = ("audit", "run", str(ROOT / "demo"), "--probe", "load_ledger", "--probe", "index_oracle")
WANTED = (  # (probe, beginning of a check's name): the lines that are drawn
    ("load_ledger", "file tensor is consumed once, or listed with a reason"),
    ("index_oracle", "index keys equal the oracle's"),
    ("index_oracle", "selection recall, float64 oracle"),
)
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def run(*arguments: str) -> str:
    """What `dsv4 …` prints."""
    said, sys.argv = io.StringIO(), ["dsv4", *arguments]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main()
    return said.getvalue()


def findings(report: dict) -> list[str]:
    """A line for each of WANTED: the first check of that name that failed."""
    lines = []
    for probe, name in WANTED:
        section = next(s for s in report["sections"] if s["probe"] == probe)
        check = next(
            c for c in section["checks"] if c["status"] == "FAIL" and c["name"] == name and c.get("where", "") != ""
        )
        bound = f"{check['relation']} {check['threshold']}" if "threshold" in check else ""
        chance = f", chance {check['chance']:.3g}" if check.get("chance") is not None else ""
        value = check.get("measured")
        measured = f"{value:.3g}" if isinstance(value, float) else str(value)
        lines += [f"FAIL  {probe}  {check['where']}", f"      {name}: measured {measured}, required {bound}{chance}"]
    return lines


def draw(sound: str, faulty: str, report: dict) -> str:
    """The picture: the text without the bug, the text with it, and what the audit says of it."""
    quoted = lambda text: [
        f"  The capital of France is{line}" if i == 0 else f"  {line}" for i, line in enumerate(text)
    ]
    text = lambda given: quoted(given.strip("\n").split("\n")[:2])
    totals = report["totals"]
    rows = [("#57606a", "$ dsv4 generate demo          # sound"), *(("#1f2328", one) for one in text(sound)), ("", "")]
    rows += [("#57606a", "$ dsv4 generate demo          # the indexer's compressor is looked up under a wrong prefix")]
    rows += [*(("#1f2328", one) for one in text(faulty)), ("", "")]
    rows += [("#57606a", "$ dsv4 audit demo")]
    rows += [("#b3261e" if one.startswith("FAIL") else "#1f2328", one) for one in findings(report)]
    rows += [("#1f2328", f"{totals['PASS']} PASS, {totals['FAIL']} FAIL; exit code {report['exit_code']}")]
    width, height = 900, 34 + 20 * len(rows)
    lines = [
        f'<text x="20" y="{40 + 20 * i}" fill="{color}" xml:space="preserve">{escape(one)}</text>'
        for i, (color, one) in enumerate(rows)
        if one
    ]
    about = report["provenance"]
    made = f"python scripts/draw_planted_bug.py; commit {about['commit'][:7]}; {about['device']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="{FONT}" font-size="14">',
            f"<title>A planted bug: the text stays the same, the audit names the tensor</title><!-- {escape(made)} -->",
            f'<rect width="{width}" height="{height}" rx="8" fill="#f6f8fa" stroke="#d0d7de"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "docs" / "planted_bug.svg")
    parser.add_argument("--audit", type=Path)
    args = parser.parse_args()
    sound = json.loads(run(*ASK))["text"]
    site = Site(ROOT / "demo")
    next(m for m in catalogue() if m.name == BUG).plant(site)
    try:
        faulty = json.loads(run(*ASK))["text"]
        with tempfile.TemporaryDirectory() as folder:
            if args.audit is None:
                run(*AUDIT, "--out", folder)
            report = json.loads((args.audit or next(Path(folder).glob("*.json"))).read_text())
    finally:
        site.undo()
    args.out.write_text(draw(sound, faulty, report))


if __name__ == "__main__":
    main()
