"""Draws the SVGs of committed measurements again from their JSON. Nothing is measured.

    python scripts/redraw.py FILE.json ... [--out DIR]

The kind of a file is read off its content; `dsv4 audit report` does this for audits, and
scripts/training/plot.py for training. The maps of kept tokens of sparse-prefill
are drawn from tensors that the JSON does not hold, and stay as they are.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from dsv4.errors import InputError
from dsv4.probes.report.document import plot_file
from dsv4.probes.report.files import write_files
from scripts.bench import report


def drawn(stem: str, document: dict) -> dict[str, str]:
    """File name → SVG of one document. Raises InputError for a kind that this does not know."""
    for _, fits, draw in KINDS:
        if fits(document):
            try:
                return draw(stem, document)
            except (KeyError, IndexError):
                raise InputError(
                    f"{stem}.json lacks lists that its plots show; expected the file as it was measured"
                ) from None
    raise InputError(f"{stem}.json is of no kind that can be drawn; expected {', '.join(kind for kind, *_ in KINDS)}")


def measured(room: str, *maps: dict) -> Callable[[str, dict], dict[str, str]]:
    """Of a room of dsv4.probes.measure, whose plots give title → SVG."""

    def draw(stem: str, document: dict) -> dict[str, str]:
        plots = import_module(f"dsv4.probes.measure.{room}.plots")
        return {plot_file(stem, title): svg for title, svg in plots.draw(document, *maps).items()}

    return draw


def _kernels(stem, document):
    from scripts.bench import redrawn

    results, _, about = redrawn.parse(document, [], stem)
    return {f"{stem}{suffix}": svg for suffix, svg in report.svgs(results, about).items()}


def _host_tier(stem, document):
    from scripts.bench import host_tier_report

    return {f"{stem}.svg": host_tier_report.svg(document)}


def _identity(stem, document):
    from scripts import measure_host_tier

    return {f"{stem}.svg": measure_host_tier.svg(document)}


def _regime(stem, document):
    from dsv4.cost_model import plot

    return {f"{stem}.svg": plot.svg(document)}


def _batch(stem, document):
    from dsv4.engine import plots

    return {f"{stem}.svg": plots.svg(stem, document)}


def _first(document):
    """The first of a document's rows."""
    return next(iter(document.get("rows") or ()), {})


def _decode(stem, document):
    from scripts.bench import decode_report
    from scripts.bench.decode import Point
    from scripts.bench.decode_prefill import Prefill

    points = [_made(Point, row) for row in document["points"]]
    prefills = [_made(Prefill, row) for row in document.get("prefills", ())]
    svg = decode_report.svg(points, document["about"], document.get("transformers"), prefills)
    return {f"{stem}.svg": svg} if svg else {}


def _speculation(stem, document):
    from scripts.bench import speculation_report
    from scripts.bench.speculation import Point, Timeline

    points = [_made(Point, row) for row in document["points"]]
    line = document["timeline"] and _made(Timeline, document["timeline"])
    return {f"{stem}.svg": speculation_report.svg(points, document["about"], document["setup"], line)}


def _made(kind, row: dict):
    """A dataclass of the fields that it has; a row of the JSON has derived figures too."""
    return kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})


KINDS = (  # name, whether a document is of it, file name → SVG
    ("kernels", lambda d: {"machine", "rows", "about"} <= d.keys(), _kernels),
    ("recall", lambda d: "gate" in d, measured("recall")),
    ("termination", lambda d: "skipped" in _first(d), measured("termination")),
    ("sparse-prefill", lambda d: "stability" in d, measured("sparse_prefill", {})),
    ("fidelity", lambda d: {"variants", "findability"} <= d.keys(), measured("fidelity")),
    ("host tier", lambda d: "link" in d, _host_tier),
    ("host tier, identity", lambda d: "hit_rate" in _first(d), _identity),
    ("regime", lambda d: "map" in d, _regime),
    ("decode", lambda d: "points" in d and "timeline" not in d, _decode),
    ("speculation", lambda d: "timeline" in d and "points" in d, _speculation),
    ("batch", lambda d: {"requests", "latency_seconds"} <= d.keys(), _batch),
)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--out", type=report.out_folder, help="folder of the SVGs; default: beside each file")
    args = parser.parse_args(given)
    return report.exit_code(lambda: redraw(args.files, args.out))


def redraw(files: list[Path], out: Path | None) -> None:
    """Raises InputError for a file that cannot be read or drawn, before anything of it is written."""
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(document, dict):
            raise InputError(f"{file} holds a {type(document).__name__}; expected the JSON of a measurement")
        for path in write_files(out or file.parent, drawn(file.stem, document)):
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
