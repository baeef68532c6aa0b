"""One report, in every format: a summary and a page for people, JSON, JUnit XML and SARIF for machines."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.loaders.errors import WriteError
from dsv4.probes.report import json_report, junit, markdown, page, sarif
from dsv4.probes.report.document import Report, plot_file

if TYPE_CHECKING:
    pass

FORMATS = {".md": markdown.render, ".html": page.render, ".xml": junit.render, ".sarif": sarif.render}
FORMATS |= {".json": json_report.render}


def write(report: Report, directory: str | Path, stem: str) -> list[Path]:
    """Write stem.md, .html, .xml, .sarif, .json and the plots into `directory` (created if absent). Returns the paths.

    Everything is rendered first, then written aside, then renamed: no file is ever half-written, and a failure to
    render or to write leaves what was there. Raises WriteError.
    """
    if not stem or stem != Path(stem).name:
        raise WriteError(f"report name {stem!r} is not a plain file name; expected something like 'audit'")
    plots = report.plot_files(stem)
    texts = {name: report.sections[i].plots[plot] for (i, plot), name in plots.items()}
    texts |= {stem + suffix: render(report, stem) for suffix, render in FORMATS.items()}
    return write_files(directory, texts)


def write_files(directory: str | Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files by name, each whole or not at all. Raises WriteError for anything the operating system refuses."""
    directory, partial = Path(directory), None
    targets = [directory / name for name in texts]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for target in targets:
            if target.is_dir():  # found before the first rename, not between two
                raise IsADirectoryError(0, f"{target.name} is a directory")
        partial = Path(tempfile.mkdtemp(prefix=".report.partial-", dir=directory))
        for name, text in texts.items():
            (partial / name).write_bytes(text.encode("utf-8", "replace"))  # a lone surrogate in a name must not end it
        for target in targets:
            os.replace(partial / target.name, target)
    except OSError as error:
        why = error.strerror or error
        raise WriteError(f"writing the report to {directory} failed ({why}); no file is half-written") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return targets


def write_measurement(
    directory: str | Path, stem: str, plots: Mapping[str, str], markdown: Callable[[dict[str, str]], str], document: str
) -> list[Path]:
    """Write stem.md, stem.json and an SVG for each title of `plots`, all or none: markdown(file by title), and the JSON
    `document`. Raises WriteError."""
    files = {title: plot_file(stem, title) for title in plots}
    texts = {files[title]: svg for title, svg in plots.items()}
    return write_files(directory, texts | {f"{stem}.md": markdown(files), f"{stem}.json": document})
